"""FedPer: the last layers stay with the clients, and all else is FedAvg."""

import pytest
import torch
from tests.algorithms.test_composition import Tied
from tests.helpers import refused, run_rounds

import fedfill
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.fedper import FedPer
from fedfill.models.views import weights_of

QUICK = {"batch_size": 8, "local_epochs": 1, "learning_rate": 0.01}
HEAD = ["classifier.weight", "classifier.bias"]


class KeepsNothing(FedPer):
    def kept(self, model, weights):
        return ()


class KeepsOneOfTwoNames(FedPer):
    def kept(self, model, weights):
        return {"b.weight"}


def test_where_nothing_stays_at_home_it_is_fedavg_to_the_bit():
    plain, shared = (run_rounds(kind(**QUICK), rounds=3, participation=0.5) for kind in (FedAvg, KeepsNothing))
    assert all(torch.equal(shared.state.weights[name], tensor) for name, tensor in plain.state.weights.items())
    assert shared.costs.legs == plain.costs.legs


def test_a_client_alone_is_fedavgs_to_the_bit(tmp_path):
    options = {"partition": "iid", "clients": 1, "rounds": 3, "data_fraction": 0.1, "local_epochs": 1}
    own, plain = (fedfill.run(name, **options, out=tmp_path / name) for name in ("fedper", "fedavg"))
    assert all(torch.equal(own.weights[f"0.{name}"], tensor) for name, tensor in plain.weights.items())


def test_the_classifier_never_travels_and_is_each_clients_own():
    plain, server = (run_rounds(kind(**QUICK), rounds=2) for kind in (FedAvg, FedPer))
    less = 2 * 4 * 4 * (16 * 4 + 4)  # two rounds of four clients, of 16 features and four classes
    down, up = plain.costs.legs["train"]
    assert server.costs.legs == {"train": [down - less, up - less]}
    own = [server.client_states[i]["own"] for i in range(4)]
    assert [sorted(mine) for mine in own] == [sorted(HEAD)] * 4
    assert not torch.equal(own[0]["classifier.weight"], own[1]["classifier.weight"])
    for name, tensor in server.state.weights.items():
        assert torch.equal(tensor, server.initial[name]) is (name in HEAD)


def test_a_clients_own_layer_goes_on_from_where_it_was():
    still = {**QUICK, "lr_decay": 1e-30, "lr_decay_every": 1}  # from the second round on nothing moves
    first, second = (run_rounds(FedPer(**still), rounds=n) for n in (1, 2))
    for i in range(4):
        kept, later = (server.client_states[i]["own"]["classifier.weight"] for server in (first, second))
        assert torch.equal(kept, later)
        assert not torch.equal(kept, first.initial["classifier.weight"])


def test_more_layers_stay_when_asked():
    server = run_rounds(FedPer(**QUICK, personal_layers=2), rounds=1)
    assert set(server.client_states[0]["own"]) == {*HEAD, "encoder.mu.weight", "encoder.mu.bias"}


def test_what_two_layers_share_stays_under_both_names():
    model = Tied()
    assert KeepsOneOfTwoNames().shared(model, weights_of(model)).keys() == {
        "first.weight", "first.bias", "a.bias", "b.bias",
    }  # fmt: skip


def test_who_never_took_part_has_the_initial_layer():
    server = run_rounds(FedPer(**QUICK), rounds=1, participation=0.5)
    newcomer = FedPer().personal_weights({}, server.state.weights)
    assert all(torch.equal(newcomer[name], server.initial[name]) for name in HEAD)
    assert not torch.equal(newcomer["encoder.mu.weight"], server.initial["encoder.mu.weight"])


def test_slips():
    with refused("personal_layers", 4, "1 to 3"):
        run_rounds(FedPer(personal_layers=4), rounds=1)
    with refused("head", "fed3r with fedper"):
        run_rounds(FedPer(head="fed3r"), rounds=1)


@pytest.mark.parametrize(("axis", "name"), [("local", "moon"), ("local", "scaffold"), ("aggregation", "qffl")])
def test_what_needs_whole_models_is_refused(axis: str, name: str):
    with refused(axis, f"{name} with fedper"):
        run_rounds(FedPer(**{axis: name}, optimizer="sgd"), rounds=1)
