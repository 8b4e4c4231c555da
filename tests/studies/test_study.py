"""Studies: an answer from validation splits alone, the same when asked again, within a budget, in plain words."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from tests.helpers import refused

import fedfill
from fedfill.algorithms import known_algorithms
from fedfill.cli.answers import print_study
from fedfill.experiment.summary import Result
from fedfill.studies import compare as comparing
from fedfill.studies import study as studying
from fedfill.studies.comparison import Comparison, Row
from fedfill.studies.look import Look
from fedfill.studies.recommend import Asked, Candidate, candidates, choose, ranked, recommend, without_head
from fedfill.studies.rules import (
    NOT_TRIED,
    SUMS,
    TRAINED,
    Entry,
    Goal,
    entries,
    goal_of,
    left_out,
    score,
    validation_share,
)
from fedfill.studies.stages import Plan, parse_budget, plan_for, screened_rounds_of
from fedfill.studies.study import Study, _suitable, commands_for, references_of, study

SMALL: dict[str, Any] = {"data": "digits", "partition": "dirichlet:0.1", "clients": 5, "rounds": 3, "seeds": [0, 1]}
QUICK: dict[str, Any] = {"local_epochs": 1, "batch_size": 64, "data_fraction": 0.4}


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return study(out=tmp_path_factory.mktemp("study") / "s", **SMALL, **QUICK)


def test_the_package_offers_the_function() -> None:
    assert fedfill.study is study


def test_it_answers(answered: Study) -> None:
    """Few rounds on five clients that lack classes: sums win by far."""
    answer = answered.recommendation
    assert answer is not None
    assert (answer.label, answered.goal) == ("fed3r", "everyone")
    assert answer.sentences[0].startswith("take fed3r: ")
    assert answered.plan.seeds == (0, 1)
    assert answered.plan.rounds == 3
    labels = [candidate.label for candidate in answered.finalists]
    assert labels[0] == "fed3r"
    assert {"fedavg", "fedavg:head=ccvr"} <= set(labels)
    assert set(answered.references) == {"local", "central"}
    for stage in ("screen", "final", "reference"):
        assert (answered.directory / stage / "comparison.json").exists()


def test_the_record_says_the_same(answered: Study) -> None:
    document = json.loads((answered.directory / "study.json").read_text())
    assert document["recommendation"]["label"] == "fed3r"
    assert document["goal"] == "everyone"
    assert [one["label"] for one in document["finalists"]] == [one.label for one in answered.finalists]
    assert document["look"]["label_skew"] == answered.seen.label_skew
    assert document["plan"]["labels"] == list(answered.plan.labels)
    assert not {"fed3r", "fedavg", "local"} & {word for names in document["not_tried"] for word in names.split(", ")}


def test_both_figures_of_a_run_with_a_head_are_its_own(answered: Study) -> None:
    """The run's record has the figures before the new last layer too, which are those of the run without it."""
    by_label = {candidate.label: candidate for candidate in answered.finalists}
    plain, headed = by_label["fedavg"], by_label["fedavg:head=ccvr"]
    row = next(row for row in answered.final.rows if row.label == "fedavg:head=ccvr")
    assert headed.accuracy == tuple(row.values("accuracy"))
    assert plain.accuracy == tuple(result.summary["accuracy_of_trained_head"] for result in row.finished)
    alone = fedfill.run(
        "fedavg", out=answered.directory.parent / "alone", seed=0, client_validation=0.25,
        **{k: v for k, v in SMALL.items() if k != "seeds"}, **QUICK,
    )  # fmt: skip
    assert alone.summary["accuracy"] == plain.accuracy[0]
    shares, sizes = alone.rounds[-1]["validation_by_client"], alone.summary["validation_samples"]
    assert plain.validation[0] == pytest.approx(
        sum(a * n for a, n in zip(shares, sizes, strict=True) if n) / sum(sizes)
    )


