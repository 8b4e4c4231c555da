"""Synthetic samples from the command line: written, trained on, added, measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.calls import TINY, fedfill_, refused
from tests.helpers import TINY_GAN

from fedfill.studies import assess as assessment

GAN = [word for name, value in {**TINY_GAN, "images_per_class": 3}.items() for word in ("--set", f"{name}={value}")]


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_run_a_file_and_what_it_is_for(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assessment, "STEPS", 3)
    monkeypatch.setattr(assessment, "DRAWS", 2)
    assert fedfill_("run", "feddpgan", *TINY, *GAN, "--out", "run").exit_code == 0
    made = fedfill_("synthesise", "run", "--per-class", "5", "--out", "made.safetensors", "--against", "digits")
    assert made.exit_code == 0, made.output
    assert "50 synthetic samples (feddpgan on digits, seed 0" in words(made.stdout)
    assert "Privacy: no differential-privacy guarantee." in made.stdout
    assert "Written: made.safetensors, made.png" in made.stdout
    assert (elsewhere / "made.png").is_file()
    refused(["synthesise", "run", "--per-class", "6", "--out", "made.safetensors"], "out")
    refused(["synthesise", "run", "--out", "made.npz"], "out")

    trained = fedfill_("run", "central", "--data", "made.safetensors", "--partition", "iid", *TINY, "--out", "central")
    assert trained.exit_code == 0, trained.output
    assert "Training set: 50 synthetic samples of made.safetensors" in words(trained.stdout)
    unnamed = fedfill_("run", "central", "--data", "./made.safetensors", "--partition", "iid", *TINY)
    assert "Run directory: runs/central-made.safetensors-iid-seed0-" in unnamed.stdout
    added = fedfill_("run", "fedavg", "--extra", "made.safetensors", *TINY, "--out", "more")
    assert added.exit_code == 0, added.output
    assert "Extra: 50 samples of made.safetensors" in words(added.stdout)
    refused(["run", "fedavg", "--extra", "nowhere.safetensors", *TINY, "--out", "x"], "extra")
    refused(["run", "fedavg", "--data", "nowhere.safetensors", *TINY, "--out", "x"], "data")

    for subject, folder in (("run", "run/samples"), ("made.safetensors", "made.measures")):
        result = fedfill_("measure", subject)
        assert result.exit_code == 0, result.output
        text = words(result.stdout)
        assert "Synthetic samples of feddpgan on digits, seed 0" in text
        for measure in ("trained on synthetic, n=359", "Fréchet distance", "precision, n=", "exact copies"):
            assert measure in text, measure
        assert f"Written: {folder}/measures.json, measures.png" in text
        assert max(map(len, result.stdout.splitlines())) <= 100
        assert (elsewhere / folder / "measures.png").is_file()
        assert json.loads((elsewhere / folder / "measures.json").read_text())["oracle"] is None
    again = fedfill_("measure", "run", "--oracle", "central", "--per-class", "4", "--ceiling", "--out", "m")
    assert again.exit_code == 0, again.output
    found = json.loads((elsewhere / "m/measures.json").read_text())
    assert found["samples"] == 40
    assert found["oracle"]["name"] == "central on made.safetensors"
    assert {"synthetic", "real", "both"} <= found["trained_on"].keys()
