"""FedRS: the restricted softmax by hand, and where it is FedAvg."""

import pytest
import torch
from tests.algorithms.test_fedlc import loss_of
from tests.helpers import run_rounds, small_federation

from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.fedrs import FedRS

SMALL = {"local_epochs": 2, "batch_size": 8}


def test_the_loss_by_hand():
    """Scores 2, 1 and 1/2: log(e^2 + e + e^.5) - 1."""
    loss, _ = loss_of(FedRS(), (5, 5, 0), (2.0, 1.0, 1.0), label=1)
    assert loss == pytest.approx(1.4644, abs=1e-4)
    plain, _ = loss_of(FedRS(rs_alpha=1.0), (5, 5, 0), (2.0, 1.0, 1.0), label=1)
    assert plain == pytest.approx(1.5514, abs=1e-4)


def test_a_scale_of_zero_stops_the_gradient_and_is_no_mask():
    loss, model = loss_of(FedRS(rs_alpha=0.0), (5, 5, 0), (2.0, 1.0, 9.0), label=1)
    # the class still counts, with a score of 0: log(e^2 + e + 1) - 1
    assert loss == pytest.approx(1.4076, abs=1e-4)
    assert model.classifier.bias.grad[2].item() == 0


def test_few_samples_may_count_as_none():
    few, _ = loss_of(FedRS(missing_below=3), (5, 5, 2), (2.0, 1.0, 1.0), label=1)
    assert few == pytest.approx(1.4644, abs=1e-4)
    enough, _ = loss_of(FedRS(missing_below=3), (5, 5, 3), (2.0, 1.0, 1.0), label=1)
    assert enough == pytest.approx(1.5514, abs=1e-4)


def test_samples_that_another_algorithm_adds_count():
    filled, _ = loss_of(FedRS(), (5, 5, 0), (2.0, 1.0, 1.0), label=1, added=(0, 0, 1))
    assert filled == pytest.approx(1.5514, abs=1e-4)


@pytest.mark.parametrize(("settings", "per_client"), [({"rs_alpha": 1.0}, 2), ({}, 4)])
def test_without_a_scale_or_a_missing_class_it_is_fedavg_to_the_bit(settings: dict[str, float], per_client: int):
    federation = small_federation(per_client=per_client)
    plain = run_rounds(FedAvg(**SMALL), rounds=2, federation=federation).state.weights
    same = run_rounds(FedRS(**SMALL, **settings), rounds=2, federation=federation).state.weights
    assert all(torch.equal(same[name], tensor) for name, tensor in plain.items())


def test_with_missing_classes_it_is_another_method():
    plain = run_rounds(FedAvg(**SMALL), rounds=2).state.weights
    other = run_rounds(FedRS(**SMALL), rounds=2).state.weights
    assert any(not torch.equal(other[name], tensor) for name, tensor in plain.items())
