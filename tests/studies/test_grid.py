"""Grids: every combination is a comparison, with its figures in one table."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from tests.helpers import refused

import fedfill
from fedfill.studies.comparison import read_comparison
from fedfill.studies.grid import combinations, markdown, read_grid, run_grid

GRID = """
algorithms = ["fedavg:batch_size=32|64", "fedprox"]
seeds = [0, 1]
[options]
data = "digits"
data_fraction = 0.3
rounds = 1
local_epochs = 1
[grid]
partition = ["iid", "classes:5"]
clients = [2, 3]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(GRID)
    return path


def test_every_combination(file: Path) -> None:
    assert combinations(read_grid(file)) == [
        {"partition": "iid", "clients": 2},
        {"partition": "iid", "clients": 3},
        {"partition": "classes:5", "clients": 2},
        {"partition": "classes:5", "clients": 3},
    ]


def test_each_is_a_comparison(file: Path, tmp_path: Path) -> None:
    text = file.read_text().replace("clients = [2, 3]", "clients = [2]")
    file.write_text(text)
    seen: list[str] = []
    cells = run_grid(file, out=tmp_path / "out", on_run=lambda label, seed: seen.append(f"{label} {seed}"))
    assert len(seen) == 2 * 2 * 3
    assert seen[0] == "partition=iid,clients=2: fedavg:batch_size=32 0"
    folders = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert folders == ["partition=classes-5-clients=2", "partition=iid-clients=2"]
    for cell, folder in zip(cells, reversed(folders), strict=True):
        assert cell.comparison is not None
        again = read_comparison(tmp_path / "out" / folder)
        assert [row.figure("accuracy") for row in again.rows] == [
            row.figure("accuracy") for row in cell.comparison.rows
        ]
        assert again.first["partition"] == cell.values["partition"]
    lines = markdown(cells).splitlines()
    assert lines[-1] == "Accuracy in percent: mean ± standard deviation over 2 seeds."
    assert lines[0] == "| partition | clients | fedavg:batch_size=32\\|64 | fedprox |"
    assert cells[0].comparison is not None
    chosen = cells[0].comparison.rows[0]
    mean, deviation = chosen.figure("accuracy")
    assert mean is not None
    assert deviation is not None
    assert f"| iid | 2 | {100 * mean:.2f} ± {100 * deviation:.2f} ({chosen.label.partition(':')[2]}) |" in lines[2]
    with (tmp_path / "out" / "grid.csv").open(newline="") as text_file:
        rows = list(csv.DictReader(text_file))
    assert {(row["partition"], row["clients"], row["algorithm"].partition(":")[0]) for row in rows} == {
        (partition, "2", name) for partition in ("iid", "classes:5") for name in ("fedavg", "fedprox")
    }


