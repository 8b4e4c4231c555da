"""A head from sums for every algorithm of one global model: beside its own or in place of it, and where it can't be."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.algorithms.test_composition import quick
from tests.helpers import refused
from torch import Tensor, nn

import fedfill
from fedfill.algorithms import find, known_algorithms
from fedfill.algorithms._heads import Headed
from fedfill.algorithms._values import able
from fedfill.algorithms.fedavg import FedAvg
from fedfill.errors import checked
from fedfill.experiment.prepare import arrange
from fedfill.runs.directory import RunDirectory

TINY: dict[str, Any] = {"data": "digits", "clients": 3, "data_fraction": 0.12, "rounds": 2, "seed": 4}
OURS = {n: k for n, k in known_algorithms().items() if k.__module__.startswith("fedfill.")}
REFUSING = (
    "cfl",
    "dpfedavg",
    "ditto",
    "fedbabu",
    "fedper",
    "fedrep",
    "fedrod",
    "fesem",
    "ifca",
    "partialfed",
    "perfedavg",
    "pfedavg",
    "pfedme",
)
TAKING = [n for n, kind in OURS.items() if issubclass(kind, Headed) and n not in REFUSING]
HEADS = ["fed3r", "fedcgs", "ccvr:samples=20"]


def options(name: str) -> dict[str, Any]:
    """Settings with which an algorithm does all that it does in three short rounds."""
    own = quick(name)
    if name in ("fedbn", "fraug"):
        own["model"] = "cnn2bn"
    if name in ("semifl", "fixmatch", "mixup"):
        own["labelled_per_client"] = 15
    return {**TINY, **own}


def run(name: str, folder: Path, **more: Any) -> fedfill.Result:
    return fedfill.run(name, **{**options(name), **more}, out=folder)


def trained(result: fedfill.Result) -> dict[str, Any]:
    """What server and clients keep of the training itself."""
    kept = RunDirectory(result.directory).read_checkpoint()
    assert kept is not None
    server = {name: value for name, value in kept["server"].items() if name != "head"}
    clients = {
        i: {name: value for name, value in state.items() if name != "own_head"} for i, state in kept["clients"].items()
    }
    return {"server": server, "clients": clients}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if hasattr(one, "__dict__"):
        return equal(vars(one), vars(other))
    return bool(one == other)


def last_layer(weights: dict[str, Tensor]) -> set[str]:
    return {name for name in weights if name.rsplit(".", 1)[0].endswith("classifier")}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs without a head, by name."""
    folder, made = tmp_path_factory.mktemp("plain"), dict[str, fedfill.Result]()

    def of(name: str) -> fedfill.Result:
        if name not in made:
            made[name] = run(name, folder / name)
        return made[name]

    return of


@pytest.mark.parametrize("name", TAKING)
def test_beside_it_the_training_is_what_it_is_without(name: str, plain: Any, tmp_path: Path) -> None:
    """After every round a head is fitted and kept; no tensor of the training, no state of a client has another bit."""
    without = plain(name)
    head = HEADS[TAKING.index(name) % len(HEADS)]
    result = run(name, tmp_path, head=head, head_every=1)
    assert equal(trained(result), trained(without))
    moved = {n for n, x in result.weights.items() if not torch.equal(x, without.weights[n])}
    assert moved
    assert moved <= last_layer(result.weights)
    for record, before in zip(result.rounds, without.rounds, strict=True):
        assert record["accuracy_of_trained_head"] == before["accuracy"]
        assert "accuracy_of_trained_head" not in before
    legs = {n: leg for n, leg in result.summary["bytes_by_handler"].items() if n != "head_sums"}
    assert legs == without.summary["bytes_by_handler"]


