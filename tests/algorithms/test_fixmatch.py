"""Local FixMatch: the loss by hand, what it is without unlabelled samples, and that these train."""

import math

import pytest
import torch
from tests.helpers import refused, run_rounds
from torch import Tensor, nn

from fedfill.algorithms import fixmatch
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.fixmatch import FixMatch
from fedfill.data.samples import Batch, Samples, draw
from fedfill.errors import checked
from fedfill.training.fit import Context

SGD = {"optimizer": "sgd", "learning_rate": 0.05, "local_steps": 3, "batch_size": 8}


def entropy(scores: list[float], label: int) -> float:
    return math.log(sum(map(math.exp, scores))) - scores[label]


def stub(monkeypatch: pytest.MonkeyPatch, weak: float, strong: float) -> None:
    monkeypatch.setattr(fixmatch, "weak", lambda images, generator, flip: weak * images)
    monkeypatch.setattr(fixmatch, "strong", lambda images, generator, flip: strong * images)


@pytest.mark.parametrize(("tau", "sure"), [(0.5, 2), (0.9, 1), (1.0, 0)])
@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_loss_by_hand(monkeypatch: pytest.MonkeyPatch, tau: float, sure: int, weight: float):
    """A network whose scores are the two pixels. Weakly augmented they are doubled, strongly they are halved."""
    stub(monkeypatch, 2.0, 0.5)
    known = torch.tensor([[0.0, 1.0], [0.5, 0.0], [1.0, 1.0]]).view(3, 1, 1, 2)
    pixels = [[0.0, 2.0], [0.7, 0.0], [1.0, 1.0]]  # doubled: probabilities of 0.98 and 0.80, and one half
    unlabelled = Samples(torch.tensor(pixels).view(3, 1, 1, 2), torch.full((3,), -1))
    algorithm = FixMatch(tau=tau, unlabelled_batch_size=5, unlabelled_weight=weight)
    stream, again = (torch.Generator().manual_seed(3) for _ in range(2))
    batch = Batch(known, torch.tensor([1, 1, 0]), torch.arange(3))
    found = algorithm.consistent(unlabelled)(nn.Flatten(), batch, Context({}, stream, 0))

    drawn = draw(unlabelled, 5, again)[0].view(5, 2).tolist()
    assert {tuple(u) for u in drawn} == {tuple(torch.tensor(u).tolist()) for u in pixels}  # each at least once
    supervised = (entropy([0, 2], 1) + entropy([1, 0], 1) + entropy([2, 2], 0)) / 3
    terms = []
    for u in drawn:
        top = 1 if u[1] > u[0] else 0
        if math.exp(-entropy([2 * u[0], 2 * u[1]], top)) > tau:
            terms.append(entropy([u[0] / 2, u[1] / 2], top))
    assert len({round(term, 6) for term in terms}) == sure
    assert found.item() == pytest.approx(supervised + weight * sum(terms) / 5, rel=1e-5)


