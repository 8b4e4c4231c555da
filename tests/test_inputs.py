"""Every public input as chance would have it: settings, TOML, Parquet, CSV, folders and folders of runs.

Whatever is given is taken or refused in one sentence; a traceback, and a file that is changed by being read, are mistakes. With
``FEDFILL_EXAMPLES=5000`` each test tries so many inputs; as they are, they are the same ones each time.
"""

from __future__ import annotations

import os
import shutil
import string
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.data.made import GREY, KINDS, NAMES, encoded, write

import fedfill
from fedfill.algorithms import find
from fedfill.cli.options import _merged
from fedfill.data.dataset import Source
from fedfill.data.sources import load
from fedfill.errors import FedfillError, checked
from fedfill.experiment.prepare import Prepared, arrange
from fedfill.experiment.settings import Experiment
from fedfill.studies.grid import read_grid

EXAMPLES = int(os.environ.get("FEDFILL_EXAMPLES", "0"))


def tries(usual: int) -> Any:
    """So many inputs in a test, the same each time, or as many others as were asked for."""
    quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(
        max_examples=EXAMPLES or usual, derandomize=not EXAMPLES, database=None, suppress_health_check=quiet
    )


def answered(call: Callable[[], Any]) -> Any:
    """What a call gives, or None where it is refused in one sentence; all else is a mistake."""
    try:
        return call()
    except FedfillError as error:
        said = str(error)
        assert said
        assert len(said.splitlines()) == 1, said
        said.encode()  # which a terminal has to show
        assert "Traceback" not in said
        return None


def new(folder: Path) -> Path:
    """A folder in a new one, which nobody has read."""
    place = Path(tempfile.mkdtemp(dir=folder)) / "x"
    place.mkdir()
    return place


# ---- settings

WORDS = st.text(max_size=12) | st.sampled_from(
    [
        "",
        "none",
        "auto",
        "inf",
        "nan",
        "-1",
        "1e400",
        "digits",
        "iid",
        "dirichlet:0",
        "classes:2",
        "flower",
        "ray",
        "mlp",
        "~",
        "..",
        "a:b",
    ]
)
SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([10**400, -(2**70), 2**64]) | st.floats() | WORDS
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=4
)
OPTIONS = sorted(Experiment.model_fields.keys() - {"algorithm", "settings", "model_settings", "own", "data_dir"})
SETTINGS = [
    "local_epochs",
    "batch_size",
    "learning_rate",
    "optimizer",
    "mu",
    "model.width",
    "model.latent",
    "target_epsilon",
    "wrong",
]
ALGORITHMS = st.sampled_from(
    ["fedavg", "fedprox", "fed3r", "feddpms", "fraug", "sdafl", "dpfedavg", "local", "no such"]
)


@tries(60)
@given(ALGORITHMS, st.dictionaries(st.sampled_from([*OPTIONS, *SETTINGS]), VALUES, max_size=3))
def test_settings(algorithm: str, options: dict[str, Any]) -> None:
    asked = {"data": "digits", "partition": "iid", "model": "auto", "clients": 3, "data_fraction": 0.05, **options}
    if isinstance(asked["clients"], int) and asked["clients"] > 100:
        return  # which would be allowed, and take long
    prepared = answered(lambda: arrange(algorithm, **asked))
    assert prepared is None or isinstance(prepared, Prepared)
    if prepared is not None:  # what is taken is written down, and read back as the same
        document = prepared.experiment.model_dump(exclude_none=True)
        assert checked(Experiment, document) == checked(Experiment, checked(Experiment, document).model_dump())


def test_the_settings_above_are_real_ones() -> None:
    known = {*find("fedprox").model_fields, *find("fed3r").model_fields, "model.width", "model.latent"}
    assert set(SETTINGS) - known == {"wrong"}


# ---- TOML

WHOLE = tomli_w.dumps(
    {
        "digest": "0123456789abcdef", "version": fedfill.__version__, "algorithm": "fedavg", "data": "digits", "clients": 4,
        "partition": "dirichlet:0.5", "seed": 0, "settings": {"local_epochs": 1}, "model_settings": {"width": 8}, "own": {},
    }
).encode()  # fmt: skip
GRID = b'algorithms = ["fedavg"]\nseeds = [0]\n[options]\nclients = 3\n[grid]\nlearning_rate = [0.1, 0.2]\n'


