"""What is printed can be read: figures, tables, and names as they are."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from tests.cli.calls import TINY, fedfill_, refused

from fedfill.runs.progress import progress


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Results of runs, each made once."""
    folder = tmp_path_factory.mktemp("runs")
    results: dict[tuple[str, ...], Result] = {}

    def make(*words: str) -> Result:
        if words not in results:
            results[words] = fedfill_(*words, "--out", str(folder / "-".join(words).replace("/", "")))
            assert results[words].exit_code == 0, results[words].output
        return results[words]

    return make


def test_run_prints_the_figures(tiny: Callable[..., Result]) -> None:
    result = tiny("run", "feddpms", *TINY, "--rounds", "2", "--set", "alpha=5", "--set", "max_candidates=50")
    text = result.stdout
    for words in (
        "feddpms on digits, dirichlet:0.5, 4 clients, seed 0",
        "accuracy, last round (2)",
        "best accuracy (chosen on the test set)",
        "worst client, own test split",
        "samples trained on",
        "Privacy\nThe server sees everything",
        "In total: no differential-privacy guarantee.",
        "\nRun directory: ",
    ):
        assert words in text
    assert max(map(len, text.splitlines()[:-1])) <= 100
    assert "\x1b" not in text + result.stderr
    assert [line.split(",")[0] for line in result.stderr.splitlines() if "accuracy" in line] == [
        "feddpms: round 1/2",
        "feddpms: round 2/2",
    ]


def test_run_shows_the_round_that_validation_chose() -> None:
    text = fedfill_("run", "fedavg", *TINY, "--client-validation", "0.2").stdout
    summary = json.loads(next(Path("runs").glob("*/summary.json")).read_text())
    for words, value in (
        (
            "accuracy, round chosen by validation",
            f"{summary['selected_accuracy']:.4f} in round {summary['selected_round']}",
        ),
        ("mean over clients, that round", f"{summary['selected_mean_client_accuracy']:.4f}"),
        ("mean over clients, last round", f"{summary['mean_client_accuracy']:.4f}"),
    ):
        assert re.search(rf"{words} +│ {value}", text)
    assert "validation" not in fedfill_("run", "fedavg", *TINY).stdout


def test_compare_prints_a_table(tiny: Callable[..., Result], elsewhere: Path) -> None:
    words = ["compare", "fedavg", "fedavg:weighting=uniform", *TINY, "--seeds", "0,1"]
    result = fedfill_(*words, "--out", "c")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith(" fedavg")]
    assert [row[0] for row in rows] == ["fedavg"] * 4  # two tables: accuracy, and fairness
    assert "worst client" in result.stdout
    assert result.stdout.count("\n  weighting=uniform") == 2
    assert all(row[2] == "±" for row in rows)
    assert "digits, dirichlet:0.5, 4 clients, 1 round, seeds 0, 1" in result.stdout
    assert "fedavg: In total: no differential-privacy guarantee.\n" in result.stdout
    assert "No guarantee covers" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert "1/4 fedavg, seed 0: round 1/1, accuracy" in result.stderr
    assert "4/4 fedavg:weighting=uniform, seed 1: round 1/1, accuracy" in result.stderr
    again = fedfill_(*words, "--out", "c")
    assert "4 of 4 runs were finished before: they were read, and not run again." in again.stdout
    assert again.stderr == ""
    alone = fedfill_("compare", "fedavg", *TINY, "--seeds", "0", "--out", "d")
    assert "±" not in alone.stdout
    assert "one seed, so no deviation" in alone.stdout


def test_compare_prints_differences_and_what_is_not_shared() -> None:
    words = ["compare", "fedprox:learning_rate=0.01", "fedavg", *TINY, "--data-fraction", "0.2", "--seeds", "0,1"]
    result = fedfill_(*words, "--out", "c")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    # mean, ± and width for accuracy and its difference; the baseline has none
    header = next(line for line in lines if "algorithm" in line and "accuracy" in line)
    assert re.split(r"  +", header.strip())[:3] == ["algorithm", "accuracy", "- fedavg"]
    prox, base = (
        next(line for line in lines if line.split()[:1] == [name]).split()[1:] for name in ("fedprox", "fedavg")
    )
    assert re.fullmatch(r"[+-]\d+\.\d\d ± \d+\.\d\d", " ".join(prox[3:6]))
    assert float(prox[3]) == pytest.approx(float(prox[0]) - float(base[0]), abs=0.011)
    assert base[3] == "-"
    text = " ".join(result.stdout.split())
    assert "with the 95 % confidence interval of its mean" in text
    assert "* not shared by fedprox:learning_rate=0.01: another local budget: learning_rate=0.01 (not 0.001)." in text
    assert text.count("not shared by") == 1
    assert "…" not in text
    assert "Pictures: c/accuracy.png, accuracy.svg, accuracy.pdf, final.png, final.svg" in text
    one = fedfill_("compare", "fedavg", "fedprox", *TINY, "--data-fraction", "0.2", "--seeds", "0", "--out", "d")
    assert one.exit_code == 0, one.output
    row = next(line.split() for line in one.stdout.splitlines() if line.split()[:1] == ["fedprox"])
    assert re.fullmatch(r"[+-]\d+\.\d\d", row[2])
    assert "Not shared by" not in one.stdout
    assert "confidence" not in one.stdout


