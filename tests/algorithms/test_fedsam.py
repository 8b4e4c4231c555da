"""FedSAM: the gradient at the worst point by hand, and what the first of its two passes leaves behind: nothing."""

import pytest
import torch
from tests.helpers import run_rounds, start_of
from torch import nn

from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.feddpms import FedDPMS
from fedfill.algorithms.fedmix import FedMix
from fedfill.algorithms.fedsam import FedSAM
from fedfill.algorithms.fedvae import FedVAE
from fedfill.data.samples import Batch
from fedfill.models.layers import Dropout, draws_from
from fedfill.training.fit import Context
from fedfill.training.functional import gradient
from fedfill.training.losses import cross_entropy

SMALL = {"local_epochs": 2, "batch_size": 8}


class Two(nn.Module):
    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor([a])), nn.Parameter(torch.tensor([b]))
        self.unused = nn.Parameter(torch.full((1,), float("nan")))  # as the engine leaves what is not trained


def half_square(model: nn.Module, batch: Batch, context: Context) -> torch.Tensor:
    return (model.a.square() + model.b.square()).sum() / 2


def gradients(algorithm: FedSAM, a: float, b: float) -> tuple[float, float]:
    model, batch = Two(a, b), Batch(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long), torch.zeros(1))
    algorithm.objective(start_of({}), half_square)(model, batch, Context({}, torch.Generator(), 0)).backward()
    assert model.unused.grad is None
    assert (model.a.item(), model.b.item()) == pytest.approx((a, b))  # the model stays where it is
    return model.a.grad.item(), model.b.grad.item()


def test_the_gradient_of_a_square_by_hand():
    assert gradients(FedSAM(rho=0.1), 1.0, 0.0) == pytest.approx((1.1, 0.0))
    # one norm over all parameters: e is .5 times (3, 4) / 5
    assert gradients(FedSAM(rho=0.5), 3.0, 4.0) == pytest.approx((3.3, 4.4))


def test_the_adaptive_gradient_by_hand():
    # T = (4, 2), T g = (12, 2), and e = .5 T T g / root(148)
    algorithm = FedSAM(rho=0.5, adaptive=True, asam_eta=1.0)
    root = 148**0.5
    assert gradients(algorithm, 3.0, -1.0) == pytest.approx((3 + 0.5 * 48 / root, -1 - 0.5 * 4 / root))


def test_where_the_gradient_is_zero_nothing_is_divided_by_it():
    assert gradients(FedSAM(rho=0.1), 0.0, 0.0) == (0.0, 0.0)


def test_both_passes_drop_the_same_units_and_statistics_move_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), Dropout(0.5), nn.Linear(8, 3))
    batch = Batch(torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]), torch.arange(6))
    stream, seen = torch.Generator().manual_seed(1), []
    model[2].register_forward_hook(lambda layer, given, output: seen.append(output == 0))
    context = Context({}, stream, 0)
    with draws_from(model, stream):
        objective = FedSAM(rho=1e-6).objective(start_of({}), lambda m, b, c: cross_entropy(m, b))
        objective(model, batch, context).backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])
    assert model[1].num_batches_tracked == 1
    once = 0.1 * model[0](batch.inputs).mean(0)
    assert torch.allclose(model[1].running_mean, once, atol=1e-5)
    plain = torch.Generator().manual_seed(1)
    torch.empty(6, 8).bernoulli_(0.5, generator=plain)
    assert torch.equal(stream.get_state(), plain.get_state())  # FedAvg's stream would stand there too


def test_the_gradient_is_that_of_the_plain_loss():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    batch = Batch(torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]), torch.arange(6))
    found = gradient(lambda m, b, c: cross_entropy(m, b), model, batch, Context({}, torch.Generator(), 0))
    assert all(p.grad is None for p in model.parameters())
    cross_entropy(model, batch).backward()
    assert all(torch.equal(found[name], p.grad) for name, p in model.named_parameters())


def test_without_a_distance_it_is_fedavg_to_the_bit():
    plain = run_rounds(FedAvg(**SMALL), rounds=2).state.weights
    none = run_rounds(FedSAM(**SMALL, rho=0.0), rounds=2).state.weights
    assert all(torch.equal(none[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize("kind", [FedVAE, FedMix, FedDPMS])
def test_others_take_it(kind: type):
    own = {
        FedMix: {"group_size": 8},
        FedDPMS: {"alpha": 5, "max_candidates": 50, "preliminary_rounds": 1, "local_epochs": 1},
    }
    settings = {**SMALL, **own.get(kind, {})}
    plain = run_rounds(kind(**settings), rounds=2)
    taken = run_rounds(kind(**settings, local="fedsam:rho=0.1,adaptive=true"), rounds=2)
    assert taken.lost == []
    assert any(not torch.equal(taken.state.weights[n], tensor) for n, tensor in plain.state.weights.items())
