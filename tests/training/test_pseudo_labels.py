"""Pseudo-labels: the threshold, what is left as it was, and their measures by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedfill.data.samples import Samples, normalise
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.training.pseudo_labels import compact, labelling_notes, predicted, pseudo_labels

HALF = math.log(3.0)  # against a score of 0: probabilities 3/4 and 1/4
SCORES = torch.tensor([[HALF, 0.0], [0.0, HALF], [0.0, 0.0], [0.0, 9.0], [float("nan"), 0.0]])


@pytest.mark.parametrize(
    ("tau", "labels"),
    [
        (0.0, [0, 1, 0, 1, -1]),
        (0.5, [0, 1, -1, 1, -1]),  # above, not at
        (0.74, [0, 1, -1, 1, -1]),
        (0.76, [-1, -1, -1, 1, -1]),
        (1.0, [-1, -1, -1, -1, -1]),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 2, 512])
def test_labels_by_hand(tau: float, labels: list[int], batch_size: int) -> None:
    found = pseudo_labels(nn.Identity(), SCORES, tau, batch_size)
    assert found.dtype == torch.int64
    assert found.tolist() == labels


@pytest.mark.parametrize("batch_size", [1, 3])
def test_predictions_by_hand(batch_size: int) -> None:
    probabilities, classes = predicted(nn.Identity(), SCORES[:4], batch_size)
    assert probabilities.tolist() == pytest.approx([0.75, 0.75, 0.5, 1 / (1 + math.exp(-9))])
    assert classes.tolist() == [0, 1, 0, 1]


def test_they_are_those_of_the_model_in_evaluation_mode(random_samples: Callable[..., Samples]) -> None:
    inputs = random_samples(30).inputs
    model = build("cnn2bn", (1, 8, 8), 3, ModelSettings(), seed=0)
    model.train()(normalise(inputs) * 3 + 1)  # statistics that differ from those of a batch
    probabilities = model.eval()(normalise(inputs)).softmax(1).detach()
    # between two of them: chunks of another size may round a probability differently
    tau = float(probabilities.max(1).values.sort().values[14:16].mean())
    expected = [int(p.argmax()) if float(p.max()) > tau else -1 for p in probabilities]
    start = weights_of(model)
    found = pseudo_labels(model.train(), inputs, tau, 7)
    assert found.tolist() == expected
    assert -1 in expected
    assert len(set(expected)) > 1
    assert all(torch.equal(start[name], tensor) for name, tensor in weights_of(model).items())


def test_every_layer_has_its_mode_back(random_samples: Callable[..., Samples]) -> None:
    model = build("cnn2bn", (1, 8, 8), 3, ModelSettings(), seed=0).train()
    frozen = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in frozen:
        layer.eval()
    modes = [layer.training for layer in model.modules()]
    pseudo_labels(model, random_samples(3).inputs, 0.5)
    assert [layer.training for layer in model.modules()] == modes
    with pytest.raises(RuntimeError):
        pseudo_labels(model, torch.zeros(2, 5), 0.5)
    assert [layer.training for layer in model.modules()] == modes


def test_they_can_be_trained_on_and_written_to() -> None:
    model = nn.Linear(2, 2)
    labels = pseudo_labels(model, torch.randn(4, 2, generator=torch.Generator().manual_seed(0)), 0.0)
    functional.cross_entropy(model(torch.ones(4, 2)), labels).backward()
    assert model.weight.grad is not None
    labels[0] = -1
    assert not labels.is_inference()


def test_no_samples_give_no_labels() -> None:
    assert pseudo_labels(nn.Linear(2, 2), torch.zeros(0, 2), 0.5).shape == (0,)


@pytest.mark.parametrize(
    ("labels", "owners", "share", "counts", "by_owner"),
    [
        ([0, -1, 2, 2, -1], [3, 3, 3, 5, 5], 0.6, [1, 0, 2], {"3": [1, 0, 1], "5": [0, 0, 1]}),
        ([-1, -1], [0, 1], 0.0, [0, 0, 0], {"0": [0, 0, 0], "1": [0, 0, 0]}),
        ([0, 2, 1, 2, 0], [7, 7, 7, 7, 7], 1.0, [2, 1, 2], {"7": [2, 1, 2]}),
        ([], [], 0.0, [0, 0, 0], {}),
    ],
)
def test_how_far_labels_reach_by_hand(
    labels: list[int], owners: list[int], share: float, counts: list[int], by_owner: dict[str, list[int]]
) -> None:
    found = labelling_notes(torch.tensor(labels, dtype=torch.int64), torch.tensor(owners, dtype=torch.int64), 3)
    assert found == {"labelled": share, "labelled_by_class": counts, "labelled_by_owner": by_owner}


def test_labels_of_more_than_128_classes_travel_in_two_bytes() -> None:
    labels = torch.tensor([200, -1])
    assert compact(labels, 201).tolist() == [200, -1]
    assert compact(torch.tensor([127, -1]), 128).dtype == torch.int8
    assert compact(torch.tensor([-1, -1]), 10) is None
