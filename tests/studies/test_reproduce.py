"""Reproductions: tables filled row by row, figures of other settings left out, and whatever the README says kept."""

import gc
import json
import math
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.helpers import refused

import fedfill.studies.reproduce
import fedfill.studies.table as module
from fedfill.engines.local import LocalEngine
from fedfill.errors import FedfillError
from fedfill.experiment.prepare import Prepared
from fedfill.experiment.summary import Result
from fedfill.studies.reproduce import reproduce
from fedfill.studies.table import BEGIN, END, Entry, Reproduction, markdown, read_entries, read_table

TABLE = """
title = "A table"
source = "Somebody, somewhere."
figures = ["best_accuracy"]
seeds = [0, 1]

[options]
rounds = 2
clients = 3
local_epochs = 1
data_fraction = 0.2

[[rows]]
name = "FedAvg"
algorithm = "fedavg"
paper = { best_accuracy = 0.5 }

[[rows]]
name = "FedProx, strong"
algorithm = "fedprox"
options = { mu = 0.1 }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "table"
    path.mkdir()
    (path / "table.toml").write_text(TABLE)
    return path


def test_a_table_is_filled_and_finished_runs_are_not_run_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = reproduce(folder, out=tmp_path / "runs")
    assert [(entry.row, entry.seed) for entry in found.entries] == [
        ("FedAvg", 0), ("FedAvg", 1), ("FedProx, strong", 0), ("FedProx, strong", 1),
    ]  # fmt: skip
    text = (folder / "README.md").read_text()
    assert text.startswith("# A table\n\nSomebody, somewhere.\n")
    summaries = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("runs/table/fedavg-*/summary.json"))]
    mean = sum(summary["best_accuracy"] for summary in summaries) / 2
    assert f"| FedAvg | 0.5000 | {mean:.4f} ± " in text
    assert f"{mean - 0.5:+.4f} |" in text
    assert "| FedProx, strong | – | " in text

    def never(*args: object) -> None:
        raise AssertionError("something was trained")

    monkeypatch.setattr(LocalEngine, "call", never)
    before = (folder / "results.json").read_text()
    reproduce(folder, out=tmp_path / "runs")
    assert (folder / "results.json").read_text() == before


def test_one_row_and_one_seed_are_added_to_the_others_and_the_text_around_stays(folder: Path, tmp_path: Path) -> None:
    (folder / "README.md").write_text(f"# Mine\n\n{BEGIN}\nold\n{END}\n\nWhat we make of it.\n")
    reproduce(folder, only=["FedAvg"], seeds=[3], out=tmp_path / "runs")
    found = reproduce(folder, only=["FedProx, strong"], seeds=[4], out=tmp_path / "runs")
    assert {(entry.row, entry.seed) for entry in found.entries} == {("FedAvg", 3), ("FedProx, strong", 4)}
    text = (folder / "README.md").read_text()
    assert text.startswith(f"# Mine\n\n{BEGIN}\n| ")
    assert text.endswith(f"{END}\n\nWhat we make of it.\n")
    assert "old" not in text


def test_figures_of_other_settings_or_versions_are_left_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reproduce(folder, seeds=[0], out=tmp_path / "runs")
    (folder / "table.toml").write_text(TABLE.replace("mu = 0.1", "mu = 0.2"))
    found = reproduce(folder, only=["FedAvg"], seeds=[1], out=tmp_path / "runs")
    assert [(entry.row, entry.seed) for entry in found.entries] == [("FedAvg", 0), ("FedAvg", 1)]
    kept = json.loads((folder / "results.json").read_text())
    assert [(item["row"], item["seed"]) for item in kept] == [("FedAvg", 0), ("FedAvg", 1), ("FedProx, strong", 0)]
    assert "| FedProx, strong | – | – |" in (folder / "README.md").read_text()
    # and shown again where the settings are
    (folder / "table.toml").write_text(TABLE)
    found = reproduce(folder, only=["FedAvg"], seeds=[1], out=tmp_path / "runs")
    assert ("FedProx, strong", 0) in {(entry.row, entry.seed) for entry in found.entries}
    monkeypatch.setattr("fedfill.experiment.digest.__version__", "9.9")
    found = reproduce(folder, only=["FedAvg"], seeds=[1], out=tmp_path / "runs")
    assert [(entry.row, entry.seed) for entry in found.entries] == [("FedAvg", 1)]


def test_figures_of_other_data_are_left_out(folder: Path, tmp_path: Path) -> None:
    (folder / "table.toml").write_text(TABLE.replace("[options]", '[options]\ndata = "mine"\npartition = "iid"'))
    for n in (60, 80):
        for c in "ab":
            place = tmp_path / str(n) / "mine" / "train" / c
            place.mkdir(parents=True)
            for k in range(n):
                Image.fromarray(np.full((8, 8), k, np.uint8)).save(place / f"{k}.png")
    reproduce(folder, seeds=[0], out=tmp_path / "runs", data_dir=tmp_path / "60")
    found = reproduce(folder, only=["FedAvg"], seeds=[0], out=tmp_path / "runs", data_dir=tmp_path / "80")
    assert [(entry.row, entry.seed) for entry in found.entries] == [("FedAvg", 0)]
    assert len(found.others) == 2


def test_figures_that_another_process_added_meanwhile_stay(folder: Path, tmp_path: Path) -> None:
    def other(row: str, seed: int) -> None:
        if row == "FedAvg":
            reproduce(folder, only=["FedProx, strong"], seeds=[0], out=tmp_path / "runs")

    found = reproduce(folder, only=["FedAvg"], seeds=[0], out=tmp_path / "runs", on_run=other)
    assert [entry.row for entry in found.entries] == ["FedProx, strong", "FedAvg"]
    assert len((folder / "results.json").read_text().splitlines()) == 4


def test_a_run_that_two_tables_share_is_run_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reproduce(folder, only=["FedAvg"], seeds=[0, 1], out=tmp_path / "runs")
    another = tmp_path / "another"
    another.mkdir()
    (another / "table.toml").write_text(TABLE.replace('"FedAvg"', '"the baseline"'))

    def never(*args: object) -> None:
        raise AssertionError("something was trained")

    monkeypatch.setattr(LocalEngine, "call", never)
    found = reproduce(another, only=["the baseline"], seeds=[0, 1], out=tmp_path / "runs")
    assert [(entry.row, entry.seed) for entry in found.entries] == [("the baseline", 0), ("the baseline", 1)]
    with pytest.raises(AssertionError, match="something was trained"):
        reproduce(another, only=["the baseline"], seeds=[2], out=tmp_path / "runs")
    # what another table has not finished is its own affair
    for summary in (tmp_path / "runs/table").glob("fedavg-seed0-*/summary.json"):
        summary.unlink()
    with pytest.raises(AssertionError, match="something was trained"):
        reproduce(another, only=["the baseline"], seeds=[0], out=tmp_path / "runs")
    assert list((tmp_path / "runs/another").glob("the-baseline-seed0-*"))


def test_no_rows_data_are_in_memory_but_those_of_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrange, launch = fedfill.studies.reproduce.arrange, fedfill.studies.reproduce.launch
    made: list[weakref.ref[Prepared]] = []
    alive: list[int] = []

    def recorded(*args: Any, **options: Any) -> Prepared:
        made.append(weakref.ref(prepared := arrange(*args, **options)))
        return prepared

    def counted(*args: Any) -> Result:
        gc.collect()
        alive.append(sum(prepared() is not None for prepared in made))
        return launch(*args)

    monkeypatch.setattr(fedfill.studies.reproduce, "arrange", recorded)
    monkeypatch.setattr(fedfill.studies.reproduce, "launch", counted)
    reproduce(folder, out=tmp_path / "runs", seeds=[0])
    assert len(made) >= 2
    assert alive == [1, 1]


def test_a_table_draws_its_curves(folder: Path, tmp_path: Path) -> None:
    reproduce(folder, only=["FedAvg"], seeds=[0], out=tmp_path / "runs")
    assert not (folder / "accuracy.png").exists()
    old = json.loads((folder / "results.json").read_text())
    assert list(old[0].pop("curve")) == ["1", "2"]
    (folder / "results.json").write_text(json.dumps(old))  # of the time before there were curves
    (folder / "table.toml").write_text(TABLE.replace("seeds = [0, 1]", "curves = true"))
    found = reproduce(folder, only=["FedProx, strong"], seeds=[0, 1], out=tmp_path / "runs")
    assert "![accuracy per round](accuracy.png)" in (folder / "README.md").read_text()
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert module._curves(found).keys() == {"FedProx, strong"}
    assert [list(seed) for seed in module._curves(found)["FedProx, strong"]] == [[1, 2], [1, 2]]


def test_a_table_draws_accuracy_against_a_cost(folder: Path, tmp_path: Path) -> None:
    series = TABLE.replace("algorithm = ", 'series = "a line"\nalgorithm = ').replace(
        "seeds = [0, 1]", 'seeds = [0, 1]\nagainst = "bytes_up"'
    )
    (folder / "table.toml").write_text(series)
    reproduce(folder, out=tmp_path / "runs")
    assert "![accuracy against bytes up](against.png)" in (folder / "README.md").read_text()
    with Image.open(folder / "against.png") as picture:
        assert picture.size > (300, 200)
    drawn = (folder / "against.svg").read_text()
    assert "a line" in drawn
    assert "mathdefault" not in drawn, "no tick is labelled in a language of formulas"
    (folder / "table.toml").write_text(series.replace("bytes_up", "bites_up"))
    with refused("against", "bites_up", "bytes_up"):
        reproduce(folder, out=tmp_path / "runs")
    (folder / "table.toml").write_text(series.replace('series = "a line"', 'shows = "acuracy"'))
    with refused("shows", "acuracy", "best_accuracy"):
        reproduce(folder, out=tmp_path / "runs")


def test_a_table_compares_single_clients(folder: Path, tmp_path: Path) -> None:
    text = TABLE.replace('figures = ["best_accuracy"]', 'figures = ["client:1", "selected_client:0", "client:7"]')
    text = text.replace("[options]", '[titles]\n"client:1" = "the second"\n\n[options]\nclient_validation = 0.2')
    (folder / "table.toml").write_text(text.replace("best_accuracy = 0.5", '"client:1" = 0.5'))
    found = reproduce(folder, out=tmp_path / "runs", only=["FedAvg"], seeds=[0])
    (summary,) = (json.loads(path.read_text()) for path in tmp_path.glob("runs/table/*/summary.json"))
    ours, chosen = summary["accuracy_by_client"][1], summary["selected_accuracy_by_client"][0]
    lines = markdown(found).splitlines()
    assert "| the second: paper | ours | difference |" in lines[0]
    assert lines[2].startswith(
        f"| FedAvg | 0.5000 | {ours:.4f} | {ours - 0.5:+.4f} | – | {chosen:.4f} | – | – | – | – |"
    )
    again = reproduce(folder, out=tmp_path / "runs", only=["FedAvg"], seeds=[0])
    assert markdown(again) == markdown(found)


def test_figures_are_means_of_all_seeds_or_of_none() -> None:
    table = module.TableFile(
        title="A table", source="Somebody.", figures=["accuracy", "best_accuracy"],
        rows=[{"name": "FedAvg", "algorithm": "fedavg", "paper": {"accuracy": 0.5, "best_accuracy": 0.5}}],
    )  # fmt: skip
    entries = tuple(
        Entry(
            "FedAvg", seed, "digest",
            {"accuracy": last, "best_accuracy": best, "bytes_up": 1e6, "bytes_down": 1e6, "seconds": 1.0, "machine": "a CPU"},
        )
        for seed, (last, best) in enumerate([(0.1, 0.3), (0.2, None), (0.9, 0.3)])
    )  # fmt: skip
    (line,) = (row for row in markdown(Reproduction(Path(), table, entries)).splitlines() if row.startswith("| FedAvg"))
    # 1.2 / 3, and the root of (0.09 + 0.04 + 0.25) / 2
    assert line.startswith("| FedAvg | 0.5000 | 0.4000 ± 0.4359 | -0.1000 | 0.5000 | – | – | 0, 1, 2 | 2 | 1 | ")


def test_the_committed_tables_are_sound() -> None:
    """Every table of the repository can be read, and its README shows exactly its results."""
    folders = sorted(path.parent for path in (Path(__file__).parents[2] / "experiments").glob("*/table.toml"))
    assert folders
    for path in folders:
        table, entries = read_table(path), tuple(read_entries(path))
        assert {entry.row for entry in entries} <= {row.name for row in table.rows}
        # whether an entry's digest is today's only the data can tell; here none is left out
        assert markdown(Reproduction(path, table, entries)) in (path / "README.md").read_text(), path


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('name = "FedAvg"', 'nam = "FedAvg"', "rows"),
        ("rounds = 2", "rouns = 2", "has no 'rouns'"),
        ('algorithm = "fedprox"', 'algorithm = "fedprx"', "did you mean 'fedprox'"),
        ("mu = 0.1", "mu = -1", "mu: found -1; allowed: at least 0"),
        ("title", "titel", "unknown name 'titel'; did you mean 'title'"),
        ("seeds = [0, 1]", "seeds = []", "seeds"),
        ('["best_accuracy"]', '["best_acuracy"]', "figures: found 'best_acuracy'; did you mean 'best_accuracy'?"),
        ('["best_accuracy"]', '["machine"]', "figures: found 'machine'"),
        ("{ best_accuracy = 0.5 }", "{ accuarcy = 0.5 }", "figures: found 'accuarcy'; did you mean 'accuracy'?"),
        ("[options]", "[options]\nseed = 3", "options: found 'seed', which no table may set"),
        ("[options]", '[options]\nalgorithm = "fedavg"', "options: found 'algorithm'"),
    ],
)
def test_slips_in_a_table_are_found_before_anything_runs(
    folder: Path, tmp_path: Path, old: str, new: str, sentence: str
) -> None:
    (folder / "table.toml").write_text(TABLE.replace(old, new))
    with pytest.raises(FedfillError) as refusal:
        reproduce(folder, out=tmp_path / "runs")
    assert sentence in str(refusal.value)
    assert not (tmp_path / "runs").exists()
    assert not (folder / "README.md").exists()


def test_other_slips(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with refused("only", "FedAvgg", "FedAvg"):
        reproduce(folder, only=["FedAvgg"])
    with refused("only", "'FedAvg'", "a list"):
        reproduce(folder, only="FedAvg")
    for seeds in ([-1], ["a"], [1.5], [True]):
        with refused("seed", "a whole number"):
            reproduce(folder, seeds=seeds)
    with refused("seeds", "none"):
        reproduce(folder, seeds=[])
    with refused("reproduce", "rounds"):
        reproduce(folder, rounds=3)
    with refused("table", "table.toml", "tabel"):
        reproduce("tabel")
    (folder / "results.json").write_text("[{}]")
    with refused("table", folder / "results.json", "damaged"):
        reproduce(folder, out=tmp_path / "runs")
    (folder / "results.json").unlink()
    (folder / "README.md").write_text("no marks")
    with refused("out", folder / "README.md", "written by fedfill reproduce"):
        reproduce(folder, only=["FedAvg"], seeds=[0], out=tmp_path / "runs")


def test_a_classifier_that_saw_synthetic_samples_alone(folder: Path, tmp_path: Path) -> None:
    more = "per_class = 3\n\n[options]\nrounds = 1\nclients = 3\ndata_fraction = 0.2\n\n"
    rows = '[[rows]]\nname = "drawn"\nalgorithm = "fedgauss"\n\n[[rows]]\nname = "none"\nalgorithm = "fedavg"\n'
    head = 'title = "A table"\nsource = "Ours."\nfigures = ["synthetic_accuracy"]\n'
    (folder / "table.toml").write_text(head + more + rows)
    found = reproduce(folder, seeds=[0], out=tmp_path / "runs")
    drawn, none = found.entries
    (place,) = (tmp_path / "runs" / "table").glob("drawn-*")
    measured = json.loads((place / "samples" / "measures.json").read_text())
    assert measured["samples"] == 30
    assert drawn.figures["synthetic_accuracy"] == measured["trained_on"]["synthetic"]["accuracy"]["value"]
    assert none.figures["synthetic_accuracy"] is None
    assert f"| drawn | {drawn.figures['synthetic_accuracy']:.4f} |" in (folder / "README.md").read_text()
    assert "| none | – |" in (folder / "README.md").read_text()
    (folder / "table.toml").write_text(head + more + rows.replace("fedgauss", "fedprox"))
    with refused("figures", "synthetic_accuracy"):
        reproduce(folder, seeds=[0], out=tmp_path / "runs")


def test_the_epsilon_of_the_one_part_that_has_one(folder: Path, tmp_path: Path) -> None:
    """SDA-FL's images have a guarantee, and its updates none."""
    few = "rounds = 1\nclients = 2\ndata_fraction = 0.2\n"
    rows = """
[[rows]]
name = "images"
algorithm = "sdafl"
options = { noise = "dpsgd", target_epsilon = 8.0, gan_iterations = 1, gan_width = 4, images_per_client = 10, local_epochs = 1 }

[[rows]]
name = "all of it"
algorithm = "fed3r"
options = { features = "conv(6) > project(12)", target_epsilon = 3.0 }
"""
    head = 'title = "A table"\nsource = "Ours."\nfigures = ["epsilon_added", "part_epsilon_added"]\n'
    (folder / "table.toml").write_text(f"{head}\n[options]\n{few}{rows}")
    images, whole = reproduce(folder, seeds=[0], out=tmp_path / "runs").entries
    assert images.figures["epsilon_added"] is None
    assert images.figures["part_epsilon_added"] == pytest.approx(8, rel=0.01)
    assert whole.figures["epsilon_added"] == pytest.approx(3, rel=0.01)
    assert whole.figures["part_epsilon_added"] is None


