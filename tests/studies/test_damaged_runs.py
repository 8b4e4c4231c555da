"""Files of runs and studies that were edited or torn: one sentence says which, and nothing of the user's is overwritten."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import refused
from tests.studies.folders import comparison_folder, run_folder

import fedfill
from fedfill.errors import FedfillError

VALUES = (None, -1, 10**12, 1.5, "x", [], {}, [None], [-1], float("nan"), ...)
"""What stands in place of another value; ... takes it out."""
EXACT: dict[str, list[tuple[tuple[str | int, ...], Any]]] = {
    "summary.json": [
        (("notes",), [-1]), (("privacy", "statement"), 1.5), (("own_test_samples",), [None]), (("accuracy",), "x"), (("accuracy",), 2.0),
        (("accuracy",), float("nan")), (("privacy",), ...), (("accuracy_by_client", 0), "x"), (("bytes_by_handler", "train"), 5),
    ],
    "rounds.jsonl": [
        ((1, "accuracy"), "x"), ((1, "privacy"), ...), ((0, "bytes_up"), None), ((2, "accuracy_by_client"), 5), ((2, "seconds"), -1.0),
    ],
    "partition.json": [(("class_names",), []), (("class_names", 0), 5), (("clients", 0), [1]), (("clients", 1, 0), -1), (("domains",), 3)],
}  # fmt: skip


def places(document: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Those of all values in a document, of a list the first."""
    if at:
        yield at
    inside = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document[:1])
        if isinstance(document, list)
        else ()
    )
    for key, value in inside:
        yield from places(value, (*at, key))


def read(path: Path) -> Any:
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


def edit(path: Path, whole: Any, at: tuple[str | int, ...], value: Any) -> None:
    document = copy.deepcopy(whole)
    table = document
    for key in at[:-1]:
        table = table[key]
    if value is ...:
        del table[at[-1]]
    else:
        table[at[-1]] = value
    lines = document if path.suffix == ".jsonl" else [document]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def complaint(call: Callable[[], Any]) -> str | None:
    """The sentence of a call that is refused; a traceback goes on."""
    try:
        call()
    except FedfillError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("name", "at", "value"), [(name, *pair) for name, pairs in EXACT.items() for pair in pairs])
def test_the_sentence_names_the_file(tmp_path: Path, name: str, at: tuple[str | int, ...], value: Any):
    run = run_folder(tmp_path / "run")
    edit(run / name, read(run / name), at, value)
    with refused("report", run / name):
        fedfill.report(run)
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("name", ["summary.json", "rounds.jsonl", "partition.json"])
def test_no_edit_ends_in_a_traceback(tmp_path: Path, name: str):
    run = run_folder(tmp_path / "run", epsilon=3.0)
    whole, kept, told = read(run / name), 0, 0
    cases = [(at, value) for at in places(whole) for value in VALUES]
    for at, value in cases[::5]:
        edit(run / name, whole, at, value)
        sentence = complaint(lambda: fedfill.report(run))
        kept, told = kept + (sentence is None), told + (sentence is not None)
        assert sentence is None or str(run) in sentence
    assert kept
    assert told > kept


@pytest.mark.parametrize("damage", [b"", b"null\n", b"\x00\xff\xfe", None, "short"])
def test_a_finished_run_without_all_its_rounds_is_told(tmp_path: Path, damage: bytes | str | None):
    run = run_folder(tmp_path / "run")
    path = run / "rounds.jsonl"
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    elif damage is None:
        path.unlink()
    else:
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with refused("report", path, "damaged", "2 rounds" if damage == "short" else "0 rounds"):
        fedfill.report(run)
    assert not (run / "report.html").exists()


