"""Every slip is one sentence and writes nothing; help is answered at once."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.calls import TINY, fedfill_, refused, sha

import fedfill
from fedfill.engines.local import LocalEngine


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["fedavgg"], "algorithm"),
        (["zzz"], "algorithm"),
        ([], "algorithm"),
        (["fedavg", "--data", "digit"], "data"),
        (["fedavg", "--data", ""], "data"),
        (["fedavg", "--partition", "dirichlett:0.5"], "partition"),
        (["fedavg", "--partition", "dirichlet:x"], "partition"),
        (["fedavg", "--partition", "dirichlet:nan"], "partition"),
        (["fedavg", "--partition", "classes:99"], "partition"),
        (["fedavg", "--partition", "dirichlet:0.0001", "--clients", "100"], "partition"),
        (["fedavg", "--model", "cnn22"], "model"),
        (["fedavg", "--engine", "lokal"], "engine"),
        (["fedavg", "--device", "rubbish"], "device"),
        (["fedavg", "--device", ""], "device"),
        (["fedavg", "--device", "cuda:x"], "device"),
        (["fedavg", "--device", "mps"], "device"),
        (["fedavg", "--rounds", "0"], "rounds"),
        (["fedavg", "--clients", "0"], "clients"),
        (["fedavg", "--clients", "-3"], "clients"),
        (["fedavg", "--clients", "2000"], "clients"),
        (["fedavg", "--clients", "9" * 30], "clients"),
        (["fedavg", "--participation", "0"], "participation"),
        (["fedavg", "--participation", "1.5"], "participation"),
        (["fedavg", "--participation", "nan"], "participation"),
        (["fedavg", "--participation", "inf"], "participation"),
        (["fedavg", "--data-fraction", "0"], "data_fraction"),
        (["fedavg", "--client-test", "0.9"], "client_test"),
        (["fedavg", "--client-validation", "0.9"], "client_validation"),
        (["fedavg", "--image-size", "0"], "image_size"),
        (["fedavg", "--partition", "domain"], "partition"),
        (["fedavg", "--labelled-per-client", "0"], "labelled_per_client"),
        (["fedavg", "--labelled-per-client", "-1"], "labelled_per_client"),
        (["fedavg", "--set", "labelled_per_client=3"], "--set"),
        (["fedavg", "--seed", "-1"], "seed"),
        (["fedavg", "--workers", "0"], "workers"),
        (["fedavg", "--workers", "1000000000"], "workers"),
        (["fedavg", "--delta", "0"], "delta"),
        (["fedavg", "--delta", "1"], "delta"),
        (["fedavg", "--data-dir", "missing", "--data", "mnist"], "data_dir"),
        (["fedavg", "--set", "local_epochs"], "--set"),
        (["fedavg", "--set", "=3"], "--set"),
        (["fedavg", "--set", ""], "--set"),
        (["fedavg", "--set", "rounds=3"], "--set"),
        (["fedavg", "--set", " data_dir =3"], "--set"),
        (["fedavg", "--set", "algorithm=fedavg"], "--set"),
        (["fedavg", "--set", "settings=3"], "setting"),
        (["fedavg", "--set", "local_epoch=3"], "setting"),
        (["fedavg", "--set", "model.widht=wide"], "model setting"),
        (["fedavg", "--set", "model.=wide"], "model setting"),
        (["fedavg", "--set", "local_epochs=2.5"], "local_epochs"),
        (["fedavg", "--set", "local_epochs=0"], "local_epochs"),
        (["fedavg", "--set", "local_epochs=-1"], "local_epochs"),
        (["fedavg", "--set", "local_epochs=none"], "local_epochs"),
        (["fedavg", "--set", "local_epochs=true"], "local_epochs"),
        (["fedavg", "--set", f"local_epochs={'9' * 5000}"], "local_epochs"),
        (["fedavg", "--set", "learning_rate=x"], "learning_rate"),
        (["fedavg", "--set", "learning_rate=nan"], "learning_rate"),
        (["fedavg", "--set", "learning_rate=inf"], "learning_rate"),
        (["fedavg", "--set", "learning_rate=1e999"], "learning_rate"),
        (["fedavg", "--set", "learning_rate=-1"], "learning_rate"),
        (["fedavg", "--set", "momentum=nan"], "momentum"),
        (["fedavg", "--set", "lr_decay=nan"], "lr_decay"),
        (["fedavg", "--set", "optimizer=adm"], "optimizer"),
        (["feddpms", "--set", "only_scarce=perhaps"], "only_scarce"),
        (["feddpms", "--set", "preliminary_rounds=9"], "preliminary_rounds"),
        (["feddpms", "--set", "latent=0"], "latent"),
    ],
)  # fmt: skip
def test_slips_of_run(words: list[str], setting: str) -> None:
    refused(["run", *words[:1], *TINY, *words[1:]], setting)


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["compare", "fedavg", "fedavg"], "compare"),
        (["compare", "fedavg", "--seeds", "1,1"], "compare"),
        (["compare", "fedavg", "--seeds", "1,x"], "seeds"),
        (["compare", "fedavg", "--seeds", ""], "seeds"),
        (["compare", "fedavg", "--seeds", "1,"], "seeds"),
        (["compare", "fedavg", "--seeds", "-1"], "seed"),
        (["compare", "fedavg", "nope"], "algorithm"),
        (["compare", "fedavg:x"], "algorithm"),
        (["compare", "fedavg", "--set", "clip=3"], "setting"),
        (["compare", "fedavg", "--set", "out=x"], "--set"),
        (["compare", "fedavg", "--set", "seeds=3"], "--set"),
        (["list", "algorithm"], "list"),
        (["list", "settings"], "list settings"),
        (["list", "settings", "fedavgg"], "algorithm"),
        (["partition", "--clients", "2000"], "clients"),
        (["partition", "--seed", "-1"], "seed"),
        (["partition", "--data", "nope"], "data"),
        (["deploy", "init", "app", "--shape", "28"], "class-names"),
        (["deploy", "init", "app", "--shape", "x", "--class-names", "a,b"], "shape"),
        (["deploy", "init", "app", "--name", "A b"], "name"),
        (["deploy", "rehearse", "fedavgg"], "algorithm"),
    ],
)
def test_slips_of_other_commands(words: list[str], setting: str) -> None:
    refused(words, setting)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fedavgg"], "algorithm: unknown name 'fedavgg'; did you mean 'fedavg'?"),
        (["fedavg", "--data", "digit"], "data: 'digit' is unknown; did you mean 'digits'?"),
        (["fedavg", "--model", "cnn22"], "model: unknown name 'cnn22'; did you mean 'cnn2'?"),
        (["fedavg", "--device", "rubbish"], "device: found 'rubbish'; allowed: auto, cpu, cuda, cuda:N"),
        (["fedavg", "--rounds", "0"], "rounds: found 0; allowed: at least 1"),
        (["fedavg", "--participation", "1.5"], "participation: found 1.5; allowed: at most 1.0"),
        (["fedavg", "--participation", "nan"], "participation: found nan; allowed: a finite number"),
        (["fedavg", "--preset", "papers"], "preset: found 'papers'; allowed: 'paper', or none"),
        (["fedavg", "--set", "local_epochs"], "--set: found 'local_epochs'; allowed: KEY=VALUE"),
        (["fedavg", "--set", "data_dir=3"], "--set: 'data_dir' has an option of its own, --data-dir"),
        (["fedavg", "--set", "out=3"], "--set: 'out' has an option of its own, --out"),
        (["fedavg", "--set", "algorithm=fedavg"], "--set: 'algorithm' stands before the options"),
        (["fedavg", "--set", "local_epoch=3"], "setting: fedavg has no 'local_epoch'; did you mean 'local_epochs'?"),
        (["fedavg", "--set", "model.widht=wide"], "model setting: unknown name 'widht'; did you mean 'width'?"),
        (["fedavg", "--set", "local_epochs=2.5"], "local_epochs: found '2.5'; allowed: a whole number"),
        (["fedavg", "--set", "optimizer=adm"], "optimizer: found 'adm'; allowed: 'adam', 'adamw' or 'sgd'"),
        (["feddpms", "--set", "only_scarce=perhaps"], "only_scarce: found 'perhaps'; allowed: true or false"),
        (
            ["fedavg", "--set", "clip=3"],
            "setting: fedavg has no 'clip', which is a setting of dpfedavg, fedcvae, feddpgan, sdafl and others; 'fedfill list settings fedavg' has its own",
        ),
    ],
)
def test_sentences_that_are_a_promise(words: list[str], sentence: str) -> None:
    """What was found, what is allowed, and the nearest right spelling."""
    assert refused(["run", *words], sentence.split(":")[0]) == sentence


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_no_gpu(device: str) -> None:
    assert "use cpu" in refused(["run", "fedavg", *TINY, "--device", device], "device")


@pytest.mark.parametrize("words", [["run", "fedavg", "--nope"], ["run", "--clients", "x"], ["compare"]])
def test_typers_own_complaints(words: list[str]) -> None:
    result = fedfill_(*words)
    assert result.exit_code == 2
    assert "Usage: " in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("rate", ["1e30", "1e300"])
def test_divergence_is_a_sentence(rate: str) -> None:
    words = ["run", "fedavg", *TINY, "--rounds", "3", "--out", "run", "--set", f"learning_rate={rate}", "--set", "optimizer=sgd"]  # fmt: skip
    result = fedfill_(*words, "--set", "latent_activation=none")
    assert result.exit_code == 2
    sentence = result.stderr.splitlines()[-1]
    assert sentence.startswith("fedfill: training diverged: ")
    assert sentence.endswith("try a smaller learning_rate")
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("words", [["--version"], ["--help"], ["list", "algorithms"]])
def test_full_standard_output(words: list[str], buffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fedfill", *words],
            env={**os.environ, "PYTHONUNBUFFERED": buffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "fedfill: standard output can't be written (No space left on device)\n"


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


def test_version() -> None:
    assert fedfill_("--version").stdout == f"{fedfill.__version__}\n"


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["deploy", "init", "--help"]])
def test_help_needs_no_torch(words: list[str]) -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from fedfill.cli import app\n"
        f"assert CliRunner().invoke(app, {words}).exit_code == 0\n"
        "slow = {'torch', 'numpy', 'sklearn', 'matplotlib', 'fedfill.algorithms'}\n"
        "sys.exit(sorted(slow & set(sys.modules)) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize(
    "command", ["run", "resume", "compare", "reproduce", "report", "measure", "partition", "list", "deploy"]
)
def test_help(command: str) -> None:
    assert command in fedfill_("--help").stdout
    assert "..." not in fedfill_("--help").stdout.split("Commands:")[1]  # no summary is cut short
    assert fedfill_(command, "--help").exit_code == 0


def test_python_m_runs_the_same() -> None:
    done = subprocess.run([sys.executable, "-m", "fedfill", "--version"], capture_output=True, text=True)
    assert done.stdout == f"{fedfill.__version__}\n"