@pytest.mark.parametrize(
    "name", ["fedavg", "scaffold", "moon", "feddpms", "fedvae", "semifl", "sdafl", "fedbn", "fraug"]
)
def test_in_its_place_the_training_goes_on_from_it(name: str, plain: Any, tmp_path: Path) -> None:
    result = run(name, tmp_path, head="fed3r", head_every=1, head_mode="replace")
    kept = trained(result)["server"]["weights"]
    if not find(name).personal:
        assert all(torch.equal(x, kept[n]) for n, x in result.weights.items() if n in kept)
    first = result.rounds[0]["loss"]
    assert first == pytest.approx(json.loads((result.directory / "rounds.jsonl").read_text().splitlines()[0])["loss"])
    assert not equal(kept, trained(plain(name))["server"]["weights"])
    assert "accuracy_of_trained_head" not in result.rounds[-1]


@pytest.mark.parametrize("every", [None, 2])
def test_when_a_head_is_due(every: int | None, tmp_path: Path) -> None:
    """After the last round always; with head_every=2 of five rounds after the second, the fourth and the last."""
    result = run("fedavg", tmp_path, rounds=5, head="fed3r", head_every=every)
    due = [record["round"] for record in result.rounds if "accuracy_of_trained_head" in record]
    assert due == ([5] if every is None else [2, 4, 5])
    assert result.summary["accuracy"] == result.rounds[-1]["accuracy"]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("mode", ["beside", "replace"])
def test_a_run_that_is_stopped_goes_on_with_the_same_bits(head: str, mode: str, tmp_path: Path) -> None:
    words = {"head": head, "head_every": 2, "head_mode": mode, "rounds": 4, "participation": 0.67}
    whole = run("scaffold", tmp_path / "whole", **words)

    def stop(record: dict[str, Any], rounds: int) -> None:
        if record.get("round") in (1, 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("scaffold", tmp_path / "stopped", **words, on_round=stop)
    with pytest.raises(KeyboardInterrupt):
        fedfill.resume(tmp_path / "stopped", on_round=stop)
    again = fedfill.resume(tmp_path / "stopped")
    assert again.resumed_after == 2
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert [r.get("accuracy_of_trained_head") for r in again.rounds] == [
        r.get("accuracy_of_trained_head") for r in whole.rounds
    ]


@pytest.mark.parametrize("head", HEADS)
def test_engines_and_workers_give_the_same_bits(head: str, tmp_path: Path) -> None:
    words: dict[str, Any] = {
        "head": head,
        "head_every": 1,
        "head_mode": "replace",
        "rounds": 2,
        "partition": "classes:4",
    }
    found = {
        run("fedavg", tmp_path / str(workers), **words, workers=workers).summary["weights_sha256"] for workers in (1, 3)
    }
    assert len(found) == 1


def test_the_head_is_over_all_clients_on_the_aggregated_weights(tmp_path: Path) -> None:
    """Slow and plain: what the trained encoder makes of everybody's records, also of those who were not in the round."""
    prepared = arrange("fedavg", model="auto", partition="dirichlet:0.5", **options("fedavg"), participation=0.34)
    result = run("fedavg", tmp_path, head="fed3r:ridge_lambda=0.5,scale=1", participation=0.34)
    weights = trained(result)["server"]["weights"]
    prepared.model.load_state_dict(weights)
    data = [client.train for client in prepared.federation.clients]
    with torch.no_grad():
        z = torch.cat([prepared.model.eval().encoder(x.inputs.float() / 127.5 - 1) for x in data]).double()
    z, y = (z * 4096).trunc() / 4096, torch.cat([x.labels for x in data])
    d = z.shape[1]
    wanted = torch.linalg.solve(z.T @ z + 0.5 * torch.eye(d), z.T @ nn.functional.one_hot(y, 10).double())
    assert torch.allclose(result.weights["classifier.weight"].double(), wanted.T, rtol=1e-3, atol=1e-4)
    assert not result.weights["classifier.bias"].any()


@pytest.mark.parametrize("name", ["fedbn", "fraug"])
@pytest.mark.parametrize("head", ["fed3r:ridge_lambda=0.5,scale=1", "pfed3r:ridge_lambda=0.5"])
def test_personal_normalisation_makes_each_clients_own_features(
    name: str, head: str, plain: Any, tmp_path: Path
) -> None:
    """The sums are those of every client's own network; the head is one for all, or with pfed3r close to it."""
    result, without = run(name, tmp_path, head=head), plain(name)
    assert equal(trained(result), trained(without))
    prepared = arrange(name, partition="dirichlet:0.5", **options(name))
    network, gram, moments = prepared.model.eval(), 0.0, 0.0
    for i, client in enumerate(prepared.federation.clients):
        own = {n.removeprefix(f"{i}."): x for n, x in result.weights.items() if n.startswith(f"{i}.")}
        network.load_state_dict(own)
        with torch.no_grad():
            z = network.encoder(client.train.inputs.float() / 127.5 - 1).double()
        z = (z * 4096).trunc() / 4096
        gram = gram + z.T @ z
        moments = moments + z.T @ nn.functional.one_hot(client.train.labels, 10).double()
    wanted = torch.linalg.solve(gram + 0.5 * torch.eye(len(gram)), moments).T
    heads = [result.weights[f"{i}.classifier.weight"].double() for i in range(3)]
    if head.startswith("fed3r"):
        assert all(torch.allclose(x, wanted, rtol=1e-3, atol=1e-3) for x in heads)
    else:
        assert not torch.equal(heads[0], heads[1])
        mean = torch.stack(heads).mean(0)
        assert float((mean - wanted).norm() / wanted.norm()) < 0.7


# The account


def test_a_head_without_noise_leaves_no_guarantee_and_one_with_noise_has_its_own(tmp_path: Path) -> None:
    for k, (more, bounded) in enumerate((("", False), (":target_epsilon=3", True))):
        result = run("fedavg", tmp_path / str(k), head=f"fed3r{more}", model="cnn2", latent_activation="sigmoid")
        kept = result.summary["privacy"]
        (entry,) = [entry for entry in kept["entries"] if entry["released"] == "Sums.sums"]
        assert (kept["total_epsilon"], kept["total_epsilon_added"]) == (None, None)  # the models that are sent
        assert (entry["epsilon_added"] == pytest.approx(3, rel=1e-6)) if bounded else (entry["epsilon_added"] is None)


def test_noise_on_features_that_nothing_bounds_is_refused(tmp_path: Path) -> None:
    with refused("target_epsilon", 3, "bounds"):
        run("fedavg", tmp_path / "x", head="fed3r:target_epsilon=3", latent_activation="none")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("every", "times"), [(None, 1), (1, 3), (2, 2)])
