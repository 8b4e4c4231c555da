"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020."""

from pydantic import Field

from fedfill.algorithms import Start
from fedfill.algorithms.fedavg import FedAvg
from fedfill.training.fit import Penalty


class FedProx(FedAvg):
    """FedAvg whose local models are held close to the global one.

    Use it when clients' data differ and you want a cheap first try; with a small mu it ends near FedAvg.
    """

    name = "fedprox"
    numbers = True

    mu: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """Weight of the proximal term."""

    def penalty(self, start: Start) -> Penalty:
        """mu/2 ||w - w_t||^2 over the parameters, beside F_i(w) (equation 2)."""
        return Penalty(self.mu, start.weights)
