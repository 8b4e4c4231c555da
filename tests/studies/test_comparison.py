"""A comparison's folder: its files by hand, read again as it was, and the verdicts on it."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import refused

from fedfill.cli.compared import left_out, print_comparison
from fedfill.experiment.summary import Result
from fedfill.experiment.verdicts import LEFT_BEHIND, NOT_CONVERGED, OWN_SPLIT, of_run
from fedfill.runs.directory import to_json
from fedfill.runs.progress import Clock, duration
from fedfill.studies.comparison import Comparison, Row, Sweep, read_comparison
from fedfill.studies.comparison_files import write_files
from fedfill.studies.comparison_table import table_of
from fedfill.studies.verdicts import DIVERGED, HIGHEST, NOT_SHARED, ONE_SEED, WITHIN_NOISE, of_comparison


def result(
    folder: Path, label: str, seed: int, accuracy: float, curve: list[float] | None = None, **more: Any
) -> Result:
    """A run's folder with made-up figures."""
    summary = {
        "algorithm": label, "dataset": "made_up", "partition": "iid", "clients": 2, "rounds": 2, "seed": seed,
        "accuracy": accuracy, "accuracy_by_class": [accuracy, accuracy], "accuracy_by_client": [accuracy, accuracy],
        "mean_client_accuracy": accuracy, "worst_client_accuracy": accuracy, "bytes_up": 1e6, "bytes_down": 5e5,
        "largest_class": 0.5, "personal": False, "seconds": 3.0, **more,
    }  # fmt: skip
    rounds = [
        {"round": t, "accuracy": a, "loss": 1.0, "bytes_up": 7, "bytes_down": 8, "seconds": 0.5, "most_predicted": 0.5}
        for t, a in enumerate(curve or [accuracy / 2, accuracy], 1)
    ]
    place = folder / f"{label}-seed{seed}"
    place.mkdir()
    (place / "summary.json").write_bytes(to_json(summary))
    (place / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in rounds))
    return Result(place, summary, rounds, {}, len(rounds))


def rows(folder: Path, **accuracies: list[float]) -> list[Row]:
    return [
        Row(label, tuple(result(folder, label, seed, value) for seed, value in enumerate(values)))
        for label, values in accuracies.items()
    ]


def kinds(comparison: Comparison) -> list[str]:
    return [verdict.kind for verdict in of_comparison(comparison)]


@pytest.fixture
def two(tmp_path: Path) -> Comparison:
    base, other = rows(tmp_path, fedavg=[0.5, 0.7], moon_x=[0.8, 0.9])
    swept = Row(other.label, other.results, Sweep("moon_x:mu=1|2", {"moon_x": 0.5, "moon_x:mu=2": None}))
    found = Comparison((base, swept), (0, 1), tmp_path, base, ("moon_x: another network: a_b (not c)",), ())
    write_files(found)
    return found


