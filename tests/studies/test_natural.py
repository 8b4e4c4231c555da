"""The benchmark natural: the same split for all, differences and goals by hand, files, going on, bad input."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cli.calls import fedfill_
from tests.helpers import refused

from fedfill.experiment.summary import Result
from fedfill.studies import benchmark_sets
from fedfill.studies.benchmark import Benchmark, difference, goals
from fedfill.studies.benchmark_files import GOALS, HEADER, goal_lines, table_of
from fedfill.studies.benchmark_sets import PERSONAL, TABLES, BenchmarkSet
from fedfill.studies.comparison import Row, read_comparison
from fedfill.studies.natural import count_runs, natural


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of few methods."""
    kept = {
        "linear": ("central", "local", "fedavg"),
        "mlp": ("central", "local", "fedavg", "fraug", "fed3r"),
        "cnn2bn": ("central", "local", "fedavg", "fraug"),
        "features": ("fed3r",),
    }
    for models in (benchmark_sets.TABLES, benchmark_sets.IMAGES):
        for name, model in models.items():
            quick = {**model.settings, "rounds": 1, "local_epochs": 1} if name != "features" else model.settings
            monkeypatch.setitem(models, name, replace(model, methods=kept[name], settings=quick))


def lines(place: Path) -> list[dict[str, str]]:
    with place.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_whole_benchmark(tmp_path: Path) -> None:
    out = tmp_path / "out"
    seen: list[str] = []
    found = natural(
        ["penguins"], seeds=[0, 1], out=out, on_run=lambda label, seed: seen.append(f"{label} {seed}"), quiet=True
    )
    assert len(seen) == count_runs(["penguins"], [0, 1]) == 2 * 8
    rows = found.rows["penguins"]
    assert [*rows] == [("linear", m) for m in ("central", "local", "fedavg")] + [
        ("mlp", m) for m in ("central", "local", "fedavg", "fraug")
    ] + [("features", "fed3r")]
    # one split of a seed for all: each site has the same test rows, and so has every method
    sites = lines(out / "sites.csv")
    for seed in ("0", "1"):
        tests = {(line["model"], line["method"]): [] for line in sites}
        for line in sites:
            if line["seed"] == seed:
                tests[line["model"], line["method"]].append((line["site"], line["test_rows"]))
        assert len({tuple(of_row) for of_row in tests.values()}) == 1
    # what stands in a file for a run is what the run found
    first = rows["linear", "fedavg"].results[0]
    assert first is not None
    own = [line for line in sites if (line["model"], line["method"], line["seed"]) == ("linear", "fedavg", "0")]
    assert [float(line["auc"]) for line in own] == first.summary["auc_by_client"]
    sizes, areas = ([float(line[name]) for line in own] for name in ("test_rows", "auc"))
    within = sum(a * n for a, n in zip(areas, sizes, strict=True)) / sum(sizes)
    assert within == pytest.approx(first.summary["auc_within_clients"])
    figures = {(li["model"], li["method"], li["seed"], li["figure"]): li["value"] for li in lines(out / "natural.csv")}
    assert float(figures["linear", "fedavg", "0", "auc"]) == first.summary["auc"]
    page = (out / "natural.md").read_text()
    assert page.count("| penguins |") == 8 + 2
    # each split is an ordinary comparison
    assert len(read_comparison(out / "penguins" / "mlp-seed1").rows) == 5
    again = natural(["penguins"], seeds=[0, 1], out=out, quiet=True)
    assert all(result.was_finished for row in again.rows["penguins"].values() for result in row.finished)
    assert (out / "natural.md").read_text() == page


def test_some_methods_give_the_same_runs(tmp_path: Path) -> None:
    whole, some = (
        natural(["penguins"], seeds=[0], out=tmp_path / name, methods=methods, quiet=True)
        for name, methods in (("all", None), ("some", ["fed3r", "fedavg"]))
    )
    assert [*some.rows["penguins"]] == [("linear", "fedavg"), ("mlp", "fedavg"), ("features", "fed3r")]
    for key, row in some.rows["penguins"].items():
        assert row.values("weights_sha256") == whole.rows["penguins"][key].values("weights_sha256")
    assert goals(some) == []


