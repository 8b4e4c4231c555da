"""How many classes a client names, and how many synthetic records of each others get: as set, or agreed upon by all clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

SCARCE = 0.02
"""Share of a client's records below which a class is decidedly less abundant than the rest."""
TENTH = 0.1
"""Share of a local data set that synthetic records should come to (FedDPMS, supplement, section 7)."""


class Dose(BaseModel):
    """Numbers of classes and of records: settings of an algorithm whose clients get synthetic records by class."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    n_classes: Annotated[int, Field(ge=1)] | Literal["auto"] = 3
    """Abundant and scarce classes that a client names (n); auto: the least number of classes that any client calls scarce, those with less than 2 % of its records."""
    alpha: Annotated[int, Field(ge=1)] | Literal["auto"] = 50
    """Codes for each shared class (the quota); auto: as many as make n classes a tenth of the mean local data set."""

    @property
    def n(self) -> int:
        """`n_classes` once it is agreed upon."""
        return 1 if self.n_classes == "auto" else self.n_classes

    @property
    def quota(self) -> int:
        """`alpha` once it is agreed upon."""
        return 50 if self.alpha == "auto" else self.alpha

    def agreement(self, scarce: Sequence[int], records: Sequence[int], classes: int) -> list[int]:
        """The n and alpha that all clients share (FedDPMS, supplement, sections 2 and 7).

        Args:
            scarce: How many classes each client calls scarce (n_i).
            records: How many each client has.
            classes: Of the task.

        Returns:
            n and alpha as they are set; for auto the least n_i, 1 at least, and so many records of each of n classes as are a
            tenth of the mean local data set.
        """
        held = [
            n_i for n_i, n in zip(scarce, records, strict=True) if n
        ]  # who has no record lacks nothing that it could be short of
        n = min(max(1, min(held, default=1)), classes) if self.n_classes == "auto" else self.n_classes
        mean = sum(records) / max(1, len(held))
        return [n, max(1, round(TENTH * mean / n)) if self.alpha == "auto" else self.alpha]

    def agreed(self, found: Sequence[int] | None) -> Self:
        """These settings with the n and alpha that clients agreed on, if they did."""
        return self if found is None else self.model_copy(update={"n_classes": found[0], "alpha": found[1]})
