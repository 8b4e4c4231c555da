"""The run directory: what a run leaves behind, written so that a kill at any moment leaves nothing half-written behind.

Whole files are written beside their place and moved over it in one step. Lines of ``rounds.jsonl`` are appended; what the
last checkpoint does not vouch for is cut off at a resume.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import secrets
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock, Timeout

from fedfill import __version__, tree
from fedfill.errors import FedfillError
from fedfill.files import SETTINGS, read_regular
from fedfill.tree import Tree

CURVES = ("curves.csv", "curves.png", "curves.svg")
"""Of a run that found survival curves."""
_FILES = {"experiment.toml", "deployment.toml", "rounds.jsonl", "summary.json", "partition.json", ".lock", *CURVES}
_FOLDERS = {"checkpoint", "samples", "model", "deployment"}
_BEFORE_ANYTHING = {"experiment.toml", "partition.json", ".lock"}
"""All that lies in the folder of a run before its first round, or step before that, is done and kept."""
_KEY = 32
"""Bytes of a key for noise."""


@contextmanager
def writing(path: Path, hint: str = "make room or choose another place", setting: str = "out") -> Iterator[None]:
    """Turn a failed write below `path` into one sentence, which begins with the setting and ends with what the user can do."""
    try:
        yield
    except OSError as error:
        raise FedfillError(f"{setting}: can't write {path} ({error.strerror or error}); {hint}") from error


def write_atomically(
    path: Path, data: bytes, hint: str = "make room or choose another place", mode: int = 0o644
) -> None:
    """Write a whole file or none of it."""
    with writing(path, hint):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, mode)  # mkstemp's files are readable by their owner alone
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def noise_key(path: Path, digest: str, new: bool = True) -> bytes:
    """A party's key for its noise in one experiment, from its own, which is made at first use; nobody else may ever read it."""
    if new and not path.exists():
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # mkstemp's files are readable by their owner alone
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(secrets.token_bytes(_KEY))
                    file.flush()
                    os.fsync(file.fileno())
                try:  # it appears whole, and whoever comes second takes the first one's
                    os.link(name, path)
                except FileExistsError:
                    pass
                except OSError:  # a file system without hard links
                    os.replace(name, path)
            finally:
                Path(name).unlink(missing_ok=True)
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        raise FedfillError(
            f"noise: the key {path} is gone, from which this run's noise came; put it back, or start in a new folder"
        ) from None
    except OSError as error:
        raise FedfillError(
            f"noise: can't read the key {path} ({error.strerror}); allowed: a file of one's own"
        ) from error
    if len(key) != _KEY:
        raise FedfillError(f"noise: found {len(key)} bytes in the key {path}; allowed: {_KEY} that nobody can guess")
    return hmac.digest(key, digest.encode(), "sha256")


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
        self._lock = FileLock(path / ".lock", timeout=0)

    def open(self, experiment: Mapping[str, Any], digest: str) -> None:
        """Make the folder this experiment's, or make sure that it is, and keep other processes out.

        A folder of another experiment that ended or was stopped before anything was kept becomes this one's.
        """
        self.check(digest)
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self.lock()
        try:
            self._take(experiment, digest)
        except BaseException:
            self.close()
            raise

    def _take(self, experiment: Mapping[str, Any], digest: str) -> None:
        """`open` behind the lock: the other experiment may have gone on until then."""
        self.check(digest)
        with writing(self.path):
            for half_written in (*self.path.glob(".*.tmp"), *self.path.glob("*/.*.tmp")):
                half_written.unlink(missing_ok=True)  # by a process that was killed
        if not (self.path / "experiment.toml").exists() or self.digest() != digest:
            self.write("experiment.toml", tomli_w.dumps({"digest": digest, **experiment}).encode())

    def check(self, digest: str) -> None:
        """Make sure, and write nothing, that the folder is new, empty or this experiment's, or that another has kept nothing there."""
        with writing(self.path):
            if not self.path.exists():
                return
            if not self.path.is_dir():
                raise FedfillError(f"out: {self.path} is a file; choose a folder that is new or holds this experiment")
            names = sorted(p.name for p in self.path.iterdir())
            self._check_kinds("out")
        if "experiment.toml" in names:
            held = self._read_experiment("out")
            if all(name in _BEFORE_ANYTHING or name.endswith(".tmp") for name in names):
                return
            if held["digest"] != digest and held["version"] != __version__:
                raise FedfillError(
                    f"out: {self.path} holds an experiment of fedfill {held['version']}, and this is {__version__}; choose another folder or remove it"
                )
            if held["digest"] != digest:
                raise FedfillError(f"out: {self.path} holds another experiment; choose another folder or remove it")
            return
        strangers = [name for name in names if name not in _FILES | _FOLDERS and not name.endswith(".tmp")]
        if strangers:
            raise FedfillError(
                f"out: {self.path} is not empty and holds no run ({strangers[0]} lies there); "
                "choose a folder that is new or holds this experiment"
            )

    def lock(self) -> None:
        """Keep other processes out of the folder until `close`; none can come to a finished run where nobody can write."""
        with writing(self.path):
            try:
                self._lock.acquire()
            except Timeout:
                raise _busy(self.path) from None
            except OSError as error:
                if error.errno not in (errno.EROFS, errno.EACCES) or not (self.path / "summary.json").exists():
                    raise

    def close(self) -> None:
        """Let other processes in again."""
        self._lock.release()

    def require_idle(self) -> None:
        """Refuse a folder in which another process runs or rehearses; asked at once, since data take a while to prepare."""
        for lock in (self.path / ".lock", self.path / "deployment" / ".lock"):
            if not lock.exists():
                continue
            try:
                FileLock(lock, timeout=0).acquire().lock.release()
            except Timeout:
                raise _busy(self.path) from None
            except OSError:  # who can't write here may still read a finished run
                continue

    def read_experiment(self, setting: str = "resume") -> dict[str, Any]:
        """The settings in ``experiment.toml``."""
        try:
            if not (self.path / "experiment.toml").exists():
                raise FedfillError(f"{setting}: {self.path} holds no run (there is no experiment.toml)")
            return self._read_experiment(setting)
        except OSError as error:
            raise FedfillError(f"{setting}: can't read {self.path} ({error.strerror or error})") from error

    def digest(self) -> str:
        """The digest of the experiment that the folder holds."""
        return str(self._read_experiment("out")["digest"])

    def _read_experiment(self, setting: str) -> dict[str, Any]:
        path = self.path / "experiment.toml"
        self._check_kinds(setting)
        document = read_toml(path)
        for key in ("digest", "version"):
            if not isinstance(document.get(key), str) or not document[key]:
                raise FedfillError(f"{setting}: {path} is damaged (it has no {key}); start again in a new folder")
        return document

    def _check_kinds(self, setting: str) -> None:
        """Refuse a folder where a run keeps a file, and the other way round."""
        for name in sorted(_FILES | {"checkpoint/state.safetensors"}):
            path = self.path / name
            if path.exists() and not path.is_file():
                raise FedfillError(
                    f"{setting}: {path} should be a file and is none; remove it or choose another folder"
                )
        for name in sorted(_FOLDERS):
            path = self.path / name
            if path.exists() and not path.is_dir():
                raise FedfillError(
                    f"{setting}: {path} should be a folder and is none; remove it or choose another folder"
                )

    def write(self, name: str, data: bytes) -> None:
        """Write one of the folder's files atomically."""
        write_atomically(self.path / name, data, self._hint())

    def _hint(self) -> str:
        if (self.path / "checkpoint" / "state.safetensors").exists():
            return f"the last checkpoint is intact: make room, then 'fedfill resume {self.path}' goes on from there"
        return "make room or choose another place"

    def append_round(self, record: Mapping[str, Any]) -> None:
        """Append one line to ``rounds.jsonl``; like a checkpoint, it outlives a power cut."""
        path = self.path / "rounds.jsonl"
        with writing(path, self._hint()), path.open("a") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rounds(self) -> list[dict[str, Any]]:
        """The records of ``rounds.jsonl``, up to the first line that is torn or out of order."""
        path = self.path / "rounds.jsonl"
        try:
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        except OSError as error:
            raise FedfillError(f"out: can't read {path} ({error.strerror or error})") from error
        records: list[dict[str, Any]] = []
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                break
            if not isinstance(record, dict) or record.get("round") != len(records) + 1:
                break
            records.append(record)
        return records

    def cut_rounds(self, done: int) -> list[dict[str, Any]]:
        """Cut ``rounds.jsonl`` back to the rounds that a checkpoint vouches for."""
        records = self.rounds()[:done]
        if len(records) < done:
            raise FedfillError(
                f"resume: {self.path / 'rounds.jsonl'} holds {len(records)} rounds and the checkpoint {done}; "
                "the folder was changed: start again in a new one"
            )
        path = self.path / "rounds.jsonl"
        text = "".join(json.dumps(record) + "\n" for record in records).encode()
        if path.exists() and path.read_bytes() != text:
            self.write("rounds.jsonl", text)
        return records

    def write_checkpoint(self, state: Tree) -> None:
        """Replace the checkpoint: one safetensors file with its structure as JSON inside."""
        self.write("checkpoint/state.safetensors", tree.to_bytes(state))

    def read_checkpoint(self, setting: str = "resume", *, unknown: bool = False) -> dict[str, Any] | None:
        """The checkpoint, or None where there is none yet; `unknown`: also without the code that wrote it, see `tree.from_bytes`."""
        path = self.path / "checkpoint" / "state.safetensors"
        if not path.exists():
            return None
        try:
            state = tree.from_bytes(path.read_bytes(), unknown=unknown)
            if not isinstance(state, dict):
                raise ValueError(f"a {type(state).__name__} in place of a table")
        except OSError as error:
            raise FedfillError(f"{setting}: can't read the checkpoint {path} ({error.strerror or error})") from error
        except tree.UnknownKindError as error:
            raise FedfillError(
                f"{setting}: the checkpoint {path} can't be read without the code that wrote it ({error})"
            ) from error
        except ValueError as error:
            raise FedfillError(f"{setting}: the checkpoint {path} is damaged; start again in a new folder") from error
        return state

    def remove_summary(self) -> None:
        """Make a finished run one that goes on."""
        with writing(self.path, self._hint()):
            (self.path / "summary.json").unlink(missing_ok=True)

    def summary(self) -> dict[str, Any] | None:
        """The summary of a finished run, or None."""
        path = self.path / "summary.json"
        if not path.exists():
            return None
        try:
            document = json.loads(read_regular(path))
            if not isinstance(document, dict):
                raise ValueError(f"a {type(document).__name__} in place of a table")
        except (ValueError, OSError, RecursionError) as error:
            raise FedfillError(f"out: {path} is damaged; remove it and resume the run") from error
        return document


def _busy(path: Path) -> FedfillError:
    return FedfillError(f"out: another process is running in {path}; wait for it or choose another folder")


def read_toml(path: Path, setting: str = "config") -> dict[str, Any]:
    """A TOML document; a sentence on what is wrong with it begins with the setting."""
    try:
        return tomllib.loads(read_regular(path, SETTINGS).decode())
    except OSError as error:
        raise FedfillError(f"{setting}: can't read {path} ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedfillError(f"{setting}: {path} is not TOML ({error})") from error
    except RecursionError as error:
        raise FedfillError(f"{setting}: {path} can't be read, it is nested too deeply") from error
