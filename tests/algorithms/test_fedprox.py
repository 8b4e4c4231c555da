"""FedProx: the proximal gradient by hand, and what it doesn't touch."""

import torch
from tests.helpers import run_rounds, start_of
from torch import nn

from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.fedprox import FedProx


def test_the_gradient_is_mu_times_the_distance_once_and_for_parameters_alone():
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    received = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 3.0
        model[1].running_mean += 7.0
    FedProx(mu=0.1).penalty(start_of(received)).adder(model)()
    # each of 5 parameters is 3 away: a gradient of mu * 3 (the FedDPMS authors' program has mu twice)
    assert all(torch.allclose(p.grad, torch.full_like(p, 0.3)) for p in model.parameters())


def test_without_mu_it_is_fedavg_to_the_bit():
    plain = run_rounds(FedAvg(local_epochs=2, batch_size=8), rounds=3)
    prox = run_rounds(FedProx(local_epochs=2, batch_size=8, mu=0.0), rounds=3)
    assert all(torch.equal(prox.state.weights[name], tensor) for name, tensor in plain.state.weights.items())


def test_a_large_mu_holds_the_models_at_the_global_one():
    def moved(mu: float) -> float:
        server = run_rounds(FedProx(local_epochs=3, batch_size=8, optimizer="sgd", learning_rate=0.01, mu=mu), rounds=1)
        return sum((server.state.weights[n] - t).square().sum().item() for n, t in server.initial.items())

    assert moved(50.0) < 0.2 * moved(0.0)
