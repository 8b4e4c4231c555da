"""Local Mixup: the loss by hand, who is mixed, and FedAvg where nothing is."""

import math
from typing import Any

import pytest
import torch
from tests.helpers import CLASSES, refused, run_rounds, small_federation
from torch import nn

from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.mixup import Mixup
from fedfill.data.samples import Batch, Samples, draw
from fedfill.errors import checked
from fedfill.models.networks import ModelSettings, build
from fedfill.streams import numpy_stream
from fedfill.training.fit import Context, Loss
from fedfill.training.mixup import draw_lambda
from fedfill.training.pseudo_labels import predicted

SGD = {"optimizer": "sgd", "learning_rate": 0.05, "local_steps": 3, "batch_size": 8}
KNOWN = Batch(torch.tensor([[0.0, 1.0], [3.0, 0.0], [1.0, -1.0]]), torch.tensor([1, 0, 1]), torch.arange(3))
CONFIDENT = Samples(torch.tensor([[5.0, 0.0], [0.0, 7.0]]), torch.tensor([0, 1]))


def entropy(scores: list[float], label: int) -> float:
    return math.log(sum(map(math.exp, scores))) - scores[label]


@pytest.mark.parametrize("confident", [CONFIDENT[:0], CONFIDENT])
def test_loss_by_hand(confident: Samples):
    """A network whose scores are its inputs."""
    stream, again = (torch.Generator().manual_seed(1) for _ in range(2))
    loss = Mixup(unlabelled_batch_size=4).mixed(confident)
    found = loss(nn.Identity(), KNOWN, Context({}, stream, 0))
    inputs, labels = KNOWN.inputs.tolist(), KNOWN.labels.tolist()
    if len(confident):
        more, guessed = draw(confident, 4, again)
        inputs, labels = inputs + more.tolist(), labels + guessed.tolist()
    order = torch.randperm(len(labels), generator=again).tolist()
    lam = draw_lambda(1.0, again)
    assert order != list(range(len(labels)))
    assert 0 < lam < 1
    terms = []
    for x, y, k in zip(inputs, labels, order, strict=True):
        scores = [lam * a + (1 - lam) * b for a, b in zip(x, inputs[k], strict=True)]
        terms.append(lam * entropy(scores, y) + (1 - lam) * entropy(scores, labels[k]))
    assert len(terms) == (7 if len(confident) else 3)
    assert found.item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)


def test_without_mixing_it_is_fedavg_to_the_bit():
    plain = run_rounds(FedAvg(**SGD, lr_decay=1, weighting="uniform"), 3, labelled=12, participation=0.5).state.weights
    same = run_rounds(Mixup(**SGD, mixup_alpha=0, unlabelled_batch_size=0), 3, labelled=12, participation=0.5)
    mixed = run_rounds(Mixup(**SGD, unlabelled_batch_size=0), 3, labelled=12, participation=0.5).state.weights
    assert all(torch.equal(same.state.weights[n], plain[n]) for n in plain)
    assert any((mixed[n] - plain[n]).abs().max() > 1e-3 for n in plain)


def test_confident_samples_are_those_of_the_received_model(monkeypatch: pytest.MonkeyPatch):
    net = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), seed=0)  # the initial model of `run_rounds`
    unlabelled = [
        client.with_labels(12, numpy_stream(0, "labelled", i)).unlabelled
        for i, client in enumerate(small_federation().clients)
    ]
    probabilities, classes = zip(*(predicted(net, samples.inputs) for samples in unlabelled), strict=True)
    middle = torch.cat(probabilities).sort().values[4 * 28 // 2 - 1 :][:2]
    tau = float(middle.mean())  # between two probabilities, so that rounding puts none on the other side
    seen: list[Samples] = []
    own = Mixup.mixed

    def mixed(self: Mixup, confident: Samples) -> Loss:
        seen.append(confident)
        return own(self, confident)

    monkeypatch.setattr(Mixup, "mixed", mixed)
    run_rounds(Mixup(**SGD, tau=tau), 1, labelled=12, workers=1)
    assert [len(samples) for samples in unlabelled] == [28] * 4
    for samples, p, c, confident in zip(unlabelled, probabilities, classes, seen, strict=True):
        sure = [k for k in range(28) if float(p[k]) > tau]
        assert torch.equal(confident.inputs, samples.inputs[sure])
        assert confident.labels.tolist() == [int(c[k]) for k in sure]
    assert sum(map(len, seen)) == 4 * 28 // 2


def test_unlabelled_samples_matter_where_the_model_is_sure_of_them():
    never, always, without = (
        run_rounds(Mixup(**SGD, **settings), 2, labelled=8).state.weights
        for settings in ({"tau": 1.0}, {"tau": 0.0}, {"tau": 0.0, "unlabelled_batch_size": 0})
    )
    assert all(torch.equal(never[n], without[n]) for n in never)
    assert any((always[n] - without[n]).abs().max() > 1e-4 for n in never)


@pytest.mark.parametrize("values", [{}, {"local": "fedprox:mu=1"}, {"local": "moon"}, {"aggregation": "qffl"}])
def test_same_bits_for_any_number_of_workers(values: dict[str, Any]):
    algorithm = Mixup(**SGD, tau=0.3, **values)
    one, two = (run_rounds(algorithm, 3, labelled=8, participation=0.75, workers=workers) for workers in (1, 2))
    assert one.lost == []
    assert all(torch.equal(one.state.weights[n], two.state.weights[n]) for n in one.state.weights)


def test_fedprox_with_no_weight_is_none_and_with_some_is_not():
    plain, zero, some = (
        run_rounds(Mixup(**SGD, tau=0.3, local=local), 2, labelled=8).state.weights
        for local in (None, "fedprox:mu=0", "fedprox:mu=5")
    )
    assert all(torch.allclose(zero[n], plain[n], atol=1e-6) for n in plain)
    assert any((some[n] - plain[n]).abs().max() > 1e-4 for n in plain)


def test_it_sends_what_fedavg_sends():
    mixup, fedavg = (run_rounds(kind(**SGD), 2, labelled=8) for kind in (Mixup, FedAvg))
    assert mixup.costs.legs == fedavg.costs.legs
    assert mixup.ledger.account()["total_epsilon"] is None


def test_slips():
    for setting, value in (("tau", -0.1), ("unlabelled_batch_size", -1), ("mixup_alpha", -1), ("mixup_alpha", "inf")):
        with refused(setting, f"found {value!r};", "allowed: "):
            checked(Mixup, {setting: value})