def test_asked_again_nothing_is_run(answered: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []
    real = comparing.launch

    def launch(prepared: Any, path: Path, on_round: Any) -> Result:
        result = real(prepared, path, on_round)
        if not result.was_finished:
            trained.append(path.name)
        return result

    monkeypatch.setattr(comparing, "launch", launch)
    again = study(out=answered.directory, **SMALL, **QUICK)
    assert trained == []
    assert (again.recommendation, again.finalists, again.commands) == (
        answered.recommendation,
        answered.finalists,
        answered.commands,
    )


def test_it_is_printed_with_what_to_do_next(answered: Study, capsys: pytest.CaptureFixture[str]) -> None:
    print_study(answered)
    text = capsys.readouterr().out
    assert "take fed3r" in " ".join(text.split())
    (command,) = [line for line in text.splitlines() if line.startswith("fedfill run")]
    words = shlex.split(command)
    assert words[:3] == ["fedfill", "run", "fed3r"]
    assert "--client-validation" not in words
    assert {"local_epochs=1", "batch_size=64"} <= set(words)
    assert "fedfill export runs/model --to model" in text
    assert "None" not in command


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"seeds": []}, ("seeds",)),
        ({"seeds": [0, 0]}, ("seeds", "0")),
        ({"goal": "all"}, ("goal", "all")),
        ({"budget": "ten"}, ("budget", "ten")),
        ({"budget": 0}, ("budget", "0")),
        ({"seed": 3}, ("seed", "3")),
        ({"client_validation": 0.0}, ("client_validation", "0")),
        ({"alpah": 1}, ("setting", "alpah")),
        ({"rounds": 0}, ("rounds", "0")),
        ({"data": "digitss"}, ("data", "digitss")),
    ],
)
def test_slips_are_found_before_anything_runs(given: dict[str, Any], facts: tuple[str, ...], tmp_path: Path) -> None:
    with refused(*facts):
        study(**{**SMALL, **given}, out=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_the_command_has_every_word_that_was_given() -> None:
    """A network of its own too, and nothing for what was not given."""
    given = {"data": "digits", "model": "cnn2", "data_dir": None, "client_validation": 0.2, "momentum": 0.5}
    train, *_ = commands_for("scaffold:mu=0.1", 7, given)
    assert shlex.split(train) == [
        "fedfill", "run", "scaffold", "--data", "digits", "--model", "cnn2", "--set", "momentum=0.5", "--rounds", "7",
        "--set", "mu=0.1", "--out", "runs/model",
    ]  # fmt: skip


def test_a_budget_cuts_the_study_and_not_the_model_in_use(tmp_path: Path) -> None:
    given = {**SMALL, **QUICK, "rounds": 9, "seeds": [0], "data_fraction": 0.1, "model": "mlp"}
    found = study(**given, out=tmp_path / "s", budget=0.001)
    assert found.recommendation is not None
    rounds = next(one.rounds for one in found.finalists if one.label == found.recommendation.label)
    once = found.recommendation.label.startswith("fed3r")
    assert found.plan.rounds < 9
    assert f"--rounds {rounds if once else 9} " in found.commands[0]


def test_a_frame_and_lists_of_rows_are_called_what_came_from_python() -> None:
    frame = pandas.DataFrame({"a": [1.0], "label": ["x"]})
    assert studying._shown(frame, [[0]], "auto") == {"data": ..., "partition": ...}
    assert studying._shown("digits", "iid", "cnn2") == {"data": "digits", "partition": "iid", "model": "cnn2"}


def test_methods_that_cannot_take_a_setting_are_left_out_and_named(tmp_path: Path) -> None:
    """SCAFFOLD needs sgd; a user who asks for adam has not named it."""
    options = {**SMALL, "rounds": 1, "clients": 2, "seeds": [0], "partition": "iid", "model": "mlp"}
    found = study(**options, **QUICK, optimizer="adam", out=tmp_path / "s")
    assert not any("scaffold" in entry.label for entry in found.entries)
    (why,) = [why for names, why in found.not_tried.items() if names.startswith("scaffold")]
    assert "optimizer" in why
    with refused("learning_rate"):
        study(**options, **QUICK, learning_rate=-1, out=tmp_path / "t")


def test_methods_that_are_the_same_with_these_settings_are_run_once(tmp_path: Path) -> None:
    """A new last layer for all: FedAvg with it and FedAvg are one and the same."""
    tried = [Entry("fedavg", TRAINED, ""), Entry("fedavg:head=ccvr", TRAINED, "")]
    given = {"data": "digits", "partition": "iid", "model": "auto", "clients": 2}
    assert _suitable(tried, 0, given) == (tried, {})
    fit, refused_ = _suitable(tried, 0, {**given, "head": "ccvr"})
    assert [entry.label for entry in fit] == ["fedavg"]
    assert refused_ == {"fedavg:head=ccvr": "with these settings it is fedavg"}


def test_a_setting_that_the_references_lack_is_no_slip(tmp_path: Path) -> None:
    options = {**SMALL, "rounds": 1, "clients": 2, "seeds": [0], "partition": "iid", "model": "mlp"}
    found = study(**options, **QUICK, weighting="uniform", head="ccvr", out=tmp_path / "s")
    assert {*found.references} == {"local", "central"}
    with refused("setting", "mu"):
        study(**options, **QUICK, mu=0.5, alpah=3, out=tmp_path / "t")


def test_another_study_in_the_folder_is_refused(answered: Study, tmp_path: Path) -> None:
    with refused("out", answered.directory, "another study"):
        study(**{**SMALL, "partition": "iid"}, **QUICK, out=answered.directory)
    with refused("out", "budget None, not 600"):
        study(**SMALL, **QUICK, budget="10m", out=answered.directory)
    (tmp_path / "mine.txt").write_text("mine")
    with refused("out", "mine.txt"):
        study(**SMALL, **QUICK, out=tmp_path)
    (tmp_path / "f").write_text("")
    with refused("out", "file"):
        study(**SMALL, **QUICK, out=tmp_path / "f")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"request": {}, "version": "0", "plan": 3}'])