def test_it_is_read_again_as_it_was(two: Comparison) -> None:
    again = read_comparison(two.directory)
    assert again == two
    assert again.baseline is again.rows[0]
    assert [path.name for path in sorted(two.directory.iterdir())] == [
        "accuracy.pdf", "accuracy.png", "accuracy.svg", "comparison.csv", "comparison.json", "curves.csv", "fedavg-seed0", "fedavg-seed1",
        "final.png", "final.svg", "moon_x-seed0", "moon_x-seed1", "pairs.csv", "table.csv", "table.md", "table.tex",
    ]  # fmt: skip


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_by_hand(two: Comparison) -> None:
    found = next(line for line in lines(two.directory / "table.csv") if line["figure"] == "accuracy")
    # 0.5 and 0.7: mean 0.6, deviation 0.1 * sqrt(2), half width 12.7062 * 0.1
    assert (found["algorithm"], found["n"]) == ("fedavg", "2")
    numbers = [float(found[name]) for name in ("mean", "deviation", "low", "high")]
    assert numbers == pytest.approx([0.6, 0.141421, 0.6 - 1.27062, 0.6 + 1.27062], abs=1e-5)
    shown = (two.directory / "table.md").read_text().splitlines()
    assert shown[2:7] == [
        "| algorithm | accuracy | - fedavg | own split | traffic | sec. |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| fedavg | 60.00 ± 14.14 | – | 60.00 ± 14.14 | 1.5 MB | 3.0 |",
        # differences 0.3 and 0.2: mean 0.25, half width 12.7062 * 0.05
        "| moon_x | 85.00 ± 7.07 | +25.00 ± 63.53 | 85.00 ± 7.07 | 1.5 MB | 3.0 |",
        "",
    ]
    assert shown[7].startswith("* Mean ± standard deviation over 2 seeds; accuracy: ")
    assert "- fedavg: difference of accuracy to fedavg, seed by seed, with the 95 % confidence interval" in shown[7]
    assert shown[8] == "* Not shared by moon_x: another network: a_b (not c)."
    tex = (two.directory / "table.tex").read_text()
    assert r"moon\_x & 85.00 $\pm$ 7.07 & +25.00 $\pm$ 63.53 & 85.00 $\pm$ 7.07 & 1.5 MB & 3.0 \\" in tex
    assert tex.count(r"\\") == 3
    assert r"made\_up, iid, 2 clients, 2 rounds, seeds 0, 1: mean $\pm$ standard deviation over 2 seeds; " in tex
    curves = lines(two.directory / "curves.csv")
    assert len(curves) == 8
    assert (curves[0]["algorithm"], curves[0]["seed"], curves[0]["round"], curves[0]["accuracy"]) == (
        "fedavg",
        "0",
        "1",
        "0.25",
    )
    assert curves[0]["worst_client_accuracy"] == ""


