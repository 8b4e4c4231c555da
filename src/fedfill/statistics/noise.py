"""The Gaussian noise on sums, and the settings that say whose it is and how much."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from fedfill.errors import FedfillError
from fedfill.privacy import discrete
from fedfill.privacy import sums as privacy
from fedfill.statistics.sums import Statistic

FINEST = 40
"""Bits behind the point of a sum's grid at the most: then 8,192 records of length 1 fit into 53 bits."""


@dataclass(frozen=True)
class Noise:
    """The Gaussian noise on one exchange of sums.

    Attributes:
        trust: Who adds it.
        stds: By block: standard deviation on each coordinate of a sum that carries the whole noise once.
        honest: With ``secure``: so many clients at least must add their share; None: two thirds of those asked.
    """

    trust: Literal["site", "secure", "server"]
    stds: Mapping[str, float]
    honest: int | None = None

    def needed(self, clients: int) -> int:
        """How many replies the sum must have before it may be opened, of so many clients that are asked."""
        if self.honest is not None and self.honest > clients:
            raise FedfillError(f"honest: found {self.honest} with {clients} clients; allowed: 1 to {clients}")
        return (self.honest or privacy.honest_default(clients)) if self.trust == "secure" else 1

    def factor(self, clients: int) -> float:
        """What a client multiplies the standard deviations by."""
        return privacy.client_factor(self.trust, clients, self.needed(clients))

    def on_grid(self, statistic: Statistic, clients: int) -> Statistic:
        """With ``secure``: the statistic in whole steps of grids that are fine for the noise of one share.

        Args:
            statistic: What is summed.
            clients: How many are asked.

        Returns:
            The statistic, its blocks with the bits of their grids.

        Raises:
            FedfillError: Where a block's sums are no multiples of a step, or the noise is too small for whole numbers of 53 bits.
        """
        factor, bits = self.factor(clients), {}
        for name, block in statistic.blocks.items():
            if block.bits is None:
                raise FedfillError(
                    f"trust: found secure, which adds whole numbers, and '{name}' of these sums is none on any grid; allowed: site, server"
                )
            std = factor * self.stds[name]
            bits[name] = discrete.grid_bits(std / math.sqrt(2) if block.symmetric else std, block.bits)
            if bits[name] > FINEST:
                raise FedfillError(
                    f"target_epsilon: its noise on '{name}' has a standard deviation of {std:g}, which is too small for whole numbers; "
                    "allowed with trust=secure: a smaller target_epsilon"
                )
        return statistic.on_grids(bits)

    def in_the_sum(self, replies: int, clients: int) -> float:
        """What the noise in a sum of so many replies is multiplied by."""
        return privacy.sum_factor(self.trust, replies, self.needed(clients))


class NoisySums(BaseModel):
    """Whose noise protects the sums, and how much: settings of an algorithm that sends sums."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    trust: Literal["site", "secure", "server"] = "site"
    """Who adds the noise of target_epsilon: each client all of it, so that nobody has to be trusted (site), each a share, where the server sees the sum alone (secure), or the server, which has to be trusted (server)."""
    target_epsilon: float | None = Field(default=None, gt=0, le=1e30)
    """Epsilon of all sums together for one record that is added or removed; none: no noise and no guarantee."""
    target_delta: float = Field(default=1e-5, ge=1e-12, lt=1)
    """Delta of target_epsilon."""
    honest: int | None = Field(default=None, ge=1)
    """With trust=secure: how many clients at least add their share and keep it to themselves; none: two thirds of them."""

    def check_trust(self) -> None:
        """Refuse words on noise that would not be heeded.

        Raises:
            FedfillError: For `honest` without trust=secure, and another trust than site without a `target_epsilon`.
        """
        if self.honest is not None and self.trust != "secure":
            raise FedfillError(f"honest: found {self.honest} with trust={self.trust}; allowed with trust=secure alone")
        if self.trust != "site" and self.target_epsilon is None:
            raise FedfillError(
                f"trust: found {self.trust} without a target_epsilon, so that there is no noise to be added; allowed with one, such as "
                "target_epsilon=3"
            )

    def noise(self, statistic: Statistic, share: float = 1.0) -> Noise | None:
        """The noise on one exchange.

        Args:
            statistic: What is summed.
            share: Of the squared mu that `target_epsilon` allows; those of all exchanges add up to 1.

        Returns:
            The noise; None where there is none.
        """
        if self.target_epsilon is None:
            return None
        mu = privacy.mu_for(self.target_epsilon, self.target_delta) * math.sqrt(share)
        bounds = statistic.bounds()
        return Noise(self.trust, privacy.stds(bounds, privacy.shares(bounds), mu), self.honest)
