"""FedMix: the Taylor term by hand, its order, and that it trains."""

import math
from typing import Any

import pytest
import torch
from tests.helpers import refused, run_rounds, scripted
from torch import nn
from torch.nn import functional

from fedfill.algorithms.fedmix import FedMix, MixedUpdate
from fedfill.algorithms.naivemix import Means, NaiveMix, SharedMeans
from fedfill.data.samples import Batch
from fedfill.protocol.client import State
from fedfill.protocol.server import Server

STREAM = torch.Generator().manual_seed(0)
X, MEAN = torch.randn(5, 3, generator=STREAM).double(), torch.randn(3, generator=STREAM).double()
TARGET = torch.tensor([0.2, 0.5, 0.3, 0.0]).double()
BATCH = Batch(X, torch.tensor([0, 3, 1, 1, 2]), torch.arange(5))


def smooth() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def test_third_term_by_hand():
    """Linear scores W u have the gradient W^T (softmax - onehot) in u."""
    torch.manual_seed(0)
    model, mix = nn.Linear(3, 4, bias=False).double(), 0.2
    u = (1 - mix) * X
    scores = model(u)
    slope = (scores.softmax(1) - functional.one_hot(BATCH.labels, 4)) @ model.weight  # [5, 3]
    expected = (
        (1 - mix) * functional.cross_entropy(scores, BATCH.labels)
        + mix * functional.cross_entropy(scores, TARGET.expand(5, 4))
        + (1 - mix) * mix * (slope @ MEAN).mean()
    )
    assert FedMix(mix=mix).mixed_loss(model, BATCH, MEAN, TARGET).item() == pytest.approx(expected.item(), rel=1e-9)


def test_it_is_mixup_up_to_the_second_order():
    """Mixup of x with its label and x-bar with y-bar; halving lambda quarters what is left of the difference."""
    model = smooth()

    def mixup(mix: float) -> torch.Tensor:
        scores = model((1 - mix) * X + mix * MEAN)
        own, theirs = (functional.cross_entropy(scores, t) for t in (BATCH.labels, TARGET.expand(5, 4)))
        return (1 - mix) * own + mix * theirs

    def apart(mix: float) -> float:
        # the term with y-bar is taken at u, which is of second order too
        return abs((mixup(mix) - FedMix(mix=mix).mixed_loss(model, BATCH, MEAN, TARGET)).item())

    assert 3.5 < apart(0.02) / apart(0.01) < 4.5


def test_the_third_term_trains():
    """With the graph of the input gradient cut off, the parameters would get the gradient of the first two terms."""
    model = smooth()
    algorithm = FedMix(mix=0.3)

    def gradients(mean: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(algorithm.mixed_loss(model, BATCH, mean, TARGET), list(model.parameters())))

    with_term, without = gradients(MEAN), gradients(torch.zeros(3).double())
    assert all((a - b).abs().max() > 1e-4 for a, b in zip(with_term[:3], without[:3], strict=True))


def test_without_its_first_order_it_is_the_two_entropies():
    model, mix = smooth(), 0.3
    scores = model((1 - mix) * X)
    expected = (1 - mix) * functional.cross_entropy(scores, BATCH.labels)
    expected = expected + mix * functional.cross_entropy(scores, TARGET.expand(5, 4))
    torch.testing.assert_close(FedMix(mix=mix, first_order=False).mixed_loss(model, BATCH, MEAN, TARGET), expected)


def test_its_first_order_has_no_lower_bound():
    """A network may move its scores along the mean and nowhere else: mixup's loss stays above 0, its expansion falls for ever."""
    mix, model = 0.1, nn.Linear(2, 2, bias=False).double()
    x, mean, target = (
        torch.tensor([[1.0, 0.0]]).double(),
        torch.tensor([0.0, 1.0]).double(),
        torch.tensor([0.5, 0.5]).double(),
    )
    for scale in (1.0, 1000.0):
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[0.0, scale], [0.0, 0.0]]))
        loss = FedMix(mix=mix).mixed_loss(model, Batch(x, torch.tensor([0]), torch.arange(1)), mean, target)
        # scores of 0 at u, where the gradient in u is -1/2 of the scale
        assert loss.item() == pytest.approx(math.log(2) - (1 - mix) * mix * scale / 2)