def test_more_personal_methods_are_run_where_they_are_named(tmp_path: Path) -> None:
    names = ["local", *PERSONAL]
    found = natural(["penguins"], seeds=[0], out=tmp_path, methods=names, quiet=True).rows["penguins"]
    assert [*found] == [("linear", "local"), *(("mlp", name) for name in names)]
    assert count_runs(["penguins"], [0], methods=names) == len(found) == len(PERSONAL) + 2
    for name in PERSONAL:  # each site's rows are judged by its own model, or its cluster's, and not all sites' by one
        result = found["mlp", name].finished[0]
        assert result.summary["personal"]
        assert 0 < result.summary["auc"] < 1
    assert not {label for model in TABLES.values() for label in model.methods} & set(PERSONAL)


def test_with_an_epsilon_the_federated_method_has_noise_in_the_sum(tmp_path: Path) -> None:
    found = natural(["penguins"], seeds=[0], epsilon=1, out=tmp_path / "out", quiet=True)
    assert [*found.rows["penguins"]] == [("linear", "central"), ("linear", "local"), ("linear", "fed3r")]
    account = {key[1]: row.finished[0].summary["privacy"] for key, row in found.rows["penguins"].items()}
    assert account["fed3r"]["total_epsilon_added"] == pytest.approx(1.0, abs=1e-3)
    assert "shared between the clients" in account["fed3r"]["statement"]
    assert "epsilon 1 " in (tmp_path / "out" / "natural.md").read_text()
    assert count_runs(["penguins"], [0], epsilon=1) == 3
    with refused("out"):  # other runs than those that lie there
        natural(["penguins"], seeds=[0], epsilon=3, out=tmp_path / "out", methods=["fed3r"], quiet=True)
    with refused("out", "epsilon 1"):  # nor of other tables, whose figures would take the place of these
        natural(["opt"], seeds=[0], out=tmp_path / "out", methods=["fed3r"], quiet=True)
    assert {line["epsilon"] for line in lines(tmp_path / "out" / "natural.csv")} == {"1"}


def test_many_sites_go_without_fraug() -> None:
    assert count_runs(["social_insure"], [0]) == count_runs(["penguins"], [0]) - 1


MADE = BenchmarkSet("made", "", "", "auc", "auc_within_clients", 2, TABLES, lambda folder, seed: {})


def made(**figures: dict[str, list[float]]) -> Benchmark:
    """A benchmark of one table whose runs have these areas; ``__`` in place of the comma between model and method."""

    def run(k: int, of: dict[str, list[float]]) -> Result:
        summary: dict[str, Any] = {name: values[k] for name, values in of.items()}
        return Result(Path(), {**summary, "bytes_up": 2000, "clients": 2, "seconds": 1.0}, [], {})

    rows = {}
    for name, of in figures.items():
        model, _, method = name.partition("__")
        rows[model, method] = Row(method, tuple(run(k, of) for k in range(2)))
    return Benchmark({"made": MADE}, {"made": rows}, (0, 1), Path())


def both(*values: float) -> dict[str, list[float]]:
    return {"auc": list(values), "auc_within_clients": list(values)}


def test_a_goal_by_hand() -> None:
    found = made(
        linear__central=both(0.70, 0.72), linear__local=both(0.60, 0.62), linear__fedavg=both(0.69, 0.72),
        mlp__central=both(0.60, 0.60), mlp__local=both(0.50, 0.50), mlp__fed3r=both(0.68, 0.70),
    )  # fmt: skip
    goal = goals(found)[0]
    assert (goal.central[0], goal.local[0], goal.best[0], goal.best[1].label) == (
        "linear",
        "linear",
        "linear",
        "fedavg",
    )
    assert goal.to_central.mean == pytest.approx(-0.005)
    assert goal.lead == pytest.approx(0.1)
    # .09 and .10: mean .095, deviation .00707, half of the interval 12.71 * .00707 / sqrt(2)
    assert goal.to_local.mean == pytest.approx(0.095)
    assert goal.to_local.half_width == pytest.approx(12.7062 * 0.0070711 / 2**0.5, rel=1e-4)
    assert goal.met
    assert goal.sentence == "met"
    assert len(goal_lines(found)[0]) == len(GOALS)
    assert all(len(line) == len(HEADER) for line in table_of(found))
    shown = {line[1:3]: line for line in table_of(found)}
    assert shown["linear", "fedavg"][7] == "1.0 kB"  # one of two sites
    # each row is told beside the better central row and the better local one, of whichever model they are
    assert shown["mlp", "fed3r"][4].startswith("-0.020")
    assert shown["mlp", "fed3r"][6].startswith("+0.080")
    assert shown["linear", "central"][4] == "-"


