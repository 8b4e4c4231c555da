"""What clients keep for themselves: in its places in the global model, and nothing before a client's first training."""

import pytest
import torch

from fedfill.algorithms import known_algorithms
from fedfill.algorithms._keeping import KeepsItsOwn

KINDS = [kind for kind in known_algorithms().values() if issubclass(kind, KeepsItsOwn) and kind.name != "fedrod"]
"""FedRoD adds two heads up, see its own tests."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_is_judged_by_its_own_tensors_and_before_its_first_training_by_the_global_ones(kind):
    weights = {"a": torch.ones(1), "b": torch.ones(1)}
    algorithm = kind()
    for state in ({}, algorithm.client_state()):
        assert algorithm.personal_weights(state, weights) == weights
    assert algorithm.personal_weights({"own": {"a": torch.tensor([2.0])}}, weights) == {
        "a": torch.tensor([2.0]),
        "b": torch.ones(1),
    }


def test_all_of_them_are_tried():
    assert {"ditto", "pfedavg", "pfedme", "partialfed", "fedbabu", "fedbn", "fedper"} <= {kind.name for kind in KINDS}
