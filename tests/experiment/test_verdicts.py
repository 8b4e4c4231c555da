"""Verdicts on a run: each where it applies, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.experiment.world import TINY

import fedfill
from fedfill.experiment import verdicts
from fedfill.experiment.verdicts import (
    BALANCED,
    FITTED,
    LEFT_BEHIND,
    NOT_CONVERGED,
    NOTHING_LEARNT,
    OWN_SPLIT,
    balanced_accuracy,
    collapse,
    left_behind,
    of_run,
    partly_private,
    rise,
)
from fedfill.studies.verdicts import of_comparison


@pytest.mark.parametrize(
    ("most", "largest", "accuracy", "named"),
    [
        (0.98, 0.3, 0.3, True),  # one class for all
        (0.979, 0.3, 0.5, False),
        (0.5, 0.3, 0.309, True),  # no better than the largest class
        (0.5, 0.3, 0.291, True),
        (0.5, 0.3, 0.02, True),  # far worse
        (0.5, 0.3, 0.32, False),
        (1.0, 0.99, 0.99, False),  # a test set of one class tells nothing
        (None, None, 0.1, False),  # nobody looked
    ],
)
def test_a_model_that_learnt_nothing_is_named(
    most: float | None, largest: float | None, accuracy: float, named: bool
) -> None:
    found = collapse({"most_predicted": most, "largest_class": largest, "accuracy": accuracy}, personal=False)
    assert (found is not None) == named
    if found is not None:
        assert "learning_rate" in found.sentence  # what to do
        record = {"most_predicted": most, "largest_class": largest, "accuracy": accuracy, "train_samples": 0}
        without_steps = collapse(record, personal=False)
        assert without_steps is not None
        assert "learning_rate" not in without_steps.sentence


@pytest.mark.parametrize(("own", "named"), [(1.0, False), (0.32, False), (0.309, True), (0.02, True), (None, False)])
def test_personal_models_are_judged_by_their_own_splits(own: float | None, named: bool) -> None:
    """On the common test set a model that knows its client's one class is no better than chance, and names that class alone."""
    record = {"most_predicted": 1.0, "largest_class": 0.3, "accuracy": 0.3, "mean_client_accuracy": own}
    found = collapse(record, personal=True)
    assert (found is not None) == named
    if found is not None:
        assert f"{own:.3f}" in found.sentence
        assert "0.300" in found.sentence


def test_clients_that_know_their_one_class_have_learnt_something(tmp_path: Path) -> None:
    options = {"partition": "classes:1", "clients": 10, "rounds": 2, "local_epochs": 2, "learning_rate": 0.01}
    result = fedfill.run("local", **options, out=tmp_path / "run")
    assert result.summary["accuracy_by_client"] == [1.0] * 10
    assert result.summary["accuracy"] < 0.11
    assert [verdict["kind"] for verdict in result.summary["verdicts"]] == [OWN_SPLIT]
    (verdict,) = of_comparison(fedfill.compare(["local"], **options, seeds=[0, 1], out=tmp_path / "all"))
    assert verdict.kind == OWN_SPLIT


def test_a_run_that_learnt_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kinds(result: fedfill.Result) -> list[str]:
        return [verdict["kind"] for verdict in result.summary["verdicts"]]

    assert NOTHING_LEARNT not in kinds(fedfill.run("fedavg", **TINY, out=tmp_path / "learnt"))
    monkeypatch.setattr(verdicts, "AT_CHANCE", 1.0)  # every accuracy is as good as the largest class
    assert kinds(fedfill.run("fedavg", **TINY, out=tmp_path / "still"))[0] == NOTHING_LEARNT


def curve(*accuracies: float | None) -> list[dict[str, Any]]:
    return [{"round": t} if a is None else {"round": t, "accuracy": a} for t, a in enumerate(accuracies, 1)]


def test_a_rise_is_of_the_last_quarter_over_the_one_before() -> None:
    # eight evaluated rounds: (0.7 + 0.9)/2 - (0.5 + 0.6)/2
    assert rise(curve(0.1, 0.2, 0.3, 0.4, 0.5, None, 0.6, 0.7, 0.9)) == pytest.approx(0.25)
    assert rise(curve(*[0.5] * 7)) is None
    headed = curve(*[0.5] * 7, 0.9)
    headed[-1]["accuracy_of_trained_head"] = 0.5  # what the last round's new layer brings is no rise
    assert rise(headed) == 0
    assert rise(curve(*[0.5] * 9, 0.4, 0.4)) == pytest.approx(-0.05 * 2)


def test_a_rise_of_personal_models_is_on_their_own_splits() -> None:
    # on everyone's test set they lose what they gain on their own
    own = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.9]
    records = [record | {"mean_client_accuracy": share} for record, share in zip(curve(*own[::-1]), own, strict=True)]
    assert rise(records, own=True) == pytest.approx(0.25)  # (0.7 + 0.9)/2 - (0.5 + 0.6)/2
    assert rise(records) == pytest.approx(-0.2)  # (0.2 + 0.1)/2 - (0.4 + 0.3)/2
    assert NOT_CONVERGED in kinds(figures(personal=True), records)
    assert NOT_CONVERGED not in kinds(figures(), records)
    records[-1]["mean_client_accuracy_of_trained_head"] = 0.7  # the rest of it is the last round's new layer
    assert rise(records, own=True) == pytest.approx(0.15)
    records[3]["mean_client_accuracy"] = None
    assert rise(records, own=True) == rise(records)


