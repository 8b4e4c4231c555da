"""A slip, help, lists of names and a shell's completion import no torch, and say what the slower way would say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.calls import fedfill_, refused

import fedfill
from fedfill.algorithms import _names, known_algorithms
from fedfill.catalogue import built_in, require_algorithm
from fedfill.cli import app
from fedfill.data.sources import _load
from fedfill.errors import FedfillError
from fedfill.experiment.settings import GROUPS, HEADINGS, Experiment, group_of

CALLS = [
    ["run", "fedavgg"],
    ["run", "fedavg:rounds=3"],
    ["run", "fedavg", "--nope"],
    ["run", "fedavg", "--rounds", "0"],
    ["run", "fedavg", "--rounds", "x"],
    ["run", "fedavg", "--data", "minst"],
    ["run", "fedavg", "--model", "cnn9"],
    ["run", "fedavg", "--partition", "dir:1"],
    ["run", "fedavg", "--engine", "lokal"],
    ["run", "fedavg", "--set", "x"],
    ["compare", "fedavg", "nope:x=1"],
    ["compare", "fedavg", "--seeds", "a"],
    ["deploy", "rehearse", "fedavgg"],
    ["list", "settings", "fedavgg"],
    ["list", "algorithms"],
    ["list", "datasets"],
    ["list", "models"],
    ["list", "partitions"],
    ["list", "engines"],
    ["partition", "--clients", "0"],
    ["reproduce", "--help"],
    ["compare", "--help"],
]


def test_none_of_these_imports_torch() -> None:
    """All of them in one process, which is fast for the same reason."""
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom fedfill.cli import app\n"
        f"for words in {CALLS}:\n"
        "    done = CliRunner().invoke(app, words)\n"
        "    assert done.exit_code == (0 if words[0] == 'list' and words[1] != 'settings' or '--help' in words else 2), words\n"
        "    assert not {'torch', 'sklearn', 'matplotlib', 'datasets', 'fedfill.algorithms'} & set(sys.modules), words\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["fedavgg"], {}),
        (["zzz"], {}),
        (["fedavg:rounds=3"], {}),
        (["fedavg", "--data", "minst"], {"data": "minst"}),
        (["fedavg", "--data", "./nowhere"], {"data": "./nowhere"}),
        (["fedavg", "--model", "cnn9"], {"model": "cnn9"}),
        (["fedavg", "--partition", "dir:1"], {"partition": "dir:1"}),
        (["fedavg", "--partition", "dirichlet:x"], {"partition": "dirichlet:x"}),
        (["fedavg", "--engine", "lokal"], {"engine": "lokal"}),
        (["fedavg", "--rounds", "0"], {"rounds": 0}),
        (["fedavg", "--preset", "x"], {"preset": "x"}),
    ],
)
def test_the_sentence_is_that_of_python(
    words: list[str], options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    # other tests of this process have algorithms of their own
    own = {name: kind for name, kind in known_algorithms().items() if kind.__module__.startswith("fedfill.")}
    monkeypatch.setattr(_names, "known_algorithms", lambda: own)
    with pytest.raises(FedfillError) as caught:
        fedfill.run(words[0], **options)
    assert refused(["run", *words], str(caught.value).split(":")[0]) == str(caught.value)


@pytest.mark.parametrize(("words", "right"), [(["rnu"], "run"), (["deploy", "innit"], "init")])
def test_an_unknown_command_has_one_suggestion(words: list[str], right: str) -> None:
    said = refused(words, "command")
    assert said.endswith(f"unknown name '{words[-1]}'; did you mean '{right}'?")


@pytest.mark.parametrize(
    ("word", "beside"),
    [
        ("fedavg:rounds=3", "; allowed: fedavg, and beside it --rounds 3, or rounds=3 in Python"),
        ("fedprox:mu=1,x=2", "; allowed: fedprox, and beside it --set mu=1, or mu=1 in Python"),
        ("fedavg:", "; allowed: fedavg"),
        ("fedavgg:mu=1", "; did you mean 'fedavg'?"),
    ],
)
def test_settings_behind_the_name_of_one_run_are_told_where_they_belong(word: str, beside: str) -> None:
    said = refused(["run", word], "algorithm")
    assert word.removesuffix(":mu=1") in said
    assert said.endswith(beside)


def test_names_are_found_in_the_files_as_the_classes_have_them() -> None:
    assert [*built_in()] == [n for n, kind in known_algorithms().items() if kind.__module__.startswith("fedfill.")]
    for name in (*built_in(), "my.py:Mine"):
        require_algorithm(name)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("fedfill run fedp", "fedper\nfedpft\nfedproto\nfedprox"),
        ("fedfill compare local fedbn fedp", "fedper\nfedpft\nfedproto\nfedprox"),
        ("fedfill run fedavg --data cifar", "cifar10\ncifar100"),
        ("fedfill run fedavg --partition di", "dirichlet"),
        ("fedfill deploy rehearse sdafl-", "sdafl-ac"),
    ],
)
def test_completion_of_names(
    typed: str, offered: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_FEDFILL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    with pytest.raises(SystemExit) as ended:
        app(prog_name="fedfill")
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == offered


COMMANDS = [["grid"], ["study"], ["export"], ["predict"], ["run"], ["resume"], ["compare"], ["reproduce"], ["synthesise"], ["measure"], ["partition"], ["list"],
            ["deploy", "rehearse"], ["deploy", "init"]]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_an_example_and_plain_brackets(command: list[str]) -> None:
    text = fedfill_(*command, "--help").stdout
    assert "\\" not in text
    examples = text.split("Example")[1].splitlines()[1:]
    assert all(line.strip().startswith(f"fedfill {' '.join(command)}") for line in examples if line.strip())
    for line in examples:
        for word in line.split():
            assert not word.startswith("--") or word in text.split("Example")[0]


def test_options_stand_under_their_headings() -> None:
    text = fedfill_("run", "--help").stdout
    places = [text.index(f"\n{heading}:\n") for heading in ("Arguments", *HEADINGS, "Options")]
    assert places == sorted(places)
    for name in ("data", "rounds", "delta", "workers"):
        flag = text.index(f"\n  --{name} ")
        assert text.index(f"\n{group_of(Experiment.model_fields[name])}:\n") == max(
            place for place in places if place < flag
        )
    assert {group_of(field) for field in Experiment.model_fields.values()} == set(GROUPS.values()) == set(HEADINGS)
    assert "[required]" in fedfill_("reproduce", "--help").stdout


def test_a_folder_of_images_by_its_path(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for k in range(24):
        place = elsewhere / "photos" / "ab"[k % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(place / f"{k}.png")
    words = ["--data", "./photos", "--clients", "2", "--partition", "iid"]
    done = fedfill_("run", "fedavg", *words, "--rounds", "1", "--set", "local_epochs=1", "--out", "run")
    assert done.exit_code == 0
    assert "fedavg on photos, iid" in done.stdout
    assert "24 grey images of 8x8 pixels, 2 classes (a, b)" in " ".join(done.stdout.split())
    assert fedfill_("partition", *words).exit_code == 0
    # the whole path is recorded; where the folder has moved, a resume is told
    monkeypatch.chdir("/")
    assert fedfill_("resume", str(elsewhere / "run")).exit_code == 0
    (elsewhere / "photos").rename(elsewhere / "moved")
    _load.cache_clear()
    assert fedfill_("resume", str(elsewhere / "run")).exit_code == 2
    assert fedfill_("resume", str(elsewhere / "run"), "--data", str(elsewhere / "moved")).exit_code == 0
