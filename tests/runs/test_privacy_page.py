"""What docs/privacy.md and docs/privacy-feddpms.md say about the account of a run is what a run writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest

import fedfill
from fedfill.algorithms.feddpms import FedDPMS
from fedfill.privacy.sums import mu_for

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FEDDPMS_PAGE = ((DOCS / name).read_text() for name in ("privacy.md", "privacy-feddpms.md"))
TINY: dict[str, Any] = {"clients": 4, "rounds": 3, "data_fraction": 0.2, "local_epochs": 1, "preliminary_rounds": 1}


def privacy(folder: Path, mechanism: str) -> dict[str, Any]:
    options = {**TINY, "mechanism": mechanism, "alpha": 5, "max_candidates": 20}
    fedfill.run("feddpms", **options, out=folder)
    return json.loads((folder / "summary.json").read_text())["privacy"]  # type: ignore[no-any-return]


def test_the_example_is_one_of_a_real_run(tmp_path: Path) -> None:
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    shown = json.loads("{" + block + "}")["privacy"]
    real = privacy(tmp_path, "single_release")
    assert list(shown) == list(real)
    entries = {(entry["released"], entry["mechanism"]): entry for entry in real["entries"]}
    for entry in shown["entries"]:
        written = entries[entry["released"], entry["mechanism"]]
        assert list(entry) == list(written)
        for key in ("conditions", "conditional_epsilon", "delta"):
            assert entry[key] == written[key]
        assert (entry["epsilon"] is None) == (written["epsilon"] is None)
    for key in ("total_epsilon", "delta", "unit", "adjacency"):
        assert shown[key] == real[key]
    for end in shown["statement"].split(" ... "):
        assert end in real["statement"]


@pytest.mark.parametrize("mechanism", ["paper", "prior"])
def test_the_table_lists_every_entry_of_a_run(mechanism: str, tmp_path: Path) -> None:
    table = PAGE[PAGE.index("FedDPMS fills these entries") :]
    listed: dict[str, str] = {}
    for names, guarantee in re.findall(r"^\| (`[A-Z]\w+\.[\w.]+`.*?) \|.*\| (.*?) \|$", table, re.MULTILINE):
        first, *others = re.findall(r"`([\w.]+)`", names)
        listed |= {first: guarantee, **{first.split(".")[0] + other: guarantee for other in others}}
    entries = privacy(tmp_path, mechanism)["entries"]
    assert {entry["released"] for entry in entries} == set(listed)
    for entry in entries:
        if listed[entry["released"]] == "none":
            assert entry["epsilon"] is None
        elif listed[entry["released"]] == "epsilon 0":
            assert entry["epsilon"] == 0


def test_settings_that_the_page_names_exist() -> None:
    fields = FedDPMS.model_fields
    assert fields["latent_bound"].default == "auto"
    assert "| `auto`, the default |" in FEDDPMS_PAGE
    for name in ("latent_bound", "latent_clip", "max_candidates", "noise", "alpha"):
        assert name in fields
        assert re.search(rf"`{name}\b", FEDDPMS_PAGE)


def test_what_a_guesser_reaches_follows_from_epsilon() -> None:
    """The best test between two normal laws that are mu apart: Phi(mu / 2) right, and the power at 1 in 100."""
    rows = re.findall(r"^\| ([\d.]+) \| (\d+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert [float(row[0]) for row in rows] == [0.5, 1, 3, 8, 20]
    normal = NormalDist()
    for epsilon, right, found in rows:
        mu = mu_for(float(epsilon), 1e-5)
        assert float(right) == round(100 * normal.cdf(mu / 2))
        power = 100 * normal.cdf(normal.inv_cdf(0.01) + mu)
        assert float(found) == round(power, len(found.partition(".")[2]))
