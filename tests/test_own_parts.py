"""Parts of one's own from files and packages: they run like built-in ones, go on from the command line, and slips name file and line."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from tests.cli.calls import fedfill_, sha
from tests.cli.calls import refused as slip
from tests.helpers import refused
from torch import nn

import fedfill
from fedfill import own_parts
from fedfill.algorithms import find, known_algorithms, parse_variant
from fedfill.algorithms._registry import registered
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.division import federate
from fedfill.own_parts import Source, absolute, entry_points, is_reference, load, split
from fedfill.tree import Record

FILE = '''
from dataclasses import dataclass

import numpy as np
from pydantic import Field
from torch import nn

from beside import SCALE
from fedfill.algorithms.fedavg import FedAvg
from fedfill.tree import Record


@dataclass(frozen=True)
class Kept(Record):
    rounds: int


class Slow(FedAvg):
    """FedAvg that steps a part of the way only."""

    name = "slow"
    step: float = Field(default=1.0, gt=0, le=1)

    def server_state(self, initial):
        return {**super().server_state(initial), "kept": Kept(0)}

    def combine(self, server, weights, mean, replies):
        server.state.kept = Kept(server.state.kept.rounds + 1)
        return {k: w + self.step * SCALE * (mean[k] - w) for k, w in server.model(weights).state_dict().items()}


class Net(nn.Sequential):
    def __init__(self, shape, classes=3):
        super().__init__(nn.Flatten(), nn.Linear(int(np.prod(shape)), classes))


def halves(labels, clients, generator):
    return np.array_split(generator.permutation(len(labels)), clients)


NET = Net((1, 8, 8), 10)
NUMBER = 3
'''
QUICK = {"clients": 3, "rounds": 2, "local_epochs": 1}
TINY = ["--clients", "3", "--rounds", "2", "--set", "local_epochs=1"]


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with the file and one that it imports; what is loaded is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(own_parts, "_executed", {})
    monkeypatch.setattr(own_parts, "_found", [])
    known_algorithms()
    known, kinds, modules = dict(registered), dict(Record._kinds), set(sys.modules)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "my.py").write_text(FILE)
    (tmp_path / "code" / "beside.py").write_text("SCALE = 1.0\n")
    yield
    for registry, before in ((registered, known), (Record._kinds, kinds)):
        registry.clear()
        registry.update(before)
    for name in set(sys.modules) - modules:
        if name.startswith("own_") or name in ("beside", "tiny_parts"):
            del sys.modules[name]


def test_the_form_of_a_reference() -> None:
    assert all(map(is_reference, ("my.py:A", "a/b/my.py:A:x=1,y=2", "my.py", "/x y/my.py:")))
    assert not any(map(is_reference, ("fedavg", "fedavg:local=my.py:A", "dirichlet:0.5", "my.pyc:A", 3, None)))
    assert split("a/my.py:A:x=1:2,y=3") == ("a/my.py:A", "x=1:2,y=3")
    assert parse_variant("a/my.py:A:x=1,y=b:2") == ("a/my.py:A", {"x": "1", "y": "b:2"})
    assert parse_variant("a/my.py:A") == ("a/my.py:A", {})
    assert absolute("code/my.py:Slow", "model") == f"{Path('code/my.py').resolve()}:Slow"


def test_a_file_is_executed_once_and_again_after_a_change() -> None:
    first = load("code/my.py:Slow", "algorithm")
    assert load("code/../code/my.py:Slow", "algorithm") is first is find("code/my.py:Slow") is find("slow")
    Path("code/my.py").write_text(FILE.replace("default=1.0", "default=0.5"))
    second = load("code/my.py:Slow", "algorithm")
    assert (first().step, second().step) == (1.0, 0.5)
    assert find("slow") is second
    assert first.__module__ == second.__module__ == "own_my"
    # a second file of that name gets along with the first
    Path("my.py").write_text(FILE.replace("default=1.0", "default=0.25"))
    third = load("my.py:Slow", "algorithm")
    assert third().step == 0.25
    assert third.__module__.startswith("own_my_")
    assert own_parts.origin_of(third) == f"{Path('my.py').resolve()}:Slow"


def test_own_parts_on_the_command_line_as_in_python() -> None:
    words = [
        "code/my.py:Slow",
        *TINY,
        "--model",
        "code/my.py:Net",
        "--partition",
        "code/my.py:halves",
        "--set",
        "step=0.5",
    ]
    line = sha(fedfill_("run", *words, "--out", "runs/a"))
    kind, net, halves = (load(f"code/my.py:{name}", "model") for name in ("Slow", "Net", "halves"))
    result = fedfill.run(kind, model=net, partition=halves, **QUICK, step=0.5, out="runs/c")
    assert result.summary["weights_sha256"][:16] in line
    assert result.summary["algorithm"] == "slow"
    documents = [tomllib.loads(Path(f"runs/{run}/experiment.toml").read_text()) for run in "ac"]
    place = str(Path("code/my.py").resolve())
    assert documents[0]["own"] == {
        "algorithm": f"{place}:Slow",
        "model": f"{place}:Net",
        "partition": f"{place}:halves",
    }
    assert [documents[0][what] for what in ("algorithm", "model", "partition")] == [
        "slow",
        "python:Net",
        "python:halves",
    ]
    assert documents[1] == documents[0]
    # an experiment.toml is a --config too
    assert sha(fedfill_("run", "--config", "runs/a/experiment.toml", "--out", "runs/d")) == line


def test_a_run_goes_on_from_the_command_line_with_the_same_source_alone() -> None:
    words = ["code/my.py:Slow", "--model", "code/my.py:Net", "--partition", "code/my.py:halves", "--clients", "3"]
    words += ["--set", "local_epochs=1"]
    whole = sha(fedfill_("run", *words, "--rounds", "3", "--out", "runs/whole"))
    fedfill_("run", *words, "--rounds", "2", "--out", "runs/a")
    own_parts._executed.clear()
    registered.pop("slow")
    assert sha(fedfill_("resume", "runs/a", "--rounds", "3")) == whole
    Path("code/my.py").write_text(FILE.replace("self.step * SCALE", "self.step * 2 * SCALE"))
    said = slip(["resume", "runs/a"], "resume")
    assert "not the ones that runs/a was started with" in said
    # what the class names in its file counts, and what it does not name does not
    Path("code/my.py").write_text(FILE.replace("(Record):\n    rounds: int", "(Record):\n    rounds: float"))
    slip(["resume", "runs/a"], "resume")
    Path("code/my.py").write_text(FILE.replace("NUMBER = 3", "NUMBER = 4  # a comment"))
    assert sha(fedfill_("resume", "runs/a")) == whole
    Path("code/my.py").rename("code/moved.py")
    assert "there is no file" in slip(["resume", "runs/a"], "algorithm")
    Path("code/moved.py").write_text(FILE)
    moved = [word for what, name in (("algorithm", "Slow"), ("model", "Net"), ("partition", "halves"))
             for word in (f"--{what}", f"code/moved.py:{name}")]  # fmt: skip
    assert sha(fedfill_("resume", "runs/a", *moved)) == whole


def test_a_comparison_takes_files_and_classes() -> None:
    kind = find("code/my.py:Slow")
    options: dict[str, Any] = {"model": "code/my.py:Net", "seeds": [0], **QUICK}
    comparison = fedfill.compare([kind, "code/my.py:Slow:step=0.5", "fedavg"], out="runs/x", **options)
    assert [row.label for row in comparison.rows] == ["slow", "slow:step=0.5", "fedavg"]
    shas = {row.results[0].summary["weights_sha256"] for row in comparison.rows if row.results[0]}
    assert len(shas) == 3
    document = tomllib.loads(Path("runs/x/slow-step=0.5-seed0/experiment.toml").read_text())
    assert document["own"]["algorithm"] == f"{Path('code/my.py').resolve()}:Slow"
    Path("my.py").write_text(FILE)
    with refused("algorithm", "slow"):
        fedfill.compare([kind, "my.py:Slow"], **options)
    with refused("algorithm", "not_one"):
        fedfill.compare([lambda: None, "fedavg", type("not_one", (), {})], **options)


def test_own_aggregation_in_another_algorithm() -> None:
    result = fedfill.run("fedprox", aggregation="code/my.py:Slow:step=0.5", **QUICK, out="runs/a")
    document = tomllib.loads(Path("runs/a/experiment.toml").read_text())
    assert document["settings"]["aggregation"] == "slow:step=0.5"
    own_parts._executed.clear()
    registered.pop("slow")
    assert fedfill.resume("runs/a").summary == result.summary


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("x = 1\ndef f(:\n", ["line 2", "SyntaxError"]),
        ("x = 1\n\nimport no_such_package\n", ["line 3", "No module named 'no_such_package'"]),
        ("def f():\n    return 1 / 0\nf()\n", ["line 2", "ZeroDivisionError"]),
        ("from fedfill.algorithms.fedavg import FedAvg\nclass A(FedAvg):\n    name = 'fedprox'\n", ["line 2", "taken"]),
        ("x = 1\n", ["has no 'Slow'"]),
        ("class Slows: pass\n", ["did you mean 'Slows'"]),
        ("class Slow: pass\n", ["line 1", "subclass of Algorithm"]),
        ("\nSlow = 3\n", ["subclass of Algorithm"]),
        ("from fedfill.algorithms.fedavg import FedAvg\nclass Slow(FedAvg): pass\n", ["line 2", "no name of its own"]),
    ],
)  # fmt: skip
def test_slips_in_a_file(text: str, facts: list[str]) -> None:
    Path("wrong.py").write_text(text)
    said = slip(["run", "wrong.py:Slow"], "algorithm")
    assert [fact for fact in [*facts, "wrong.py'"] if fact not in said] == [], said


@pytest.mark.parametrize("word", ["missing.py:Slow", "code/my.py", "code/my.py:", "code/my.py:Slow:step"])
def test_slips_in_a_reference(word: str) -> None:
    slip(["run", word], "algorithm")


@pytest.mark.parametrize(
    ("setting", "word", "facts"),
    [
        ("model", "code/my.py:NET", ["Net", "a class or a function"]),
        ("model", "code/my.py:NUMBER", ["int"]),
        ("model", "code/my.py:halves", ["needs 'labels'"]),
        ("model", "code/more.py:broken", ["more.py', line 4", "ValueError: no"]),
        ("model", "code/more.py:nothing", ["NoneType"]),
        ("model", "code/my.py:Net:width=3", [":width=3", "no settings", "FILE.py:NAME"]),
        ("partition", "code/my.py:halves:a=1", [":a=1", "no settings", "FILE.py:NAME"]),
        ("partition", "code/my.py:NUMBER", ["int"]),
        ("partition", "code/more.py:raising", ["more.py', line 10", "KeyError"]),
        ("partition", "code/more.py:few", ["1", "3 clients"]),
        ("partition", "code/more.py:twice", ["sample 0", "client 0", "client 1"]),
        ("partition", "code/more.py:beyond", ["index 5000"]),
        ("partition", "code/more.py:empty", ["client 2", "no samples"]),
    ],
)  # fmt: skip
def test_slips_of_networks_and_partitions(setting: str, word: str, facts: list[str]) -> None:
    Path("code/more.py").write_text(
        dedent("""
        def broken(shape):
            # ends badly
            raise ValueError("no")

        def nothing():
            pass

        def raising(labels, clients, generator):
            return {}["x"]

        def few(labels, clients, generator):
            return [[1, 2]]

        def twice(labels, clients, generator):
            return [[0, 1], [2, 0], [3]]

        def beyond(labels, clients, generator):
            return [[0], [1], [5000]]

        def empty(labels, clients, generator):
            return [[0], [1], []]
        """)
    )
    said = slip(["run", "fedavg", *TINY, f"--{setting}", word], setting)
    assert [fact for fact in facts if fact not in said] == [], said


def test_networks_from_python_as_classes_and_functions() -> None:
    def small(classes: int, width: int = 4) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, classes))

    runs = [fedfill.run("fedavg", model=small, **QUICK, out=f"runs/{k}", seed=seed) for k, seed in enumerate((0, 0, 1))]
    shas = [run.summary["weights_sha256"] for run in runs]
    assert shas[0] == shas[1] != shas[2]
    before = torch.get_rng_state()
    fedfill.run("fedavg", model=small, **QUICK, out="runs/again")
    assert torch.equal(before, torch.get_rng_state())
    with refused("model", "came from Python"):
        fedfill.resume("runs/0", rounds=3)
    assert fedfill.resume("runs/0", model=small, rounds=3).summary["rounds"] == 3


def test_lists_of_indices_from_python() -> None:
    parts = [np.arange(0, 200), list(range(300, 400)), torch.arange(400, 450)]
    result = fedfill.run("fedavg", partition=parts, client_test=0, rounds=1, local_epochs=1, out="runs/a")
    assert result.summary["clients"] == 3
    assert "The partition left out 1,088 of 1,438 training samples." in result.summary["notes"]
    for wrong, facts in (
        ([[0, 1], [1, 2]], ["sample 1"]),
        ([[0], []], ["client 1"]),
        ([[-1]], ["-1"]),
        ([[0.5]], ["float64"]),
        ([[True, False]], ["bool"]),
        ([[[0]]], ["[1, 1]"]),
        ([], ["no clients"]),
    ):
        with refused("partition", *facts):
            fedfill.run("fedavg", partition=wrong, rounds=1)
    with refused("clients", 4):
        fedfill.run("fedavg", partition=parts, clients=4, rounds=1)


def test_a_function_divides_by_the_seed_and_may_write_into_its_labels() -> None:
    def spoilt(labels: np.ndarray, clients: int, generator: np.random.Generator) -> Any:
        labels[:] = 0
        return np.array_split(generator.permutation(len(labels)), clients)

    counts = []
    for seed in (0, 0, 1):
        federation = federate("digits", partition=spoilt, clients=4, seed=seed)
        counts.append(federation.counts)
    assert counts[0] == counts[1] != counts[2]
    assert sum(map(sum, federation.counts)) > 1000
    assert min(federation.counts[0]) > 0
    with refused("clients", "a number"):
        federate("digits", partition=spoilt, seed=0)


TINY_PARTS = '''
from fedfill.algorithms.fedavg import FedAvg
from torch import nn

class Packed(FedAvg):
    """Use it never."""
    name = "packed"

class Other(FedAvg):
    name = "other"

def net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))

def stripes(labels, clients, generator):
    return [range(k, len(labels), clients) for k in range(clients)]
'''


def test_an_installed_package_offers_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    (site / "tiny_parts-1.0.dist-info").mkdir(parents=True)
    (site / "tiny_parts-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tiny-parts\nVersion: 1.0\n"
    )
    (site / "tiny_parts-1.0.dist-info" / "entry_points.txt").write_text(
        "[fedfill.algorithms]\npacked = tiny_parts:Packed\nlost = tiny_parts:Lost\nmisnamed = tiny_parts:Other\n"
        "[fedfill.models]\ntiny_net = tiny_parts:net\n[fedfill.partitions]\nstripes = tiny_parts:stripes\n"
    )
    (site / "tiny_parts.py").write_text(TINY_PARTS)
    monkeypatch.syspath_prepend(site)
    assert set(entry_points("algorithms")) == {"packed", "lost", "misnamed"}
    assert find("packed").__module__ == "tiny_parts"
    assert "packed" in known_algorithms()
    assert "packed" in fedfill_("list", "algorithms").stdout
    words = ["packed", *TINY, "--model", "tiny_net", "--partition", "stripes", "--out", "runs/a"]
    line = sha(fedfill_("run", *words))
    document = tomllib.loads(Path("runs/a/experiment.toml").read_text())
    assert [document[what] for what in ("algorithm", "model", "partition")] == ["packed", "tiny_net", "stripes"]
    assert "own" not in document
    assert sha(fedfill_("resume", "runs/a")) == line
    assert "tiny-parts" in slip(["run", "lost"], "algorithm")
    assert "'other'" in slip(["run", "misnamed"], "algorithm")
    slip(["run", "pack", *TINY], "algorithm")


def test_another_process_executes_the_same_text() -> None:
    """What a worker of Ray does: the classes have the names that they have in the driver, wherever the file lies."""
    kind = find("code/my.py:Slow")
    source = own_parts.sources()[0]
    del sys.modules["own_my"]
    own_parts.execute(Source(source.module, "/nowhere/my.py", source.text), "engine")
    again = sys.modules["own_my"].Slow
    assert again is not kind
    assert (again.__module__, again.__qualname__) == (kind.__module__, kind.__qualname__)
    assert issubclass(again, FedAvg)


def test_a_deployment_refuses_a_file_that_its_parties_do_not_have() -> None:
    pytest.importorskip("flwr")
    slip(["deploy", "init", "app", "code/my.py:Slow"], "algorithm")


@pytest.mark.parametrize("code", ["3", "", "0"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_file_that_would_end_the_program_is_a_sentence(code: str, inside: bool, tmp_path: Path) -> None:
    leave = f"raise SystemExit({code})"
    body = f"class Net(nn.Module):\n    def __init__(self):\n        {leave}\n" if inside else f"{leave}\n"
    file = tmp_path / "leaves.py"
    file.write_text(f"from torch import nn\n{body}")
    with refused("model", "leaves.py", f"line {4 if inside else 2}", f"SystemExit({code})"):
        fedfill.run("fedavg", model=f"{file}:Net", data="digits", clients=2, rounds=1, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