def test_a_damaged_record_is_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(text)
    with refused("out", "study.json"):
        study(**SMALL, **QUICK, out=tmp_path)


def test_with_a_guarantee_asked_for_only_those_that_give_one(tmp_path: Path) -> None:
    options = {**SMALL, "rounds": 2, "partition": "iid", "clients": 2, "seeds": [0]}
    found = study(**options, features="conv(20) > project(64)", target_epsilon=8, out=tmp_path / "s")
    assert [entry.label for entry in found.entries] == ["fed3r", "softmax"]
    assert list(found.references) == ["without noise"]
    assert found.recommendation is not None
    assert found.recommendation.sure == "one seed"
    text = str(found)
    assert all(words in text for words in ("epsilon", "Without noise".lower(), "trust=secure"))
    assert "target_epsilon=8" in found.commands[0]
    reasons = {name: why for names, why in found.not_tried.items() for name in names.split(", ")}
    assert "guarantee" in reasons["fedavg"]
    assert "guarantee" not in reasons["dpfedavg"]


def test_data_from_python_have_a_command_in_python(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(240, 6)).astype(np.float32)
    labels = (inputs[:, 0] > 0).astype(int)
    found = study(
        data=(inputs, labels), partition="iid", clients=3, rounds=2, seeds=[0], local_epochs=1, out=tmp_path / "s"
    )
    assert found.recommendation is not None
    train, export, use = found.commands
    assert train.startswith(f'fedfill.run("{found.recommendation.label.partition(":")[0]}", ')
    for words in ("data=..., ", "partition='iid', ", "clients=3, ", "local_epochs=1, ", "out='runs/model'"):
        assert words in train
    assert "validation" not in train
    assert export.startswith("fedfill.export(")
    assert use.startswith("fedfill.load(")
    assert repr(found).startswith("<study: take ")
    assert len(found.to_frame()) == len(found.finalists)
    assert "<table>" in found._repr_html_()
    assert json.loads((tmp_path / "s" / "study.json").read_text())["request"]["data"] == "python"


# --- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), (" 2 m ", 120), (30, 30), (None, None)]
)
def test_budgets(text: Any, seconds: float | None) -> None:
    assert parse_budget(text) == seconds


