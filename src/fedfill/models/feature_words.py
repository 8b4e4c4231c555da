"""The words of a feature map: steps with settings, such as ``conv(200, size=5) > project(1024)``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from fedfill.errors import FedfillError, did_you_mean

MOST = 16384
"""Features that a map may have."""


@dataclass(frozen=True)
class Number:
    """A setting of a step: its default (none: it has to be given), the least and the most, and whether it is whole."""

    default: float | None
    least: float
    most: float
    whole: bool = True


_LIFT = {"features": Number(None, 1, MOST)}
_FILTERS = {"filters": Number(200, 1, 4096), "size": Number(6, 2, 32), "cells": Number(4, 1, 32)}
STEPS: dict[str, dict[str, Number]] = {
    "conv": {**_FILTERS, "threshold": Number(0.25, 0, 100, False)},
    "patches": {
        **_FILTERS, "filters": Number(300, 1, 4096), "cells": Number(3, 1, 32), "threshold": Number(0.5, 0, 100, False)
    },
    "scatter": {},
    "project": _LIFT,
    "fourier": {"features": Number(None, 2, MOST), "width": Number(1, 1e-3, 1e3, False)},
    "relu": _LIFT,
    "unit": {},
    "clip": {},
}  # fmt: skip
"""The steps of a map and their settings, in the order in which they may be given without a name."""
OF_IMAGES = ("conv", "patches", "scatter")
LAST = ("unit", "clip")


def parse(words: str) -> list[tuple[str, dict[str, float]]]:
    """The steps that words name.

    Args:
        words: Such as ``"conv(200, size=5) > project(1024)"``.

    Returns:
        Names and settings, from left to right, defaults filled in.

    Raises:
        FedfillError: Where a step or a setting is unknown, or a number is not allowed.
    """
    return [_step(word.strip(), words) for word in words.split(">")]


def _step(word: str, words: str) -> tuple[str, dict[str, float]]:
    match = re.fullmatch(r"(\w+)\s*(?:\(([^()]*)\))?", word)
    if match is None:
        raise FedfillError(
            f"features: found '{word}' in '{words}'; allowed: steps such as conv(200) > project(2048), from left to right"
        )
    name, inside = match[1], match[2] or ""
    if name not in STEPS:
        raise FedfillError(f"features: found step '{name}' in '{words}'; {did_you_mean(name, STEPS)}")
    known = STEPS[name]
    settings: dict[str, float] = {}
    for place, given in enumerate(part.strip() for part in inside.split(",") if inside.strip()):
        setting, equals, value = (part.strip() for part in given.partition("="))
        if not equals:
            setting, value = (list(known)[place] if place < len(known) else ""), given
        if setting not in known or setting in settings:
            raise FedfillError(
                f"features: found '{given}' in {word}; allowed: {', '.join(known) if known else 'no settings there'}, each once"
            )
        settings[setting] = _number(known[setting], setting, value, word)
    for setting, number in known.items():
        if setting not in settings:
            if number.default is None:
                raise FedfillError(f"features: found {word} without a number; allowed: {name}(N), N {_range(number)}")
            settings[setting] = number.default
    return name, settings


def _number(number: Number, setting: str, value: str, word: str) -> float:
    try:
        found = int(value) if number.whole else float(value)
    except ValueError:
        found = math.nan
    if not number.least <= found <= number.most:
        raise FedfillError(f"features: found {setting} '{value}' in {word}; allowed: {_range(number)}")
    return found


def _range(number: Number) -> str:
    return f"{'a whole number ' if number.whole else ''}{number.least:g}..{number.most:g}"
