"""The command line: every slip is one sentence and writes nothing, and what is printed can be read."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

import fedfill
from fedfill.algorithms import find
from fedfill.algorithms._base import known_algorithms
from fedfill.cli import _settings, app
from fedfill.engines.local import LocalEngine

TINY = ["--clients", "4", "--rounds", "1", "--set", "local_epochs=1"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to stand in, on a terminal of a known width."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("FEDFILL_DATA", raising=False)
    return tmp_path


def fedfill_(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def refused(words: Sequence[str], *parts: str) -> None:
    """One sentence with these parts, exit code 2, and nothing written."""
    before = tree(Path())
    result = fedfill_(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("fedfill: ")
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith("\n")
    for part in parts:
        assert part in result.stderr
    assert tree(Path()) == before


# ---- slips


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["fedavgg"], ["algorithm: unknown name 'fedavgg'; did you mean 'fedavg'?"]),
        (["zzz"], ["algorithm: unknown name 'zzz'; allowed: central, "]),
        ([], ["algorithm: none is given"]),
        (["fedavg", "--data", "digit"], ["data: 'digit' is unknown; did you mean 'digits'?"]),
        (["fedavg", "--data", ""], ["data"]),
        (["fedavg", "--partition", "dirichlett:0.5"], ["partition", "did you mean 'dirichlet"]),
        (["fedavg", "--partition", "dirichlet:x"], ["partition", "'dirichlet:x'"]),
        (["fedavg", "--partition", "dirichlet:nan"], ["partition"]),
        (["fedavg", "--partition", "classes:99"], ["partition"]),
        (["fedavg", "--partition", "dirichlet:0.0001", "--clients", "100"], ["partition 'dirichlet:0.0001'"]),
        (["fedavg", "--model", "cnn22"], ["model: unknown name 'cnn22'; did you mean 'cnn2'?"]),
        (["fedavg", "--engine", "lokal"], ["engine: unknown name 'lokal'; did you mean 'local'?"]),
        (["fedavg", "--device", "rubbish"], ["device: found 'rubbish'; allowed: auto, cpu, cuda, cuda:N"]),
        (["fedavg", "--device", ""], ["device"]),
        (["fedavg", "--device", "cuda:x"], ["device: found 'cuda:x'"]),
        (["fedavg", "--device", "mps"], ["device: found 'mps'"]),
        (["fedavg", "--rounds", "0"], ["rounds: found 0; allowed: at least 1"]),
        (["fedavg", "--clients", "0"], ["clients: found 0; allowed: at least 1"]),
        (["fedavg", "--clients", "-3"], ["clients: found -3"]),
        (["fedavg", "--clients", "2000"], ["clients: found 2,000", "1,438"]),
        (["fedavg", "--clients", "9" * 30], ["clients"]),
        (["fedavg", "--participation", "0"], ["participation: found 0.0; allowed: more than 0"]),
        (["fedavg", "--participation", "1.5"], ["participation: found 1.5; allowed: at most 1"]),
        (["fedavg", "--participation", "nan"], ["participation: found nan; allowed: a finite number"]),
        (["fedavg", "--participation", "inf"], ["participation: found inf"]),
        (["fedavg", "--data-fraction", "0"], ["data_fraction: found 0.0; allowed: more than 0"]),
        (["fedavg", "--client-test", "0.9"], ["client_test: found 0.9; allowed: at most 0.5"]),
        (["fedavg", "--client-validation", "0.9"], ["client_validation: found 0.9; allowed: at most 0.5"]),
        (["fedavg", "--image-size", "0"], ["image_size: found 0; allowed: at least 1"]),
        (["fedavg", "--partition", "domain"], ["partition: 'domain' needs data whose samples have domains"]),
        (["fedavg", "--labelled-per-client", "0"], ["labelled_per_client: found 0; allowed: at least 1"]),
        (["fedavg", "--labelled-per-client", "-1"], ["labelled_per_client: found -1; allowed: at least 1"]),
        (["fedavg", "--set", "labelled_per_client=3"], ["has an option of its own, --labelled-per-client"]),
        (["fedavg", "--seed", "-1"], ["seed: found -1; allowed: at least 0"]),
        (["fedavg", "--workers", "0"], ["workers: found 0; allowed: at least 1"]),
        (["fedavg", "--workers", "1000000000"], ["workers: found 1000000000; allowed: at most 1024"]),
        (["fedavg", "--delta", "0"], ["delta: found 0.0; allowed: more than 0"]),
        (["fedavg", "--delta", "1"], ["delta: found 1.0; allowed: less than 1"]),
        (["fedavg", "--data-dir", "missing", "--data", "mnist"], ["data_dir", "missing", "is not a folder"]),
        (["fedavg", "--set", "local_epochs"], ["--set: found 'local_epochs'; allowed: KEY=VALUE"]),
        (["fedavg", "--set", "=3"], ["--set: found '=3'"]),
        (["fedavg", "--set", ""], ["--set: found ''"]),
        (["fedavg", "--set", "rounds=3"], ["--set: 'rounds' has an option of its own, --rounds"]),
        (["fedavg", "--set", " data_dir =3"], ["--set: 'data_dir' has an option of its own, --data-dir"]),
        (["fedavg", "--set", "algorithm=fedavg"], ["--set: 'algorithm' stands before the options"]),
        (["fedavg", "--set", "settings=3"], ["fedavg has no 'settings'"]),
        (["fedavg", "--set", "local_epoch=3"], ["fedavg has no 'local_epoch'; did you mean 'local_epochs'?"]),
        (["fedavg", "--set", "model.widht=wide"], ["model setting: unknown name 'widht'; did you mean 'width'?"]),
        (["fedavg", "--set", "model.=wide"], ["model setting: unknown name ''"]),
        (["fedavg", "--set", "local_epochs=2.5"], ["local_epochs: found '2.5'; allowed: a whole number"]),
        (["fedavg", "--set", "local_epochs=0"], ["local_epochs: found '0'; allowed: at least 1"]),
        (["fedavg", "--set", "local_epochs=-1"], ["local_epochs: found '-1'; allowed: at least 1"]),
        (["fedavg", "--set", "local_epochs=none"], ["local_epochs: found 'none'; allowed: a whole number"]),
        (["fedavg", "--set", "local_epochs=true"], ["local_epochs: found 'true'; allowed: a whole number"]),
        (["fedavg", "--set", f"local_epochs={'9' * 5000}"], ["local_epochs: found '999"]),
        (["fedavg", "--set", "learning_rate=x"], ["learning_rate: found 'x'; allowed: a number"]),
        (["fedavg", "--set", "learning_rate=nan"], ["learning_rate: found 'nan'; allowed: a finite number"]),
        (["fedavg", "--set", "learning_rate=inf"], ["learning_rate: found 'inf'; allowed: a finite number"]),
        (["fedavg", "--set", "learning_rate=1e999"], ["learning_rate: found '1e999'; allowed: a finite number"]),
        (["fedavg", "--set", "learning_rate=-1"], ["learning_rate: found '-1'; allowed: more than 0"]),
        (["fedavg", "--set", "momentum=nan"], ["momentum: found"]),
        (["fedavg", "--set", "lr_decay=nan"], ["lr_decay: found"]),
        (["fedavg", "--set", "optimizer=adm"], ["optimizer: found 'adm'; allowed: 'adam', 'adamw' or 'sgd'"]),
        (["feddpms", "--set", "only_scarce=perhaps"], ["only_scarce: found 'perhaps'; allowed: true or false"]),
        (["feddpms", "--set", "preliminary_rounds=9"], ["preliminary_rounds: found 9; allowed: 1 to rounds, which is 1"]),
        (["feddpms", "--set", "latent=0"], ["latent: found '0'; allowed: at least 1"]),
    ],
)  # fmt: skip
def test_slips_of_run(words: list[str], parts: list[str]) -> None:
    refused(["run", *words[:1], *TINY, *words[1:]] if words else ["run", *TINY], *parts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_no_gpu(device: str) -> None:
    refused(["run", "fedavg", *TINY, "--device", device], f"device: found '{device}'", "0 CUDA devices", "use cpu")


def test_empty_data_folder(elsewhere: Path) -> None:
    (elsewhere / "empty").mkdir()
    refused(["run", "fedavg", *TINY, "--data-dir", "empty", "--data", "mine"], "data: 'mine' is unknown")
    (elsewhere / "empty" / "mine").mkdir()
    refused(["run", "fedavg", *TINY, "--data-dir", "empty", "--data", "mine"], "'mine'", "holds neither")


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (None, ["config: can't read config.toml (No such file or directory)"]),
        (b"rounds = ", ["config: config.toml is not TOML"]),
        (b"\xff", ["config: config.toml is not TOML"]),
        (b"round = 3", ["config: unknown name 'round'; did you mean 'rounds'?"]),
        (b"rounds = 'many'", ["rounds: found 'many'; allowed: a whole number"]),
        (b"rounds = []", ["rounds: found []; allowed: a whole number"]),
        (b"rounds = 1979-05-27", ["rounds: found", "allowed: a whole number"]),
        (b"seed = true", ["seed: found 'True'; allowed: a whole number"]),
        (b"data = 5", ["data: found 5; allowed: text"]),
        (b"settings = 5", ["settings: found 5; allowed: a table of settings"]),
        (b"model_settings = [1]", ["model_settings: found [1]; allowed: a table of settings"]),
        (b"[settings]\nlocal_epoch = 3", ["fedavg has no 'local_epoch'; did you mean 'local_epochs'?"]),
        (b"[settings]\nlocal_epochs = [3]", ["local_epochs: found [3]; allowed: a whole number"]),
        (b"[settings]\nlocal_epochs = true", ["local_epochs: found 'True'; allowed: a whole number"]),
        (b"[settings]\nlearning_rate = nan", ["learning_rate: found nan; allowed: a finite number"]),
        (b"[model_settings]\nwidth = 3", ["width: found 3; allowed: 'paper' or 'wide'"]),
        (b"data = 'python'", ["data: this experiment's data came from Python"]),
    ],
)  # fmt: skip
def test_slips_in_a_config(config: bytes | None, parts: list[str], elsewhere: Path) -> None:
    if config is not None:
        (elsewhere / "config.toml").write_bytes(config)
    for command in (["run", "fedavg"], ["compare", "fedavg", "--seeds", "0"]):
        refused([*command, "--config", "config.toml"], *parts)


def test_places_that_cannot_be_used(elsewhere: Path) -> None:
    run = ["run", "fedavg", *TINY, "--out"]
    (elsewhere / "file").write_text("mine")
    (elsewhere / "foreign").mkdir()
    (elsewhere / "foreign" / "thesis.tex").write_text("mine")
    refused([*run, "file"], "out: file is a file")
    refused([*run, "file/run"], "out: can't write file/run (Not a directory)")
    refused([*run, "foreign"], "out: foreign is not empty and holds no run (thesis.tex lies there)")
    refused([*run, "x" * 300], "out: can't write", "File name too long")
    refused([*run, "/proc/run"], "out: can't write /proc/run")
    assert fedfill_(*run, "mine").exit_code == 0
    refused(["run", "fedavg", *TINY, "--seed", "1", "--out", "mine"], "out: mine holds another experiment")
    refused(["resume", "foreign"], "resume: foreign holds no run (there is no experiment.toml)")
    refused(["resume", "missing"], "resume: missing holds no run")
    refused(["partition", "--clients", "4", "--out", "file/x.png"], "out: can't write file/x.png")
    refused(["partition", "--clients", "4", "--out", "foreign"], "out: can't write foreign")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["compare", "fedavg", "fedavg"], ["the algorithm 'fedavg' is given twice"]),
        (["compare", "fedavg", "--seeds", "1,1"], ["the seed '1' is given twice"]),
        (["compare", "fedavg", "--seeds", "1,x"], ["seeds: found '1,x'; allowed: whole numbers separated by commas"]),
        (["compare", "fedavg", "--seeds", ""], ["seeds: found ''"]),
        (["compare", "fedavg", "--seeds", "1,"], ["seeds: found '1,'"]),
        (["compare", "fedavg", "--seeds", "-1"], ["seed: found -1; allowed: a whole number, at least 0"]),
        (["compare", "fedavg", "nope"], ["algorithm: unknown name 'nope'"]),
        (["compare", "fedavg:x"], ["allowed: NAME or NAME:setting=value"]),
        (
            ["compare", "fedavg", "--set", "clip=3"],
            [
                "fedavg has no 'clip', which is a setting of dpfedavg, feddpgan, sdafl, sdafl-ac; 'fedfill list settings fedavg' has its own"
            ],
        ),
        (["list", "algorithm"], ["list: found 'algorithm'; did you mean 'algorithms'?"]),
        (["list", "settings"], ["list settings: name an algorithm"]),
        (["list", "settings", "fedavgg"], ["did you mean 'fedavg'?"]),
        (["partition", "--clients", "2000"], ["clients: found 2,000"]),
        (["partition", "--seed", "-1"], ["seed: found -1"]),
        (["partition", "--data", "nope"], ["data: 'nope' is unknown"]),
    ],
)
def test_slips_of_other_commands(words: list[str], parts: list[str]) -> None:
    refused(words, *parts)


@pytest.mark.parametrize("words", [["run", "fedavg", "--nope"], ["run", "--clients", "x"], ["nope"], ["compare"]])
def test_typers_own_complaints(words: list[str]) -> None:
    result = fedfill_(*words)
    assert result.exit_code == 2
    assert "Usage: " in result.stderr
    assert "Traceback" not in result.stderr


def test_none_is_what_is_there_without_the_setting() -> None:
    for name, words in (("plain", []), ("none", ["--domain-fractions", "none", "--set", "model.weights=none"])):
        assert fedfill_("run", "fedavg", *TINY, "--out", name, *words).exit_code == 0
    assert Path("plain/experiment.toml").read_text() == Path("none/experiment.toml").read_text()


@pytest.mark.parametrize("rate", ["1e30", "1e300"])
def test_divergence_is_a_sentence(rate: str) -> None:
    words = ["run", "fedavg", *TINY, "--rounds", "3", "--out", "run", "--set", f"learning_rate={rate}", "--set", "optimizer=sgd"]  # fmt: skip
    result = fedfill_(*words, "--set", "latent_activation=none")
    assert result.exit_code == 2
    sentence = result.stderr.splitlines()[-1]
    assert sentence.startswith("fedfill: training diverged: ")
    assert sentence.endswith("try a smaller learning_rate")
    assert "Traceback" not in result.stderr


def test_full_disk(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Any, target: Any) -> None:
        if str(target).endswith("state.safetensors") and Path(target).exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    replace = os.replace
    words = ["run", "fedavg", *TINY, "--rounds", "3"]
    whole = fedfill_(*words, "--out", "whole")
    monkeypatch.setattr(os, "replace", full)
    result = fedfill_(*words, "--out", "run")
    monkeypatch.undo()
    monkeypatch.chdir(elsewhere)
    assert result.exit_code == 2
    assert "No space left on device" in result.stderr.splitlines()[-1]
    assert "'fedfill resume run'" in result.stderr.splitlines()[-1]
    resumed = fedfill_("resume", "run")
    assert resumed.exit_code == 0
    assert "Rounds 1 to 1 had been done before; the run went on from there." in resumed.stdout
    assert sha(resumed) == sha(whole)


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: LocalEngine, *args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalEngine, "evaluate", interrupt)
    result = fedfill_("run", "fedavg", *TINY, "--out", "run")
    assert result.exit_code == 130
    assert result.stderr.startswith("fedfill: stopped; ")
    assert result.stderr.count("\n") == 1


# ---- what is printed


def sha(result: Result) -> str:
    return next(line for line in result.stdout.splitlines() if "SHA-256" in line)


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
    refused(["run", "--config", "x/experiment.toml", "--seed", "4", "--out", "y"], "y holds another experiment")


def test_what_is_given_here_wins_over_the_config(elsewhere: Path) -> None:
    config = {
        "algorithm": "feddpms",
        "clients": 4,
        "rounds": 7,
        "seed": 5,
        "settings": {"local_epochs": 3, "batch_size": 16},
        "model_settings": {"latent": 8},
    }
    (elsewhere / "config.toml").write_text(tomli_w.dumps(config))
    result = fedfill_(
        "run", "fedavg", "--config", "config.toml", "--rounds", "1", "--set", "local_epochs=1", "--out", "x"
    )
    assert result.exit_code == 0, result.output
    text = (elsewhere / "x" / "experiment.toml").read_text()
    for line in ('algorithm = "fedavg"', "rounds = 1", "seed = 5", "local_epochs = 1", "batch_size = 16", "latent = 8"):
        assert f"\n{line}\n" in text


@pytest.mark.parametrize(
    ("words", "steps"),
    [([], 2), (["local_epochs=3"], '"none"'), (["local_epochs=3", "local_steps=4"], 4), (["local_steps=4"], 4)],
)
def test_epochs_that_are_given_here_win_over_mini_batches_of_the_config(
    words: list[str], steps: object, elsewhere: Path
) -> None:
    (elsewhere / "config.toml").write_text(
        "clients = 2\nrounds = 1\ndata_fraction = 0.1\n[settings]\nlocal_steps = 2\n"
    )
    result = fedfill_(
        "run", "fedavg", "--config", "config.toml", *(word for w in words for word in ("--set", w)), "--out", "x"
    )
    assert result.exit_code == 0, result.output
    assert f"\nlocal_steps = {steps}\n" in (elsewhere / "x" / "experiment.toml").read_text()


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
    words = ["compare", "fedavg", "fedavg:latent_activation=none", *TINY, "--seeds", "0,1"]
    result = fedfill_(*words, "--out", "c")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith(" fedavg")]
    assert [row[0] for row in rows] == ["fedavg"] * 4  # two tables: accuracy, and fairness
    assert "mean client" in result.stdout
    assert result.stdout.count("\n  latent_activation=none") == 2
    assert all(row[2] == "±" for row in rows)
    assert "digits, dirichlet:0.5, 4 clients, 1 round, seeds 0, 1" in result.stdout
    assert "fedavg: In total: no differential-privacy guarantee.\n" in result.stdout
    assert "No guarantee covers" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert "1/4 fedavg, seed 0: round 1/1, accuracy" in result.stderr
    assert "4/4 fedavg:latent_activation=none, seed 1: round 1/1, accuracy" in result.stderr
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
    assert "Not shared by fedprox:learning_rate=0.01: another local budget: learning_rate=0.01 (not 0.001)." in text
    assert text.count("Not shared by") == 1
    assert "…" not in text
    assert "Pictures: c/accuracy.png, c/final.png" in text
    one = fedfill_("compare", "fedavg", "fedprox", *TINY, "--data-fraction", "0.2", "--seeds", "0", "--out", "c")
    assert one.exit_code == 0, one.output
    row = next(line.split() for line in one.stdout.splitlines() if line.split()[:1] == ["fedprox"])
    assert re.fullmatch(r"[+-]\d+\.\d\d", row[2])
    assert "Not shared by" not in one.stdout
    assert "confidence" not in one.stdout


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
    ("words", "parts"),
    [
        (["tinny"], ["table: found no table.toml in 'tinny'; did you mean 'tiny'?"]),
        (["tiny", "--only", "FedAvgg"], ["only: found 'FedAvgg'; did you mean 'FedAvg'?"]),
        (["tiny", "--seeds", "a"], ["seeds: found 'a'; allowed: whole numbers separated by commas"]),
        (["tiny", "--seeds", "0,-1"], ["seed: found -1; allowed: a whole number, at least 0"]),
        (["tiny", "--device", "rubbish"], ["device: found 'rubbish'"]),
    ],
)
def test_slips_of_reproduce(table: Path, words: list[str], parts: list[str]) -> None:
    refused(["reproduce", *words], *parts)


def test_rows_of_one_name_are_refused(table: Path) -> None:
    (table / "table.toml").write_text(TABLE.replace('"FedProx"', '"FedAvg"'))
    refused(["reproduce", "tiny"], "rows: the name 'FedAvg' is given twice")


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
    refused(["partition", *words, "--clients", "10"], "clients: found 10, but partition 'domain:2' makes 4")


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


def test_a_run_with_few_labels_trains_on_these(elsewhere: Path) -> None:
    result = fedfill_("run", "fedavg", *TINY, "--labelled-per-client", "20", "--out", "r")
    assert result.exit_code == 0, result.output
    summary = json.loads((elsewhere / "r" / "summary.json").read_text())
    assert summary["train_samples"] == 4 * 20
    assert "labelled_per_client = 20" in (elsewhere / "r" / "experiment.toml").read_text()
    assert fedfill_("resume", "r").exit_code == 0


def test_partition_of_many_clients_and_classes_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    result = fedfill_("partition", "--clients", "60", "--partition", "iid")
    assert "digits, iid, seed 0, 10 classes" in result.stdout
    assert "... and 20 more clients, all of them in the picture." in " ".join(result.stdout.split())
    table = result.stdout.split("...")[0].splitlines()
    rows = [line.split() for line in table if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == [str(client) for client in range(40)]
    assert all(len(row) == 4 for row in rows)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("algorithms", ["fedavg", "feddpms"]),
        ("datasets", ["digits", "cifar100", "digits-domains"]),
        ("partitions", ["iid", "dirichlet", "domain:K"]),
        ("models", ["auto", "cnn2"]),
    ],
)
def test_list(what: str, words: list[str]) -> None:
    result = fedfill_("list", what)
    assert result.exit_code == 0
    first = [line.split()[0] for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert any(entry.startswith(word) for word in words for entry in first)


def test_list_names_every_algorithm() -> None:
    text = fedfill_("list", "algorithms").stdout
    names = [line.split()[0] for line in text.splitlines() if not line.startswith(" ")]
    # other tests of this process may have algorithms of their own
    assert [name for name in names if find(name).__module__.startswith("fedfill.")] == [
        "central", "dpfedavg", "fedavg", "fedbn", "feddpgan", "feddpms", "feddyn", "fedmix", "fednova", "fedprox", "fedvae", "fedzdac", "fedzdas",
        "fixmatch", "fraug", "local", "mixup", "moon", "naivemix", "partialfed", "pfedavg", "qffl", "scaffold", "sdafl", "sdafl-ac", "semifl",
    ]  # fmt: skip


def test_run_tells_of_each_step_before_the_first_round(tmp_path: Path) -> None:
    tiny = ("gan_iterations=3", "gan_chunk=2", "gan_width=4", "images_per_client=4", "local_steps=1", "server_steps=1")
    settings = [word for pair in tiny for word in ("--set", pair)]
    result = fedfill_("run", "sdafl", "--clients", "3", "--rounds", "1", "--out", str(tmp_path / "r"), *settings)
    assert result.exit_code == 0
    lines = [line for line in result.stderr.splitlines() if "preparation" in line or ": round" in line]
    assert [line.split(", ")[0].split(": ")[1] for line in lines] == [
        "preparation 1/3", "preparation 2/3", "preparation 3/3", "round 1/1",
    ]  # fmt: skip


def test_list_settings_knows_every_setting_and_its_words() -> None:
    from fedfill.models.networks import ModelSettings

    text = fedfill_("list", "settings", "feddpms").stdout
    first = [line.split()[0] for line in text.splitlines() if not line.startswith(" ")]
    assert first == [*find("feddpms").model_fields, *(f"model.{name}" for name in ModelSettings.model_fields)]
    assert " ".join(text.split()).count("[adam, adamw, sgd]") == 1
    assert "[true, false]" in " ".join(text.split())
    assert "[shift, shift_flip, crop, crop_colour, none]" in " ".join(text.split())


def test_version() -> None:
    assert fedfill_("--version").stdout == f"{fedfill.__version__}\n"


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from fedfill.cli import app\n"
        "assert CliRunner().invoke(app, ['run', '--help']).exit_code == 0\n"
        "sys.exit(sorted({'torch', 'numpy', 'sklearn', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize("command", ["run", "resume", "compare", "reproduce", "measure", "partition", "list"])
def test_help(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command in fedfill_("--help").stdout
    assert "..." not in fedfill_("--help").stdout.split("Commands:")[1]  # no summary is cut short
    assert fedfill_(command, "--help").exit_code == 0


def test_defaults_in_the_help_are_true() -> None:
    from fedfill.experiment.settings import Experiment

    text = " ".join(fedfill_("run", "--help").stdout.split())
    empty = {  # what an option that is not given does; it takes no word for that
        "image_size": "as they are stored", "client_validation": "no validation split", "labelled_per_client": "all",
        "evaluate_every": "1", "reply_timeout": "no limit",
    }  # fmt: skip
    for name, info in Experiment.model_fields.items():
        if name in ("algorithm", "settings", "model_settings", "data_dir", "workers"):
            continue
        found = re.search(rf"--{name.replace('_', '-')} (?:<|[A-Z])(.*?)(?= --[a-z-]+ (?:<|[A-Z])|$)", text)
        assert found
        assert f"[default: {empty.get(name, 'none') if info.default is None else info.default}]" in found[1]


def test_every_argument_and_setting_has_a_word_of_help() -> None:
    """Some pairs of typer and click lose the help of arguments, and a mixin's settings lose theirs without a flag."""
    for command, words in {
        "run": "A name of 'fedfill list algorithms'", "list": "algorithms, datasets, partitions", "reproduce": "A folder with",
        "compare": "Names, also with", "measure": "Directory of a finished run", "resume": "A run directory",
    }.items():  # fmt: skip
        assert words in fedfill_(command, "--help").stdout
    for name in known_algorithms():
        assert [row[0] for row in _settings(name) if not row[2].split(" [")[0].strip()] == []


def test_defaults_for_single_data_sets_are_listed() -> None:
    rows = {row[0]: row[1] for row in _settings("feddpms")}
    assert rows["alpha"] == "50; cifar10: 200"