def test_a_line_for_each_run_that_ends(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(
        GRID.replace("[2, 3]", "[2]").replace('["iid", "classes:5"]', '["iid"]').replace(":batch_size=32|64", "")
    )
    run_grid(file, out=tmp_path / "out")
    said = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[0] for line in said] == [
        "1/4 fedavg, seed 0", "2/4 fedprox, seed 0", "3/4 fedavg, seed 1", "4/4 fedprox, seed 1"
    ]  # fmt: skip
    assert all("1 round, accuracy 0." in line for line in said)
    run_grid(file, out=tmp_path / "other", quiet=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("old", "new", "facts"),
    [
        ("[grid]", "[gird]", ("grid", "gird")),
        ('["iid", "classes:5"]', "[]", ("grid", "partition")),
        ('["iid", "classes:5"]', '["iid", "iid"]', ("grid", "partition")),
        ('["iid", "classes:5"]', '"iid"', ("grid", "iid")),
        ("rounds = 1", "rounds = 1\nclients = 4", ("grid", "clients")),
        ("seeds = [0, 1]", "seeds = []", ("grid", "grid.toml", "seeds", "a list of 1 or more")),
        ("seeds = [0, 1]", 'seeds = "0"', ("grid", "grid.toml", "seeds", "allowed: a list")),
        ("seeds = [0, 1]", 'seeds = ["x"]', ("grid", "grid.toml", "seeds", "allowed: a whole number")),
        ("algorithms =", "algorithm =", ("grid", "grid.toml", "did you mean 'algorithms'")),
        (
            'algorithms = ["fedavg:batch_size=32|64", "fedprox"]',
            "",
            ("grid", "grid.toml", "algorithms", "has to be given"),
        ),
        ("seeds = [0, 1]", "seeds = [0, 1", ("grid", "grid.toml", "is not TOML")),
        ("rounds = 1", "roundss = 1", ("grid", "grid.toml", "setting", "roundss")),
        ("clients = [2, 3]", "clients = [0]", ("grid", "grid.toml", "clients", "0")),
        ("clients = [2, 3]", "clients = [1979-05-27]", ("grid", "grid.toml", "clients", "1979", "a whole number")),
        ("rounds = 1", 'rounds = 1\ndata-dir = "x"', ("grid", "grid.toml", "data-dir", "did you mean 'data_dir'")),
        ("clients = [2, 3]", "data-fraction = [0.1]", ("grid", "[grid]", "did you mean 'data_fraction'")),
        (
            "clients = [2, 3]",
            'learning_rate = [0.01, "0.01"]',
            ("grid", "grid.toml", "learning_rate", "values that differ"),
        ),
        ("clients = [2, 3]", 'norm = [true, "true"]', ("grid", "grid.toml", "norm", "values that differ")),
        ("seeds = [0, 1]", "seeds = [true]", ("grid", "grid.toml", "seeds", "True", "allowed: a whole number")),
        ("seeds = [0, 1]", "seeds = [-1]", ("grid", "grid.toml", "seeds", "-1", "at least 0")),
        ("rounds = 1", 'rounds = 1\nout = "zz"', ("grid", "out", "[options]")),
        ("rounds = 1", "rounds = 1\nquiet = true", ("grid", "quiet", "[options]")),
        ("rounds = 1", "rounds = 1\non_run = 1", ("grid", "on_run", "[options]")),
        ("rounds = 1", "rounds = 1\nseeds = [1]", ("grid", "seeds", "[options]")),
        ("rounds = 1", "rounds = 1\nseed = 1", ("grid", "seed", "[options]")),
        ("rounds = 1", 'rounds = 1\nalgorithms = ["local"]', ("grid", "algorithms", "[options]")),
        ("rounds = 1", 'rounds = 1\nalgorithm = "local"', ("grid", "algorithm", "[options]")),
        ("clients = [2, 3]", 'out = ["a", "b"]', ("grid", "out", "[grid]")),
        ("clients = [2, 3]", "seeds = [[1], [2]]", ("grid", "seeds", "[grid]")),
        # a later combination is wrong, and the first does not run
        ('["iid", "classes:5"]', '["iid", "nonsense"]', ("grid", "grid.toml", "partition", "nonsense")),
        ("clients = [2, 3]", "clients = [2, 100000]", ("grid", "grid.toml", "clients", "100,000")),
    ],
)
def test_slips_are_sentences(old: str, new: str, facts: tuple[str, ...], file: Path, tmp_path: Path) -> None:
    file.write_text(GRID.replace(old, new))
    with refused(*facts):
        run_grid(file, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


RATES = """
algorithms = ["fedavg", "fedprox"]
seeds = [0]
[options]
data = "digits"
data_fraction = 0.2
clients = 2
rounds = 1
local_epochs = 1
optimizer = "sgd"
latent_activation = "none"
[grid]
learning_rate = [1e30, 0.01]
"""


def test_a_combination_that_diverges_does_not_end_the_others(file: Path, tmp_path: Path) -> None:
    file.write_text(RATES)
    out = tmp_path / "out"
    wild, tame = run_grid(file, out=out, quiet=True)
    assert wild.comparison is None
    assert tame.comparison is not None
    shown = (out / "grid.md").read_text().splitlines()
    assert shown[0] == "| learning_rate | fedavg | fedprox |"
    assert shown[2] == "| 1e+30 | diverged | diverged |"
    assert shown[3].startswith("| 0.01 | ")
    assert "diverged" not in shown[3]
    assert shown[-1] == "Accuracy in percent; one seed, so no deviation."
    with (out / "grid.csv").open(newline="") as text:
        rows = [row for row in csv.DictReader(text) if row["figure"] == "accuracy"]
    assert [(row["learning_rate"], row["mean"] != "", row["n"]) for row in rows] == [
        ("1e+30", False, "0"), ("1e+30", False, "0"), ("0.01", True, "1"), ("0.01", True, "1")
    ]  # fmt: skip
    page = fedfill.report(out, out=tmp_path / "page.html").read_text()
    assert page.count(">diverged<") == 2
    assert "A grid over learning_rate: 2 comparisons." in page


def test_a_grid_of_which_nothing_is_left_is_a_sentence(file: Path, tmp_path: Path) -> None:
    file.write_text(RATES.replace("[1e30, 0.01]", "[1e30, 1e29]"))
    with refused("grid", "learning_rate=1e+30", "no run of any combination"):
        run_grid(file, out=tmp_path / "out", quiet=True)
    assert (tmp_path / "out" / "grid.md").read_text().count("diverged") == 4


def test_names_that_differ_have_folders_that_differ(file: Path, tmp_path: Path) -> None:
    table = "\n".join(["a,b,label", *(f"{k % 7},{k % 5},{k % 2}" for k in range(120))])
    for name in ("x y.csv", "x-y.csv"):
        (tmp_path / name).write_text(table)
    names = [f"{tmp_path}/x y.csv", f"{tmp_path}/x-y.csv"]
    file.write_text(
        f'algorithms = ["fedprox"]\nseeds = [0]\n[options]\nrounds = 1\nlocal_epochs = 1\nclients = 2\npartition = "iid"\n[grid]\ndata = {names}\n'
    )
    cells = run_grid(file, out=tmp_path / "out", quiet=True)
    assert [cell.values["data"] for cell in cells] == names
    folders = [cell.comparison.directory.name for cell in cells if cell.comparison is not None]
    assert len(set(folders)) == 2
    assert folders[1] == f"{folders[0]}-2"
    again = run_grid(file, out=tmp_path / "out", quiet=True)
    assert all(
        result.was_finished
        for cell in again
        if cell.comparison is not None
        for row in cell.comparison.rows
        for result in row.finished
    )


def test_a_folder_that_holds_no_grid_is_left_alone(file: Path, tmp_path: Path) -> None:
    for name in ("thesis.doc", "comparison.json", "experiment.toml"):
        out = tmp_path / name.partition(".")[0]
        out.mkdir()
        (out / name).write_text("mine")
        with refused("out", out, name, "holds no grid"):
            run_grid(file, out=out)
        with refused("out", "is a file"):
            run_grid(file, out=out / name)
        assert [path.name for path in out.iterdir()] == [name]
    (tmp_path / "stopped" / "fedavg-seed0").mkdir(parents=True)
    with refused("out", "fedavg-seed0"):
        run_grid(file, out=tmp_path / "stopped")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with refused("grid", tmp_path / "no.toml"):
        read_grid(tmp_path / "no.toml")
