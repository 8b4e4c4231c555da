"""What the commands do and leave behind."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from tests.cli.calls import TINY, fedfill_, refused, sha


def test_running_again_says_that_nothing_was_run() -> None:
    first = fedfill_("run", "fedavg", *TINY)
    again = fedfill_("run", "fedavg", *TINY)
    assert "finished before" not in first.stdout
    assert "This run was finished before: it was read from its folder, and nothing was run again." in again.stdout
    assert "round" in first.stderr
    assert again.stderr == ""
    assert sha(again) == sha(first)


def test_an_experiment_is_a_config(elsewhere: Path) -> None:
    words = [*TINY, "--rounds", "2", "--participation", "0.5", "--set", "alpha=5", "--set", "max_candidates=50"]
    first = fedfill_("run", "feddpms", *words, "--seed", "3", "--delta", "0.001", "--out", "x")
    again = fedfill_("run", "--config", "x/experiment.toml", "--out", "y")
    assert (first.exit_code, again.exit_code) == (0, 0), again.output
    assert sha(first) == sha(again)
    assert (elsewhere / "x" / "experiment.toml").read_text() == (elsewhere / "y" / "experiment.toml").read_text()
    refused(["run", "--config", "x/experiment.toml", "--seed", "4", "--out", "y"], "out")


def test_going_on_from_a_finished_run(elsewhere: Path) -> None:
    assert fedfill_("run", "fedavg", *TINY, "--out", "a").exit_code == 0
    result = fedfill_("run", "fedprox", *TINY, "--start-from", "a", "--out", "b")
    assert result.exit_code == 0, result.output
    assert "The network begins with the final weights of a (fedavg, rounds 1" in " ".join(result.stdout.split())
    more = fedfill_("resume", "a", "--rounds", "2")
    assert more.exit_code == 0, more.output
    assert json.loads((elsewhere / "a" / "summary.json").read_text())["rounds"] == 2
    refused(["resume", "a", "--rounds", "1"], "rounds")
    refused(["resume", "b"], "resume")
    refused(["run", "fedavg", *TINY, "--start-from", "nowhere", "--out", "c"], "start_from")


def test_a_run_with_few_labels_trains_on_these(elsewhere: Path) -> None:
    result = fedfill_("run", "fedavg", *TINY, "--labelled-per-client", "20", "--out", "r")
    assert result.exit_code == 0, result.output
    summary = json.loads((elsewhere / "r" / "summary.json").read_text())
    assert summary["train_samples"] == 4 * 20
    assert "labelled_per_client = 20" in (elsewhere / "r" / "experiment.toml").read_text()
    assert fedfill_("resume", "r").exit_code == 0


def test_places_that_cannot_be_used(elsewhere: Path) -> None:
    run = ["run", "fedavg", *TINY, "--out"]
    (elsewhere / "file").write_text("mine")
    (elsewhere / "foreign").mkdir()
    (elsewhere / "foreign" / "thesis.tex").write_text("mine")
    refused([*run, "file"], "out")
    refused([*run, "file/run"], "out")
    refused([*run, "foreign"], "out")
    refused([*run, "x" * 300], "out")
    refused([*run, "/proc/run"], "out")
    assert fedfill_(*run, "mine").exit_code == 0
    refused(["run", "fedavg", *TINY, "--seed", "1", "--out", "mine"], "out")
    refused(["resume", "foreign"], "resume")
    refused(["resume", "missing"], "resume")
    refused(["partition", "--clients", "4", "--out", "file/x.png"], "out")
    refused(["partition", "--clients", "4", "--out", "foreign"], "out")


def test_empty_data_folder(elsewhere: Path) -> None:
    (elsewhere / "empty").mkdir()
    refused(["run", "fedavg", *TINY, "--data-dir", "empty", "--data", "mine"], "data")
    (elsewhere / "empty" / "mine").mkdir()
    assert "'mine'" in refused(["run", "fedavg", *TINY, "--data-dir", "empty", "--data", "mine"], "data")


@pytest.mark.parametrize("pause", [0.0, 5.0])  # seconds between two looks at the clock
def test_run_tells_of_the_long_steps_before_the_first_round(
    pause: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count(0.0, pause)
    monkeypatch.setattr("fedfill.runs.progress.time", SimpleNamespace(monotonic=lambda: next(ticks)))
    tiny = ("gan_iterations=3", "gan_chunk=2", "gan_width=4", "images_per_client=4", "local_steps=1", "server_steps=1")
    settings = [word for pair in tiny for word in ("--set", pair)]
    result = fedfill_("run", "sdafl", "--clients", "3", "--rounds", "1", "--out", str(tmp_path / "r"), *settings)
    assert result.exit_code == 0
    lines = [line for line in result.stderr.splitlines() if "preparation" in line or ": round" in line]
    steps = ["preparation 1/3", "preparation 2/3"] if pause else []
    assert [line.split(", ")[0].split(": ")[1] for line in lines] == [*steps, "preparation 3/3", "round 1/1"]


TABLE = """
title = "A table"
source = "Somebody, somewhere."
figures = ["accuracy"]
seeds = [0]

