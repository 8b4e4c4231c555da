"""Methods that read something off the steps of local training: each has to be the learning rate times a gradient."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from fedfill.algorithms import Composable
from fedfill.algorithms.fedavg import FedAvg
from fedfill.errors import FedfillError
from fedfill.training.optimizers import OptimizerName


class PlainSteps(FedAvg):
    """FedAvg trained by SGD without momentum. A subclass says in `read_off` what it reads off the steps."""

    read_off: ClassVar[str] = "something"
    """What, as in "its control variates", for messages."""

    optimizer: OptimizerName = "sgd"
    """Of the local training: sgd, as each step must be the learning rate times a gradient."""
    learning_rate: float = Field(default=0.02, gt=0, allow_inf_nan=False)
    """Step size of the local training."""

    def check_compatible(self, whole: Composable) -> None:
        """Refuse an optimizer whose steps are not the learning rate times a gradient."""
        super().check_compatible(whole)
        if whole.optimizer != "sgd" or whole.momentum:
            found = f"optimizer={whole.optimizer}" + (f" and momentum={whole.momentum:g}" if whole.momentum else "")
            raise FedfillError(
                f"optimizer: found {found} with {self.name}, which reads {self.read_off} off steps that are the learning rate "
                "times a gradient; allowed: optimizer=sgd and momentum=0"
            )
