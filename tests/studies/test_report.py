"""Reports: the folders' figures on one page that is whole in itself, safe, in order, and never too large."""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.cli.calls import fedfill_
from tests.helpers import refused
from tests.studies.folders import comparison_folder, run_folder

import fedfill
from fedfill.experiment.prepare import arrange
from fedfill.runs import directory
from fedfill.studies.comparison import read_comparison
from fedfill.studies.grid import Cell, table
from fedfill.studies.report import LIMIT, page
from fedfill.studies.reporting.again import compare_again, run_again
from fedfill.studies.reporting.parts import gather, read_trial

VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """What a page holds: elements, tables, text; complains where elements are not closed in their order."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self._open: list[str] = []
        self._rows: list[list[str]] = []
        self._caption = ""
        self.source = path.read_text()
        self.feed(self.source)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self._rows, self._caption = [], ""
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("th", "td"):
            self._rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "table":
            self.tables[self._caption] = self._rows

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.text += data
        if "caption" in self._open:
            self._caption += data
        elif self._open and self._open[-1] in ("th", "td"):
            self._rows[-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def table(self, words: str) -> list[list[str]]:
        (found,) = (rows for caption, rows in self.tables.items() if caption.startswith(words))
        return found

    @property
    def headline(self) -> str:
        return re.search(r"<h1>(.*?)</h1>", self.source, re.S)[1]  # type: ignore[index]


def made(tmp_path: Path, *folders: Path) -> Page:
    return Page(fedfill.report(*folders, out=tmp_path / "page.html"))


def test_the_figures_of_a_run(tmp_path: Path) -> None:
    found = made(tmp_path, run_folder(tmp_path / "run"))
    assert "fedavg gets 80.0 % of everyone's test set right; the worst client is at 40.0 %" in found.headline.replace(
        "&#39;", "'"
    )
    assert found.table("Accuracy on everyone's test set") == [
        ["round", "fedavg"],
        ["1", "20.0"],
        ["2", "50.0"],
        ["3", "80.0"],
    ]
    assert found.table("Training samples of each class at each client") == [
        ["client", "cat", "dog", "fish", "all"],
        ["0", "10", "0", "3", "13"],
        ["1", "0", "7", "0", "7"],
        ["2", "5", "5", "5", "15"],
        ["3", "1", "0", "0", "1"],
    ]
    assert found.table("Accuracy by client")[1:3] == [["1", "40.0", "7"], ["3", "70.0", "1"]]  # the lowest first
    assert found.table("By exchange")[1] == ["train", "3.0 MB", "3.0 MB"]
    assert "client 1 is left behind" in found.text
    assert "fedfill run fedavg" in found.text


@pytest.mark.parametrize(("largest", "told"), [(0.8, True), (0.7, False)])
def test_page_and_verdict_agree_on_uneven_classes(tmp_path: Path, largest: float, told: bool) -> None:
    # two of three classes are in the test set: 0.75 is one and a half times the even share of two
    run = run_folder(tmp_path / "run", by_class=(0.9, 0.7, None), summary={"largest_class": largest})
    found = made(tmp_path, run)
    assert ("Balanced accuracy" in found.text, "uneven classes" in found.text) == (told, told)


def test_a_comparison_says_who_won_by_how_much_and_how_sure(tmp_path: Path) -> None:
    # differences of 10, 12 and 14 points: 12 ± t(2) * 2 / sqrt(3) = 12 ± 4.97
    finals = {"fedavg": [0.5, 0.6, 0.7], "fedprox:mu=0.1": [0.6, 0.72, 0.84], "local": [0.3, None, 0.3]}
    found = made(tmp_path, comparison_folder(tmp_path / "cmp", finals, notes=["local: another network"]))
    assert "fedprox:mu=0.1 is highest" in found.headline
    assert "+12.00 ± 4.97 points over fedavg" in found.headline
    assert "not shared by local: another network" in found.text
    rows = found.table("After the last round")
    assert rows[0][4] == "against fedavg, points"
    assert [row[4] for row in rows[1:]] == ["–", "+12.00 ± 4.97", "–"]
    assert [row[1] for row in rows[1:]] == ["60.0 ± 10.0 %", "72.0 ± 12.0 %", "diverged"]
    assert found.table("Accuracy on everyone's test set")[2] == ["2", "60.0", "72.0", "30.0"]
    assert "--seeds 0,1,2" in found.text


def test_runs_side_by_side_are_compared_where_they_share_their_data(tmp_path: Path) -> None:
    runs = [
        run_folder(tmp_path / name, algorithm=name, curve=(0.1, share))
        for name, share in (("fedavg", 0.5), ("fedbn", 0.7))
    ]
    found = made(tmp_path, *runs)
    assert "fedbn is highest" in found.headline
    assert found.table("After the last round")[2][4] == "+20.00"
    other = run_folder(tmp_path / "other", algorithm="qffl", curve=(0.1, 0.9), experiment={"partition": "iid"})
    apart = made(tmp_path, *runs, other)
    assert "on data that differ (partition)" in apart.headline
    assert "partition=iid (not dirichlet:0.5)" in apart.text
    assert "against" not in " ".join(apart.table("After the last round")[0])


def test_runs_of_one_method_that_differ_in_their_seed_are_one_line(tmp_path: Path) -> None:
    runs = [run_folder(tmp_path / f"r{seed}", seed=seed, curve=(0.1, 0.5 + 0.1 * seed)) for seed in (2, 0, 1)]
    found = made(tmp_path, *runs)
    assert found.table("Accuracy on everyone's test set")[2] == ["2", "60.0"]
    assert "60.0 ± 10.0 %" in found.text
    assert "seeds 0, 1, 2" in found.text
    # the same again is no second draw
    twice = made(tmp_path, runs[0], run_folder(tmp_path / "again", seed=2, curve=(0.1, 0.7)))
    assert [row[0] for row in twice.table("After the last round")[1:]] == ["fedavg (r2)", "fedavg (again)"]


def test_several_subjects_have_a_part_each(tmp_path: Path) -> None:
    found = made(
        tmp_path, run_folder(tmp_path / "run"), comparison_folder(tmp_path / "cmp", {"fedavg": [0.5], "local": [0.4]})
    )
    parts = [attributes for tag, attributes in found.elements if tag == "h2"]
    assert [part["id"] for part in parts] == ["part1", "part2"]
    assert "fedavg gets 80.0 %" in found.text
    assert "fedavg is highest" in found.text


@pytest.mark.parametrize("kind", ["run", "comparison", "both"])
def test_the_page_is_in_order(tmp_path: Path, kind: str) -> None:
    run = run_folder(tmp_path / "run", picture=True, epsilon=3.0)
    compared = comparison_folder(tmp_path / "cmp", {"fedavg": [0.5, 0.6], "local": [0.4, 0.5]})
    found = made(tmp_path, *{"run": [run], "comparison": [compared], "both": [run, compared]}[kind])
    levels = [int(tag[1]) for tag, _ in found.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert [len(found.all(tag)) for tag in ("header", "nav", "main", "footer")] == [1, 1, 1, 1]
    assert all("scope" in attributes for attributes in found.all("th"))
    assert len(found.tables) > 5
    drawings = [attributes for attributes in found.all("svg") if "drawing" in attributes["class"]]
    assert len(drawings) >= 4
    assert all(attributes["role"] == "img" for attributes in drawings)
    assert len(re.findall(r'role="img">\s*<title>[^<]+</title><desc>[^<]+</desc>', found.source)) == len(drawings)
    assert all(attributes.get("aria-label") for _, attributes in found.elements if attributes.get("tabindex") == "0")
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"].removeprefix("#") for attributes in found.all("a")]
    assert set(links) <= set(ids)


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    found = made(tmp_path, run_folder(tmp_path / "run", picture=True))
    assert not found.all("script")
    assert "default-src 'none'" in found.source
    sources = [
        attributes[name]
        for _, attributes in found.elements
        for name in ("src", "href", "srcset", "data")
        if name in attributes
    ]
    assert all(source.startswith(("#", "data:")) for source in sources)
    assert not re.search(r"https?:|@import|url\(", found.source)


def test_nothing_of_the_user_breaks_out(tmp_path: Path) -> None:
    evil = "</title><script>alert(1)</script><img src=x onerror='alert(2)'>\"'&"
    shown = {"data": f"/data/{evil}", "partition": evil}
    run = run_folder(
        tmp_path / "run</style><script>", algorithm=evil, class_names=[evil, evil + "b", evil + "c"], experiment=shown,
        summary={"notes": [evil], "warnings": [evil], "machine": evil, "bytes_by_handler": {evil: {"up": 1, "down": 1}},
                 "privacy": {"statement": evil, "entries": [{"released": evil, "mechanism": evil, "conditions": [evil]}], "total_epsilon": None}},
    )  # fmt: skip
    domains = json.loads((run / "partition.json").read_text()) | {"domains": [evil] * 4}
    (run / "partition.json").write_text(json.dumps(domains))
    compared = comparison_folder(tmp_path / "cmp", {"fedavg": [0.5, 0.6], "local": [0.4, 0.5]}, notes=[evil])
    document = json.loads((compared / "comparison.json").read_text())
    document["rows"][1]["label"] = document["rows"][1]["label"] + evil
    (compared / "comparison.json").write_text(json.dumps(document))
    found = made(tmp_path, run, compared)
    assert found.text.count("<script>alert(1)</script>") > 20  # told as it is
    assert not found.all("script")
    assert not found.all("img")
    assert len(found.all("style")) == 1
    assert not [attributes for _, attributes in found.elements if any(name.startswith("on") for name in attributes)]


def audited(folder: Path, **changes: Any) -> None:
    finding = {"released": "Sums.sums", "neighbours": "a record is replaced", "ledger_epsilon": 12.7, "found_epsilon": 10.7,
               "verdict": "PASS (tight)", "ceiling": None} | changes  # fmt: skip
    (folder / "audit.json").write_text(json.dumps({"confidence": 0.95, "delta": 1e-5, "findings": [finding]}))


def test_an_audit_stands_beside_the_account(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    audited(run)
    found = made(tmp_path, run)
    assert found.table("The account attacked: fedavg")[1] == [
        "Sums.sums", "a record is replaced", "12.7", "10.7", "PASS (tight)",
    ]  # fmt: skip
    audited(run, ledger_epsilon=None, found_epsilon=None)
    assert made(tmp_path, run).table("The account attacked: fedavg")[1][2:4] == ["none", "none"]
    (run / "audit.json").write_text('{"confidence": 0.95, "delta": 1e-5, "findings": []}')
    assert "The account attacked" not in made(tmp_path, run).text
    compared = comparison_folder(tmp_path / "compared", {"fedavg": [0.5, 0.6], "local": [0.3, 0.4]})
    audited(compared / "fedavg-seed1")
    assert found.table("The account attacked: fedavg") == made(tmp_path, compared).table(
        "The account attacked: fedavg, seed 1"
    )


@pytest.mark.parametrize("text", ["", "[]", "{", '{"confidence": 0.95, "delta": 1e-5}', "[" * 100_000])
def test_a_damaged_audit_is_named(tmp_path: Path, text: str) -> None:
    run = run_folder(tmp_path / "run")
    (run / "audit.json").write_text(text)
    with refused("report", "audit.json", "fedfill audit"):
        fedfill.report(run, out=tmp_path / "page.html")


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    found = made(tmp_path, run_folder(tmp_path / "run", rounds=5))
    assert "3 of 5 rounds are done" in found.text
    assert "80.0 % of everyone's test set right so far" in found.headline.replace("&#39;", "'")
    begun = made(tmp_path, run_folder(tmp_path / "begun", curve=(), rounds=5))
    assert "No round has been evaluated yet" in begun.headline
    assert "0 of 5 rounds are done" in begun.text
    assert "fedfill run fedavg" in begun.text


def test_clients_whose_counts_stay_with_them(tmp_path: Path) -> None:
    found = made(tmp_path, run_folder(tmp_path / "run", counts=None))
    assert "Who holds what" not in found.text
    assert found.table("Accuracy by client")[1] == ["1", "40.0"]


def test_identical_curves_are_named(tmp_path: Path) -> None:
    finals: dict[str, list[float | None]] = {"fedavg": [0.5, 0.6], "fedprox": [0.5, 0.6], "qffl": [0.4, 0.6]}
    found = made(tmp_path, comparison_folder(tmp_path / "cmp", finals))
    assert "fedavg and fedprox have the same curve" in found.text


def test_many_methods_get_a_small_chart_each(tmp_path: Path) -> None:
    found = made(
        tmp_path, comparison_folder(tmp_path / "cmp", {f"fedavg:server_{k}=1": [0.5 + k / 50, 0.5] for k in range(9)})
    )
    assert found.source.count("Grey: the others") == 18  # everyone's test set, and own splits
    assert found.source.count('class="faint"') == 18 * 8


@pytest.mark.parametrize("methods", [1, 8])
def test_a_thousand_clients_and_a_hundred_classes_stay_small_and_are_told(tmp_path: Path, methods: int) -> None:
    size: dict[str, Any] = {
        "by_client": [(i * 37 % 101) / 100 for i in range(1000)],
        "by_class": [(c * 13 % 97) / 96 for c in range(100)],
        "counts": [[(i * c) % 7 for c in range(100)] for i in range(1000)],
        "class_names": [f"class number {c}" for c in range(100)],
        "picture": True,
    }
    if methods == 1:
        folder = run_folder(tmp_path / "run", curve=[t / 101 for t in range(1, 101)], **size)
    else:
        folder = comparison_folder(
            tmp_path / "cmp", {f"fedavg:weight_decay={k}": [0.5, 0.5 + k / 100] for k in range(methods)}, **size
        )
    found = made(tmp_path, folder)
    assert len(found.source.encode()) <= LIMIT
    assert re.search(r"Shown are \d+ of 1,000 clients", found.text)
    assert "How far apart the 1,000 clients are" in found.tables
    samples = [sum((i * c) % 7 for c in range(100)) for i in range(1000)]
    assert found.table("How far apart")[1][1] == f"{min(samples):,}"
    assert found.table("How far apart")[1][-1] == f"{max(samples):,}"
    assert "Each column stands for 2 classes" in found.text


def test_what_is_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path / "run")
    monkeypatch.setattr("fedfill.studies.report.LIMIT", 9_000)
    with refused("report", "9 kB"):
        fedfill.report(run)
    assert not (run / "report.html").exists()


def test_with_less_room_details_are_left_out_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path / "run", picture=True)
    whole = len(page(gather([run])))
    monkeypatch.setattr("fedfill.studies.report.LIMIT", whole - 1)
    less = page(gather([run])).decode()
    assert len(less.encode()) < whole
    assert "are left out" in less


def test_the_same_folder_gives_the_same_page(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", picture=True)
    assert page(gather([run])) == page(gather([run]))


def test_a_picture_is_made_small_and_one_that_stays_large_is_left_out(tmp_path: Path) -> None:
    found = made(tmp_path, run_folder(tmp_path / "run", picture=True))
    (image,) = found.all("img")
    data = base64.b64decode(image["src"].removeprefix("data:image/png;base64,"))
    assert len(data) <= 60_000
    with Image.open(io.BytesIO(data)) as picture:
        assert (str(picture.width), str(picture.height)) == (image["width"], image["height"])
    assert image["alt"]
    noise = run_folder(tmp_path / "noise", picture=True)
    drawn = next((noise / "samples").iterdir())
    Image.effect_noise((900, 900), 80).save(drawn)
    large = made(tmp_path, noise)
    assert not large.all("img")
    assert f"they lie in the runs' folders: {drawn}" in large.text
    broken = run_folder(tmp_path / "broken", picture=True)
    next((broken / "samples").iterdir()).write_bytes(b"no picture")
    with refused("report", "no picture"):
        fedfill.report(broken)


def test_epsilon_grows_over_the_rounds(tmp_path: Path) -> None:
    found = made(tmp_path, run_folder(tmp_path / "run", epsilon=3.0))
    assert found.table("Epsilon over the rounds") == [["round", "fedavg"], ["1", "1"], ["2", "2"], ["3", "3"]]
    assert "ε 3.00" in found.text


def test_a_study_has_its_recommendation_first(tmp_path: Path) -> None:
    study = tmp_path / "study"
    study.mkdir()
    (study / "study.json").write_text(json.dumps({"version": "0", "request": {"data": "digits"}}))
    assert "not finished" in made(tmp_path, study).headline  # it was stopped before its screening had ended
    document = {"look": {"sentences": ["4 clients hold 36 samples"]}, "goal": "everyone"}
    (study / "study.json").write_text(json.dumps(document))
    begun = made(tmp_path, study)
    assert "not finished" in begun.headline
    assert "4 clients hold 36 samples." in begun.text
    comparison_folder(study / "screen", {"fedavg": [0.5], "local": [0.4]})
    comparison_folder(study / "final", {"fedavg": [0.5, 0.6], "fedbn": [0.4, 0.4]})
    figures = {"accuracy": [0.6, 0.8], "own": [0.1, 0.1], "rounds": 2, "bytes": 1500, "seconds": 3}
    document |= {
        "finalists": [
            {"label": "fedavg", "validation": [0.5, 0.7], **figures},
            {"label": "fedbn", "validation": [0.9, None], **figures},
        ],
        "recommendation": {"label": "fedavg", "sure": "yes", "sentences": ["take fedavg", "it costs 1.5 kB"]},
        "commands": ["fedfill run fedavg --out runs/model"],
        "not_tried": {"qffl": "another <goal>"},
    }
    (study / "study.json").write_text(json.dumps(document))
    found = made(tmp_path, study)
    assert found.headline == "Take fedavg."
    assert "It costs 1.5 kB." in found.text
    assert found.table("Finalists")[1] == [
        "fedavg",
        "60.0 ± 14.1 %",
        "70.0 ± 14.1 %",
        "10.0 ± 0.0 %",
        "2",
        "1.5 kB",
        "3.0 s",
    ]
    assert found.table("Finalists")[2][1] == "–"  # a run of it diverged
    assert found.all("td")[0] == {"class": "strong"}
    assert found.table("Methods")[1] == ["qffl", "another <goal>"]
    assert "fedfill run fedavg --out runs/model" in found.text
    parts = [attributes["id"] for tag, attributes in found.elements if tag == "h2"]
    assert parts[-2:] == ["part1", "part2"]
    assert found.text.index("The last stage") < found.text.index("The screening")
    (study / "study.json").write_text("{}")
    with refused("report", "study.json"):
        fedfill.report(study)


def test_a_grid_has_its_table_first(tmp_path: Path) -> None:
    grid = tmp_path / "grid"
    cells = []
    for partition, shares in (("iid", ([0.5, 0.6], [0.3, 0.5])), ("one|class", ([0.2, 0.2], [0.4, 0.6]))):
        folder = comparison_folder(grid / f"partition={partition}", dict(zip(("fedavg", "local"), shares, strict=True)))
        found = read_comparison(folder)
        cells.append(Cell({"partition": partition}, tuple(row.label for row in found.rows), found))
    (grid / "grid.csv").write_text(table(cells))
    found = made(tmp_path, grid)
    assert "A grid over partition: 2 comparisons." in found.headline
    assert "Highest on everyone's test set: fedavg in 1, local in 1." in found.text
    assert found.table("Accuracy on everyone's test set, in percent, mean") == [
        ["partition", "fedavg", "local"],
        ["iid", "55.0 ± 7.1", "40.0 ± 14.1"],
        ["one|class", "20.0 ± 0.0", "50.0 ± 14.1"],
    ]
    below = found.text.split("All combinations")[-1]
    assert 0 < below.index("partition=iid: digits") < below.index("partition=one|class: digits")
    for text in ("", "a,b\n", (grid / "grid.csv").read_text().replace("0.55", "x")):
        (grid / "grid.csv").write_text(text)
        with refused("report", "grid.csv"):
            fedfill.report(grid)
    (grid / "grid.csv").unlink()
    with refused("report", grid / "partition=iid"):
        fedfill.report(grid)


def test_where_the_page_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, other = run_folder(tmp_path / "run"), run_folder(tmp_path / "other", algorithm="fedbn")
    assert fedfill.report(run) == run / "report.html"
    assert fedfill.report(str(run), other) == Path("runs/report.html")
    assert (tmp_path / "runs" / "report.html").exists()
    with refused("out", other):
        fedfill.report(run, out=other)

    def full(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(directory.tempfile, "mkstemp", full)  # whoever runs tests as root may write everywhere
    with refused("out", "Permission denied", "--out FILE"):
        fedfill.report(other)
    assert not (other / "report.html").exists()


def test_what_is_no_folder_of_ours(tmp_path: Path) -> None:
    with refused("report"):
        fedfill.report()
    with refused("report", tmp_path):
        fedfill.report(tmp_path)
    run = run_folder(tmp_path / "run")
    for damage in ("{", "[]", '{"clients": [["a"]], "class_names": ["x"]}'):
        (run / "partition.json").write_text(damage)
        with refused("report", "partition.json"):
            fedfill.report(run)
    assert not (run / "report.html").exists()


def test_the_command(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    answer = fedfill_("report", str(run), "--out", str(tmp_path / "page.html"))
    assert answer.exit_code == 0
    assert str(tmp_path / "page.html") in answer.stdout.replace("\n", "")
    nothing = fedfill_("report", str(tmp_path / "nothing"))
    assert nothing.exit_code == 2
    assert nothing.stderr.startswith("fedfill: report: ")


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("fedavg", {"local_epochs": 1, "learning_rate": 0.01, "client_validation": 0.2}),
        ("fed3r", {"target_epsilon": 3, "partition": "classes:3"}),
        ("moon", {"seed": 4, "participation": 0.5, "head": "ccvr"}),
    ],
)
def test_the_command_again_is_the_same_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, options: dict[str, Any]
) -> None:
    plan: dict[str, Any] = {"data": "digits", "partition": "dirichlet:0.5", "model": "auto", "clients": 4, "rounds": 2}
    before = arrange(algorithm, **{**plan, **options})
    directory.RunDirectory(tmp_path / "run").open(_document(before), before.digest)
    text = run_again(read_trial(tmp_path / "run").experiment)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(fedfill, "run", lambda name, **given: asked.update(given, algorithm=name) or 1 / 0)
    fedfill_(*shlex.split(text.replace("\\\n", ""))[1:])
    del asked["out"], asked["on_round"], asked["quiet"]
    after = arrange(asked.pop("algorithm"), **{**plan, **asked})
    assert after.digest == before.digest


def _document(prepared: Any) -> dict[str, Any]:
    from fedfill.experiment.loop import document_of

    return document_of(prepared.experiment)


def test_what_came_from_python_is_called_from_there(tmp_path: Path) -> None:
    held = {"data": "python", "partition": "given", "model": "python:Net", "settings": {"learning_rate": 0.5}}
    text = run_again(read_trial(run_folder(tmp_path / "run", experiment=held)).experiment)
    compile(text, "again", "exec")
    assert "fedfill.run(" in text
    assert "data=..." in text
    assert "model=..." in text
    assert "Net" in text
    assert "learning_rate=0.5" in text


def test_a_comparison_again(tmp_path: Path) -> None:
    shared = {"data": "digits", "partition": "iid", "clients": 4, "model": "cnn2"}
    one = {**shared, "algorithm": "fedprox", "rounds": 5, "seed": 0, "settings": {"mu": 0.1, "batch_size": 16}}
    other = {
        **shared,
        "algorithm": "fed3r",
        "rounds": 1,
        "seed": 0,
        "model": "features",
        "settings": {"batch_size": 16},
    }
    text = compare_again(["fedprox:mu=0.1", "fed3r"], [0, 1], [one, other])
    words = shlex.split(text.replace("\\\n", ""))
    assert words[:4] == ["fedfill", "compare", "fedprox:mu=0.1", "fed3r"]
    assert words[4:] == [
        "--seeds",
        "0,1",
        "--data",
        "digits",
        "--partition",
        "iid",
        "--clients",
        "4",
        "--rounds",
        "5",
        "--set",
        "batch_size=16",
    ]