def test_a_row_that_diverges_is_shown_as_such_and_the_others_are_run(folder: Path, tmp_path: Path) -> None:
    fast = """
[[rows]]
name = "too fast"
algorithm = "fedavg"
paper = { best_accuracy = 0.4 }
options = { optimizer = "sgd", learning_rate = 1e30, latent_activation = "none" }

[[rows]]
name = "FedProx, strong"
"""
    (folder / "table.toml").write_text(TABLE.replace('\n[[rows]]\nname = "FedProx, strong"\n', fast))
    for _ in range(2):  # the second time it is tried again
        found = reproduce(folder, seeds=[0], out=tmp_path / "runs")
        assert [entry.row for entry in found.entries] == ["FedAvg", "too fast", "FedProx, strong"]
        item = json.loads((folder / "results.json").read_text())[1]
        assert item["diverged"].startswith("training diverged: ")
        assert item["accuracy"] is None
        text = (folder / "README.md").read_text()
        assert "| too fast | 0.4000 | diverged | – | diverged | 0 | – | – | – |" in text
        assert f" too fast, seed 0: {item['diverged']}. " in " ".join(text.split())
        assert "| FedProx, strong | – | 0." in text


def test_the_mean_of_a_row_is_not_that_of_the_seeds_that_survived(folder: Path, tmp_path: Path) -> None:
    found = reproduce(folder, only=["FedAvg"], seeds=[0], out=tmp_path / "runs")
    lost = Entry(
        "FedAvg", 1, "x", dict.fromkeys(module.KEPT) | {"curve": {1: 0.3}, "diverged": "training diverged: so"}
    )
    text = markdown(Reproduction(folder, found.table, (*found.entries, lost)))
    megabytes = (found.entries[0].figures["bytes_up"] + found.entries[0].figures["bytes_down"]) / 1e6
    assert f"| FedAvg | 0.5000 | diverged | – | diverged | 0, 1 | {megabytes:,.0f} | " in text
    curved = replace(found, entries=(*found.entries, lost), table=found.table.model_copy(update={"curves": True}))
    assert module._curves(curved) == {}


