"""SGD, Adam and AdamW by torch's functions, which its classes of the same names call too.

The bits are those of the classes. The first step of one of these imports torch's compiler: a second, which every process that
trains would wait for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

OptimizerName = Literal["adam", "adamw", "sgd"]
Momenta = dict[str, Tensor]
"""What is remembered of a parameter, under torch's names: ``momentum_buffer``, or ``exp_avg``, ``exp_avg_sq`` and ``step``."""


@dataclass(frozen=True)
class Rule:
    """How parameters follow their gradients.

    Attributes:
        kind: ``adam``, ``adamw`` or ``sgd``, with torch's defaults for what is not named here.
        learning_rate: Step size.
        momentum: Of ``sgd``.
        weight_decay: L2 penalty (decoupled for ``adamw``).
        fused: Torch's fused form: one pass over the parameters, twice as fast on small networks. Otherwise torch chooses.
    """

    kind: OptimizerName
    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    fused: bool = True

    def start(self, parameter: Tensor) -> Momenta:
        """What is remembered before the first step."""
        if self.kind == "sgd":
            return {}
        counter = torch.zeros((), device=parameter.device if self.fused else "cpu")
        return {"step": counter, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], momenta: Sequence[Momenta]) -> None:
        """One step, in place.

        Args:
            parameters: What moves.
            gradients: One for each parameter.
            momenta: What is remembered of each; brought up to date.
        """
        moved, along = list(parameters), list(gradients)
        form, rate, decay = self.fused or None, self.learning_rate, self.weight_decay
        if self.kind == "sgd":
            buffers = [of.get("momentum_buffer") for of in momenta] if self.momentum else []
            sgd(
                moved, along, buffers, fused=form, weight_decay=decay, momentum=self.momentum, lr=rate,
                dampening=0.0, nesterov=False, maximize=False,
            )  # fmt: skip
            for of, buffer in zip(momenta, buffers, strict=False):
                if buffer is not None:
                    of["momentum_buffer"] = buffer
            return
        first, second, steps = ([of[name] for of in momenta] for name in ("exp_avg", "exp_avg_sq", "step"))
        (adam if self.kind == "adam" else adamw)(
            moved, along, first, second, [], steps, fused=form, amsgrad=False, beta1=0.9, beta2=0.999, lr=rate,
            weight_decay=decay, eps=1e-8, maximize=False,
        )  # fmt: skip


class Optimizer:
    """A rule, the parameters that it moves, and what it remembers of them.

    Args:
        parameters: Those without a gradient stay as they are.
        rule: How they move.
        momenta: What another optimizer of these parameters remembers; copied.

    Attributes:
        momenta: By the position of the parameter: nothing before its first step.
    """

    def __init__(
        self, parameters: Sequence[Tensor], rule: Rule, momenta: Mapping[int, Mapping[str, Tensor]] | None = None
    ) -> None:
        self.momenta: dict[int, Momenta] = {
            k: {name: x.detach().clone() for name, x in of.items()} for k, of in (momenta or {}).items()
        }
        self._parameters, self._rule = list(parameters), rule

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def step(self) -> None:
        """Move the parameters that have a gradient."""
        moved = {k: p for k, p in enumerate(self._parameters) if p.grad is not None}
        for k, parameter in moved.items():
            if k not in self.momenta:
                self.momenta[k] = self._rule.start(parameter)
        gradients = [p.grad for p in moved.values() if p.grad is not None]
        self._rule.step(list(moved.values()), gradients, [self.momenta[k] for k in moved])