def seen(hellinger: float = 0.7, drift: float = 0.0, samples: int = 5000) -> Look:
    return Look(10, samples, samples / 10, 1.0, 0.5, hellinger, drift, 0.0, 0.1)


def test_rules() -> None:
    def labels(look: Look, goal: Goal, shape: tuple[int, ...] = (1, 28, 28), private: bool = False) -> set[str]:
        return {entry.label for entry in entries(look, goal, shape, private)}

    assert "fed3r" in labels(seen(), "everyone")
    assert not labels(seen(), "everyone") & {"pfed3r", "fedbn", "fedbn:head=pfed3r", "pfedavg", "fraug"}
    assert {"pfed3r", "fedbn:head=pfed3r", "fraug"} <= labels(seen(drift=0.4), "own")
    assert "fraug" not in labels(seen(), "own")
    assert "fedprox:mu=0.01,head=ccvr" not in labels(seen(hellinger=0.05), "everyone")
    assert any("patches" in label for label in labels(seen(), "everyone"))
    assert not any(
        "patches" in label for label in labels(seen(), "everyone", (1, 8, 8)) | labels(seen(), "everyone", (30,))
    )
    assert labels(seen(), "everyone", private=True) == {"fed3r", "softmax"}
    found = [{entry.label for entry in entries(seen(), "everyone", (30,), private, True)} for private in (False, True)]
    assert ["cox" in labels for labels in found] == [True, False]  # of times to an event
    assert "cox" not in labels(seen(), "everyone")
    assert (goal_of(seen(), False), goal_of(seen(drift=0.1), False), goal_of(seen(), True)) == (
        "everyone",
        "own",
        "own",
    )
    assert [validation_share(n) for n in (100, 1000, 5000, 60000)] == [0.25, 0.25, 0.2, 0.1]


def test_what_was_not_tried_is_all_that_is_left() -> None:
    missing = left_out([Entry("fedavg:head=ccvr", TRAINED, "")], ["fedavg", "fedbn", "moon", "local"])
    assert "fedbn" in missing
    assert not any("fedavg" in names.replace(",", " ").split() for names in missing if "moon" not in names)


def test_each_algorithm_has_one_reason() -> None:
    words = [word for names in NOT_TRIED if "--" not in names for word in names.split(", ")]
    assert len(words) == len(set(words))
    assert set(words) <= set(known_algorithms())
    assert {"feddyn", "fedavgm", "fedsam", "moon", "fednova", "qffl", "ditto", "fedgan", "fedma"} <= set(words)


def test_what_decides_by_hand() -> None:
    assert score([0.5, None, 1.0], [30, 0, 10], "everyone") == pytest.approx(25 / 40)
    assert score([0.5, None, 1.0], [30, 0, 10], "own") == pytest.approx(0.75)
    assert score([None], [0], "own") is None


@pytest.mark.parametrize(
    ("label", "plain"),
    [
        ("fedavg:head=ccvr", "fedavg"),
        ("fedprox:mu=0.01,head=ccvr", "fedprox:mu=0.01"),
        ("fedprox:head=ccvr,mu=0.01", "fedprox:mu=0.01"),
        ("fed3r", "fed3r"),
    ],
)
def test_a_label_without_its_head(label: str, plain: str) -> None:
    assert without_head(label) == plain


def candidate(
    label: str, *validation: float | None, test: float = 0.5, rounds: int = 10, size: float = 1e6
) -> Candidate:
    n = len(validation)
    return Candidate(label, validation, (test,) * n, (test,) * n, rounds, size, 1.0, None, "In total: no guarantee.")


def test_the_test_set_decides_nothing() -> None:
    found = [candidate("a", 0.8, 0.9, test=0.1), candidate("b", 0.7, 0.81, test=0.99)]
    assert choose(found) is found[0]
    answer = recommend(found, {}, "everyone", Asked(10))
    assert answer is not None
    assert answer.label == "a"
    assert answer.sure == "yes"
    assert "+9.50 ± 6.35" in answer.sentences[1]