def test_heads_of_several_rounds_share_the_promise(every: int | None, times: int, tmp_path: Path) -> None:
    """After the second and the third round with head_every=2 of three."""
    words = {"head": "fed3r:target_epsilon=3", "head_every": every, "latent_activation": "sigmoid", "rounds": 3}
    result = run("fedavg", tmp_path, **words)
    (entry,) = [e for e in result.summary["privacy"]["entries"] if e["released"] == "Sums.sums"]
    assert entry["times"] == times
    assert entry["epsilon_added"] == pytest.approx(3, rel=1e-6)


# Words


def test_words_and_back_again(tmp_path: Path) -> None:
    algorithm = checked(FedAvg, {"head": "ccvr:samples=inf"})
    assert algorithm.head.samples == "inf"
    assert algorithm.model_dump()["head"].endswith(",samples=inf,prior=uniform")
    assert checked(FedAvg, algorithm.model_dump()) == algorithm
    assert checked(FedAvg, {"head": "fed3r:ridge_lambda=0.5;column_norm=true"}).head.ridge_lambda == 0.5
    result = run("fedavg", tmp_path, rounds=1, head="ccvr:samples=inf")
    settings = tomllib.loads((tmp_path / "experiment.toml").read_text())["settings"]
    assert settings["head"] == algorithm.model_dump()["head"]
    assert fedfill.resume(tmp_path).was_finished
    assert result.rounds[0]["accuracy_of_trained_head"] > 0


@pytest.mark.parametrize("head", able("head"))
def test_every_head_survives_the_settings_file(head: str) -> None:
    algorithm = checked(find("fedbn"), {"head": head, "head_every": 2, "head_mode": "replace"})
    assert checked(find("fedbn"), algorithm.model_dump()) == algorithm


