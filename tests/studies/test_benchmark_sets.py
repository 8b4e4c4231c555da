"""The sets of the benchmark natural: digits of four sources beside tables, what each is judged by, and what can't be read."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from tests.cli.calls import fedfill_
from tests.data.made import write
from tests.helpers import refused

from fedfill.runs.directory import RunDirectory
from fedfill.studies import benchmark_sets
from fedfill.studies.benchmark_files import GOALS, goal_lines, meanings, table_of
from fedfill.studies.benchmark_sets import DIGITS, IMAGES, OF_SUMS, open_set
from fedfill.studies.natural import count_runs, natural
from fedfill.studies.run import reopen

TRAIN = {"mnist": 60, "mnist_m": 60, "svhn": 60, "usps": 30}
TEST = {"mnist": 40, "mnist_m": 20, "svhn": 20, "usps": 20}
OF_EACH = 40


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scikit-learn's digits in the layout of the four sources: grey, tinted, inverted and small."""
    folder = tmp_path_factory.mktemp("digits")
    found = load_digits()
    images = (found.images * 15.9).astype(np.uint8)
    colours = {"mnist": None, "mnist_m": (1.0, 0.5, 0.2), "svhn": (-1.0, -0.8, -0.6), "usps": None}
    sides = {"mnist": 28, "mnist_m": 32, "svhn": 32, "usps": 16}
    begin = 0
    for name, tint in colours.items():
        for part, count in (("train", TRAIN[name]), ("test", TEST[name])):
            chosen = slice(begin, begin + count)
            begin += count
            pixels = [np.asarray(Image.fromarray(image).resize((sides[name], sides[name]))) for image in images[chosen]]
            if tint is not None:
                pixels = [np.stack([(255 if c < 0 else 0) + c * image for c in tint], -1) for image in pixels]
            write(folder / name / f"{part}.parquet", np.array(pixels, np.uint8), found.target[chosen])
    return folder


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of few methods, and few images."""
    quick = {**IMAGES["cnn2bn"].settings, "rounds": 1, "local_epochs": 1}
    kept = ("central", "local", "fedavg", "fraug")
    monkeypatch.setitem(IMAGES, "cnn2bn", replace(IMAGES["cnn2bn"], methods=kept, settings=quick))
    features = {**IMAGES["features"].settings, "model": "features", "model.features": "conv(10) > project(32)"}
    monkeypatch.setitem(IMAGES, "features", replace(IMAGES["features"], settings=features))
    monkeypatch.setattr(benchmark_sets, "OF_A_DOMAIN", OF_EACH)


def test_digits_of_four_sources(digits: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = natural([DIGITS], seeds=[0, 1], data_dir=digits, out=out, quiet=True)
    rows = found.rows[DIGITS]
    assert [*rows] == [("cnn2bn", m) for m in ("central", "local", "fedavg", "fraug")] + [
        ("features", m) for m in OF_SUMS
    ]
    assert count_runs([DIGITS], [0, 1], data_dir=digits) == 2 * len(rows)
    for row in rows.values():
        for result in row.finished:
            summary = result.summary
            # a site is a source, with its own whole test set
            assert dict(zip(summary["client_names"], summary["own_test_samples"], strict=True)) == TEST
            own = summary["accuracy_by_client"]
            assert summary["mean_client_accuracy"] == pytest.approx(sum(own) / 4)
            over = sum(share * n for share, n in zip(own, TEST.values(), strict=True)) / sum(TEST.values())
            assert summary["accuracy"] == pytest.approx(over, abs=1e-6)
    # that of each source OF_EACH images train, of the small one all, and of another seed other ones
    drawn = []
    for seed in (0, 1):
        place = RunDirectory(out / DIGITS / f"cnn2bn-seed{seed}" / f"fedavg-seed{seed}")
        clients = reopen(place, setting="run").federation.clients
        assert [len(client.train) for client in clients] == [OF_EACH, OF_EACH, OF_EACH, 30]
        drawn.append(clients[0].train.inputs.float().mean(dim=(1, 2, 3)).sort().values.tolist())
    assert drawn[0] != drawn[1]
    # it is judged by accuracy
    lines = [dict(zip(GOALS, line, strict=True)) for line in goal_lines(found)]
    assert [line["score"] for line in lines] == ["accuracy", "accuracy within sites"]
    mean = sum(row.summary["accuracy"] for row in rows["cnn2bn", "central"].finished) / 2
    assert lines[0]["central"].startswith(f"{mean:.3f} ")
    within = [row.summary["mean_client_accuracy"] for row in rows["features", "fed3r"].finished]
    assert {line[2]: line[5] for line in table_of(found)}["fed3r"].startswith(f"{sum(within) / 2:.3f} ")
    assert meanings(found).startswith("Score: accuracy over all test samples")
    assert "four sources" in (out / "natural.md").read_text()
    with (out / "sites.csv").open(newline="") as file:
        sites = [line["site"] for line in csv.DictReader(file) if (line["method"], line["seed"]) == ("fedavg", "1")]
    assert sites == [*TEST]


def test_digits_beside_a_table(digits: Path, tmp_path: Path) -> None:
    found = natural(["penguins", DIGITS], seeds=[0], methods=["fed3r"], data_dir=digits, out=tmp_path, quiet=True)
    assert {name: [*rows] for name, rows in found.rows.items()} == {
        "penguins": [("features", "fed3r")],
        DIGITS: [("features", "fed3r")],
    }
    summary = found.rows["penguins"]["features", "fed3r"].finished[0].summary
    assert table_of(found)[0][3] == f"{summary['auc']:.3f}"
    assert f"Of {DIGITS} accuracy" in meanings(found)


def test_digits_with_an_epsilon(digits: Path, tmp_path: Path) -> None:
    found = natural([DIGITS], seeds=[0], epsilon=2, data_dir=digits, out=tmp_path, quiet=True).rows[DIGITS]
    assert [*found] == [("cnn2bn", "central"), ("cnn2bn", "local"), ("features", "fed3r")]
    account = found["features", "fed3r"].finished[0].summary["privacy"]
    assert account["total_epsilon_added"] == pytest.approx(2.0, abs=1e-3)


def test_methods_that_are_not_of_images(digits: Path, tmp_path: Path) -> None:
    for name in ("fedprox", "linear"):  # the first is of the tables alone here
        with refused("methods"):
            natural([DIGITS], seeds=[0], methods=[name], data_dir=digits, out=tmp_path / "out", quiet=True)
    assert count_runs([DIGITS], [0], methods=["ditto", "fraug"], data_dir=digits) == 2
    assert count_runs([DIGITS, "penguins"], [0], methods=["fedprox"], data_dir=digits) == 2


def test_what_cannot_be_read(tmp_path: Path) -> None:
    images = np.zeros((60, 8, 8), np.uint8)
    write(tmp_path / DIGITS / "train.parquet", images, [*range(10)] * 6)
    with refused("data_dir", "domain"):
        natural([DIGITS], seeds=[0], data_dir=tmp_path, out=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()
    with refused("data_dir"):
        open_set(DIGITS, None, tmp_path / "nowhere")


def test_on_the_command_line(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("bench", "natural", "--sets", DIGITS, "--seeds", "0", "--methods", "fed3r", "--out", "out")
    result = fedfill_(*words, "--data-dir", str(digits))
    assert result.exit_code == 0, result.output
    assert "accuracy over all test samples" in " ".join(result.stdout.split())
    assert (tmp_path / "out" / "natural.md").is_file()