def test_the_price_of_noise_is_that_of_what_is_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that are alike the cheaper one, and not the one that is ahead by less than counts."""
    dear, cheap = candidate("dear", 0.803, 0.803, rounds=50), candidate("cheap", 0.80, 0.80, rounds=1)
    asked: list[Any] = []

    class Recorded:
        def without(self, *names: str) -> Recorded:
            asked.append(names)
            return self

        def run(self, name: str, labels: list[str], seeds: Any, rounds: int) -> str:
            asked.append(labels)
            return "compared"

    monkeypatch.setattr(studying, "candidates", lambda compared, goal: [cheap])
    plan = Plan(("dear", "cheap"), 50, (0, 1), 10)
    found = references_of(Recorded(), plan, [dear, cheap], "everyone", True, [])  # type: ignore[arg-type]
    assert "target_epsilon" in asked[0]
    assert asked[1] == ["cheap"]
    assert found == {"without noise": cheap}


def test_among_those_that_are_alike_the_cheapest() -> None:
    dear, cheap = candidate("dear", 0.803, 0.803, rounds=50), candidate("cheap", 0.80, 0.80, rounds=1)
    assert choose([dear, cheap]) is cheap
    answer = recommend([dear, cheap], {}, "everyone", Asked(50))
    assert answer is not None
    assert "costs less" in answer.sentences[1]
    assert choose([candidate("dear", 0.81, 0.81, rounds=50), cheap]) is not cheap
    light = candidate("light", 0.80, 0.80, rounds=1, size=1.0)
    assert choose([dear, cheap, light]) is light


def test_who_diverged_is_not_recommended() -> None:
    broken = candidate("broken", 0.99, None)
    assert ranked([broken]) == []
    assert choose([broken, candidate("a", 0.5, 0.5)]).label == "a"  # type: ignore[union-attr]
    assert recommend([broken], {}, "everyone", Asked(5)) is None


def test_within_the_noise_is_said() -> None:
    answer = recommend([candidate("a", 0.9, 0.7), candidate("b", 0.7, 0.8)], {}, "own", Asked(10))
    assert answer is not None
    assert answer.sure == "no"
    assert "within the noise of 2 seeds" in answer.sentences[1]
    alike = recommend([candidate("a", 0.9, 0.8), candidate("b", 0.8, 0.7)], {}, "own", Asked(10))
    assert alike is not None
    assert alike.sure == "no"
    assert "+10.00 points from b, the next: the same on every seed" in alike.sentences[1]


def test_what_a_budget_took_away_is_said() -> None:
    found = [candidate("a", 0.9, rounds=1), candidate("fedavg", 0.2, rounds=3)]
    asked = Asked(50, 3, budget=60.0, elapsed=75.0)
    answer = recommend(found, {}, "everyone", asked)
    assert answer is not None
    text = "; ".join(answer.sentences)
    assert "3 of 50 rounds and 1 of 3 seeds" in text
    assert "75 seconds" in text
    assert "60 were asked for" in text
    kept = recommend(found, {}, "everyone", Asked(3, 1, budget=60.0, elapsed=50.0))
    assert not any("budget" in sentence or "asked for" in sentence for sentence in kept.sentences)  # type: ignore[union-attr]
    (alone,) = [s for s in recommend(found[:1], {}, "own", asked).sentences if s.startswith("one seed")]  # type: ignore[union-attr]
    assert "chance" in alone


@pytest.mark.parametrize(("goal", "risen"), [("own", 0.25), ("everyone", -0.2)])
def test_whether_it_still_rises_is_judged_where_the_model_will_be_used(goal: Any, risen: float, tmp_path: Path) -> None:
    own = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.9]
    records = [
        {"round": t, "accuracy": everyone, "mean_client_accuracy": share, "validation_by_client": [0.5]}
        for t, (share, everyone) in enumerate(zip(own, own[::-1], strict=True), 1)
    ]
    compared = screening(tmp_path, fedavg=(0.5, 1.0))
    summary = compared.rows[0].finished[0].summary
    (found,) = candidates(replace(compared, rows=(Row("fedavg", (Result(tmp_path, summary, records, {}),)),)), goal)
    assert found.rising == pytest.approx(risen)  # own: (0.7 + 0.9)/2 - (0.5 + 0.6)/2


def test_without_test_splits_no_figure_is_made_up() -> None:
    bare = replace(candidate("a", 0.9, 0.8), own=(None, None))
    answer = recommend([bare], {"local": bare}, "own", Asked(5))
    assert answer is not None
    assert not any("no figure after" in sentence for sentence in answer.sentences)
    assert sum("client_test" in sentence for sentence in answer.sentences) == 1


# --- the plan --------------------------------------------------------------------------------------------------------


def screening(tmp_path: Path, **figures: tuple[float, float]) -> Comparison:
    """Validation and seconds by label, where ``_`` stands for ``:head=``."""
    found = []
    for name, (validation, seconds) in figures.items():
        summary = {
            "seconds": seconds, "rounds": 1, "bytes_up": 1.0, "bytes_down": 1.0, "validation_samples": [10],
            "privacy": {"statement": "In total: none."},
        }  # fmt: skip
        record = {"round": 1, "accuracy": 0.5, "mean_client_accuracy": 0.5, "validation_by_client": [validation]}
        found.append(Row(name.replace("_", ":head="), (Result(tmp_path, summary, [record], {}),)))
    return Comparison(tuple(found), (0,), tmp_path, found[0])


@pytest.fixture
def planned(tmp_path: Path) -> Callable[[float | None], Any]:
    compared = screening(
        tmp_path, fed3r=(0.9, 10), softmax=(0.895, 10), fedavg_ccvr=(0.5, 4), scaffold=(0.7, 4), fedprox=(0.6, 4),
        local=(0.3, 4), central=(0.95, 4),
    )  # fmt: skip
    tried = [Entry("fed3r", SUMS, ""), Entry("softmax", SUMS, ""), Entry("fedavg:head=ccvr", TRAINED, "")]
    tried += [Entry("scaffold", TRAINED, ""), Entry("fedprox", TRAINED, "")]
    eligible = [one for one in candidates(compared, "everyone") if one.label not in ("local", "central")]
    return lambda seconds: plan_for(compared, eligible, tried, 50, 2, (0, 1, 2), seconds, False)


def test_the_best_of_each_kind_go_on_and_fedavg_always(planned: Callable[[float | None], Any]) -> None:
    plan = planned(None)
    assert set(plan.labels) == {"fed3r", "softmax", "scaffold", "fedprox", "fedavg:head=ccvr"}
    assert (plan.rounds, plan.seeds) == (50, (0, 1, 2))


@pytest.mark.parametrize(
    ("seconds", "rounds", "seeds"),
    [
        # 40 s are spent; sums take 20 s a seed, the three others 2 s a round each, the references 4 s a round
        (2040, 50, 3),  # 1,800 - 60 = 1,740 for 22 s a round: 79
        (540, 17, 3),  # 450 - 60 = 390: 17
        (340, 14, 2),  # 270 - 60 = 210: 9, too few; 270 - 40 = 230 for 16: 14
        (100, 3, 1),  # 54 - 20 = 34 for 10
        (10, 2, 1),  # no time is left: those of the screening
    ],
)
def test_a_budget_by_hand(planned: Callable[[float | None], Any], seconds: float, rounds: int, seeds: int) -> None:
    plan = planned(seconds)
    assert (plan.rounds, len(plan.seeds)) == (rounds, seeds)


def test_the_rounds_of_the_screening() -> None:
    tried = [Entry("fed3r", SUMS, ""), Entry("fedavg", TRAINED, ""), Entry("scaffold", TRAINED, "")]
    assert screened_rounds_of(50, None, None, tried) == 10
    assert screened_rounds_of(3, None, None, tried) == 1
    # four trained ones with the references: 0.3 * 100 / (4 * 1.5) = 5
    assert screened_rounds_of(50, 100, 1.5, tried) == 5
    assert screened_rounds_of(50, 1, 1.5, tried) == 1
    assert screened_rounds_of(50, 10000, 1.5, tried) == 10
    # 3 s beside the rounds of each: (30 - 12) / 6
    assert screened_rounds_of(50, 100, 1.5, tried, 3.0) == 3
