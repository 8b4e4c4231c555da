"""Options are the fields of `Experiment`; what is given wins over --config, and --set takes the rest."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import pytest
import tomli_w
import typer
from tests.cli.calls import TINY, fedfill_, refused
from typer.testing import CliRunner

import fedfill
from fedfill.cli import options
from fedfill.cli.options import FIELDS, help_of, takes
from fedfill.experiment.settings import DATA, INCIDENTAL, PLACES, SIMULATION, Experiment


def flags(*command: str) -> set[str]:
    """Fields that a command has options for."""
    text = fedfill_(*command, "--help").stdout
    return {name.replace("-", "_") for name in re.findall(r"^  --([a-z-]+)", text, re.MULTILINE)} & {
        *Experiment.model_fields
    }


def test_each_command_has_the_options_that_it_can_use() -> None:
    hosts = {
        "data_fraction",
        "domain_fractions",
        "test_fraction",
        "partition",
        "device",
    }  # these have the data and their machines
    assert flags("run") == FIELDS == {*Experiment.model_fields} - {"algorithm", "settings", "model_settings", "own"}
    assert flags("compare") == FIELDS - {"seed"}
    assert flags("resume") == INCIDENTAL | PLACES | {"rounds", "algorithm", "model", "partition", "data"}
    assert flags("reproduce") == {"data_dir", "device", "workers"}
    assert flags("measure") == {"data_dir", "device"}
    assert flags("partition") == DATA | {"seed"}
    assert flags("deploy", "rehearse") == FIELDS - SIMULATION
    assert flags("deploy", "init") == FIELDS - SIMULATION - (PLACES - {"schema_file"}) - hosts


def test_groups_of_fields() -> None:
    assert {
        "data_dir", "device", "workers", "stack", "ray_address", "gpus_per_worker", "min_replies", "reply_timeout",
    } == INCIDENTAL  # fmt: skip
    assert {"start_from", "extra", "schema_file"} == PLACES
    assert {"engine", "workers", "stack", "ray_address", "gpus_per_worker"} == SIMULATION
    assert {
        "data", "data_dir", "data_fraction", "domain_fractions", "image_size", "partition", "clients", "client_test",
        "client_validation", "labelled_per_client", "schema_file", "test_fraction",
    } == DATA  # fmt: skip


def test_every_field_says_what_it_is_and_what_its_default_means() -> None:
    text = " ".join(fedfill_("run", "--help").stdout.split()).replace("- ", "-")
    for name in FIELDS:
        field = Experiment.model_fields[name]
        assert field.description
        empty = re.search(r" None: ([^.]+)\.$", " ".join(field.description.split()))
        assert empty or field.default is not None, f"what is {name} without a value?"
        default = empty[1] if empty and field.default is None else field.default
        assert help_of(name).endswith(f"[default: {default}]")
        assert "None" not in help_of(name)
        assert "`" not in help_of(name)
        assert help_of(name) in text


class More(Experiment):
    """An experiment with a few more fields."""

    speed: Literal["fast", "slow"] = "fast"
    """How fast; see `tool_dir`."""
    sealed: bool | None = None
    """Whether it is. None: as it comes."""
    tool_dir: str | None = None
    """Folder of tools. None: no
    tools."""
    share: float | None = None
    """Share. None: all."""


def test_a_new_field_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "Experiment", More)
    app, found = typer.Typer(rich_markup_mode=None), {}

    @app.command()
    @takes({"speed", "sealed", "tool_dir", "share", "rounds"}, share="A share of yours.")
    def show(options: dict[str, Any]) -> None:
        found.update(options)

    text = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    assert "--speed [fast|slow] How fast; see --tool-dir. [default: fast]" in text
    assert "--sealed / --no-sealed Whether it is. [default: as it comes]" in text
    assert "--tool-dir PATH Folder of tools. [default: no tools]" in text
    assert "--share FLOAT A share of yours." in text
    assert "--set" not in text
    words = ["--speed", "slow", "--no-sealed", "--tool-dir", "here", "--rounds", "3"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert found == {"speed": "slow", "sealed": False, "tool_dir": "here", "rounds": 3}


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (None, "config"),
        (b"rounds = ", "config"),
        (b"\xff", "config"),
        (b"round = 3", "config"),
        (b"rounds = 'many'", "rounds"),
        (b"rounds = []", "rounds"),
        (b"rounds = 1979-05-27", "rounds"),
        (b"seed = true", "seed"),
        (b"data = 5", "data"),
        (b"settings = 5", "settings"),
        (b"model_settings = [1]", "model_settings"),
        (b"[settings]\nlocal_epoch = 3", "setting"),
        (b"[settings]\nlocal_epochs = [3]", "local_epochs"),
        (b"[settings]\nlocal_epochs = true", "local_epochs"),
        (b"[settings]\nlearning_rate = nan", "learning_rate"),
        (b"[model_settings]\nwidth = 3", "width"),
        (b"data = 'python'", "data"),
    ],
)  # fmt: skip
def test_slips_in_a_config(config: bytes | None, setting: str, elsewhere: Path) -> None:
    if config is not None:
        (elsewhere / "config.toml").write_bytes(config)
    for command in (["run", "fedavg"], ["compare", "fedavg", "--seeds", "0"]):
        refused([*command, "--config", "config.toml"], setting)


def test_none_is_what_is_there_without_the_setting() -> None:
    for name, words in (("plain", []), ("none", ["--domain-fractions", "none", "--set", "model.weights=none"])):
        assert fedfill_("run", "fedavg", *TINY, "--out", name, *words).exit_code == 0
    assert Path("plain/experiment.toml").read_text() == Path("none/experiment.toml").read_text()


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


def test_what_an_older_version_recorded_of_a_network_that_lacks_it_is_dropped(elsewhere: Path) -> None:
    """0.1.0 wrote the settings of the latent layer into every record."""
    recorded = {"width": "paper", "latent": "none", "latent_activation": "sigmoid", "dropout": "none", "projection": 8}
    config = {
        "digest": "0123456789abcdef", "version": "0.1.0", "algorithm": "fedavg", "clients": 4, "rounds": 1,
        "model": "cnn2bn", "settings": {"local_epochs": 1}, "model_settings": recorded,
    }  # fmt: skip
    place = elsewhere / "config.toml"
    place.write_text(tomli_w.dumps(config))
    result = fedfill_("run", "--config", "config.toml", "--out", "x")
    assert result.exit_code == 0, result.output
    found = tomllib.loads((elsewhere / "x" / "experiment.toml").read_text())["model_settings"]
    assert "latent_activation" not in found
    assert found["projection"] == 8  # which the network has
    place.write_text(tomli_w.dumps({**config, "model": "cnn2"}))  # this one has such a layer
    assert fedfill_("run", "--config", "config.toml", "--out", "y").exit_code == 0
    assert 'latent_activation = "sigmoid"' in (elsewhere / "y" / "experiment.toml").read_text()
    for version in ({}, {"version": fedfill.__version__}):  # asked for today
        place.write_text(tomli_w.dumps({**{k: v for k, v in config.items() if k != "version"}, **version}))
        refused(["run", "--config", "config.toml", "--out", "z"], "latent_activation")


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