def damaged(whole: bytes) -> st.SearchStrategy[bytes]:
    """A file of which a part is missing, is another or is there twice."""
    place = st.integers(0, len(whole))

    def damage(parts: tuple[int, int, bytes]) -> bytes:
        start, end = sorted(parts[:2])
        return whole[:start] + parts[2] + whole[end:]

    near = st.tuples(place, st.integers(0, 4), st.binary(max_size=4)).map(
        lambda t: whole[: t[0]] + t[2] + whole[t[0] + t[1] :]
    )
    return near | st.tuples(place, place, st.binary(max_size=8)).map(damage)


@tries(80)
@given(damaged(WHOLE) | st.dictionaries(WORDS, VALUES, max_size=4).map(lambda d: _dumped(d)))
def test_a_file_of_settings(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "own.toml"
    file.write_bytes(content)
    options = answered(lambda: _merged({}, file, (), {}))
    assert options is None or isinstance(options, dict)
    assert file.read_bytes() == content


@tries(60)
@given(damaged(GRID) | st.dictionaries(WORDS, VALUES, max_size=4).map(lambda d: _dumped(d)))
def test_a_grid(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "grid.toml"
    file.write_bytes(content)
    answered(lambda: read_grid(file))


def _dumped(document: dict[str, Any]) -> bytes:
    """TOML of what TOML can say."""
    try:
        return tomli_w.dumps(document).encode()
    except (TypeError, ValueError):
        return b"x = 1"


# ---- Parquet


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small set of images."""
    return write(tmp_path_factory.mktemp("whole") / "train.parquet", GREY, KINDS, NAMES).read_bytes()


@tries(120)
@given(st.data())
def test_a_damaged_parquet_file(tmp_path: Path, parquet: bytes, data: st.DataObject) -> None:
    content = data.draw(damaged(parquet))
    place = new(tmp_path)
    (place / "train.parquet").write_bytes(content)
    _read(place)


COLUMNS = st.sampled_from(["image", "img", "label", "fine_label", "domain", "x", "", " label"])
CELLS: list[st.SearchStrategy[Any]] = [
    st.integers(-2, 300), st.floats(), st.text(max_size=3), st.booleans(), st.none(), st.binary(max_size=4), st.just({"bytes": encoded(GREY[0]), "path": None}),
    st.just(encoded(GREY[0])), st.lists(st.integers(0, 1), max_size=2),
]  # fmt: skip


@tries(120)
@given(st.data())
def test_any_table_as_parquet(tmp_path: Path, data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 12))
    columns = {
        name: data.draw(st.lists(data.draw(st.sampled_from(CELLS)), min_size=rows, max_size=rows))
        for name in data.draw(st.lists(COLUMNS, max_size=4, unique=True))
    }
    place = new(tmp_path)
    try:
        table = pa.table(columns)
    except (pa.ArrowException, TypeError):
        return
    pq.write_table(table, place / "train.parquet")
    _read(place)


def _read(place: Path) -> None:
    source = answered(lambda: load(f"{place}/"))
    if source is not None:
        assert isinstance(source, Source)
        assert len(source.train) == len(source.train.labels) > 0
        assert 0 <= int(source.train.labels.min()) <= int(source.train.labels.max()) < len(source.class_names)
        assert np.isfinite(source.train.inputs.double().numpy()).all()
    shutil.rmtree(place.parent, ignore_errors=True)


# ---- CSV

LINES = st.lists(
    st.lists(
        st.sampled_from(
            ["label", "x", "1", "2.5", "a", "b", "", "nan", "-inf", "1e400", "true", '"', "é", "\0", "label "]
        ),
        min_size=1,
        max_size=3,
    ).map(",".join),
    max_size=12,
).map("\n".join)


@tries(120)
@given(
    LINES.map(lambda text: ("label,x\n" + text).encode())
    | LINES.map(str.encode)
    | damaged(b"x,y,label\n" + b"".join(b"%d,%d.5,%s\n" % (i, i, b"ab"[i % 2 : i % 2 + 1]) for i in range(12)))
)
def test_a_csv_file(tmp_path: Path, content: bytes) -> None:
    place = new(tmp_path)
    (place / "train.csv").write_bytes(content)
    _read(place)


# ---- folders

LETTERS = st.text(string.ascii_lowercase + ". é", min_size=1, max_size=4).map(str.encode) | st.sampled_from(
    [b"train", b"test", b"\xff\xfe", b"train.csv", b"train.parquet", b"a.png", b"b.jpg", b".png", b"__MACOSX"]
)
CONTENTS = st.sampled_from(
    [b"", b"hello", encoded(GREY[0]), encoded(GREY[1]), encoded(GREY[0])[:-9], b"label,x\na,1\n"]
)
TREES = st.dictionaries(st.lists(LETTERS, min_size=1, max_size=4).map(tuple), CONTENTS, max_size=8)


@tries(120)
@given(TREES)
def test_a_folder(tmp_path: Path, tree: dict[tuple[bytes, ...], bytes]) -> None:
    place = new(tmp_path)
    for parts, content in tree.items():
        file = os.path.join(os.fsencode(place), *parts)
        try:
            os.makedirs(os.path.dirname(file), exist_ok=True)
            Path(os.fsdecode(file)).write_bytes(content)
        except OSError:  # a name that is a file and a folder at once
            continue
    _read(place)


# ---- folders of runs


ASKED: dict[str, Any] = {
    "algorithm": "fedavg", "clients": 2, "rounds": 2, "data_fraction": 0.05, "local_epochs": 1, "model": "mlp", "partition": "iid",
    "quiet": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    out = tmp_path_factory.mktemp("finished") / "run"
    fedfill.run(**ASKED, out=out)
    return out


FILES = ["experiment.toml", "summary.json", "rounds.jsonl", "partition.json", "checkpoint/state.safetensors"]


@tries(40)
@given(st.data())
def test_a_folder_of_a_run(tmp_path: Path, finished: Path, data: st.DataObject) -> None:
    place = tmp_path / "run"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(finished, place)
    file = place / data.draw(st.sampled_from(FILES))
    kind = data.draw(st.sampled_from(["damaged", "damaged", "damaged", "missing", "a folder", "a pipe"]))
    content = data.draw(damaged(file.read_bytes()))
    file.unlink()
    if kind == "damaged":
        file.write_bytes(content)
    elif kind == "a folder":
        file.mkdir()
    elif kind == "a pipe" and hasattr(os, "mkfifo"):
        os.mkfifo(file)
    answered(lambda: fedfill.report(place, out=tmp_path / "report.html"))
    answered(lambda: fedfill.load(place))
    answered(lambda: fedfill.export(place, to=tmp_path / f"model{data.draw(st.integers(0, 10**9))}"))
    if kind == "damaged":
        assert file.read_bytes() == content


@pytest.fixture
def read_only(tmp_path: Path, finished: Path) -> Iterator[Path]:
    """The finished run where nobody can write: of an administrator, who may write everywhere, on a mount of its own."""
    place = tmp_path / "medium"
    shutil.copytree(finished, place)
    if os.geteuid():
        for path in (place, *place.rglob("*")):
            path.chmod(0o555)
        yield place
        for path in (place, *place.rglob("*")):
            path.chmod(0o755)
        return
    if subprocess.run(["mount", "--bind", place, place], capture_output=True, check=False).returncode:
        pytest.skip("an administrator who may not mount can't make a read-only place")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_finished_run_on_a_read_only_medium(tmp_path: Path, finished: Path, read_only: Path) -> None:
    with pytest.raises(OSError, match=r"Read-only|Permission"):
        (read_only / "x").write_text("x")
    again = fedfill.run(**ASKED, out=read_only)
    assert again.was_finished
    assert again.summary == fedfill.run(**ASKED, out=finished).summary
    assert fedfill.resume(read_only, quiet=True).was_finished
    assert fedfill.report(read_only, out=tmp_path / "report.html").exists()
    assert fedfill.export(read_only, to=tmp_path / "model").directory == tmp_path / "model"
    assert fedfill.load(read_only).card["run"]["rounds"] == 2
    for call in (
        lambda: fedfill.report(read_only),
        lambda: fedfill.resume(read_only, rounds=3, quiet=True),
        lambda: fedfill.export(read_only),
    ):
        assert answered(call) is None


def test_the_whole_run_is_read(tmp_path: Path, finished: Path) -> None:
    assert fedfill.report(finished, out=tmp_path / "report.html").exists()
    assert fedfill.load(finished).card