[options]
rounds = 1
clients = 3
local_epochs = 1
data_fraction = 0.2

[[rows]]
name = "FedAvg"
algorithm = "fedavg"
paper = { accuracy = 0.5 }

[[rows]]
name = "FedProx"
algorithm = "fedprox"
"""


@pytest.fixture
def table(elsewhere: Path) -> Path:
    folder = elsewhere / "experiments" / "tiny"
    folder.mkdir(parents=True)
    (folder / "table.toml").write_text(TABLE)
    return folder


def test_reproduce(table: Path, elsewhere: Path) -> None:
    result = fedfill_("reproduce", "tiny", "--workers", "1")
    assert result.exit_code == 0, result.output
    readme = (table / "README.md").read_text()
    rows = [line for line in result.stdout.splitlines() if line.startswith("| Fed")]
    assert [row.split(" | ")[0] for row in rows] == ["| FedAvg", "| FedProx"]
    assert all(row in readme for row in rows)
    assert rows[0].startswith("| FedAvg | 0.5000 | 0.")
    assert result.stdout.endswith("Written into experiments/tiny/README.md and results.json\n")
    assert "FedProx, seed 0: round 1/1, accuracy" in result.stderr
    assert len(list((elsewhere / "runs" / "reproduce" / "tiny").iterdir())) == 2
    more = fedfill_("reproduce", "experiments/tiny", "--only", "FedProx", "--seeds", "0,2")
    assert more.exit_code == 0, more.output
    assert "seed 0" not in more.stderr  # finished before
    assert "FedProx, seed 2: round 1/1, accuracy" in more.stderr
    assert "FedAvg" not in more.stderr
    assert len(list((elsewhere / "runs" / "reproduce" / "tiny").iterdir())) == 3
    assert more.stdout.count("| 0, 2 |") == 1


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["tinny"], "table"),
        (["tiny", "--only", "FedAvgg"], "only"),
        (["tiny", "--seeds", "a"], "seeds"),
        (["tiny", "--seeds", "0,-1"], "seed"),
        (["tiny", "--device", "rubbish"], "device"),
    ],
)
def test_slips_of_reproduce(table: Path, words: list[str], setting: str) -> None:
    refused(["reproduce", *words], setting)


def test_rows_of_one_name_are_refused(table: Path) -> None:
    (table / "table.toml").write_text(TABLE.replace('"FedProx"', '"FedAvg"'))
    refused(["reproduce", "tiny"], "rows")


def test_partition_by_domain(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for start, domain in enumerate(("sea", "air")):
        for name in ("ant", "bee"):
            (elsewhere / "data" / "pets" / domain / name).mkdir(parents=True)
            for k in range(10):
                Image.new("L", (2 + k, 3), 10 * k + start).save(
                    elsewhere / "data" / "pets" / domain / name / f"{k}.png"
                )
    words = [
        "--data",
        "pets",
        "--data-dir",
        "data",
        "--image-size",
        "4",
        "--partition",
        "domain:2",
        "--client-validation",
        "0.25",
    ]
    result = fedfill_("partition", *words)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()[:1].isdigit()]
    # of 16 samples of a domain two clients have 8 each, of which two are kept for validation; all four share the test set's halves
    assert [(row[1], row[2], *row[-2:]) for row in rows] == [
        (domain, "6", "2", "4") for domain in ("air", "air", "sea", "sea")
    ]
    refused(["partition", *words, "--clients", "10"], "clients")
