"""Re-keying of kept figures: what gets the digest of today, and what stays as it was, on small tables that are made up."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedfill.experiment.digest import digest
from fedfill.experiment.prepare import Prepared, arrange

TABLE = """
title = "Made up"
source = "Nobody."
figures = ["accuracy"]

[options]
data = "digits"
clients = 3
rounds = 1
"""
ROWS: dict[str, dict[str, Any]] = {
    "one shape": {"algorithm": "fedavg", "model": "cnn2bn"},
    "auto with a sigmoid": {"algorithm": "fedavg", "model": "auto", "latent_activation": "sigmoid"},
    "auto": {"algorithm": "fedavg", "model": "auto"},
    "without effect": {"algorithm": "partialfed", "model": "cnn2bn"},
}
LATENT = {"width": "paper", "latent": None, "latent_activation": "sigmoid", "dropout": None, "projection": None}
"""What 0.1.0 recorded of every network."""


def prepared_of(name: str, seed: int = 0) -> Prepared:
    options = {"data": "digits", "clients": 3, "rounds": 1, "partition": "dirichlet:0.5", "seed": seed, **ROWS[name]}
    return arrange(options.pop("algorithm"), **options)


def digest_of_before(prepared: Prepared, **others: Any) -> str:
    """The digest by 0.1.0 of the experiment of today, with other fields in place of its own."""
    fields = {**prepared.experiment.model_dump(), **others}
    parts = type(prepared.algorithm), prepared.model, prepared.federation.fingerprint, prepared.initial
    return digest(fields, *parts, version="0.1.0")


def toml_of(rows: dict[str, dict[str, Any]]) -> str:
    text = TABLE
    for name, own in rows.items():
        options = ", ".join(f'{key} = "{value}"' for key, value in own.items() if key != "algorithm")
        text += f'\n[[rows]]\nname = "{name}"\nalgorithm = "{own["algorithm"]}"\noptions = {{ {options} }}\n'
    return text


@pytest.fixture
def rekey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, whose tables are those of the test."""
    script = Path(__file__).parents[2] / "experiments" / "rekey.py"
    spec = importlib.util.spec_from_file_location("rekey", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "rekey.py"))
    monkeypatch.setattr(sys, "argv", ["rekey.py", "--data-dir", str(tmp_path)])
    return module


def rekeyed(rekey: ModuleType, folder: Path, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the program makes of kept runs."""
    place = folder / "made-up"
    place.mkdir()
    (place / "table.toml").write_text(toml_of(ROWS))
    (place / "results.json").write_text(json.dumps(entries))
    rekey.main()
    found: list[dict[str, Any]] = json.loads((place / "results.json").read_text())
    return found


def test_the_same_experiments_get_the_digests_of_today(
    rekey: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = {name: prepared_of(name) for name in ROWS}
    keep = {**now["without effect"].experiment.settings, "keep": "norm_head"}  # which adaptive never looked at
    before = {
        "one shape": digest_of_before(now["one shape"], model_settings=LATENT),
        "auto with a sigmoid": digest_of_before(now["auto with a sigmoid"], model="auto", model_settings=LATENT),
        "without effect": digest_of_before(now["without effect"], settings=keep, model_settings=LATENT),
    }
    kept = [{"row": name, "seed": 0, "digest": old, "accuracy": 0.5} for name, old in before.items()]
    found = rekeyed(rekey, tmp_path, kept)
    assert found == [{**entry, "digest": now[entry["row"]].digest, "version": "0.1.0"} for entry in kept]
    assert "3 runs have the digests of today, 0 are of other" in capsys.readouterr().out
    rekey.main()
    assert (
        "0 runs have the digests of today, 0 are of other" in capsys.readouterr().out
    )  # those of today are left alone
    assert json.loads((tmp_path / "made-up" / "results.json").read_text()) == found


def test_other_experiments_stay_as_they_were(
    rekey: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape, auto, second = prepared_of("one shape"), prepared_of("auto"), prepared_of("one shape", seed=1)
    epochs = {**shape.experiment.settings, "local_epochs": 2}
    kept = [
        # beside what does not apply to the network, something else differs
        ("one shape", 0, digest_of_before(shape, settings=epochs, model_settings=LATENT)),
        ("one shape", 0, digest_of_before(shape, rounds=2, model_settings=LATENT)),
        ("one shape", 0, digest_of_before(shape, model_settings={**LATENT, "projection": 8})),
        ("one shape", 0, digest_of_before(second, model_settings=LATENT)),  # another seed's
        # this network has a latent layer: 0.1.0 trained it with a sigmoid, which it has not today
        ("auto", 0, digest_of_before(auto, model="auto", model_settings=LATENT)),
        ("no row of the table", 0, digest_of_before(shape, model_settings=LATENT)),
        ("one shape", 0, "0123456789abcdef"),
    ]
    entries = [{"row": row, "seed": seed, "digest": old, "accuracy": 0.5} for row, seed, old in kept]
    assert rekeyed(rekey, tmp_path, entries) == entries
    assert "0 runs have the digests of today, 7 are of other" in capsys.readouterr().out
