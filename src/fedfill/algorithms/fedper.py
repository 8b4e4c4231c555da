"""FedPer: Arivazhagan et al., "Federated Learning with Personalization Layers", 2019."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Self

from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms._keeping import KeepsAPart
from fedfill.errors import FedfillError
from fedfill.models.views import layers_of, part, rest, weights_of
from fedfill.tree import Weights


class FedPer(KeepsAPart):
    """FedAvg of the base layers, while every client trains and keeps the last ones, its personalization layers (section 4).

    Use it when clients have classes or tastes of their own, and enough samples for a last layer each.
    """

    name = "fedper"
    parts: ClassVar[tuple[str, ...]] = ("classifier",)

    personal_layers: int = Field(default=1, ge=1)
    """How many layers stay with the client (K_P): the part classifier counts as one, the others are the last before it."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Make sure that something is shared."""
        if not self.shared(model, weights := weights_of(model)):
            layers = len(layers_of(rest(weights, "classifier")))
            raise FedfillError(
                f"personal_layers: found {self.personal_layers} in a network with {layers} layers before its classifier, so that "
                f"none is shared; allowed: 1 to {layers}"
            )
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def kept(self, model: nn.Module, weights: Weights) -> Collection[str]:
        """The last layer, and those before it."""
        base = layers_of(rest(weights, "classifier"))
        last = base[max(0, len(base) - self.personal_layers + 1) :]
        return {*part(weights, "classifier"), *(name for layer in last for name in layer)}