@pytest.mark.parametrize("width", [80, 100, 160])
def test_partition_fits(width: int, monkeypatch: pytest.MonkeyPatch, elsewhere: Path) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    result = fedfill_("partition", "--clients", "4", "--out", "deep/map.png")
    assert result.exit_code == 0, result.output
    assert "digits, dirichlet:0.5, seed 0" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert len(rows) == 4
    assert all(len(row) == 13 for row in rows)  # client, samples, ten classes, own test
    for row in rows:
        assert int(row[1]) == sum(int(count) for count in row[2:-1] if count != "·")
    assert max(map(len, result.stdout.splitlines())) <= width
    assert (elsewhere / "deep" / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("width", "columns"), [(50, 5), (160, 14)])
def test_partition_shows_samples_without_labels(width: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    result = fedfill_("partition", "--clients", "4", "--partition", "iid", "--labelled-per-client", "20")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= width or width == 50
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()[:1].isdigit()][:4]
    assert [(len(row), row[1]) for row in rows] == [(columns, "20")] * 4
    assert sum(int(row[-1]) + int(row[-2]) + 20 for row in rows) == 1438
    assert "20 for each client, stratified by class." in " ".join(result.stdout.split())
    if columns == 5:
        assert [row[2] for row in rows] == ["10"] * 4, "classes, each of them with a label"


def test_partition_of_many_clients_and_classes_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    result = fedfill_("partition", "--clients", "60", "--partition", "iid")
    assert "digits, iid, seed 0, 10 classes" in result.stdout
    assert "... and 20 more clients, all of them in the picture." in " ".join(result.stdout.split())
    table = result.stdout.split("...")[0].splitlines()
    rows = [line.split() for line in table if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == [str(client) for client in range(40)]
    assert all(len(row) == 4 for row in rows)


def test_names_that_look_like_markup_are_printed_as_they_are(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    names = ["[teen]", "[/b]", ":cat:"]
    (elsewhere / "people.csv").write_text("age,label\n" + "".join(f"{k},{names[k % 3]}\n" for k in range(90)))
    result = fedfill_(
        "partition",
        "--data",
        "people.csv",
        "--data-dir",
        ".",
        "--partition",
        "iid",
        "--clients",
        "3",
        "--client-test",
        "0",
    )
    assert result.exit_code == 0, result.output
    for name in names:
        assert name in result.stdout


def test_long_steps_are_announced(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("fedfill")
    with progress() as follow:
        follow("run")
        log.info("solving for %d features", 7)
        log.info("solving for %d features", 7)  # said once
        log.debug("nothing for users")
    log.info("nobody listens any more")
    assert capsys.readouterr().err.splitlines() == ["run: solving for 7 features"]


def test_a_warning_of_several_runs_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    record = {"round": 1, "accuracy": 0.5, "seconds": 1.0, "lost": []}
    with progress(2) as follow:
        for label in ("a", "b"):
            follow(label)({**record, "warnings": ["beware", f"of {label}"]}, 1)
    said = capsys.readouterr().err
    assert (said.count("beware"), said.count("of a"), said.count("of b")) == (1, 1, 1)


def test_a_study_and_a_grid_are_tracked_run_by_run(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr("fedfill.studies.track.require", lambda tracker: None)
    monkeypatch.setattr("fedfill.studies.track.track", lambda tracker, label: names.append(label))
    small = [
        *("--clients", "2", "--partition", "iid", "--rounds", "1", "--set", "local_epochs=1", "--data-fraction", "0.3"),
        *("--model", "mlp"),
    ]
    assert fedfill_("study", *small, "--seeds", "0", "--track", "mlflow").exit_code == 0
    assert len(names) == len(set(names))  # the same method comes again in a later stage
    assert {name.split("-")[1] for name in names} == {"screen", "final", "reference"}
    assert {name.split("-")[0] for name in names} == {"study"}
    names.clear()
    (elsewhere / "g.toml").write_text(
        'algorithms = ["fedavg"]\nseeds = [0]\n[options]\nrounds = 1\nlocal_epochs = 1\ndata_fraction = 0.3\n[grid]\nclients = [2, 3]\n'
    )
    assert fedfill_("grid", "g.toml", "--track", "mlflow").exit_code == 0
    assert names == ["grid-clients=2: fedavg-seed0", "grid-clients=3: fedavg-seed0"]
    names.clear()
    for out in ("one", "two"):
        assert fedfill_("compare", "fedavg", *small, "--seeds", "0", "--out", out, "--track", "mlflow").exit_code == 0
    assert names == ["one-fedavg-seed0", "two-fedavg-seed0"]


@pytest.mark.parametrize("command", [["study"], ["grid", "g.toml"], ["compare", "fedavg"]])
def test_an_unknown_tracker_is_found_before_anything_runs(command: list[str]) -> None:
    assert "did you mean 'mlflow'" in refused([*command, "--track", "mlfow"], "track")