def test_run_and_compare_read_no_damaged_run(tmp_path: Path):
    settings: dict[str, Any] = {"clients": 2, "data_fraction": 0.1, "rounds": 2, "local_epochs": 1, "model": "mlp"}
    out = tmp_path / "comparison"

    def compare() -> Any:
        return fedfill.compare(["fedavg"], seeds=[0], out=out, quiet=True, **settings)

    compare()
    table, run = (out / "table.md").read_bytes(), out / "fedavg-seed0"
    for name, at, value in (
        ("summary.json", ("accuracy",), 7), ("summary.json", ("accuracy",), "high"), ("summary.json", ("dataset",), ...),
        ("summary.json", ("rounds",), "x"), ("rounds.jsonl", (1, "accuracy"), "high"),
    ):  # fmt: skip
        whole = read(run / name)
        edit(run / name, whole, at, value)
        for call in (compare, lambda: fedfill.run("fedavg", seed=0, out=run, quiet=True, **settings)):
            with refused("out", run / name, "damaged"):
                call()
        assert (out / "table.md").read_bytes() == table
        (run / name).write_text(
            "".join(json.dumps(line) + "\n" for line in (whole if isinstance(whole, list) else [whole]))
        )
    assert compare().rows[0].finished[0].was_finished


def test_figures_that_do_not_fit_together(tmp_path: Path):
    run = run_folder(tmp_path / "run")
    toml = run / "experiment.toml"
    toml.write_text(toml.read_text().replace("seed = 0", 'seed = "first"'))
    with refused("report", run, "first"):
        fedfill.report(run)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "\x00", ""])
@pytest.mark.parametrize("name", ["summary.json", "partition.json"])
def test_a_file_that_is_no_document(tmp_path: Path, name: str, text: str):
    run = run_folder(tmp_path / "run")
    (run / name).write_text(text)
    with pytest.raises(FedfillError, match=name):
        fedfill.report(run)


def test_a_study_of_which_the_record_was_edited(tmp_path: Path):
    comparison_folder(tmp_path / "study" / "final", {"fedavg": [0.5], "local": [0.3]})
    figures = {"validation": [0.5], "accuracy": [0.5], "own": [0.4], "rounds": 2, "bytes": 10.0, "seconds": 1.0}
    whole = {
        "goal": "everyone", "look": {"sentences": ["2 clients"]}, "finalists": [{"label": "a", **figures}, {"label": "b", **figures}],
        "recommendation": {"label": "a", "sentences": ["take a", "one seed"]}, "commands": ["fedfill run a"], "not_tried": {"c": "no"},
    }  # fmt: skip
    record = tmp_path / "study" / "study.json"
    edit(record, whole, ("goal",), "everyone")
    fedfill.report(tmp_path / "study")
    for at, value in [(at, value) for at in places(whole) for value in VALUES][::4]:
        edit(record, whole, at, value)
        sentence = complaint(lambda: fedfill.report(tmp_path / "study"))
        assert sentence is None or str(tmp_path / "study") in sentence
    edit(record, whole, ("finalists", 1, "accuracy"), -1)
    with refused("report", "study.json"):
        fedfill.report(tmp_path / "study")


def test_nothing_but_a_report_is_replaced(tmp_path: Path):
    run = run_folder(tmp_path / "run")
    before = (run / "summary.json").read_bytes()
    (tmp_path / "mine.html").write_text("<html>mine</html>")
    (tmp_path / "empty.html").touch()
    for name in ("run/summary.json", "page", "page.txt", "mine.html"):
        with refused("out", name):
            fedfill.report(run, out=tmp_path / name)
    assert (run / "summary.json").read_bytes() == before
    assert (tmp_path / "mine.html").read_text() == "<html>mine</html>"
    for name in ("empty.html", "new.htm", "new.html"):
        assert fedfill.report(run, out=tmp_path / name) == fedfill.report(run, out=tmp_path / name)


def test_export_reads_no_damaged_summary(tmp_path: Path):
    settings: dict[str, Any] = {
        "clients": 2,
        "data_fraction": 0.1,
        "rounds": 1,
        "local_epochs": 1,
        "model": "mlp",
        "workers": 1,
    }
    fedfill.run("fedavg", out=tmp_path / "run", **settings)
    path = tmp_path / "run" / "summary.json"
    whole = read(path)
    told = 0
    for at in places(whole):
        for value in (..., float("nan"), "x"):
            edit(path, whole, at, value)
            shutil.rmtree(tmp_path / "model", ignore_errors=True)
            sentence = complaint(lambda: fedfill.export(tmp_path / "run", tmp_path / "model"))
            told += sentence is not None
            assert sentence is None or "summary.json" in sentence
    assert told > 20
    edit(path, whole, ("privacy",), ...)
    with refused("export", path, "privacy"):
        fedfill.export(tmp_path / "run")