def test_the_terminal_has_the_columns_of_the_files(
    two: Comparison, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedfill.cli.compared._print_fairness", lambda found: None)
    monkeypatch.setattr("fedfill.experiment.verdicts.of_run", lambda *run: ())
    for row in two.rows:
        for one in row.finished:
            one.summary.update(notes=[], privacy={"statement": "None."})
    print_comparison(two)
    shown = capsys.readouterr().out
    header = next(line for line in (two.directory / "table.md").read_text().splitlines() if line.startswith("| alg"))
    (line,) = (line for line in shown.splitlines() if "algorithm" in line and "accuracy" in line)
    assert re.split(r" {1,}(?!fedavg|split)", line.strip()) == header.strip("| ").split(" | ")
    # and names every file that is there
    for path in two.directory.iterdir():
        assert path.is_dir() or path.name in shown


@pytest.mark.parametrize(("target", "score", "more"), [("number", "R²", {}), ("survival", "C-index", {"c_index": 0.5})])
def test_of_what_has_no_classes_none_are_told(
    target: str, score: str, more: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = {
        "target": target, "largest_class": None, "accuracy_by_class": [0.5], "class_variance": 0.0, "client_variance": 0.0,
        "worst_tenth_accuracy": 0.5, "notes": [], "privacy": {"statement": "None."}, **more,
    }  # fmt: skip
    base, own = (
        Row(label, tuple(result(tmp_path, label, seed, 0.5, personal=label == "ditto", **shared) for seed in (0, 1)))
        for label in ("fedavg", "ditto")
    )
    found = Comparison((base, own), (0, 1), tmp_path, base)
    sentences = [verdict.sentence for verdict in of_comparison(found)]
    print_comparison(found)
    shown = capsys.readouterr().out.split("Run directories")[0]
    assert not [word for word in ("class", "accura") if word in shown]
    assert f"{score} of clients on their own test splits" in " ".join(shown.split())
    assert any(sentence.startswith(f"with the {score} of fedavg on every seed: ditto;") for sentence in sentences)
    assert any(f"'{score}' is on everyone's test set" in sentence for sentence in sentences)
    (alone,) = (one.sentence for one in of_run(own.results[0].summary, own.results[0].rounds) if one.kind == OWN_SPLIT)
    assert f"the mean {score} on each client's own test split and 0.500 the mean on everyone's" in alone


def test_names_are_whole_at_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedfill.cli.compared.out.width", 80)
    shared = {
        "auc": 0.5, "balanced_accuracy": 0.5, "largest_class": 0.9, "selected_accuracy": 0.5, "notes": [], "privacy": {"statement": "None."},
        "client_variance": 1.0, "class_variance": 1.0, "worst_tenth_accuracy": 0.5,
    }  # fmt: skip
    labels = ("central", "clusteredsampling", "fedprox:mu=0.001,proximal=true")
    found = [
        Row(label, tuple(result(tmp_path, f"{k}", seed, 0.5 + seed / 10, **shared) for seed in (0, 1)))
        for k, label in enumerate(labels)
    ]
    print_comparison(Comparison(tuple(found), (0, 1), tmp_path, found[0]))
    shown = capsys.readouterr().out
    tables = [part.splitlines() for part in shown.split("fairness")[:2]]
    for part in tables:
        assert max(map(len, part[:10])) <= 80
        below = next(k for k, line in enumerate(part) if "───" in line) + 1
        names = ["central", "clusteredsampling", "fedprox", "mu=0.001", "proximal=true"]
        assert [line.split()[0] for line in part[below : below + 5]] == names
    (table, _), header = tables, next(line.split() for line in tables[0] if "algorithm" in line)
    assert header[:2] == ["algorithm", "accuracy"]
    assert not {"sec.", "traffic"} & set(header)
    told = " ".join(" ".join(table).split())
    assert "traffic: " not in told, "what is not there needs no words"
    assert "for want of room without sec., traffic" in told


@pytest.mark.parametrize(
    ("width", "left"),
    # names 9, figures 5, 8 and 4, and a blank at each side and between
    [(31, []), (30, ["sec."]), (26, ["sec."]), (25, ["sec.", "traffic"]), (1, ["sec.", "traffic"])],
)
def test_what_is_least_is_left_out_first(width: int, left: list[str]) -> None:
    rows = [("a,b", "50.00", "700.8 kB", "13.5")]
    assert left_out(("algorithm", "R²", "traffic", "sec."), rows, width) == left


def test_all_pairs_by_hand(tmp_path: Path) -> None:
    three = rows(tmp_path, a=[0.5, 0.7], b=[0.6, 0.9], c=[0.7, 0.9])
    found = Comparison(tuple(three), (0, 1), tmp_path, three[0])
    write_files(found)
    first, alike, _, *own = lines(tmp_path / "pairs.csv")
    assert [(line["algorithm"], line["other"]) for line in (first, alike)] == [("a", "b"), ("a", "c")]
    # differences -0.1 and -0.2: mean -0.15, half width 12.7062 * 0.05, and for three pairs 38.1885 * 0.05
    ends = [float(first[name]) for name in ("mean", "low", "high", "low_of_all", "high_of_all")]
    widths = [12.7062 * 0.05, 38.1885 * 0.05]
    wanted = [-0.15, *(-0.15 + sign * width for width in widths for sign in (-1, 1))]
    assert ends == pytest.approx(wanted, abs=1e-4)
    # -0.2 on both seeds: no interval
    assert [alike[name] for name in ("low", "high", "low_of_all", "high_of_all")] == [""] * 4
    assert [line["figure"] for line in own] == ["mean_client_accuracy"] * 3
    # three pairs of one figure, and not six of both: the same figures have the same ends
    assert [float(own[0][name]) for name in ("mean", "low", "high", "low_of_all", "high_of_all")] == ends


def test_the_same_accuracy_on_every_seed_is_no_certain_zero(tmp_path: Path) -> None:
    base, other = rows(tmp_path, fedavg=[0.5, 0.7], fedprox=[0.5, 0.7])
    found = Comparison((base, other), (0, 1), tmp_path, base)
    write_files(found)
    table = (tmp_path / "table.md").read_text()
    assert "| fedprox | 60.00 ± 14.14 | +0.00 | " in table
    assert "without ± is the same on all 2 seeds" in table
    highest, alike = of_comparison(found)
    assert "nothing follows of chance" in highest.sentence
    assert alike.kind == WITHIN_NOISE
    assert alike.sentence.startswith("as accurate as fedavg on every seed: fedprox;")


def test_seeds_that_are_alike_give_no_interval(tmp_path: Path) -> None:
    (base,) = rows(tmp_path, fed3r=[1.0, 1.0])
    write_files(Comparison((base,), (0, 1), tmp_path, base))
    found = next(line for line in lines(tmp_path / "table.csv") if line["figure"] == "accuracy")
    assert [found[name] for name in ("mean", "deviation", "low", "high", "n")] == ["1.0", "0.0", "", "", "2"]


def test_rows_with_fewer_rounds_are_named(tmp_path: Path) -> None:
    base = Row("fedavg", (result(tmp_path, "fedavg", 0, 0.5),))
    others = [Row(label, (result(tmp_path, label, 0, 0.6, rounds=1),)) for label in ("fed3r", "fedcgs")]
    found = Comparison((base, *others), (0,), tmp_path, base)
    write_files(found)
    for name in ("table.md", "table.tex"):
        assert "; fed3r, fedcgs: 1 round, not 2." in (tmp_path / name).read_text()
    assert "±" not in (tmp_path / "table.md").read_text()


STRANGE = "a_b|c&d%\n\n$x_{\\y} #~^<z> _w_ `k` *m* [n] &amp;"


def test_names_of_any_signs_stand_in_tables(tmp_path: Path) -> None:
    base = Row(STRANGE, (result(tmp_path, "fedavg", 0, 0.5, dataset=f"# {STRANGE}"),))
    write_files(Comparison((base,), (0,), tmp_path, base))
    tex = (tmp_path / "table.tex").read_text()
    in_tex = (
        r"a\_b\textbar{}c\&d\% \$x\_\{\textbackslash{}y\} \#\textasciitilde{}\textasciicircum{}\textless{}z\textgreater{} "
        r"\_w\_ `k` *m* [n] \&amp;"
    )
    assert [line for line in tex.splitlines() if line.endswith(r"\\")][1].startswith(f"{in_tex} & 50.00 & ")
    assert rf"\# {in_tex}, iid, " in tex
    shown = (tmp_path / "table.md").read_text()
    in_markdown = r"a_b\|c&d% \$x\_{\\y} #\~^\<z\> \_w\_ \`k\` \*m\* \[n\] \&amp;"
    assert shown.splitlines()[4].startswith(f"| {in_markdown} | 50.00 | ")
    assert shown.startswith(rf"\# {in_markdown}, iid, ")


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (lambda d: d.pop("rows"), ("comparison", "damaged")),
        (lambda d: d.update(baseline="nobody"), ("comparison", "damaged")),
        (lambda d: d.update(seeds=[0]), ("comparison", "damaged")),
        (lambda d: d["rows"][0].update(folders=["nowhere", "fedavg-seed1"]), ("run", "nowhere")),
        (lambda d: d["rows"][0].update(folders=["../../etc", "fedavg-seed1"]), ("run", "etc", "no finished run")),
    ],
)
def test_a_damaged_record_is_a_sentence(two: Comparison, change: Any, facts: tuple[str, ...]) -> None:
    path = two.directory / "comparison.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_bytes(to_json(document))
    with refused(*facts):
        read_comparison(two.directory)


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_no_record_is_a_sentence(two: Comparison, text: str) -> None:
    (two.directory / "comparison.json").write_text(text)
    with refused("comparison", "damaged"):
        read_comparison(two.directory)
    with refused("comparison", "holds none"):
        read_comparison(two.directory / "fedavg-seed0")