def test_settings_that_are_as_they_come_leave_no_trace() -> None:
    """So that digests of runs without a head stay what they were."""
    document = FedAvg().model_dump()
    assert not {"head", "head_every", "head_mode"} & set(document)
    assert checked(FedAvg, {"head": "none"}).model_dump() == document


def test_what_is_a_head() -> None:
    assert set(able("head")) >= {"fed3r", "fedcgs", "ccvr"}
    assert "softmax" not in able("head")
    assert not set(able("head")) & {*able("local"), *able("aggregation")}


# Where it can't be


class Ends(nn.Module):
    """A network whose last step is no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.flatten(1)).relu()).log_softmax(1)


def unbiased() -> nn.Module:
    torch.manual_seed(0)  # the values are drawn here, and not by the run
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10, bias=False))


@pytest.mark.parametrize(
    ("name", "more", "setting", "facts"),
    [
        ("dpfedavg", {"head": "fed3r"}, "head", ["fed3r with dpfedavg", "whole client"]),
        ("fedavg", {"head": "fed3r", "aggregation": "dpfedavg"}, "head", ["fed3r with dpfedavg"]),
        ("pfedavg", {"head": "fed3r"}, "head", ["fed3r with pfedavg", "last layers of their own"]),
        ("partialfed", {"head": "ccvr"}, "head", ["ccvr with partialfed", "last layers of their own"]),
        ("local", {"head": "fed3r"}, "setting", ["'head'"]),
        ("central", {"head": "fed3r"}, "setting", ["'head'"]),
        ("fedavg", {"head": "fed3r", "model": Ends()}, "model", ["fed3r", "Ends", "linear"]),
        ("fedavg", {"head": "fedcgs", "model": unbiased()}, "model", ["fedcgs", "bias"]),
        ("fedavg", {"head": "ccvr", "model": unbiased()}, "model", ["ccvr", "bias"]),
        ("fedavg", {"head": "pfed3r"}, "head", ["pfed3r"]),
        ("fedavg", {"head": "fed3rr"}, "head", ["fed3rr", "'fed3r'"]),
        ("fedavg", {"head": "fedprox"}, "head", ["fedprox", "local"]),
        ("fedavg", {"head": "softmax"}, "head", ["softmax", "fed3r"]),
        ("fedavg", {"local": "fed3r"}, "local", ["fed3r", "head=fed3r"]),
        ("fedavg", {"head": "fed3r:lambda=1"}, "head", ["'lambda'", "ridge_lambda"]),
        ("fedavg", {"head": "fed3r:ridge_lambda=-1"}, "ridge_lambda", [-1]),
        ("fedavg", {"head": "ccvr:samples=0"}, "samples", [0]),
        ("fedavg", {"head": "ccvr:samples=many"}, "samples", ["many", "inf"]),
        ("fedavg", {"head": "fed3r:local_epochs=2"}, "head", ["local_epochs"]),
        ("fedavg", {"head_every": 2}, "head_every", [2, "head="]),
        ("fedavg", {"head_mode": "replace"}, "head_mode", ["replace", "head="]),
        ("fedavg", {"head": "fed3r", "head_every": 0}, "head_every", [0]),
        ("fedavg", {"head": "fed3r", "head_mode": "instead"}, "head_mode", ["instead", "beside", "replace"]),
        ("fedavg", {"head": "fedcgs:covariance=class"}, "model", ["fedcgs", "gaussian"]),
        ("fedavg", {"head": "fed3r:filter_steps=3"}, "head", ["filter_steps"]),
        ("fedavg", {"head": "fed3r:centre=federated"}, "head", ["centre"]),
    ],
)
def test_where_it_can_not_be_is_a_sentence(
    name: str, more: dict[str, Any], setting: str, facts: list[Any], tmp_path: Path
) -> None:
    with refused(setting, *facts) as caught:
        run(name, tmp_path / "x", **more)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "x").exists()


def test_a_layer_without_biases_takes_a_head_without(tmp_path: Path) -> None:
    result = run("fedavg", tmp_path, head="fed3r", model=unbiased())
    assert result.rounds[-1]["accuracy"] > 0.3