@pytest.mark.parametrize(
    ("given", "told", "silent"),
    [
        ({}, ["head=ccvr", "(pfed3r, fedbn)"], ["another"]),
        ({"algorithm": "fedbn", "personal": True}, ["another personal model (pfed3r)"], ["ccvr", "fedbn"]),
        ({"algorithm": "pfed3r", "personal": True}, ["another personal model (fedbn)"], ["ccvr", "pfed3r"]),
        ({"accuracy_of_trained_head": 0.5}, ["(pfed3r, fedbn)"], ["ccvr"]),
    ],
)
def test_nobody_is_told_to_take_what_the_run_is(given: dict[str, Any], told: list[str], silent: list[str]) -> None:
    behind = figures(accuracy_by_client=[0.9, 0.9, 0.1], own_test_samples=[99, 99, 99], **given)
    (sentence,) = [verdict.sentence for verdict in of_run(behind, []) if verdict.kind == LEFT_BEHIND]
    assert [words for words in told if words not in sentence] == []
    assert [words for words in silent if words in sentence] == []


def figures(**given: Any) -> dict[str, Any]:
    plain = {"accuracy": 0.6, "accuracy_by_class": [0.9, 0.3], "accuracy_by_client": [], "mean_client_accuracy": None}
    return {**plain, "largest_class": 0.5, "personal": False, **given}


def kinds(summary: dict[str, Any], records: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    return [verdict.kind for verdict in of_run(summary, records)]


@pytest.mark.parametrize(
    ("accuracies", "sizes", "who"),
    [
        ([0.9, 0.9, 0.7], [100, 100, 100], 2),  # mean 0.833: 0.133 under it, and 70 of 100 where 83 are expected
        ([0.9, 0.9, 0.7], [30, 30, 30], None),  # 21 of 30 where 25 are expected: so the worst of three may be by chance
        ([0.9, 0.9, 0.76], [900, 900, 900], None),  # less than a tenth under
        ([0.9, 0.9, 0.7], [10, 10, 10], None),  # 7 of 10 is no surprise
        ([0.9, 0.9, 0.7], None, 2),  # nobody knows the sizes
        ([0.9, None, 0.7], [30, 0, 30], None),
        ([0.9, None, 0.5], [100, 0, 100], 2),
        ([0.1], [100], None),
    ],
)
def test_a_client_is_left_behind_where_it_is_no_chance(
    accuracies: list[float | None], sizes: list[int] | None, who: int | None
) -> None:
    found = left_behind({"accuracy_by_client": accuracies, "own_test_samples": sizes})
    assert (None if found is None else found[0]) == who
    if who is not None:
        assert kinds(figures(accuracy_by_client=accuracies, own_test_samples=sizes)) == [LEFT_BEHIND]


def test_uneven_classes_get_the_balanced_accuracy() -> None:
    assert kinds(figures()) == []
    (verdict,) = of_run(figures(largest_class=0.76), ())
    assert verdict.kind == BALANCED
    assert "0.600" in verdict.sentence  # (0.9 + 0.3) / 2
    assert balanced_accuracy([0.9, None, 0.3]) == pytest.approx(0.6)
    assert balanced_accuracy([None]) is None
    assert kinds(figures(largest_class=1.0, accuracy_by_class=[0.6, None])) == []  # one class is no uneven one


def test_personal_models_are_told_with_both_figures() -> None:
    (verdict,) = of_run(figures(personal=True, mean_client_accuracy=0.914, accuracy=0.583), ())
    assert verdict.kind == OWN_SPLIT
    assert {"0.914", "0.583"} <= set(verdict.sentence.split())


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ([("Sums.sums", 3.0, None), ("Update.weights", None, None)], True),
        ([("Sums.sums", 3.0, None)], False),
        ([("Update.weights", None, None)], False),
        (
            [("Sums.sums", None, 3.0), ("Other.sums", 3.0, None)],
            False,
        ),  # with trust=server nothing is claimed towards the server
        ([("Sums.sums", 0.0, None), ("Update.weights", None, None)], False),  # what depends on no record needs no noise
    ],
)
def test_noise_on_a_part_alone_protects_nobody(
    entries: list[tuple[str, float | None, float | None]], named: bool
) -> None:
    names = ("released", "epsilon", "conditional_epsilon")
    found = partly_private({"entries": [dict(zip(names, entry, strict=True)) for entry in entries]})
    assert (found is not None) == named
    if found is not None:
        assert "Sums.sums alone" in found.sentence
        assert "Update.weights went" in found.sentence


def test_a_private_head_on_open_training_is_told(tmp_path: Path) -> None:
    options = {"clients": 2, "rounds": 1, "partition": "iid", "data_fraction": 0.2, "local_epochs": 1}
    options |= {"latent": 8, "latent_activation": "sigmoid"}
    for head, expected in (("fed3r:target_epsilon=3", True), ("fed3r", False)):
        summary = fedfill.run("fedavg", out=tmp_path / head[-1], head=head, **options).summary
        assert ("partly private" in [verdict["kind"] for verdict in summary["verdicts"]]) == expected


def test_a_test_set_of_training_samples_is_told_once(tmp_path: Path) -> None:
    assert kinds(figures()) == kinds(figures(test_fraction=0.1)) == []
    assert kinds(figures(test_fraction=0)) == [FITTED]
    options = {"clients": 2, "rounds": 1, "partition": "iid", "data_fraction": 0.2, "local_epochs": 1}
    found = fedfill.compare(["fedavg", "fedprox"], seeds=[0], test_fraction=0, out=tmp_path, **options)
    assert [verdict.kind for verdict in of_comparison(found)].count(FITTED) == 1


def test_who_still_rises_is_told() -> None:
    rounds = curve(*[0.5] * 6, 0.515, 0.516)
    rounds[-1] |= {"largest_class": 0.1, "most_predicted": 0.2}
    assert kinds(figures(), rounds) == [NOT_CONVERGED]
    assert kinds(figures(), curve(*[0.5] * 6, 0.505, 0.506)) == []
