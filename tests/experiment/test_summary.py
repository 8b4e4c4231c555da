"""The summary: figures of a run, the round that validation chooses, what a run that diverged says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tests.experiment.world import EACH, TINY
from tests.helpers import refused

import fedfill
from fedfill import tree
from fedfill.engines.local import LocalEngine
from fedfill.errors import DivergedError
from fedfill.experiment.summary import selected
from fedfill.training.evaluation import Evaluation


@pytest.mark.parametrize("name", EACH)
def test_summary_and_rounds_hold_what_they_promise(name: str, whole: dict[str, fedfill.Result]) -> None:
    result = whole[name]

    def no_constant(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    summary = json.loads((result.directory / "summary.json").read_text(), parse_constant=no_constant)
    records = [
        json.loads(line, parse_constant=no_constant)
        for line in (result.directory / "rounds.jsonl").read_text().splitlines()
    ]
    assert summary == result.summary
    assert records == result.rounds
    assert {
        *("algorithm", "dataset", "partition", "clients", "rounds", "seed", "engine", "version", "accuracy"),
        *("best_accuracy", "best_round", "accuracy_by_class", "accuracy_by_client", "class_variance"),
        *("client_variance", "worst_client_accuracy", "bytes_up", "bytes_down", "train_samples", "seconds"),
        *("seconds_in_fit", "weights_sha256", "privacy", "verdicts", "balanced_accuracy", "personal"),
    } <= set(summary)
    assert {"entries", "total_epsilon", "statement"} <= set(summary["privacy"])
    assert all(
        {"released", "mechanism", "epsilon", "delta", "conditions"} <= set(e) for e in summary["privacy"]["entries"]
    )
    for number, record in enumerate(records, 1):
        assert record["round"] == number
        assert {
            *("accuracy", "loss", "accuracy_by_class", "accuracy_by_client", "bytes_up", "bytes_down"),
            *("train_samples", "seconds", "privacy", "lost", "warnings"),
        } <= set(record)
        assert len(record["accuracy_by_class"]) == 10
        assert len(record["accuracy_by_client"]) == 4
    assert (summary["algorithm"], summary["dataset"], summary["partition"]) == (name, "digits", "dirichlet:0.5")
    assert (summary["clients"], summary["rounds"], summary["seed"], summary["engine"]) == (4, 5, 0, "local")
    assert summary["version"] == fedfill.__version__
    assert summary["accuracy"] == records[-1]["accuracy"]
    for total in ("bytes_up", "bytes_down", "train_samples"):
        assert summary[total] == sum(record[total] for record in records)
    assert summary["bytes_up"] == sum(leg["up"] for leg in summary["bytes_by_handler"].values())
    assert summary["seconds"] == pytest.approx(sum(record["seconds"] for record in records), abs=0.01)
    assert 0 < summary["seconds_in_fit"] <= summary["seconds"]
    assert summary["weights_sha256"] == tree.sha256(result.weights)
    counts = json.loads((result.directory / "partition.json").read_text())
    assert counts["class_names"] == [str(digit) for digit in range(10)]


def test_bytes_and_samples_by_hand(tmp_path: Path) -> None:
    """FedAvg, one epoch: every client sends and gets all weights, one number beside them, and passes its data once."""
    result = fedfill.run("fedavg", **{**TINY, "rounds": 2, "participation": 1.0}, out=tmp_path)
    weights = 4 * sum(tensor.numel() for tensor in result.weights.values())
    held = sum(map(sum, json.loads((tmp_path / "partition.json").read_text())["clients"]))
    assert result.summary["bytes_down"] == 2 * 4 * weights
    assert result.summary["bytes_up"] == 2 * 4 * (weights + 8)
    assert result.summary["train_samples"] == 2 * held


def test_variances_and_the_best_round_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = iter([0.25, 0.75, 0.75, 0.5])

    def evaluate(self: LocalEngine, weights: tree.Weights, t: int) -> Evaluation:
        return Evaluation(next(accuracies), 1.0, [0.5, 1.0, *[None] * 8], [0.2, None, 0.4, 0.6])

    monkeypatch.setattr(LocalEngine, "evaluate", evaluate)
    summary = fedfill.run("fedavg", **{**TINY, "rounds": 4}, out=tmp_path).summary
    assert (summary["accuracy"], summary["best_accuracy"], summary["best_round"]) == (0.5, 0.75, 2)
    assert summary["class_variance"] == pytest.approx(625)  # of 50 and 100
    assert summary["client_variance"] == pytest.approx(800 / 3)  # of 20, 40 and 60
    assert summary["worst_client_accuracy"] == 0.2


def test_no_own_test_split_is_null_and_not_zero(tmp_path: Path) -> None:
    summary = fedfill.run("fedavg", **{**TINY, "rounds": 1}, client_test=0, out=tmp_path).summary
    assert summary["accuracy_by_client"] == [None] * 4
    assert summary["client_variance"] is None
    assert summary["worst_client_accuracy"] is None


def test_a_loss_that_is_no_number_is_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        LocalEngine, "evaluate", lambda self, weights, t: Evaluation(0.1, math.nan, [None] * 10, [None] * 4)
    )
    with refused("training diverged", "round 1", "nan", kind=DivergedError):
        fedfill.run("fedavg", **TINY, out=tmp_path)
    assert not (tmp_path / "rounds.jsonl").exists()


def test_the_round_is_chosen_among_those_that_were_evaluated(tmp_path: Path) -> None:
    result = fedfill.run(
        "fedavg", **{**TINY, "rounds": 3}, client_validation=0.2, evaluate_every=5, out=tmp_path / "run"
    )
    assert result.summary["selected_round"] == result.summary["best_round"] == 3


def test_a_field_without_a_guarantee_is_not_hidden_by_another_mechanism_of_the_same_field() -> None:
    from fedfill.experiment.loop import _epsilons

    rows = [("a", None), ("a", 0.0), ("b", 0.0), ("b", 2.0), ("b", 1.0)]
    assert _epsilons([{"released": name, "epsilon": epsilon} for name, epsilon in rows]) == {"a": None, "b": 2.0}


def test_validation_splits_choose_a_round(tmp_path: Path) -> None:
    options = {"data": "digits", "clients": 3, "rounds": 4, "data_fraction": 0.3, "local_epochs": 1, "batch_size": 16}
    result = fedfill.run("fedavg", **options, client_validation=0.3, out=tmp_path / "held")
    shares = [record["validation_by_client"] for record in result.rounds]
    assert all(len(each) == 3 and all(0 <= share <= 1 for share in each) for each in shares)
    means = [sum(each) / 3 for each in shares]
    chosen = result.rounds[means.index(max(means))]
    summary = result.summary
    assert summary["selected_round"] == chosen["round"]
    assert summary["selected_validation"] == pytest.approx(max(means))
    assert summary["selected_accuracy"] == chosen["accuracy"]
    assert summary["selected_accuracy_by_client"] == chosen["accuracy_by_client"]
    # nothing of the test data has a say: only validation is looked at
    moved = [{**record, "accuracy": 1 - record["accuracy"]} for record in result.rounds]
    assert selected(moved)["selected_round"] == chosen["round"]
    plain = fedfill.run("fedavg", **options, out=tmp_path / "plain")
    assert not any("selected" in name for name in plain.summary)
    assert "validation_by_client" not in plain.rounds[0]


def test_clients_without_validation_samples_have_no_say() -> None:
    rounds = [
        {"round": 1, "validation_by_client": [None, 0.5], "accuracy": 0.9, "accuracy_by_client": [None, 0.8], "mean_client_accuracy": 0.8},
        {"round": 2, "validation_by_client": [None, 0.7], "accuracy": 0.1, "accuracy_by_client": [None, 0.2], "mean_client_accuracy": 0.2},
        {"round": 3, "validation_by_client": [None, 0.7], "accuracy": 0.5, "accuracy_by_client": [None, 0.6], "mean_client_accuracy": 0.6},
    ]  # fmt: skip
    found = selected(rounds)
    assert found["selected_round"] == 2  # the first of two
    # its own figures, and neither the last round's nor the best on the test data
    assert (found["selected_accuracy"], found["selected_accuracy_by_client"]) == (0.1, [None, 0.2])
    assert (found["selected_mean_client_accuracy"], found["selected_validation"]) == (0.2, 0.7)
    assert selected([{"round": 1, "validation_by_client": [None]}]) == {}