@pytest.mark.parametrize(
    ("federated", "local", "met", "words"),
    [
        ((0.68, 0.68), (0.60, 0.61), False, "0.030 below central"),  # surely above local, and far from central
        ((0.70, 0.72), (0.60, 0.72), False, "not surely above local"),
        ((0.705, 0.705), (0.70, 0.72), True, "local wins"),  # near central, which has no lead over local
    ],
)
def test_what_a_goal_says(federated: tuple[float, float], local: tuple[float, float], met: bool, words: str) -> None:
    found = made(linear__central=both(0.70, 0.72), linear__local=both(*local), linear__fedavg=both(*federated))
    assert goals(found)[0].met is met
    assert words in goals(found)[0].sentence


def test_a_run_without_a_figure_has_no_goal_and_no_difference() -> None:
    found = made(linear__central=both(0.7, 0.7), linear__local=both(0.6, 0.6), linear__fedavg=both(0.7, 0.7))
    rows = dict(found.rows["made"])
    rows["linear", "fedavg"] = Row("fedavg", (None, rows["linear", "fedavg"].results[1]))
    broken = Benchmark({"made": MADE}, {"made": rows}, found.seeds, found.directory)
    assert goals(broken) == []
    assert difference(rows["linear", "fedavg"], rows["linear", "central"], "auc") is None
    assert table_of(broken)[2][3] == "diverged"


def test_bad_input(tmp_path: Path) -> None:
    for given, setting in (
        ({"sets": ["penguin"]}, "sets"),
        ({"sets": []}, "sets"),
        ({"sets": ["penguins", "penguins"]}, "sets"),
        ({"sets": ["hsb82"]}, "tables"),
        ({"sets": ["penguins"], "methods": ["moon"]}, "methods"),
        ({"sets": ["penguins"], "methods": []}, "methods"),
        ({"sets": ["rats", "social_insure"], "methods": ["fraug"]}, "methods"),  # all have more sites than fraug takes
        ({"sets": ["penguins"], "epsilon": 0}, "epsilon"),
        ({"sets": ["penguins"], "epsilon": "1"}, "epsilon"),
        ({"sets": ["penguins"], "epsilon": 0.12345649}, "epsilon"),  # runs would have .123456 or more
        ({"sets": ["penguins"], "epsilon": 1, "methods": ["fedavg"]}, "methods"),
        ({"sets": ["penguins"], "seeds": []}, "seeds"),
        ({"sets": ["penguins"], "seeds": [1, 1]}, "seeds"),
        ({"sets": ["penguins"], "seeds": [-1]}, "seed"),
    ):
        with refused(setting):
            natural(out=tmp_path / "new", quiet=True, **given)
    assert not (tmp_path / "new").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("")
    with refused("out"):
        natural(["penguins"], out=tmp_path / "other", quiet=True)


def test_a_table_of_figures_that_is_damaged_is_refused_and_made_again(tmp_path: Path) -> None:
    whole = natural(["penguins"], seeds=[0], methods=["fedavg"], out=tmp_path, quiet=True)
    stored = (tmp_path / "natural.csv").read_bytes()
    for damaged in (b"\rx\r\n\xff" * 9, b"epsilon\n" + b"1" * 200_000, b"", b"name,value\na,1\n"):
        (tmp_path / "natural.csv").write_bytes(damaged)
        with refused("out", "natural.csv"):
            natural(["penguins"], seeds=[0], methods=["fedavg"], out=tmp_path, quiet=True)
        assert (tmp_path / "natural.csv").read_bytes() == damaged
    for name in ("natural.csv", "natural.md", "sites.csv"):
        (tmp_path / name).unlink()
    again = natural(["penguins"], seeds=[0], methods=["fedavg"], out=tmp_path, quiet=True)
    assert [*again.rows["penguins"]] == [*whole.rows["penguins"]]
    assert (tmp_path / "natural.csv").read_bytes() == stored


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = fedfill_("bench", "natural", "--sets", "penguins", "--seeds", "0", "--out", "out", "--workers", "1")
    assert result.exit_code == 0, result.output
    assert "best federated" in " ".join(result.stdout.split())
    assert (tmp_path / "out" / "natural.md").is_file()
    for words in (("bench", "unnatural"), ("bench", "natural", "--sets", "x"), ("bench", "natural", "--seeds", "a")):
        assert fedfill_(*words).exit_code == 2
