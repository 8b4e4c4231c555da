"""Parts of one's own: what ``FILE.py:NAME`` names, and what installed packages offer. No torch is needed here.

A reference executes its file, as ``python FILE.py`` would, under another name than ``__main__``.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from fedfill.errors import FedfillError, did_you_mean, first_line, path_of

_FORM = re.compile(r"(?P<file>[^:]*\.py)(?::(?P<name>[^:]*)(?::(?P<rest>.*))?)?", re.DOTALL)


@dataclass(frozen=True)
class Source:
    """A file as it was executed.

    Attributes:
        module: Name under which its classes are known in this process.
        path: Where it lies.
        text: What it held.
    """

    module: str
    path: str
    text: bytes


_executed: dict[str, Source] = {}
"""By path."""
_found: list[tuple[Any, str]] = []
"""What references stood for, with each one's text."""


def is_reference(word: object) -> bool:
    """Whether it has the form of a reference, which may have settings behind it."""
    return isinstance(word, str) and _FORM.fullmatch(word) is not None


def split(word: str) -> tuple[str, str]:
    """A reference, and the settings behind it: ``my.py:Name`` and ``mu=1`` of ``my.py:Name:mu=1``."""
    match = _FORM.fullmatch(word)
    if match is None:
        raise ValueError(f"'{word}' is no reference")
    return f"{match['file']}:{match['name'] or ''}", match["rest"] or ""


def absolute(word: str, what: str) -> str:
    """The same reference from any folder.

    Args:
        word: Such as ``my.py:Net``.
        what: The setting, which an error's sentence begins with.

    Returns:
        The reference with the file's whole path.

    Raises:
        FedfillError: Where it has another form, or there is no such file.
    """
    match = _FORM.fullmatch(word)
    if match is None or not match["name"]:
        raise FedfillError(f"{what}: found '{word}'; allowed: FILE.py:NAME")
    if match["rest"] is not None:
        raise FedfillError(
            f"{what}: found ':{match['rest']}' behind '{match['file']}:{match['name']}', which takes no settings there; allowed: "
            "FILE.py:NAME"
        )
    path = path_of(what, match["file"], "FILE.py:NAME").resolve()
    if not path.is_file():
        raise FedfillError(f"{what}: found '{word}', and there is no file '{path}'; allowed: FILE.py:NAME")
    return f"{path}:{match['name']}"


def load(word: str, what: str) -> Any:
    """What a reference stands for. Its file is executed once, and again after it has changed.

    Args:
        word: Such as ``my.py:Net``.
        what: The setting, which an error's sentence begins with.

    Returns:
        Whatever has that name in the file.

    Raises:
        FedfillError: Where there is no such file or name, or the file can't be executed.
    """
    whole = absolute(word, what)
    path, _, name = whole.rpartition(":")
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise FedfillError(f"{what}: '{path}' can't be read ({first_line(error)})") from error
    source = _executed.get(path)
    if source is None or source.text != text:
        source = Source(_module_name(path), path, text)
        execute(source, what)
    members = vars(sys.modules[source.module])
    if name not in members:
        public = [key for key, value in members.items() if getattr(value, "__module__", None) == source.module]
        raise FedfillError(
            f"{what}: '{path}' has no '{name}'; {did_you_mean(name, public or ['a class or a function'])}"
        )
    thing = members[name]
    if origin_of(thing) != whole:
        _found.append((thing, whole))
    return thing


def execute(source: Source, what: str) -> None:
    """Make the module of a file, or of one that another process read.

    Args:
        source: The file.
        what: The setting, which an error's sentence begins with.

    Raises:
        FedfillError: Where it can't be executed: which line, and why.
    """
    lines = source.text.decode(errors="replace").splitlines(keepends=True)
    # who asks for the source of a class gets what was executed, also after the file has changed
    linecache.cache[source.path] = (len(source.text), None, lines, source.path)
    module = ModuleType(source.module)
    module.__file__ = source.path
    before = sys.modules.get(source.module)
    sys.modules[source.module] = module
    if (folder := str(Path(source.path).parent)) not in sys.path:
        sys.path.append(folder)  # behind all others, so that a file beside it hides no package
    try:
        exec(compile(source.text, source.path, "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:  # whatever a file may raise
        if before is None:
            del sys.modules[source.module]
        else:
            sys.modules[source.module] = before
        raise FedfillError(f"{what}: {told(error, source.path)}") from error
    _executed[source.path] = source


def told(error: Exception | SystemExit, path: str) -> str:
    """What went wrong in a file, in one line: the file, the line where there is one, and the words of the error."""
    frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    line: int | None = frames[-1] if frames else None
    words = words_of(error)
    if isinstance(error, SyntaxError) and error.filename == path:
        line, words = error.lineno, f"{type(error).__name__}: {error.msg}"
    return f"'{path}'{f', line {line}' if line else ''}: {words}"


def words_of(error: Exception | SystemExit) -> str:
    """Kind and first line of an error; a sentence of fedfill's own stands alone."""
    kind = type(error).__name__
    if isinstance(error, SystemExit):
        return f"{kind}({'' if error.code is None else repr(error.code)}), which would end fedfill"
    words = first_line(error)
    return words if isinstance(error, FedfillError) or words == kind else f"{kind}: {words}"


def place_of(thing: Any) -> str:
    """The file and the line where a class or a function begins, as `told` names them; "" where that isn't known."""
    try:
        return f"'{inspect.getfile(thing)}', line {inspect.getsourcelines(thing)[1]}"
    except (OSError, TypeError):
        origin = origin_of(thing)
        return f"'{origin.rpartition(':')[0]}'" if origin else ""


def origin_of(thing: Any) -> str | None:
    """The reference that stood for this very thing, with the file's whole path; None: it came from elsewhere."""
    return next((word for known, word in reversed(_found) if known is thing), None)


def sources() -> list[Source]:
    """All files that were executed, for other processes to execute."""
    return list(_executed.values())


def _module_name(path: str) -> str:
    """``own_my`` for ``my.py``, the same in every process as records in a checkpoint bear it; a second file of that name has more."""
    name = f"own_{re.sub(r'[^A-Za-z0-9_]', '_', Path(path).stem)}"
    others = {source.module for source in _executed.values() if source.path != path}
    return name if name not in others else f"{name}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"


def entry_points(group: str) -> Mapping[str, metadata.EntryPoint]:
    """What installed packages offer.

    Args:
        group: ``algorithms``, ``models`` or ``partitions``; in a package's metadata ``fedfill.`` stands before it.

    Returns:
        By name, nothing of it imported.
    """
    return {entry.name: entry for entry in metadata.entry_points(group=f"fedfill.{group}")}


def load_entry(entry: metadata.EntryPoint, what: str) -> Any:
    """What an entry point stands for.

    Args:
        entry: Of `entry_points`.
        what: The setting, which an error's sentence begins with.

    Returns:
        Whatever it names.

    Raises:
        FedfillError: Where it can't be imported.
    """
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # whatever a package may raise
        package = f" of the package {entry.dist.name}" if entry.dist is not None else ""
        raise FedfillError(f"{what}: '{entry.name}'{package} can't be loaded ({words_of(error)})") from error
