"""experiments/fraug-digits/usps.py: shares of USPS's official test part, and of what of its training part no client has."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from sklearn.datasets import load_digits
from tests.data.made import write

import fedfill

SCRIPT = Path(__file__).parents[2] / "experiments" / "fraug-digits" / "usps.py"
TRAIN, TEST = 30, 20


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("usps", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of four sources, no two of them alike."""
    folder = tmp_path_factory.mktemp("sources")
    found = load_digits()
    images, begin = (found.images * 15.9).astype(np.uint8), 0
    for name, side, colour in (("mnist", 28, False), ("mnist_m", 32, True), ("svhn", 32, True), ("usps", 16, False)):
        for part, count in (("train", TRAIN), ("test", TEST)):
            pixels = np.stack([np.resize(image, (side, side)) for image in images[begin : begin + count]])
            pixels = np.stack([pixels] * 3, -1) if colour else pixels
            write(folder / name / f"{part}.parquet", pixels, found.target[begin : begin + count])
            begin += count
    return folder


def test_a_runs_model_is_scored_on_both_parts(
    script: ModuleType,
    sources: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = fedfill.run(
        "fedavg", data="digits-domains", data_dir=sources, partition="domain", domain_fractions="usps=0.5", client_test=0.0,
        model="cnn2bn", rounds=1, local_epochs=1, seed=1, out=tmp_path / "run", quiet=True,
    )  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["usps.py", str(tmp_path / "run"), "--data-dir", str(sources)])
    script.main()
    shares = re.findall(r": ([\d.]+) of (\d+)", capsys.readouterr().out)
    images = [int(n) for _, n in shares]
    others = TRAIN - (result.summary["train_samples"] - 3 * TRAIN)  # one epoch over all of the other three
    assert 0 < others < TRAIN
    assert images == [TEST, others, TEST + others]
    official, unused, both = (float(share) for share, _ in shares)
    assert official == pytest.approx(result.summary["accuracy_by_client"][script.USPS], abs=1e-4)
    assert both == pytest.approx((official * images[0] + unused * images[1]) / images[2], abs=1e-4)


def test_what_is_no_run_is_refused_in_a_sentence(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["usps.py", str(tmp_path), "--data-dir", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^run: .*needed: a finished run"):
        script.main()
