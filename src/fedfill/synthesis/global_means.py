"""Mean latent codes of classes over all clients' records, from one sum of bounded codes with one noise.

In place of one client's mean (`fedfill.synthesis.noisy_means`): it does not depend on how the records lie on clients, and
the noise on it is that of the sum divided by the records of all clients together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from fedfill.data.samples import Samples, normalise
from fedfill.errors import FedfillError
from fedfill.statistics.noise import Noise, NoisySums
from fedfill.statistics.sums import Statistic, class_moments, within
from fedfill.synthesis.vae import Bound

_CHUNK = 500


def require_default(settings: BaseModel, names: Sequence[str], why: str) -> None:
    """Refuse settings that would do nothing.

    Args:
        settings: Of which these are some.
        names: Of fields.
        why: With which other setting, in a few words.

    Raises:
        FedfillError: Where one is not its default.
    """
    for name in names:
        found, default = getattr(settings, name), type(settings).model_fields[name].default
        if found != default:
            raise FedfillError(f"{name}: found {found} {why}; allowed: {'none' if default is None else default}")


class GlobalMeans(BaseModel):
    """Whose means are shared, and the noise on the sum that those of all clients are made of."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    # left out where they have their defaults, so that digests of runs without them stay as they were
    means: Literal["local", "global"] = Field(default="local", exclude_if=lambda value: value == "local")
    """Whose records a shared mean is of: one assisting client's (local, the paper), or all clients' together, from one sum of bounded codes by the global encoder (global)."""
    target_epsilon: float | None = Field(default=None, gt=0, le=1e30, exclude_if=lambda value: value is None)
    """With means=global: epsilon of the sum for one record that is added or removed; none: no noise and no guarantee."""
    target_delta: float = Field(default=1e-5, ge=1e-12, lt=1, exclude_if=lambda value: value == 1e-5)
    """Delta of target_epsilon."""
    trust: Literal["site", "secure", "server"] = Field(default="site", exclude_if=lambda value: value == "site")
    """Who adds the noise of target_epsilon: each client all of it, so that nobody has to be trusted (site), each a share, where the server sees the sum alone (secure), or the server, which has to be trusted (server)."""
    honest: int | None = Field(default=None, ge=1, exclude_if=lambda value: value is None)
    """With trust=secure: how many clients at least add their share and keep it to themselves; none: two thirds of them."""

    @property
    def _sums(self) -> NoisySums:
        return NoisySums(
            trust=self.trust, target_epsilon=self.target_epsilon, target_delta=self.target_delta, honest=self.honest
        )

    def code_noise(self, statistic: Statistic) -> Noise | None:
        """The noise on the one sum; None where there is none."""
        return self._sums.noise(statistic)

    def check_sums(self, bound: Bound) -> None:
        """Refuse noise on a sum that there is not, or on codes that nothing bounds.

        Args:
            bound: Of the codes.

        Raises:
            FedfillError: Where settings don't fit together.
        """
        if self.means == "local":
            names = ("target_epsilon", "target_delta", "trust", "honest")
            require_default(self, names, "with means=local, which sums nothing")
        self._sums.check_trust()
        if self.target_epsilon is not None and bound == "none":
            raise FedfillError(
                f"target_epsilon: found {self.target_epsilon:g} with latent_bound=none, so that no noise gives a guarantee; allowed: "
                "latent_bound=auto, sigmoid or clip"
            )


def code_moments(latent: int, classes: int, bound: Bound, clip: float) -> Statistic:
    """Sums of bounded codes by class, ``moments`` ``[l, classes]``, and ``counts`` ``[classes]``.

    Args:
        latent: Size l of a code.
        classes: Of the task.
        bound: As in `bounded_codes`.
        clip: The longest length of a code.

    Returns:
        The statistic.
    """
    return class_moments(latent, classes, radius=math.inf if bound == "none" else clip, gram=False)


@torch.no_grad()
def bounded_codes(
    model: nn.Module,
    data: Samples,
    bound: Bound,
    clip: Callable[[int], float],
    check: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Codes of single records that nothing but the record and the model decides, none longer than `clip`.

    Args:
        model: In evaluation mode.
        data: Images and labels.
        bound: ``sigmoid``: in [0, 1], and moved to around 0, so that no code is longer than half the root of l; ``clip``:
            shortened to `clip`; ``none``.
        clip: The longest length by l, half its root for ``sigmoid``.
        check: Called before each chunk; what it raises ends them.

    Yields:
        Codes ``[b, l]`` float64, and labels ``[b]``.
    """
    for start in range(0, len(data), _CHUNK):
        check()
        part = data[start : start + _CHUNK]
        codes = model.encoder(normalise(part.inputs))  # type: ignore[operator]
        if bound == "sigmoid":
            codes = codes.clamp(0, 1) - 0.5
        yield within(codes, math.inf if bound == "none" else clip(codes.shape[1])), part.labels


def means_of(moments: Tensor, counts: Tensor, bound: Bound, clip: float) -> tuple[list[int], Tensor]:
    """The mean code of each class that somebody holds.

    Args:
        moments: Sums of bounded codes, ``[l, classes]``.
        counts: Records of each class, 0 for one that counts as held by nobody, ``[classes]``.
        bound: As in `bounded_codes`.
        clip: The longest length of a code.

    Returns:
        Classes, and their means ``[k, l]`` float32: noise makes none longer than a mean of bounded codes can be.
    """
    held = counts > 0
    means = within(moments.T[held] / counts[held, None], math.inf if bound == "none" else clip)
    means = means + 0.5 if bound == "sigmoid" else means
    return held.nonzero()[:, 0].tolist(), means.to(torch.float32)