def test_verdicts_on_two_rows(two: Comparison) -> None:
    highest, noise, shared = of_comparison(two)
    assert (highest.kind, noise.kind, shared.kind) == (HIGHEST, WITHIN_NOISE, NOT_SHARED)
    assert "85.00" in highest.sentence
    assert "+25.00 ± 63.53" in highest.sentence
    assert "within the noise" in highest.sentence
    assert "moon_x +25.00 ± 63.53" in noise.sentence
    assert shared.sentence.endswith(two.notes[0])


def test_a_difference_that_is_no_noise_has_no_such_verdict(tmp_path: Path) -> None:
    base, other = rows(tmp_path, fedavg=[0.5, 0.7, 0.6], fed3r=[0.7, 0.9, 0.81])
    (highest,) = of_comparison(Comparison((base, other), (0, 1, 2), tmp_path, base))
    assert highest.kind == HIGHEST
    assert "more than chance" in highest.sentence


def test_rows_without_the_figure_are_not_ranked(tmp_path: Path) -> None:
    """No two rows of a small test set can be compared: then there is no C-index, and not one of 0."""
    more = {"target": "survival", "c_index": None}
    base, other = (
        Row(name, tuple(result(tmp_path, name, seed, 0.2, **more) for seed in (0, 1))) for name in ("cox", "fedavg")
    )
    found = kinds(Comparison((base, other), (0, 1), tmp_path, base))
    assert HIGHEST not in found
    assert WITHIN_NOISE not in found


