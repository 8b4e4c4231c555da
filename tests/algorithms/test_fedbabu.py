"""FedBABU: a body under a head that nobody trains, and copies of both that clients fine-tune for themselves."""

import pytest
import torch
from tests.helpers import Run, refused, run_rounds

import fedfill
from fedfill import tree
from fedfill.algorithms.fedbabu import FedBABU
from fedfill.models.views import part, rest
from fedfill.streams import torch_stream
from fedfill.training.fit import Fit, LocalTraining, fit

QUICK = {"batch_size": 8, "local_epochs": 1, "learning_rate": 0.01}


def test_it_is_fedavg_with_a_frozen_head_to_the_bit(tmp_path):
    options = {"clients": 3, "rounds": 3, "data_fraction": 0.2, "local_epochs": 1, "client_test": 0.1}
    babu = fedfill.run("fedbabu", **options, personal_epochs=0, out=tmp_path / "babu")
    plain = fedfill.run("fedavg", **options, frozen="classifier", out=tmp_path / "plain")
    for i in range(3):
        assert all(torch.equal(babu.weights[f"{i}.{name}"], tensor) for name, tensor in plain.weights.items())
    assert babu.summary["accuracy"] == plain.summary["accuracy"]
    assert babu.summary["bytes_up"] == plain.summary["bytes_up"] - 9 * 4 * (16 * 10 + 10)


@pytest.mark.parametrize("which", ["all", "head"])
def test_copies_are_fine_tuned_from_what_was_received(which: str):
    algorithm = FedBABU(**QUICK, personal_epochs=2, personal_part=which)
    first, second = (run_rounds(algorithm, rounds=n) for n in (1, 2))
    run = Run(algorithm, {}, 1, 1.0, 2)
    training = LocalTraining(epochs=2, batch_size=8, learning_rate=0.01)
    body, head = rest(first.state.weights, "classifier"), part(first.initial, "classifier")
    for i in range(4):
        moving, fixed = (head, body) if which == "head" else ({**body, **head}, {})
        streams = (torch_stream(0, name, 1, i, 1) for name in ("fit", "draws"))  # the second training of this round
        request = Fit(moving, algorithm.loss, run.engine._data[i], training, fixed=fixed)
        fitted = fit(run.server._resident, request, *streams).weights
        copy = second.client_states[i]["own"]
        assert copy.keys() == first.state.weights.keys()
        assert all(torch.equal(copy[name], tensor) for name, tensor in {**fixed, **fitted}.items())
        assert not torch.equal(copy["classifier.weight"], head["classifier.weight"])
    run.engine.close()


def test_fine_tuning_leaves_what_is_shared_alone_and_weight_decay_the_head():
    plain, tuned = (
        run_rounds(FedBABU(**QUICK, weight_decay=0.1, personal_epochs=n), rounds=2).state.weights for n in (0, 2)
    )
    assert tree.sha256(plain) == tree.sha256(tuned)
    initial = run_rounds(FedBABU(**QUICK), rounds=1).initial
    assert torch.equal(plain["classifier.weight"], initial["classifier.weight"])
    assert torch.equal(plain["classifier.bias"], initial["classifier.bias"])


def test_slips():
    with refused("local", "moon with fedbabu"):
        run_rounds(FedBABU(local="moon:contrast=latent"), rounds=1)
    with pytest.raises(ValueError, match=r"\bpersonal_epochs\b"):
        FedBABU(personal_epochs=-1)
