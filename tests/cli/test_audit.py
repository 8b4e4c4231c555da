"""``fedfill audit``: what it prints, what it writes, and the exit status."""

import json
import re

import pytest
from typer.testing import CliRunner

from fedfill.algorithms.dpfedavg import DPFedAvg
from fedfill.cli import app

SMALL = ("--clients", "3", "--data-fraction", "0.2", "--rounds", "1", "--canaries", "300")


def called(*words):
    return CliRunner().invoke(app, ["audit", *words])


def test_a_sound_algorithm_passes(tmp_path):
    found = called("dpfedavg", *SMALL, "--set", "noise_multiplier=2", "--out", str(tmp_path))
    assert found.exit_code == 0
    assert "no evidence of privacy" in " ".join(found.output.split())
    assert json.loads((tmp_path / "audit.json").read_text())["findings"][0]["verdict"].startswith("PASS")


def test_a_fault_has_exit_status_1(monkeypatch):
    monkeypatch.setattr(DPFedAvg, "pack", lambda self, start, trained, steps: (trained, None))
    found = called("dpfedavg", *SMALL, "--set", "noise_multiplier=2", "--json")
    assert found.exit_code == 1
    assert json.loads(found.output)["findings"][0]["verdict"] == "FAIL"


def test_no_guarantee_is_told_in_words():
    found = called("fedavg", *SMALL)
    words = " ".join(found.output.split())
    assert found.exit_code == 0
    assert "No claim to test" in words
    assert "Membership by loss: with its update" in words
    assert re.search(r"hits \d+ points (above|below) false alarms", words)
    assert "better than by a coin" not in words
    assert "Update.weights, as local training is not repeated" in words


def test_a_slip_is_one_sentence(tmp_path):
    found = called("fedavgg", *SMALL)
    assert found.exit_code == 2
    nothing = called(str(tmp_path / "nope"))
    assert nothing.exit_code == 2
    assert "holds no run" in " ".join(nothing.output.split())


def test_a_place_that_cannot_be_written_is_found_before_the_attacks(tmp_path, monkeypatch):
    monkeypatch.setattr("fedfill.studies.audit._run", lambda *_: pytest.fail("it began"))
    (tmp_path / "file").write_text("")
    found = called("dpfedavg", *SMALL, "--out", str(tmp_path / "file" / "deep"))
    assert found.exit_code == 2
    assert "can't write" in " ".join(found.output.split())


def test_a_run_is_audited_where_it_lies(tmp_path):
    run = tmp_path / "run"
    CliRunner().invoke(app, ["run", "dpfedavg", "--clients", "3", "--data-fraction", "0.2", "--rounds", "1", "--out", str(run)])  # fmt: skip
    weights = (run / "checkpoint").stat().st_mtime_ns
    found = called(str(run), "--canaries", "300")
    assert found.exit_code == 0, found.output
    assert json.loads((run / "audit.json").read_text())["algorithm"] == "dpfedavg"
    assert (run / "checkpoint").stat().st_mtime_ns == weights
