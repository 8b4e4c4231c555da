"""Arguments of the public functions that are of another kind: one sentence that begins with the argument's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers import refused

import fedfill
from fedfill import FedfillError
from fedfill.errors import path_of, shown
from fedfill.experiment.summary import Result

TINY: dict[str, Any] = {"clients": 2, "partition": "iid", "rounds": 1, "local_epochs": 1, "workers": 1, "quiet": True}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return fedfill.run("fedavg", out=tmp_path_factory.mktemp("done"), **TINY)


@pytest.mark.parametrize(
    ("name", "given", "options", "setting"),
    [
        ("run", (3,), {}, "algorithm"),
        ("run", (None,), {}, "algorithm"),
        ("run", ("fedavg",), {"data": 5}, "data"),
        ("run", ("fedavg",), {"data": Path("nowhere")}, "data"),
        ("run", ("fedavg",), {"partition": None}, "partition"),
        ("run", ("fedavg",), {"out": 5}, "out"),
        ("run", ("fedavg",), {"out": b"folder"}, "out"),
        ("run", ("fedavg",), {"on_round": 5}, "on_round"),
        ("run", ("fedavg",), {"rounds": [1]}, "rounds"),
        ("run", ("fedavg",), {"rounds": 10**400}, "rounds"),
        ("run", ("fedavg",), {"rounds": 1, "out": "a\0b"}, "out"),
        ("run", ("fedavg",), {"start_from": 5}, "start_from"),
        ("compare", (None,), {}, "algorithms"),
        ("compare", ("fedavg",), {}, "algorithms"),
        ("compare", ({"fedavg": 1},), {}, "algorithms"),
        ("compare", ([],), {}, "compare"),
        ("compare", ([None],), {}, "compare"),
        ("compare", (["fedavg"],), {"seeds": 3}, "seeds"),
        ("compare", (["fedavg"],), {"seeds": None}, "seeds"),
        ("compare", (["fedavg"],), {"seeds": "012"}, "seeds"),
        ("compare", (["fedavg"],), {"seeds": []}, "compare"),
        ("compare", (["fedavg"],), {"out": None}, "out"),
        ("compare", (["fedavg"],), {"on_run": 5}, "on_run"),
        ("study", (), {"seeds": 3}, "seeds"),
        ("study", (), {"data": None}, "data"),
        ("study", (), {"data": 5}, "data"),
        ("study", (), {"out": None}, "out"),
        ("study", (), {"goal": [1]}, "goal"),
        ("study", (), {"on_stage": 5}, "on_stage"),
        ("resume", (None,), {}, "directory"),
        ("resume", ([5],), {}, "directory"),
        ("load", (None,), {}, "directory"),
        ("load", ("a\0b",), {}, "directory"),
        ("load", ("x" * 300,), {}, "directory"),
        ("run", ("fedavg",), {"rounds": 1, "out": "\ud800"}, "out"),
        ("run", ("fedavg",), {"data": "./" + "x" * 300}, "data"),
        ("run", ("fedavg",), {"data": "x" * 300 + ".safetensors"}, "data"),
        ("run", ("fedavg",), {"start_from": "x" * 300}, "start_from"),
        ("run", ("fedavg",), {"model": "a\0b.py:N"}, "model"),
        ("run", ("fedavg",), {"rounds": 10**5000}, "rounds"),
        ("compare", (["fedavg"],), {"seeds": [10**5000]}, "seed"),
        ("report", ("a\0b",), {}, "paths"),
        ("load", (np.zeros(3),), {}, "directory"),
        ("predict", (None, "x.png"), {}, "directory"),
        ("report", (5,), {}, "paths"),
        ("report", (["folder"],), {}, "paths"),
        ("report", ("folder",), {"out": 5}, "out"),
        ("export", (None,), {}, "run"),
        ("audit", (None,), {}, "audit"),
        ("audit", ("fedavg",), {"out": 5}, "out"),
        ("audit", ("fedavg",), {"confidence": "high"}, "confidence"),
        ("audit", ("fedavg",), {"level": None}, "level"),
        ("audit", (Path("nowhere"),), {}, "audit"),
        ("measure", (None,), {}, "subject"),
        ("reproduce", (5,), {}, "table"),
        ("synthesise", ("folder",), {"out": 5}, "out"),
        ("synthesise", (None,), {"out": "x.safetensors"}, "directory"),
    ],
)  # fmt: skip
def test_an_argument_of_another_kind(
    name: str, given: Any, options: Any, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(setting) as caught:
        getattr(fedfill, name)(*given, **options)
    assert "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "options", "setting"),
    [
        ("predict", {"paths": [5]}, "data"),
        ("predict", {"paths": None}, "data"),
        ("predict", {"paths": []}, "paths"),
        ("predict", {"paths": np.zeros((2, 3), np.float32)}, "data"),
        ("resume", {"algorithm": 5}, "algorithm"),
        ("resume", {"on_round": 5}, "on_round"),
        ("export", {"to": 5}, "to"),
        ("export", {"data_dir": 5}, "data_dir"),
        ("audit", {"data": 5}, "data"),
    ],
)
def test_an_argument_of_another_kind_beside_a_run(done: Result, name: str, options: Any, setting: str) -> None:
    with refused(setting):
        getattr(fedfill, name)(done, **options)


def test_what_came_back_is_taken_wherever_a_folder_is(done: Result, tmp_path: Path) -> None:
    assert fedfill.resume(done).was_finished
    assert fedfill.report(done) == done.directory / "report.html"
    exported = fedfill.export(done, tmp_path / "model")
    images = np.zeros((2, 8, 8), np.uint8)
    found = [fedfill.predict(place, images).classes for place in (done, exported, tmp_path / "model")]
    assert found[0] == found[1] == found[2]
    after = fedfill.run("fedavg", out=tmp_path / "after", start_from=done, **TINY)
    assert any(str(done.directory) in note for note in after.summary["notes"])


def test_what_on_run_returns(tmp_path: Path) -> None:
    folder = tmp_path / "table"
    folder.mkdir()
    (folder / "table.toml").write_text(
        'title = "T"\nsource = "S"\nfigures = ["accuracy"]\nseeds = [0]\n[options]\nclients = 2\nrounds = 1\n[[rows]]\nname = "A"\nalgorithm = "fedavg"\n'
    )
    wrong: Any = lambda label, seed: 3  # noqa: E731
    for call in (
        lambda: fedfill.compare(["fedavg"], seeds=[0], out=tmp_path / "runs", on_run=wrong, clients=2, rounds=1),
        lambda: fedfill.reproduce(folder, out=tmp_path / "reproduced", on_run=wrong),
    ):
        with refused("on_run", "found 3"):
            call()


def test_data_at_a_path(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("a,label\n" + "".join(f"{k},{'xy'[k % 2]}\n" for k in range(40)))
    results = [
        fedfill.run("fedavg", data=data, out=tmp_path / type(data).__name__, **TINY) for data in (table, str(table))
    ]
    assert results[0].summary["weights_sha256"] == results[1].summary["weights_sha256"]


def test_words_for_what_was_given() -> None:
    assert shown(None) == "None"
    assert shown(np.zeros(3)) == "a value of type ndarray"
    assert shown(["long"] * 100) == "a value of type list"
    with pytest.raises(FedfillError, match=r"^out: "):
        path_of("out", "~nobody-of-this-name/x")
