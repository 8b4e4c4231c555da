"""The rehearsal of a secure sum: whole Flower processes over TLS, with the bits of the simulation."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.experiment.test_numbers import TOML, stays

import fedfill


@pytest.mark.deploy
def test_secure_sums_of_a_rehearsal_have_the_bits_of_the_simulation(tmp_path: Path) -> None:
    """Sums and noise are whole numbers and masks cancel exactly, so that not even the last step of the grid differs."""
    options = {
        "data": "digits", "clients": 3, "partition": "classes:4", "trust": "secure", "target_epsilon": 8.0, "client_test": 0.0,
    }  # fmt: skip
    local = fedfill.run("fed3r", out=tmp_path / "local", **options)
    flower = fedfill.run("fed3r", out=tmp_path / "flower", engine="flower", **options)
    assert flower.summary["weights_sha256"] == local.summary["weights_sha256"]
    assert flower.summary["lost_replies"] == 0
    theirs, ours = flower.summary["privacy"], local.summary["privacy"]
    assert theirs["total_epsilon_added"] == pytest.approx(8, abs=1e-6)
    assert theirs["total_epsilon_added"] == ours["total_epsilon_added"]
    conditions = {words for entry in theirs["entries"] for words in entry["conditions"]}
    assert any("public keys" in words for words in conditions)
    assert not any("no single reply" in words for words in conditions)
    print(flower.summary["bytes_by_handler"], local.summary["bytes_by_handler"], flower.summary.get("seconds"))


@pytest.mark.deploy
def test_a_number_is_learnt_on_hosts_with_the_bits_of_the_simulation(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(TOML)
    options = {
        "data": stays(), "schema_file": tmp_path / "schema.toml", "partition": "domain", "model": "features", "trust": "secure",
        "target_epsilon": 10.0, "honest": 3,
    }  # fmt: skip
    local = fedfill.run("fed3r", out=tmp_path / "local", **options)
    flower = fedfill.run("fed3r", out=tmp_path / "flower", engine="flower", **options)
    assert flower.summary["weights_sha256"] == local.summary["weights_sha256"]
    assert flower.summary["r2"] == local.summary["r2"]
    assert flower.summary["accuracy_by_client"] == pytest.approx(local.summary["accuracy_by_client"], abs=1e-6)
