"""FedLC: the calibrated loss by hand, what a missing class gets, and where it is FedAvg."""

from dataclasses import replace

import pytest
import torch
from tests.helpers import TINY_GAN, run_rounds, small_federation, start_of
from torch import nn

from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.feddpgan import FedDPGAN
from fedfill.algorithms.fedlc import FedLC
from fedfill.algorithms.fedmix import FedMix
from fedfill.algorithms.fedvae import FedVAE
from fedfill.algorithms.fixmatch import FixMatch
from fedfill.data.samples import Batch, Samples
from fedfill.training.fit import Context
from fedfill.training.losses import cross_entropy

SMALL = {"local_epochs": 2, "batch_size": 8}


class Scores(nn.Module):
    """Scores that are the biases, whatever the input."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.classifier = nn.Linear(1, len(scores))
        with torch.no_grad():
            self.classifier.weight.zero_()
            self.classifier.bias.copy_(torch.tensor(scores))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(x)


def held(*counts: int) -> Samples:
    labels = torch.cat([torch.full((n,), c) for c, n in enumerate(counts)])
    return Samples(torch.zeros(len(labels), 1), labels)


def start(*counts: int):
    made = start_of({}, data=held(*counts))
    made.client.classes = len(counts)
    return made


def loss_of(
    algorithm: FedAvg, counts: tuple[int, ...], scores: tuple[float, ...], label: int, added: tuple[int, ...] = ()
) -> tuple[float, Scores]:
    """The loss of one sample at a client with so many samples of each class, and others that are trained on beside them."""
    model, made = Scores(*scores), start(*counts)
    made = replace(made, data=made.data + held(*added)) if added else made
    objective = algorithm.objective(made, lambda model, batch, context: cross_entropy(model, batch))
    batch = Batch(torch.zeros(1, 1), torch.tensor([label]), torch.tensor([0]))
    loss = objective(model, batch, Context({}, torch.Generator(), 0))
    loss.backward()
    return loss.item(), model


@pytest.mark.parametrize(("missing", "expected"), [("mask", 1.7014), ("one", 1.7664)])
def test_the_loss_by_hand(missing: str, expected: float):
    """Margins .5, 1 and none or 1: log(1 + e^1.5), and with e^-1 in the sum."""
    loss, model = loss_of(FedLC(missing=missing), (16, 1, 0), (2.0, 1.0, 0.0), label=1)
    assert loss == pytest.approx(expected, abs=1e-4)
    assert (model.classifier.bias.grad[2].item() == 0) is (missing == "mask")


def test_samples_that_another_algorithm_adds_count():
    filled, _ = loss_of(FedLC(), (16, 1, 0), (2.0, 1.0, 0.0), label=1, added=(0, 15, 0))
    plain, _ = loss_of(FedLC(), (16, 16, 0), (2.0, 1.0, 0.0), label=1)
    assert filled == plain


def test_without_margins_it_is_fedavg_to_the_bit():
    plain = run_rounds(FedAvg(**SMALL), rounds=2).state.weights
    none = run_rounds(FedLC(**SMALL, tau=0.0), rounds=2).state.weights
    assert all(torch.equal(none[name], tensor) for name, tensor in plain.items())


def test_equal_counts_shift_all_scores_alike():
    even, _ = loss_of(FedLC(tau=3.0), (7, 7, 7), (2.0, 1.0, 0.0), label=1)
    plain, _ = loss_of(FedLC(tau=0.0), (7, 7, 7), (2.0, 1.0, 0.0), label=1)
    assert even == pytest.approx(plain, abs=1e-6)


def test_rows_of_missing_classes_stay_where_they_were():
    """Client 0 holds the classes 0 and 1: alone it leaves the rows 2 and 3 alone, and FedAvg does not."""
    federation = small_federation()
    federation = type(federation)(**{**vars(federation), "clients": federation.clients[:1] * 4})
    name = "classifier.weight"
    for algorithm, moved in ((FedLC(**SMALL), False), (FedAvg(**SMALL), True)):
        server = run_rounds(algorithm, rounds=1, federation=federation)
        rows = server.state.weights[name] - server.initial[name]
        assert rows[:2].abs().max() > 0
        assert bool(rows[2:].abs().max() > 1e-6) is moved


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (FedVAE, {}),
        (FedMix, {"group_size": 8}),  # mixes in labels that the client lacks
        (FedDPGAN, {**TINY_GAN, "images_per_class": 2}),
        (FixMatch, {"tau": 0.3}),
    ],
)
def test_it_calibrates_the_losses_of_others(kind: type, settings: dict[str, object]):
    labelled = 8 if kind is FixMatch else None
    plain = run_rounds(kind(**SMALL, **settings), rounds=2, labelled=labelled)
    taken = run_rounds(kind(**SMALL, **settings, local="fedlc"), rounds=2, labelled=labelled)
    assert taken.lost == []
    assert any(not torch.equal(taken.state.weights[n], tensor) for n, tensor in plain.state.weights.items())


def test_scores_in_evaluation_mode_are_what_they_are():
    """In a loss that guesses labels, say."""
    model, seen = Scores(2.0, 1.0, 0.0), []

    def guessing(model: nn.Module, batch: Batch, context: Context) -> torch.Tensor:
        seen.append(model.eval()(batch.inputs).tolist())
        seen.append(model.train()(batch.inputs).tolist())
        return torch.zeros(())

    FedLC().objective(start(16, 1, 1), guessing)(model, Batch(torch.zeros(1, 1), torch.tensor([0]), None), None)
    assert seen == [[[2.0, 1.0, 0.0]], [[1.5, 0.0, -1.0]]]
    assert model(torch.zeros(1, 1)).tolist() == [[2.0, 1.0, 0.0]]
