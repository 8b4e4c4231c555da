"""The run directory: what a run leaves behind, written so that a kill at any moment leaves nothing half-written behind.

Whole files are written beside their place and moved over it in one step. Lines of ``rounds.jsonl`` are appended; what the
last checkpoint does not vouch for is cut off at a resume.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import tomli_w

from fedfill import tree
from fedfill.errors import FedfillError
from fedfill.tree import Tree

_OWN = {"experiment.toml", "rounds.jsonl", "summary.json", "checkpoint", "partition.json", "samples", ".lock"}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write below into one sentence.

    Args:
        path: What is being written.

    Raises:
        FedfillError: Where the disk is full, or the place can't be written to.
    """
    try:
        yield
    except OSError as error:
        raise FedfillError(
            f"out: can't write {path} ({error.strerror or error}); what was checkpointed before is intact: "
            "make room or choose another folder, then use 'fedfill resume'"
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write a whole file or none of it.

    Args:
        path: Its parent is created.
        data: All of its bytes.

    Raises:
        FedfillError: Where it can't be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def to_json(value: Any) -> bytes:
    """JSON as people like to read it; NaN and infinity are refused."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


class RunDirectory:
    """One run's folder.

    Args:
        path: Where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    def open(self, experiment: Mapping[str, Any], digest: str) -> None:
        """Make the folder this experiment's, or make sure that it is, and keep other processes out.

        Args:
            experiment: Every setting, resolved.
            digest: Identifies the experiment.

        Raises:
            FedfillError: Where the folder holds something else, is in use, or can't be written.
        """
        if self.path.exists() and not self.path.is_dir():
            raise FedfillError(f"out: {self.path} is a file; choose a folder that is new or holds this experiment")
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / "experiment.toml").exists():
            strangers = [p.name for p in self.path.iterdir() if p.name not in _OWN and not p.name.endswith(".tmp")]
            if strangers:
                raise FedfillError(
                    f"out: {self.path} is not empty and holds no run ({sorted(strangers)[0]} lies there); "
                    "choose a folder that is new or holds this experiment"
                )
        elif self.digest() != digest:
            raise FedfillError(f"out: {self.path} holds another experiment; choose another folder or remove it")
        self.lock()
        if not (self.path / "experiment.toml").exists():
            document = {key: value for key, value in experiment.items() if value is not None}
            self.write("experiment.toml", tomli_w.dumps({**document, "digest": digest}).encode())

    def lock(self) -> None:
        """Keep other processes out of the folder until `close`.

        Raises:
            FedfillError: Where another process holds it.
        """
        with writing(self.path):
            self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise FedfillError(
                f"out: another process is running in {self.path}; wait for it or choose another folder"
            ) from error

    def close(self) -> None:
        """Let other processes in again."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def read_experiment(self) -> dict[str, Any]:
        """The settings in ``experiment.toml``.

        Returns:
            The document, with its digest.

        Raises:
            FedfillError: Where there is none or it can't be read.
        """
        path = self.path / "experiment.toml"
        if not path.exists():
            raise FedfillError(f"resume: {self.path} holds no run (there is no experiment.toml)")
        return read_toml(path)

    def digest(self) -> str:
        """The digest of the experiment that the folder holds."""
        return str(self.read_experiment().get("digest", ""))

    def write(self, name: str, data: bytes) -> None:
        """Write one of the folder's files atomically."""
        write_atomically(self.path / name, data)

    def append_round(self, record: Mapping[str, Any]) -> None:
        """Append one line to ``rounds.jsonl``."""
        path = self.path / "rounds.jsonl"
        with writing(path), path.open("a") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

    def rounds(self) -> list[dict[str, Any]]:
        """The whole lines of ``rounds.jsonl``, up to the first torn one."""
        path = self.path / "rounds.jsonl"
        records: list[dict[str, Any]] = []
        if path.exists():
            for line in path.read_text(errors="replace").splitlines():
                try:
                    records.append(json.loads(line))
                except json.JSONDecodeError:
                    break
        return records

    def cut_rounds(self, done: int) -> list[dict[str, Any]]:
        """Cut ``rounds.jsonl`` back to the rounds that a checkpoint vouches for.

        Args:
            done: Rounds in the checkpoint.

        Returns:
            Their records.

        Raises:
            FedfillError: Where records are missing.
        """
        records = self.rounds()[:done]
        if len(records) < done:
            raise FedfillError(
                f"resume: {self.path / 'rounds.jsonl'} holds {len(records)} rounds and the checkpoint {done}; "
                "the folder was changed: start again in a new one"
            )
        self.write("rounds.jsonl", "".join(json.dumps(record) + "\n" for record in records).encode())
        return records

    def write_checkpoint(self, state: Tree) -> None:
        """Replace the checkpoint: one safetensors file with its structure as JSON inside."""
        self.write("checkpoint/state.safetensors", tree.to_bytes(state))

    def read_checkpoint(self) -> Tree | None:
        """The checkpoint, or None where there is none yet.

        Returns:
            What was written.

        Raises:
            FedfillError: Where it is damaged.
        """
        path = self.path / "checkpoint" / "state.safetensors"
        if not path.exists():
            return None
        try:
            return tree.from_bytes(path.read_bytes())
        except (ValueError, OSError) as error:
            raise FedfillError(f"resume: the checkpoint {path} is damaged; start again in a new folder") from error

    def summary(self) -> dict[str, Any] | None:
        """The summary of a finished run, or None.

        Returns:
            The document.

        Raises:
            FedfillError: Where it is damaged.
        """
        path = self.path / "summary.json"
        if not path.exists():
            return None
        try:
            document: dict[str, Any] = json.loads(path.read_text())
        except (ValueError, OSError) as error:
            raise FedfillError(f"out: {path} is damaged; remove it and resume the run") from error
        return document


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML document.

    Args:
        path: The file.

    Returns:
        Its contents.

    Raises:
        FedfillError: Where it can't be read.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise FedfillError(f"config: can't read {path} ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedfillError(f"config: {path} is not TOML ({error})") from error
