"""Choosing an engine."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
from tests.helpers import refused

import fedfill
from fedfill.engines import NAMES, require
from fedfill.errors import FedfillError
from fedfill.experiment.prepare import arrange


@pytest.mark.parametrize("name", NAMES)
def test_every_engine_of_the_list_can_be_had(name: str) -> None:
    require(name)


def test_an_unknown_engine() -> None:
    with refused("engine", "rey", "ray"):
        fedfill.run("fedavg", engine="rey")


@pytest.mark.parametrize(("name", "package"), [("ray", "ray"), ("flower", "flwr")])
def test_an_extra_that_is_not_installed_is_one_sentence_with_the_command(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("fedfill.engines.find_spec", lambda what: None if what == package else found(what))
    with pytest.raises(FedfillError) as caught:
        fedfill.run("fedavg", engine=name)
    assert str(caught.value) == (
        f"engine: '{name}' needs a package that is not installed; run: pip install 'fedfill[{name}]'"
    )


def test_without_the_extras_everything_else_works() -> None:
    """Neither the command line nor a local run imports them."""
    code = (
        "import sys; sys.modules.update(ray=None, flwr=None)\n"
        "import fedfill.cli, fedfill.studies.run, fedfill.studies.compare, fedfill.algorithms\n"
        "fedfill.algorithms.known_algorithms()\n"
        "from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(fedfill.cli.app, ['deploy', '--help']).exit_code == 0\n"
    )
    done = subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_more_replies_than_clients_in_a_round_can_not_be_needed() -> None:
    with refused("min_replies", "6", "5"):
        fedfill.run("fedavg", clients=10, participation=0.5, min_replies=6)


def test_the_clients_in_a_round_may_follow_from_the_data() -> None:
    data = {str(k): (np.zeros((10, 8, 8), np.uint8), np.arange(10) % 2) for k in range(6)}
    options = {"data": data, "partition": "domain", "model": "auto", "participation": 0.5}
    assert len(arrange("fedavg", **options, min_replies=3).federation.clients) == 6
    with refused("min_replies", "4", "3"):
        arrange("fedavg", **options, min_replies=4)


def test_what_changes_no_result_can_be_changed_at_a_resume(tmp_path) -> None:
    fedfill.run("fedavg", rounds=1, local_steps=1, out=tmp_path)
    with refused("resume", "clients", "min_replies"):
        fedfill.resume(tmp_path, clients=3)
    assert fedfill.resume(tmp_path, min_replies=2, reply_timeout=60).was_finished
