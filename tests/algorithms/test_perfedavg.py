"""Per-FedAvg: the gradient after a step, with the second derivatives and without, and the step that each client takes."""

import pytest
import torch
from tests.algorithms.toy import trained
from tests.helpers import CLASSES, Run, bars, run_rounds
from torch import nn

from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.perfedavg import PerFedAvg, divided
from fedfill.data.samples import Batch, normalise
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.streams import torch_stream
from fedfill.training.fit import Context, Fit, LocalTraining, fit
from fedfill.training.losses import cross_entropy

QUICK = {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.01}


class Toy(PerFedAvg):
    def loss(self, model, batch, context):
        return model.weight.sum() ** 2


@pytest.mark.parametrize(("order", "slope"), [("first", 1.6), ("hessian_free", 1.28), ("exact", 1.28)])
def test_a_step_worked_by_hand(order: str, slope: float):
    """F = w^2, w 1, alpha .1: w' .8, the gradient there 1.6; times 1 - alpha F'' = .8 with second derivatives."""
    algorithm = Toy(inner_rate=0.1, order=order, optimizer="sgd", learning_rate=0.01, local_steps=1)
    sent, client = trained(algorithm, 1.0)
    assert sent == pytest.approx(1 - 0.01 * slope, abs=1e-5)
    assert float(client.state.adapted["weight"]) == pytest.approx(0.8)


def slopes(algorithm: PerFedAvg, width: str = "") -> tuple[torch.Tensor, nn.Module]:
    """The gradient of the objective on sixteen images, and the network after it; without a width a smooth one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    if width:
        model = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(width=width), seed=0).train()
    data = bars(16, [0, 1, 2], 0)
    batch = Batch(normalise(data.inputs), data.labels, torch.arange(16))
    context = Context(weights_of(model), torch.Generator().manual_seed(0), 0)
    objective = algorithm.objective(None, lambda model, batch, context: cross_entropy(model, batch))  # type: ignore[arg-type]
    objective(model, batch, context).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), model


def test_the_exact_order_is_the_derivative_and_the_difference_comes_near_it():
    exact, free, first = (
        slopes(PerFedAvg(inner_rate=0.1, order=order))[0] for order in ("exact", "hessian_free", "first")
    )
    assert (free - exact).norm() < 1e-4 * exact.norm()
    assert (first - exact).norm() > 0.05 * exact.norm()


@pytest.mark.parametrize("order", ["first", "hessian_free", "exact"])
def test_statistics_move_once_and_by_the_outer_samples(order: str):
    _, model = slopes(PerFedAvg(inner_rate=0.1, order=order), "wide")
    layers = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert {int(layer.num_batches_tracked) for layer in layers} == {1}


def test_without_an_inner_step_it_is_fedavg_to_the_bit():
    plain, own = (run_rounds(a, rounds=2) for a in (FedAvg(**QUICK), PerFedAvg(**QUICK, inner_rate=0)))
    assert all(torch.equal(own.state.weights[name], tensor) for name, tensor in plain.state.weights.items())
    assert own.costs == plain.costs or own.costs.legs == plain.costs.legs
    assert all(state["adapted"] is None for state in own.client_states.values())


def test_clients_take_their_step_from_what_they_received():
    algorithm = PerFedAvg(**QUICK, inner_rate=0.1, adaptation_steps=2)
    first, second = (run_rounds(algorithm, rounds=n) for n in (1, 2))
    run = Run(algorithm, {}, 1, 1.0, 2)
    training = LocalTraining(steps=2, batch_size=8, optimizer="sgd", learning_rate=0.1)
    for i in range(4):
        streams = (torch_stream(0, name, 1, i, 1) for name in ("fit", "draws"))
        fitted = fit(
            run.server._resident, Fit(first.state.weights, algorithm.loss, run.engine._data[i], training), *streams
        )
        assert all(torch.equal(w, second.client_states[i]["adapted"][name]) for name, w in fitted.weights.items())
    run.engine.close()


def test_it_is_a_local_objective_of_others():
    own, taken = (
        run_rounds(a, rounds=2)
        for a in (PerFedAvg(**QUICK, inner_rate=0.1), FedAvg(**QUICK, local="perfedavg:inner_rate=0.1"))
    )
    assert all(torch.equal(own.state.weights[name], tensor) for name, tensor in taken.state.weights.items())


@pytest.mark.parametrize(
    ("b", "share", "sizes"), [(8, 0.5, (4, 4)), (8, 0.9, (6, 2)), (5, 0.1, (2, 3)), (3, 0.5, (3, 3))]
)
def test_a_mini_batch_is_divided(b: int, share: float, sizes: tuple[int, int]):
    batch = Batch(torch.arange(b)[:, None], torch.arange(b), torch.arange(b))
    parts = divided(batch, share)
    assert tuple(len(part.labels) for part in parts) == sizes
    if b > 3:
        assert torch.equal(torch.cat([part.index for part in parts]), batch.index)