class Opaque(nn.Module):
    """A network of which nothing is known: its gradient in the inputs is taken backwards."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_the_floor_is_each_samples_own_in_a_network_of_any_kind():
    """Of two samples one falls far below zero and is held there; the other one is as without a floor."""
    mix, scale = 0.1, 1000.0
    linear = nn.Linear(2, 2, bias=False).double()
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[0.0, scale], [0.0, 0.0]]))
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0]]).double()
    mean, target = torch.tensor([0.0, 1.0]).double(), torch.tensor([0.5, 0.5]).double()
    batch = Batch(x, torch.tensor([0, 1]), torch.arange(2))
    # scores of 0 at u, where the gradient in u is -1/2 of the scale for label 0, and 1/2 of it for label 1
    slope = (1 - mix) * mix * scale / 2
    assert math.log(2) - slope < -40
    known, opaque = (FedMix(mix=mix, floor=True).mixed_loss(m, batch, mean, target) for m in (linear, Opaque(linear)))
    assert opaque.item() == pytest.approx((math.log(2) + slope) / 2)
    (found,), (expected,) = (torch.autograd.grad(loss, [linear.weight]) for loss in (opaque, known))
    torch.testing.assert_close(found, expected)


def test_a_floor_that_nobody_reaches_changes_nothing():
    model = smooth()
    plain, floored = (FedMix(mix=0.2, floor=floor).mixed_loss(model, BATCH, MEAN, TARGET) for floor in (False, True))
    assert plain.item() > 0
    torch.testing.assert_close(floored, plain)


def test_losses_below_zero_are_told_with_their_number():
    server, engine = scripted(clients=3, weights={"w": torch.tensor([0.0])})
    server.state = State(FedMix().server_state(server.state.weights))
    shape = server.sample.inputs.shape[1:]
    engine.script["share_means"] = lambda i, message, t: SharedMeans(Means(torch.ones(1, *shape), torch.ones(1, 4)))
    answers = [[None, True, True], [None, None, None]]
    engine.script["train_mixed"] = lambda i, message, t: MixedUpdate({"w": torch.ones(1)}, 10, answers[t][i])
    for t, told in enumerate((["2 of 3"], [])):
        server.begin(t)
        FedMix().round(server, t)
        assert len(server.warnings) == len(told)
        assert all(fact in warning for fact, warning in zip(told, server.warnings, strict=True))


@pytest.mark.parametrize(("shift", "below"), [(-50.0, 4), (0.0, 0)])
def test_a_client_tells_that_its_loss_fell_below_zero_and_else_nothing(shift: float, below: int):
    replies = []

    class Shifted(FedMix):
        def mixed_loss(self, model: nn.Module, batch: Batch, mean: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return super().mixed_loss(model, batch, mean, target) + shift

        def mix_and_average(self, server: Server, t: int) -> dict[int, Any]:
            replies.append(super().mix_and_average(server, t))
            return replies[-1]

    server = run_rounds(Shifted(local_epochs=1, group_size=8), rounds=1)
    assert [reply.below for reply in replies[0].values()] == [True if below else None] * 4
    assert bool(server.warnings) == bool(below)


def test_it_exchanges_like_naivemix():
    costs = [run_rounds(kind(local_epochs=1, group_size=8), rounds=2).costs for kind in (NaiveMix, FedMix)]
    assert costs[0].legs == costs[1].legs
    means = 5 * (64 + 4) * 4  # five groups of eight, each an image and four shares
    assert costs[0].legs["share_means"] == [0, 4 * means]


def test_a_floor_holds_each_sample_at_zero_and_leaves_those_above():
    """Two samples: one whose loss falls far below zero, one whose loss stays above."""
    mix, model = 0.1, nn.Linear(2, 2, bias=False).double()
    x, labels = torch.tensor([[1.0, 0.0], [1.0, 0.0]]).double(), torch.tensor([0, 1])
    mean, target = torch.tensor([0.0, 1.0]).double(), torch.tensor([0.5, 0.5]).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0, 100.0], [0.0, 0.0]]))
    batch = Batch(x, labels, torch.arange(2))
    below = math.log(2) - (1 - mix) * mix * 100 / 2  # of label 0, whose score the mean raises
    above = math.log(2) + (1 - mix) * mix * 100 / 2
    assert below < 0
    assert FedMix(mix=mix).mixed_loss(model, batch, mean, target).item() == pytest.approx((below + above) / 2)
    floored = FedMix(mix=mix, floor=True).mixed_loss(model, batch, mean, target)
    assert floored.item() == pytest.approx(above / 2)
    (slope,) = torch.autograd.grad(floored, model.weight)
    alone = FedMix(mix=mix).mixed_loss(model, Batch(x[1:], labels[1:], torch.arange(1)), mean, target)
    torch.testing.assert_close(slope, torch.autograd.grad(alone, model.weight)[0] / 2)


@pytest.mark.parametrize(
    ("settings", "warned"), [({}, True), ({"floor": True}, False), ({"first_order": False}, False)]
)
def test_a_loss_without_a_floor_is_told(settings: dict[str, bool], warned: bool):
    """With a large step the first-order term is followed down in the first rounds."""
    server = run_rounds(FedMix(local_epochs=6, learning_rate=0.05, mix=0.5, group_size=8, **settings), rounds=2)
    told = [text for note in server.history for text in note["warnings"] if "below zero" in text]
    assert bool(told) == warned


def test_a_floor_under_what_can_t_fall_is_refused():
    words = {"rounds": 1, "model": smooth(), "inputs": X[:1]}
    with refused("floor", "first_order=false"):
        FedMix(floor=True, first_order=False).resolved(**words)
    assert FedMix(floor=True).resolved(**words) == FedMix(floor=True)