def test_labels_are_those_of_the_weak_form_and_no_gradient_goes_through_it(monkeypatch: pytest.MonkeyPatch):
    """The strong form says the opposite: its score of the weak form's class is pushed up."""
    stub(monkeypatch, 1.0, -1.0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(5 * torch.eye(2))
    unlabelled = Samples(torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([-1]))
    batch = Batch(torch.zeros(1, 1, 1, 2), torch.tensor([0]), torch.arange(1))
    FixMatch().consistent(unlabelled)(model, batch, Context({}, torch.Generator(), 0)).backward()
    # scores of -u are (-5, 0); the gradient in the weights is (softmax - onehot of class 0) times -u
    p = math.exp(-5) / (1 + math.exp(-5))
    expected = torch.tensor([[1 - p, 0.0], [p - 1, 0.0]])
    assert torch.allclose(model[1].weight.grad, expected, atol=1e-6)


def test_without_the_unsupervised_part_and_augmentation_it_is_fedavg_to_the_bit(monkeypatch: pytest.MonkeyPatch):
    stub(monkeypatch, 1.0, 1.0)
    plain = run_rounds(FedAvg(**SGD, lr_decay=1, weighting="uniform"), 2, labelled=12).state.weights
    same = run_rounds(FixMatch(**SGD, unlabelled_weight=0), 2, labelled=12).state.weights
    none = run_rounds(FixMatch(**SGD), 2)  # no sample is unlabelled
    every = run_rounds(FedAvg(**SGD, lr_decay=1, weighting="uniform"), 2).state.weights
    assert all(torch.equal(same[n], plain[n]) for n in plain)
    assert all(torch.equal(none.state.weights[n], every[n]) for n in every)


def test_unlabelled_samples_train_where_the_model_is_sure():
    def weights(**settings: float) -> dict[str, Tensor]:
        return run_rounds(FixMatch(**SGD, **settings), 2, labelled=12).state.weights

    def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
        return all(torch.allclose(one[n], other[n], atol=1e-6) for n in one)

    never, always = weights(tau=1.0), weights(tau=0.0)
    assert not same(never, always)
    assert not same(always, weights(tau=0.0, unlabelled_weight=0.5))
    assert same(never, weights(tau=1.0, unlabelled_weight=0.5))


@pytest.mark.parametrize("values", [{}, {"local": "fedprox:mu=1"}, {"local": "moon"}, {"aggregation": "fednova"}])
def test_same_bits_for_any_number_of_workers(values: dict[str, str]):
    algorithm = FixMatch(**SGD, tau=0.3, **values)
    one, two = (run_rounds(algorithm, 3, labelled=8, participation=0.75, workers=workers) for workers in (1, 2))
    assert one.lost == []
    assert all(torch.equal(one.state.weights[n], two.state.weights[n]) for n in one.state.weights)


def test_fedprox_with_no_weight_is_none_and_with_some_is_not():
    plain, zero, some = (
        run_rounds(FixMatch(**SGD, tau=0.3, local=local), 2, labelled=8).state.weights
        for local in (None, "fedprox:mu=0", "fedprox:mu=5")
    )
    assert all(torch.allclose(zero[n], plain[n], atol=1e-6) for n in plain)
    assert any((some[n] - plain[n]).abs().max() > 1e-4 for n in plain)


def test_it_sends_what_fedavg_sends():
    fixmatch_, fedavg = (run_rounds(kind(**SGD), 2, labelled=8) for kind in (FixMatch, FedAvg))
    assert fixmatch_.costs.legs == fedavg.costs.legs
    assert fixmatch_.ledger.account()["total_epsilon"] is None


@pytest.mark.parametrize(
    ("shape", "given", "chosen"),
    [((1, 3, 8, 8), None, True), ((1, 1, 8, 8), None, False), ((1, 3, 8, 8), False, False), ((1, 1, 8, 8), True, True)],
)
def test_colour_is_flipped_unless_told_otherwise(shape: tuple[int, ...], given: bool | None, chosen: bool):
    algorithm = FixMatch(flip=given).resolved(
        rounds=1, model=nn.Flatten(), inputs=torch.zeros(shape, dtype=torch.uint8)
    )
    assert algorithm.flip is chosen


def test_slips():
    with refused("data", "fixmatch", "[6]"):
        FixMatch().resolved(rounds=1, model=nn.Linear(6, 2), inputs=torch.zeros(1, 6))
    with refused("data", "fixmatch", "torch.float32"):
        FixMatch().resolved(rounds=1, model=nn.Flatten(), inputs=torch.zeros(1, 1, 8, 8))
    for setting, value in (("tau", 1.5), ("unlabelled_batch_size", 0), ("unlabelled_weight", -1), ("flip", "up")):
        with refused(setting, f"found {value!r};", "allowed: "):
            checked(FixMatch, {setting: value})
