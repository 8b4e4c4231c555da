"""The one error that users meet, what checks their settings, and the help with slips of the pen."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_args

from pydantic import BaseModel, ValidationError

B = TypeVar("B", bound=BaseModel)


class FedfillError(Exception):
    """A slip or a circumstance that the user can mend: one sentence, printed without a traceback.

    Args:
        sentence: What a name or a file in it holds that no line can show, such as a line's end or half a letter, is written as Python
            writes it in a text.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in sentence))


class DivergedError(FedfillError):
    """Training that ended in values that are no numbers: a finding about one run, which does not end the others of a table."""


DIVERGED = "training diverged: "
"""How the sentence of a `DivergedError` begins."""


def told(sentence: str) -> FedfillError:
    """The error of another process, of which the sentence alone came here.

    Args:
        sentence: What the error said.

    Returns:
        An error of the same kind, to be raised.
    """
    return DivergedError(sentence) if sentence.startswith(DIVERGED) else FedfillError(sentence)


class ContractError(Exception):
    """A mistake of the algorithm's author, such as changing a received message: it ends the run with a traceback."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The tail of an error sentence: the nearest right spelling where there is one, else all that is allowed.

    Args:
        word: What was found.
        known: What is allowed.

    Returns:
        For example ``"did you mean 'fedavg'?"`` or ``"allowed: fedavg, feddpms"``.
    """
    names = sorted(known)
    same = [name for name in names if name.lower() == word.lower()]
    near = same or difflib.get_close_matches(word, names, n=1)
    return f"did you mean '{near[0]}'?" if near else f"allowed: {', '.join(names)}"


A_RUN = "a run directory, or what fedfill.run returned"
A_FUNCTION = "a function, or None"


class Kept(Protocol):
    """What lies in a folder: what `fedfill.run`, `compare`, `study` and `export` return."""

    @property
    def directory(self) -> Path:
        """The folder."""


def expect(setting: str, found: Any, kinds: Any, allowed: str) -> None:
    """Refuse an argument of another kind.

    Args:
        setting: Its name.
        found: What was given.
        kinds: As for `isinstance`.
        allowed: In words.

    Raises:
        FedfillError: Where it is none of these.
    """
    if not isinstance(found, kinds):
        raise FedfillError(f"{setting}: found {shown(found)}; allowed: {allowed}")


def shown(found: Any) -> str:
    """What was given, in a few words: a large thing by its kind alone."""
    try:
        text = "..." if hasattr(found, "__array__") else repr(found)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number of thousands of digits"
    short = len(text) <= 60 and "\n" not in text and text != "..."
    return text if short else f"a value of type {type(found).__name__}"


LONGEST = 255
"""Bytes of a file's name at the most, on the file systems that are in use."""


def path_of(setting: str, found: str | os.PathLike[str] | Kept, allowed: str = "a text or a Path") -> Path:
    """Where something lies or shall lie.

    Args:
        setting: The name of the argument.
        found: A path, or what lies in a folder; ``~`` is the user's own.
        allowed: In words.

    Returns:
        The path.

    Raises:
        FedfillError: Where it is neither.
    """
    path: Any = getattr(found, "directory", found)
    if not isinstance(path, str | os.PathLike):
        expect(setting, found, str | os.PathLike, allowed)
    try:
        if "\0" in os.fspath(path):
            raise ValueError("it holds a zero character")
        place = Path(path).expanduser()
        if any(len(os.fsencode(part)) > LONGEST for part in place.parts):
            raise ValueError(f"a name in it has more than {LONGEST} bytes")
        return place
    except (RuntimeError, TypeError, ValueError) as error:  # a user who is unknown; a path of bytes; half a letter
        raise FedfillError(f"{setting}: can't look for {path!r} ({error}); allowed: {allowed}") from error


def checked(kind: type[B], values: Mapping[str, Any], what: str = "setting") -> B:
    """An instance of settings from values of any origin, or one sentence on what is wrong.

    Args:
        kind: Settings class.
        values: By name; text is converted where the setting is a number or a truth value, ``none`` where it may be empty.
        what: What an unknown name is called in the sentence.

    Returns:
        The settings.

    Raises:
        FedfillError: Where a name is unknown or a value is not allowed.
    """
    for name in values:
        if name not in kind.model_fields:
            raise FedfillError(f"{what}: unknown name '{name}'; {did_you_mean(name, kind.model_fields)}")
    # a truth value is no number: Python and pydantic would read True as 1
    given = {
        name: str(value) if isinstance(value, bool) and kind.model_fields[name].annotation is not bool else value
        for name, value in values.items()
    }
    for name, value in given.items():  # pydantic would take it for a text like any other
        if kind.model_fields[name].annotation == (str | None) and str(value).lower() == "none":
            given[name] = None
    try:
        return kind(**given)
    except ValidationError as error:
        first, *others = error.errors()
    name = str(first["loc"][0]) if first["loc"] else what
    optional = name in given and type(None) in get_args(kind.model_fields[name].annotation)
    if optional and str(given[name]).lower() == "none":
        return checked(kind, {**given, name: None}, what)
    empty = ", or none" if optional and first["type"] == "literal_error" else ""
    # of a setting that may be one thing or another each has an error of its own
    kinds = dict.fromkeys(_allowed(e) for e in (first, *others) if e["loc"][:1] == first["loc"][:1])
    found = "nothing" if first["type"] == "missing" else _cut(first["input"])
    raise FedfillError(f"{name}: found {found}; allowed: {', or '.join(kinds)}{empty}")


def _cut(found: Any) -> str:
    """What was given, or its beginning."""
    try:
        text = repr(found)
    except ValueError:
        return shown(found)
    return text if len(text) <= 200 else f"{text[:50]}..."


def _allowed(error: Mapping[str, Any]) -> str:
    context = error.get("ctx", {})
    words = {
        "greater_than": "more than {gt}",
        "greater_than_equal": "at least {ge}",
        "less_than": "less than {lt}",
        "less_than_equal": "at most {le}",
        "literal_error": "{expected}",
        "int_parsing": "a whole number",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_parsing": "a number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_parsing": "true or false",
        "bool_type": "true or false",
        "string_type": "text",
        "dict_type": "a table of settings",
        "list_type": "a list",
        "too_short": "a list of {min_length} or more",
        "model_type": "a table",
        "missing": "a value, which has to be given",
    }
    kind = str(error["type"])
    return words[kind].format(**context) if kind in words else str(error["msg"])


def first_line(error: Exception) -> str:
    """The first line of what an exception says, or its kind where it says nothing."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.rstrip(".") + (
            f": {str(error.filename)!r}" if error.filename else ""
        )  # without its number
    # Arrow says several things at once, which Python would show as a tuple
    said = error.args if all(isinstance(part, str) for part in error.args) else (error,)
    text = "; ".join(map(str, said)).strip()
    return (text.splitlines()[0].rstrip(".") if text else "") or type(error).__name__
