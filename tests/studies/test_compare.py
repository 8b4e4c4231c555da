"""Comparisons: the same data for everybody, means and deviations by hand, and nothing run twice."""

from __future__ import annotations

import csv
import json
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy import stats
from tests.helpers import refused

import fedfill
from fedfill.cli.compared import print_comparison
from fedfill.engines.local import LocalEngine
from fedfill.errors import DivergedError, FedfillError
from fedfill.experiment.prepare import Prepared, arrange
from fedfill.experiment.summary import Result
from fedfill.statistics.survival import FIGURES as TIMES
from fedfill.studies import compare as comparison
from fedfill.studies.compare import compare, parse_variant, unshared
from fedfill.studies.comparison import Comparison, Difference, Row, paired_difference
from fedfill.studies.comparison_files import FIGURES
from fedfill.training.regression import FIGURES as NUMBERS

TINY: dict[str, Any] = {"data": "digits", "clients": 4, "rounds": 2, "local_epochs": 1}
LABELS = ["fedavg", "fedavg:latent_activation=sigmoid,weighting=uniform", "feddpms"]
SEEDS = [3, 1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compare(LABELS, seeds=SEEDS, out=tmp_path_factory.mktemp("compare"), alpha=5, max_candidates=50, **TINY)


def toml(comparison: Comparison, folder: str) -> str:
    return (comparison.directory / folder / "experiment.toml").read_text()


def test_the_package_offers_the_function() -> None:
    assert fedfill.compare is compare


def test_one_folder_for_each_run(tiny: Comparison) -> None:
    assert {path.name for path in tiny.directory.iterdir()} == {
        *(f"fedavg-seed{seed}" for seed in SEEDS),
        *(f"fedavg-latent_activation=sigmoid-weighting=uniform-seed{seed}" for seed in SEEDS),
        *(f"feddpms-seed{seed}" for seed in SEEDS),
        *("comparison.json", "comparison.csv", "curves.csv", "pairs.csv", "table.csv", "table.md", "table.tex"),
        *("accuracy.png", "accuracy.svg", "accuracy.pdf", "final.png", "final.svg"),
    }
    assert [row.label for row in tiny.rows] == LABELS
    assert tiny.seeds == (3, 1)
    assert [[result.summary["seed"] for result in row.results] for row in tiny.rows] == [SEEDS] * 3
    assert not any(result.was_finished for row in tiny.rows for result in row.results)


def test_every_algorithm_sees_the_same_data(tiny: Comparison) -> None:
    held = {
        seed: {(tiny.directory / f"{name}-seed{seed}" / "partition.json").read_text() for name in ("fedavg", "feddpms")}
        for seed in SEEDS
    }
    assert [len(found) for found in held.values()] == [1, 1]
    assert held[3] != held[1]


def test_settings_reach_those_who_have_them(tiny: Comparison) -> None:
    assert "alpha = 5" in toml(tiny, "feddpms-seed3")
    assert "alpha" not in toml(tiny, "fedavg-seed3")
    assert 'latent_activation = "none"' in toml(tiny, "fedavg-seed3")
    assert 'weighting = "samples"' in toml(tiny, "fedavg-seed3")
    variant = toml(tiny, "fedavg-latent_activation=sigmoid-weighting=uniform-seed3")
    assert 'latent_activation = "sigmoid"' in variant
    assert 'weighting = "uniform"' in variant
    assert "local_epochs = 1" in variant


def test_a_run_of_a_comparison_is_the_run_itself(tiny: Comparison, tmp_path: Path) -> None:
    alone = fedfill.run("fedavg", **TINY, seed=1, out=tmp_path)
    assert alone.summary["weights_sha256"] == tiny.rows[0].results[1].summary["weights_sha256"]


def test_finished_runs_are_not_run_again(tiny: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("something was trained")

    first = compare(["fedavg"], seeds=[0], out=tmp_path, **TINY)
    more = compare(["fedavg"], seeds=[0, 1], out=tmp_path, **TINY)
    assert [result.was_finished for result in more.rows[0].results] == [True, False]
    monkeypatch.setattr(LocalEngine, "call", never)
    again = compare(["fedavg"], seeds=[1, 0], out=tmp_path, **TINY)
    assert [result.was_finished for result in again.rows[0].results] == [True, True]
    assert again.rows[0].results[1].summary == first.rows[0].results[0].summary


def test_tidy_csv(tiny: Comparison) -> None:
    with (tiny.directory / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    # there are no validation splits, and classes are learnt, no numbers and no times
    judged = [name for name in FIGURES if not name.startswith("selected_") and name not in {*NUMBERS, *TIMES}]
    assert len(rows) == len(LABELS) * len(SEEDS) * len(judged)
    assert list(rows[0]) == ["algorithm", "seed", "figure", "value"]
    assert len({(row["algorithm"], row["seed"], row["figure"]) for row in rows}) == len(rows)
    for row in tiny.rows:
        for result in row.results:
            found = {
                line["figure"]: float(line["value"])
                for line in rows
                if (line["algorithm"], line["seed"]) == (row.label, str(result.summary["seed"]))
            }
            assert found == {name: result.summary[name] for name in judged}


@pytest.fixture
def result() -> Callable[[float | None], Result]:
    return lambda value: Result(Path("nowhere"), {"accuracy": value}, [], {})


def test_mean_and_sample_deviation_by_hand(result: Callable[[float | None], Result]) -> None:
    def figure(*values: float | None) -> tuple[float | None, float | None]:
        return Row("x", tuple(map(result, values))).figure("accuracy")

    mean, deviation = figure(0.1, 0.2, 0.6)
    assert mean == pytest.approx(0.3)
    assert deviation == pytest.approx(math.sqrt((0.04 + 0.01 + 0.09) / 2))
    assert figure(0.25) == (0.25, None)
    assert figure(0.25, None) == (None, None)


@pytest.mark.parametrize("differences", [[0.01, 0.02, 0.03], [-0.5, 0.25], [0.1, -0.2, 0.05, 0.4, 0.01]])
def test_the_interval_is_students(differences: list[float]) -> None:
    found = paired_difference(differences)
    low, high = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert found.half_width is not None
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx((low, high))


def test_the_interval_by_hand() -> None:
    # 1, 2, 3: mean 2, deviation 1, and Student's t for two degrees of freedom is 4.302653
    found = paired_difference([1, 2, 3])
    assert found.mean == 2
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3), abs=1e-6)
    # that 0.1 + 0.2 is not 0.3 is no deviation
    assert paired_difference([0.3, 0.1 + 0.2]).half_width is None
    assert paired_difference([1, 2, 3], missed=0.01).half_width == pytest.approx(9.924843 / math.sqrt(3), abs=1e-6)
    assert paired_difference([-0.25]) == Difference(-0.25, None)


def test_differences_are_taken_seed_by_seed(result: Callable[[float | None], Result]) -> None:
    base, better, broken = (Row("x", tuple(map(result, values))) for values in ([0.25, 0.75], [0.5, 1.0], [0.5, None]))
    # both seeds gain a quarter: no deviation, and so no interval, whatever the seeds' own deviation
    found = Comparison((base, better, broken), (0, 1), Path("nowhere"), base, ())
    assert found.difference(better, "accuracy") == Difference(0.25, None)
    assert found.difference(base, "accuracy") is None
    assert found.difference(broken, "accuracy") is None
    assert Comparison((base, broken), (0, 1), Path("nowhere"), broken, ()).difference(base, "accuracy") is None
    swapped = Row("x", (result(1.0), result(0.5)))
    # 3/4 and -1/4: mean 1/4, deviation sqrt(1/2), and t for one degree of freedom is 12.7062
    difference = found.difference(swapped, "accuracy")
    assert difference is not None
    assert (difference.mean, difference.half_width) == (0.25, pytest.approx(12.7062 / 2, abs=1e-4))


def test_differences_of_a_comparison(tiny: Comparison) -> None:
    assert tiny.baseline is tiny.rows[0]
    for name in ("accuracy", "worst_client_accuracy"):
        assert [tiny.difference(row, name) is None for row in tiny.rows] == [True, False, False]
        found = tiny.difference(tiny.rows[2], name)
        assert found is not None
        means = [row.figure(name)[0] or 0.0 for row in tiny.rows]
        assert found.mean == pytest.approx(means[2] - means[0])


def test_the_first_fedavg_is_the_baseline_and_notes_are_to_it(tmp_path: Path) -> None:
    options = {**TINY, "rounds": 1, "data_fraction": 0.2}
    found = compare(
        ["local:learning_rate=0.01", "fedavg:weighting=uniform", "fedavg:batch_size=32"],
        seeds=[0, 1], out=tmp_path / "a", **options,
    )  # fmt: skip
    assert found.baseline is found.rows[1]
    assert found.notes == (
        "local:learning_rate=0.01: another local budget: learning_rate=0.01 (not 0.001)",
        "fedavg:batch_size=32: another local budget: batch_size=32 (not 64)",
    )
    assert [found.difference(row, "accuracy") is None for row in found.rows] == [False, True, False]
    without = compare(["fedprox", "local"], seeds=[0], out=tmp_path / "b", **options)
    assert without.baseline is without.rows[0]
    assert without.notes == ()


def prepared(algorithm: str, **options: Any) -> Prepared:
    words: dict[str, Any] = {**TINY, "partition": "iid", "model": "auto", "seed": 0}
    return arrange(algorithm, **{**words, **options})


def test_what_is_not_shared_is_told() -> None:
    base = prepared("fedavg")
    assert unshared(base, base) == unshared(prepared("fedprox", mu=0.5), base) == []
    assert unshared(prepared("fedavg", optimizer="sgd", learning_rate=0.1, local_epochs=3), base) == [
        "another local budget: local_epochs=3 (not 1), optimizer=sgd (not adam), learning_rate=0.1 (not 0.001)"
    ]
    assert unshared(prepared("fedavg", seed=1), base) == ["other initial weights"]
    # the network of FedDPMS holds that of FedAvg, with the same weights, and a decoder
    mine, own = (prepared(name).initial for name in ("feddpms", "fedavg"))
    more = sum(tensor.numel() for tensor in mine.values()) - sum(tensor.numel() for tensor in own.values())
    assert more > 0
    assert unshared(prepared("feddpms"), base) == [
        f"another network: {more:,} numbers that the baseline lacks, 0 that it has alone"
    ]
    assert unshared(base, prepared("feddpms")) == [
        f"another network: 0 numbers that the baseline lacks, {more:,} that it has alone"
    ]
    # other settings of the network are named, also where every tensor has the same shape
    assert unshared(prepared("fedavg", **{"model.latent": 8}), base)[0] == "another network: latent=8 (not None)"
    assert unshared(prepared("fedavg", latent_activation="sigmoid"), base) == [
        "another network: latent_activation=sigmoid (not none)"
    ]
    # personal models stay with their hosts on flower, and so does what they are judged on
    assert (
        unshared(prepared("local"), base)
        == unshared(prepared("local", engine="flower"), prepared("local", engine="flower"))
        == []
    )
    judged = ["the test set: on flower personal models are judged by their hosts, each on its own test split"]
    assert unshared(prepared("local", engine="flower"), prepared("fedavg", engine="flower")) == judged


def test_pictures_are_drawn(tiny: Comparison) -> None:
    for name in ("accuracy.png", "final.png"):
        with Image.open(tiny.directory / name) as image:
            assert image.format == "PNG"
            assert min(image.size) > 200
            assert len(image.getcolors(2**24) or []) > 20


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("fedavg", ("fedavg", {})),
        ("fedavg:", ("fedavg", {})),
        ("fedavg:a=1", ("fedavg", {"a": "1"})),
        ("fedavg:a=1, b = x=y ", ("fedavg", {"a": "1", "b": "x=y"})),
    ],
)
def test_variants(text: str, parsed: tuple[str, dict[str, str]]) -> None:
    assert parse_variant(text) == parsed


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"algorithms": []}, "needs at least one algorithm and one seed"),
        ({"seeds": []}, "needs at least one algorithm and one seed"),
        ({"algorithms": ["fedavg", "feddpms", "fedavg"]}, "the algorithm 'fedavg' is given twice"),
        ({"seeds": [0, 1, 0]}, "the seed '0' is given twice"),
        ({"seeds": [0, -1]}, "seed: found -1; allowed: a whole number, at least 0"),
        ({"algorithm": "fedavg"}, "algorithm: a comparison has algorithms"),
        ({"seed": 1}, "seed: a comparison has seeds"),
        ({"algorithms": ["fedavg", "fedavgg"]}, "unknown name 'fedavgg'; did you mean 'fedavg'"),
        ({"algorithms": ["fedavg:weighting"]}, "found 'weighting' in 'fedavg:weighting'"),
        ({"algorithms": ["fedavg:=1"]}, "found '=1' in 'fedavg:=1'"),
        ({"algorithms": ["fedavg:wheighting=uniform"]}, "did you mean 'weighting'"),
        ({"algorithms": ["fedavg:weighting=even"]}, "weighting: found 'even'; allowed: 'samples' or 'uniform'"),
        ({"algorithms": ["fedavg:rounds=3"]}, "rounds: found in 'fedavg:rounds=3'; allowed: the same for all"),
        ({"algorithms": ["fedprox:mu=0.1|0.10"]}, "found 'fedprox:mu=0.1' and 'fedprox:mu=0.10', which are the same"),
        ({"algorithms": ["fedavg", "fedavg:head=none"]}, "'fedavg' and 'fedavg:head=none', which are the same"),
        ({"algorithms": ["fedavg", "fedavg:learning_rate=1e-3", "local"]}, "which are the same"),
        ({"algorithms": ["fedavg"], "alpha": 5}, "fedavg has no 'alpha'"),
        ({"alpah": 5}, "did you mean 'alpha'"),
        ({"alpha": 0}, "alpha: found 0; allowed: at least 1"),
        ({"partition": "dirichlet:0"}, "dirichlet"),
        ({"preliminary_rounds": 3}, "preliminary_rounds: found 3"),
    ],
)
def test_slips_are_found_before_anything_runs(given: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(FedfillError) as refusal:
        compare(**{"algorithms": ["fedavg", "feddpms"], "seeds": [0], "out": tmp_path / "out", **TINY, **given})
    assert sentence in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_seeds_of_numpy_are_seeds(tmp_path: Path) -> None:
    found = compare(["fedavg"], seeds=np.arange(2), out=tmp_path, **TINY)  # type: ignore[arg-type]
    assert found.seeds == (0, 1)
    assert {type(seed) for seed in found.seeds} == {int}
    with refused("compare", "one seed"):
        compare(["fedavg"], seeds=np.arange(0), out=tmp_path, **TINY)  # type: ignore[arg-type]


def test_a_folder_of_another_experiment_is_found_before_anything_runs(tmp_path: Path) -> None:
    fedfill.run("fedavg", **TINY, seed=1, learning_rate=0.1, out=tmp_path / "fedavg-seed1")
    with refused("out", tmp_path / "fedavg-seed1", "another experiment"):
        compare(["fedavg"], seeds=[0, 1], out=tmp_path, **TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["fedavg-seed1"]
    assert json.loads((tmp_path / "fedavg-seed1" / "summary.json").read_text())["seed"] == 1


def test_a_folder_that_holds_no_comparison_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.doc").write_text("mine")
    with refused("out", tmp_path, "thesis.doc", "no comparison"):
        compare(["fedavg"], seeds=[0], out=tmp_path, **TINY)
    with refused("out", "is a file"):
        compare(["fedavg"], seeds=[0], out=tmp_path / "thesis.doc", **TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.doc"]
    # what lies beside a comparison that is there, such as a report, is no matter; nor a run of one that was stopped
    (tmp_path / "thesis.doc").unlink()
    (tmp_path / "moon-seed7").mkdir()
    (tmp_path / ".comparison.json.x.tmp").write_text("")
    compare(["fedavg"], seeds=[0], out=tmp_path, **TINY)
    (tmp_path / "report.html").write_text("")
    assert compare(["fedavg"], seeds=[0, 1], out=tmp_path, **TINY).seeds == (0, 1)


def test_a_comparison_may_grow_and_loses_no_row(tmp_path: Path) -> None:
    once: dict[str, Any] = {"out": tmp_path, "quiet": True, **TINY}
    compare(["fedprox"], seeds=[0], **once)
    grown = compare(["fedavg", "fedprox"], seeds=[0, 1], **once)
    assert [row.label for row in grown.rows] == ["fedavg", "fedprox"]
    before = (tmp_path / "table.md").read_bytes()
    with refused("out", tmp_path, "fedavg", "another folder"):
        compare(["fedprox"], seeds=[0, 1], **once)
    with refused("out", tmp_path, "seed 1"):
        compare(["fedavg", "fedprox"], seeds=[0], **once)
    assert (tmp_path / "table.md").read_bytes() == before


def test_a_lock_is_no_stranger(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / "thesis.doc").touch()
    with refused("out", "thesis.doc"):
        compare(["fedprox"], seeds=[0], out=tmp_path, **TINY)
    (tmp_path / "thesis.doc").unlink()
    assert compare(["fedprox"], seeds=[0], out=tmp_path, **TINY).rows[0].finished


FAST = "fedavg:learning_rate=1e30"
ONE: dict[str, Any] = {"optimizer": "sgd", "latent_activation": "none", "seeds": [0], **TINY}


def test_a_run_that_diverges_does_not_end_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(["fedavg", FAST, "fedprox"], out=tmp_path, **ONE)
    fast, prox = found.rows[1:]
    assert [len(row.finished) for row in found.rows] == [1, 0, 1]
    assert fast.results == (None,)
    (sentence,) = found.diverged
    assert sentence.startswith(f"{FAST}, seed 0: training diverged: ")
    assert found.difference(fast, "accuracy") is None
    assert found.difference(prox, "accuracy") is not None
    assert fast.figure("accuracy") == (None, None)
    with (tmp_path / "comparison.csv").open(newline="") as file:
        assert {line["algorithm"] for line in csv.DictReader(file)} == {"fedavg", "fedprox"}
    print_comparison(found)
    text = capsys.readouterr().out
    assert text.count("diverged") == 3  # in the table, the sentence, and what the curves leave out


def test_a_run_that_failed_before_anything_was_kept_leaves_its_folder_to_another(tmp_path: Path) -> None:
    shared = {name: value for name, value in ONE.items() if name != "seeds"} | {"rounds": 1}
    with pytest.raises(DivergedError):
        fedfill.run("fedavg", **shared, learning_rate=1e30, out=tmp_path)
    assert (tmp_path / "experiment.toml").exists(), "it could be resumed"
    mended = fedfill.run("fedavg", **shared, learning_rate=0.01, out=tmp_path)
    assert not mended.was_finished
    assert not mended.resumed_after
    with refused("out", tmp_path, "another experiment"):
        fedfill.run("fedavg", **shared, learning_rate=0.02, out=tmp_path)
    assert fedfill.resume(tmp_path).was_finished


def test_a_row_with_one_seed_that_diverged_has_no_mean_and_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[set[str]] = []
    real = comparison.launch

    def launch(prepared: Prepared, path: Path, on_round: Any) -> Result:
        if path.name == "fedprox-seed1":
            raise DivergedError("training diverged: so")
        return real(prepared, path, on_round)

    monkeypatch.setattr(comparison, "launch", launch)
    for name in ("accuracy_curves", "accuracy_bars"):
        monkeypatch.setattr(f"fedfill.runs.pictures.{name}", lambda rows, *_: drawn.append(set(rows)))
    found = compare(["fedavg", "fedprox"], out=tmp_path, **{**ONE, "seeds": [0, 1]})
    assert drawn == [{"fedavg"}, {"fedavg"}]
    assert found.diverged == ("fedprox, seed 1: training diverged: so",)
    assert found.rows[1].figure("accuracy") == (None, None)
    assert found.difference(found.rows[1], "accuracy") is None
    with (tmp_path / "comparison.csv").open(newline="") as file:
        seeds = {(line["algorithm"], line["seed"]) for line in csv.DictReader(file)}
    assert seeds == {("fedavg", "0"), ("fedavg", "1"), ("fedprox", "0")}


def test_without_the_baseline_there_are_no_differences(tmp_path: Path) -> None:
    found = compare([FAST, "fedprox"], out=tmp_path, **ONE)
    assert found.baseline.label == FAST
    assert found.difference(found.rows[1], "accuracy") is None


def test_a_comparison_of_which_nothing_is_left_is_a_sentence(tmp_path: Path) -> None:
    with refused("compare", "fedavg:learning_rate=1e30, seed 0"):
        compare([FAST], out=tmp_path, **ONE)
    assert not (tmp_path / "comparison.csv").exists()


def test_epochs_of_one_row_win_over_the_mini_batches_of_all(tmp_path: Path) -> None:
    labels = ["fedavg", "fedavg:local_epochs=1"]
    compare(labels, seeds=[0], out=tmp_path, data="digits", clients=2, rounds=1, data_fraction=0.2, local_steps=3)
    recorded = [file.read_text() for file in sorted(tmp_path.glob("*/experiment.toml"))]
    assert ['\nlocal_steps = "none"\n' in text for text in recorded] == [True, False]
    assert "\nlocal_steps = 3\n" in recorded[1]


def test_auto_is_one_network_that_all_can_use(tmp_path: Path) -> None:
    found = compare(["fedavg", "fedbn"], out=tmp_path / "both", **{**ONE, "model": "auto"})
    settings = [
        tomllib.loads((tmp_path / "both" / f"{name}-seed0" / "experiment.toml").read_text())
        for name in ("fedavg", "fedbn")
    ]
    assert [s["model_settings"]["width"] for s in settings] == ["wide", "wide"]
    assert not [note for note in found.notes if "network" in note]
    alone = compare(["fedavg", "fedprox"], out=tmp_path / "plain", **{**ONE, "model": "auto"})
    assert [note for note in alone.notes if "network" in note] == []
    assert (
        tomllib.loads((tmp_path / "plain" / "fedavg-seed0" / "experiment.toml").read_text())["model_settings"]["width"]
        == "paper"
    )


def test_what_a_method_must_have_otherwise_is_said_with_what_would_be_fair(tmp_path: Path) -> None:
    found = compare(["fedavg", "scaffold"], out=tmp_path, **ONE)
    (note,) = [note for note in found.notes if note.startswith("scaffold: another local budget")]
    assert "optimizer=sgd" in note
    assert "control variates" in note