def test_one_seed_and_a_diverged_row(tmp_path: Path) -> None:
    base, other = rows(tmp_path, fedavg=[0.5], fed3r=[0.7])
    broken = Row("fedprox", (None,))
    found = Comparison((base, other, broken), (0,), tmp_path, base, (), ("fedprox, seed 0: training diverged: so",))
    assert kinds(found) == [HIGHEST, DIVERGED, ONE_SEED]
    write_files(found)
    assert read_comparison(tmp_path) == found
    assert "| fedprox | diverged |" in (tmp_path / "table.md").read_text()


def test_the_runs_verdicts_are_gathered(tmp_path: Path) -> None:
    late = [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.3, 0.5]
    behind = {"accuracy_by_client": [0.9, 0.1], "own_test_samples": [50, 50]}
    base = Row("fedavg", tuple(result(tmp_path, "fedavg", s, 0.7, late, **behind) for s in (0, 1)))
    own = Row(
        "local", tuple(result(tmp_path, "local", s, 0.7, late, personal=True, **(behind if s else {})) for s in (0, 1))
    )
    found = of_comparison(Comparison((base, own), (0, 1), tmp_path, base))
    assert [verdict.kind for verdict in found] == [HIGHEST, LEFT_BEHIND, NOT_CONVERGED, OWN_SPLIT, WITHIN_NOISE]
    _, left, rising, personal, _ = (verdict.sentence for verdict in found)
    assert left.startswith("fedavg, seed 0: client 1")  # not local's, of which it is so in one of two seeds
    assert "in 2 of 2 seeds" in left
    assert "fedavg (+30.0), local (+30.0)" in rising  # (0.3 + 0.5)/2 - 0.1
    assert personal.startswith("local: ")


def test_the_time_that_is_left() -> None:
    now = [0.0]
    clock = Clock(3, lambda: now[0])
    assert clock.begin() == 1
    assert clock.left() is None
    now[0] = 10.0
    clock.done(0.5)
    assert clock.left() == pytest.approx(10 + 2 * 20)  # this run takes 20, and so may the two others
    now[0] = 30.0
    clock.done(1.0)
    assert clock.begin() == 2
    now[0] = 35.0
    clock.done(0.5)
    assert clock.left() == pytest.approx(5 + (30 + 10) / 2)
    now[0] = 40.0  # given up, or read: it says nothing of the others
    assert clock.begin() == 3
    now[0] = 44.0
    clock.done(0.25)
    assert clock.left() == pytest.approx(12)


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5399, "1 h 30 min"), (12000, "3 h 20 min")]
)
def test_times_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_the_area_stands_where_classes_are_uneven(tmp_path: Path) -> None:
    summary = {
        "algorithm": "fedavg", "dataset": "d", "partition": "iid", "clients": 2, "rounds": 1, "seed": 0, "accuracy": 0.9, "auc": 0.716,
        "balanced_accuracy": 0.6, "accuracy_by_class": [0.9, 0.3], "mean_client_accuracy": None, "bytes_up": 1, "bytes_down": 1, "seconds": 1.0,
    }  # fmt: skip
    for largest, shown in ((0.8, True), (0.5, False)):
        row = Row("fedavg", (Result(tmp_path, {**summary, "largest_class": largest}, [], {}),))
        table = table_of(Comparison((row,), (0,), tmp_path, row))
        assert ("AUC" in table.header) is shown
        assert ("71.60" in table.rows[0]) is shown