def test_prose_on_a_page_is_in_lines_of_at_most_120(tmp_path: Path) -> None:
    table = module.TableFile(
        title="A table", source="Somebody says something. " * 9, figures=["accuracy"],
        rows=[{"name": "FedAvg", "algorithm": "fedavg"}],
    )  # fmt: skip
    figures = dict.fromkeys(module.KEPT) | {"curve": {}, "diverged": "training diverged: " + "so and " * 20 + "so"}
    head, _ = module.frame(tmp_path, table)
    text = head + markdown(Reproduction(tmp_path, table, (Entry("FedAvg", 0, "x", figures),)))
    assert " ".join(f"FedAvg, seed 0: {figures['diverged']}.".split()) in " ".join(text.split())
    written = [page.read_text() for page in (Path(__file__).parents[2] / "experiments").glob("*/README.md")]
    prose = [re.sub("```.*?```", "", page, flags=re.DOTALL) for page in (text, *written)]  # commands may be longer
    long = [line for page in prose for line in page.splitlines() if len(line) > 120 and line[0] != "|"]
    assert long == []
    assert written


def test_a_run_that_diverges_later_keeps_its_curve_up_to_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalEngine.evaluate
    monkeypatch.setattr(
        LocalEngine,
        "evaluate",
        lambda self, weights, t: replace(real(self, weights, t), **({"loss": math.nan} if t == 1 else {})),
    )
    (entry,) = reproduce(folder, only=["FedAvg"], seeds=[0], out=tmp_path / "runs").entries
    (first,) = map(json.loads, next(tmp_path.glob("runs/table/fedavg-*/rounds.jsonl")).read_text().splitlines())
    assert entry.figures["curve"] == {1: first["accuracy"]}
    assert entry.figures["diverged"].startswith("training diverged: after round 2 ")
    assert read_entries(folder) == [entry]
