"""What was found by attacking the library: files that never end, names that nobody can read, images that fill the memory.

Each row is one way in, with the setting that the sentence has to be about and what it has to say.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tests.data.made import GREY, KINDS, encoded, write, write_folder
from tests.helpers import refused

from fedfill.data.names import is_place
from fedfill.data.sources import load
from fedfill.errors import FedfillError
from fedfill.models import networks
from fedfill.runs.directory import read_toml
from fedfill.studies.grid import read_grid

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """A file that never ends must not be waited for."""

    def end(*_: Any) -> None:
        pytest.fail("it hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def claim(width: int, height: int) -> bytes:
    """A PNG of a hundred bytes that says it has so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def table(path: Path, metadata: bytes | None = None) -> None:
    """A Parquet file of images, with the metadata of `datasets` or none."""
    write(path, GREY, KINDS)
    if metadata is not None:
        pq.write_table(pq.read_table(path).replace_schema_metadata({b"huggingface": metadata}), path)


def names(given: Any) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        table(
            folder / "train.parquet",
            json.dumps({"info": {"features": {"label": {"names": given}}}}).encode(),
        )
        return load(f"./{folder.name}")

    return make


def image(data: bytes, **environment: str) -> Callable[[Path], Any]:
    """A data set whose last image is this."""

    def make(folder: Path) -> Any:
        write(folder / "train.parquet", [*map(encoded, GREY[:-1]), data], KINDS)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            return load(f"./{folder.name}")

    return make


def pipe(name: str, kind: str = "pipe") -> Callable[[Path], Any]:
    """A data set of which one file is a pipe, or leads to a device."""

    def make(folder: Path) -> Any:
        folder.mkdir()
        if name == "test.parquet":
            pq.write_table(pa.table({"x": [1.0, 2.0] * 9, "label": ["a", "b"] * 9}), folder / "train.parquet")
        if name.endswith("png"):
            write_folder(folder)
        endless(folder / name, kind)
        return load(f"./{folder.name}")

    return make


def endless(path: Path, kind: str) -> Path:
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    return path


def settings(read: Callable[[Path], Any], kind: str) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        folder.mkdir()
        return read(endless(folder / "own.toml", kind))

    return make


def text(content: bytes) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        folder.mkdir()
        (folder / "own.toml").write_bytes(content)
        return read_toml(folder / "own.toml")

    return make


def class_folders(*found: bytes) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        for name in found:
            place = os.path.join(os.fsencode(folder), name)
            os.makedirs(place)
            for number in range(4):
                Path(os.fsdecode(place), f"{number}.png").write_bytes(encoded(GREY[number]))
        return load(f"./{folder.name}")

    return make


NO_FILE = "no regular file"
ONCE, WORDS, READABLE = "each name once", "a list of words", "names of one line that can be read"

ROWS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "a pipe as train.parquet": (pipe("train.parquet"), "data", NO_FILE),
    "a device as train.parquet": (pipe("train.parquet", "device"), "data", NO_FILE),
    "a pipe as a shard": (pipe("train-00000-of-00001.parquet"), "data", NO_FILE),
    "a pipe as test.parquet": (pipe("test.parquet"), "data", NO_FILE),
    "a pipe as train.csv": (pipe("train.csv"), "data", "neither"),
    "a pipe among images": (pipe("ant/9.png"), "data", NO_FILE),
    "a device among images": (pipe("ant/9.png", "device"), "data", NO_FILE),
    "a pipe of settings": (settings(read_toml, "pipe"), "config", NO_FILE),
    "a device of settings": (settings(read_toml, "device"), "config", NO_FILE),
    "a pipe of a grid": (settings(read_grid, "pipe"), "grid", NO_FILE),
    "settings of megabytes": (text(b"#" * 5_000_000), "config", "bytes"),
    "settings nested deeply": (text(b"a=" + b"[" * 100_000), "config", "nested too deeply"),
    "settings in another encoding": (text(b"a='\xff'"), "config", "not TOML"),
    "a class in another encoding": (class_folders(b"a", b"caf\xe9"), "class names of the data", READABLE),
    "a domain in another encoding": (
        class_folders(b"\xe9/a", b"\xe9/b", b"e/a", b"e/b"),
        "domains of the data",
        READABLE,
    ),
    "metadata nested deeply": (
        lambda folder: (table(folder / "train.parquet", b"[" * 100_000), load(f"./{folder.name}")),
        "data",
        "metadata",
    ),
    "metadata that are no JSON": (
        lambda folder: (table(folder / "train.parquet", b"{"), load(f"./{folder.name}")),
        "data",
        "metadata",
    ),
    "names that repeat": (names(["a", "b", "a"]), "class names of the data", ONCE),
    "names that are numbers": (names([1, 2, 3]), "data", WORDS),
    "names that are no list": (names("abc"), "data", WORDS),
    "names that are a table": (names({"a": 1, "b": 2, "c": 3}), "data", WORDS),
    "a name that is nothing": (names(["a", None, "c"]), "data", WORDS),
    "half a letter as a name": (names(["a", "\ud800", "c"]), "class names of the data", READABLE),
    "a zero character in a name": (names(["a", "\0", "c"]), "class names of the data", READABLE),
    "an image that says it is huge": (image(claim(60_000, 60_000)), "data", "FEDFILL_MAX_PIXELS"),
    "an image that says it is large": (image(claim(13_000, 13_000)), "data", "FEDFILL_MAX_PIXELS"),
    "an image above the user's limit": (image(claim(5, 5), FEDFILL_MAX_PIXELS="24"), "data", "5x5 pixels"),
    "a limit that is none": (image(claim(5, 5), FEDFILL_MAX_PIXELS="many"), "FEDFILL_MAX_PIXELS", "whole number"),
    **{
        f"a PNG without its last {cut} bytes": (image(encoded(GREY[0])[:-cut]), "data", "cut short")
        for cut in (1, 4, 5, 8, 12, 13, 16, 20)
    },
}


@pytest.mark.parametrize("row", ROWS)
def test_an_attack_is_answered_with_one_sentence(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    attack, setting, fact = ROWS[row]
    with pytest.raises(FedfillError) as caught:
        attack(Path("place"))
    said = str(caught.value)
    assert said.startswith(setting), said
    assert fact in said
    assert "\n" not in said
    assert len(said) < 500


def test_a_sound_neighbour_of_each_attack_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_place("./place")
    table(Path("place/train.parquet"), b'{"info": {}}')
    assert len(load("./place").train) == 9
    assert names(["c", "a", "b"])(Path("named")).class_names == ("c", "a", "b")
    large = Path("large")
    # 4 x 5 pixels are just allowed, and bytes behind the end of a PNG are no harm
    assert image(encoded(GREY[0]) + b"more", FEDFILL_MAX_PIXELS="20")(large).train.inputs.shape == (9, 1, 4, 5)
    assert Image.MAX_IMAGE_PIXELS == 89_478_485


def test_a_limit_above_pillow_s_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 8)
    with pytest.raises(FedfillError, match="FEDFILL_MAX_PIXELS"):
        image(encoded(GREY[0]))(Path("refused"))
    assert len(image(encoded(GREY[0]), FEDFILL_MAX_PIXELS="20")(Path("read")).train) == 9


def test_a_network_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 43264000000 bytes")

    monkeypatch.setattr(networks, "_built", full)
    with refused("model", "'mlp'", "1x9000x9000", "memory", "image_size"):
        networks.build("mlp", (1, 9000, 9000), 2, networks.ModelSettings(), seed=0)
