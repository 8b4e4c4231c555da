"""How to run it again: the command of a run or a comparison, or the call where something came from Python."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from fedfill.algorithms import Algorithm, find, parse_variant
from fedfill.errors import FedfillError
from fedfill.experiment.settings import INCIDENTAL, PYTHON, Experiment
from fedfill.models.networks import ModelSettings

_ALWAYS = ("data", "partition", "clients", "rounds", "seed")
_APART = {"algorithm", "settings", "model_settings"}
_KEPT = {"data_dir", "min_replies", "reply_timeout"}
"""What may change at a resume and is told all the same, since another value may end otherwise."""


def run_again(experiment: Mapping[str, Any]) -> str:
    """The command that ends with the same bits, or the call in Python.

    Args:
        experiment: What ``experiment.toml`` holds.

    Returns:
        Text for a terminal; or for Python, where data, partition, model or algorithm came from there.
    """
    fields, settings = _fields(experiment), _settings(experiment)
    name = str(experiment["algorithm"])
    if _from_python(experiment):
        return _call("run", repr(name) if _known(name) else f"{_word(name)}  # the class", {**fields, **settings})
    return _command(["fedfill", "run", name], fields, settings)


def compare_again(labels: Sequence[str], seeds: Sequence[int], experiments: Sequence[Mapping[str, Any]]) -> str:
    """The command of a comparison, or the call in Python.

    Args:
        labels: Of its rows, as they were asked for.
        seeds: Of each row.
        experiments: One of each row, what ``experiment.toml`` holds; of rows without one nothing.

    Returns:
        As `run_again`. What only some rows have in common, such as the network that an algorithm chooses, is left to them.
    """
    first = experiments[0]
    fields = {k: v for k, v in _fields(first).items() if k != "seed"}
    # a method of one round has one
    fields["rounds"] = max(int(one.get("rounds", 1)) for one in experiments)
    if any(one.get("model") != first.get("model") for one in experiments):
        fields.pop("model", None)
    shared: dict[str, Any] = {}
    for one in experiments:
        for key, value in _settings(one).items():
            shared.setdefault(key, value)
    own = {key for label in labels for key in parse_variant(label)[1]}
    shared = {k: v for k, v in shared.items() if k not in own and ("model" in fields or not k.startswith("model."))}
    if _from_python(first):
        return _call("compare", repr(list(labels)), {"seeds": tuple(seeds), **fields, **shared})
    words = ["fedfill", "compare", *labels]
    return _command(words, {"seeds": ",".join(map(str, seeds)), **fields}, shared)


def _from_python(experiment: Mapping[str, Any]) -> bool:
    words = [str(experiment.get(what, "")).split(":")[0] for what in ("data", "partition", "model")]
    return PYTHON in words or experiment.get("partition") == "given" or not _known(str(experiment["algorithm"]))


def _known(name: str) -> bool:
    return _kind(name) is not None


def _kind(name: str) -> type[Algorithm] | None:
    try:
        return find(name)
    except FedfillError:
        return None


def _fields(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are not the default, and those that everybody asks for."""
    found: dict[str, Any] = {}
    for name, field in Experiment.model_fields.items():
        if name in _APART or name not in experiment or (name in INCIDENTAL and name not in _KEPT):
            continue
        if name == "clients" and str(experiment.get("partition", "")).partition(":")[0] in ("domain", "given"):
            continue  # as many as the data make
        if name in _ALWAYS or experiment[name] != field.default:
            found[name] = experiment[name]
    return found


def _settings(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that are not the default of the algorithm and the networks; all of them where that is not known."""
    kind = _kind(str(experiment["algorithm"]))
    presets = dict(kind.presets.get(str(experiment.get("data")), {})) if kind is not None else {}

    def differs(name: str, value: Any, home: Mapping[str, Any]) -> bool:
        plain = None if value == "none" else value
        return name not in home or name in presets or plain != home[name].default

    own = kind.model_fields if kind is not None else {}
    found = {k: v for k, v in experiment.get("settings", {}).items() if differs(k, v, own)}
    networks = {
        f"model.{k}": v
        for k, v in experiment.get("model_settings", {}).items()
        if differs(k, v, ModelSettings.model_fields) or f"model.{k}" in presets
    }
    return {**found, **networks}


def _command(words: Sequence[str], fields: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    lines = [" ".join(map(shlex.quote, words))]
    lines += [f"--{name.replace('_', '-')} {shlex.quote(_text(value))}" for name, value in fields.items()]
    lines += [f"--set {shlex.quote(f'{name}={_text(value)}')}" for name, value in settings.items()]
    return " \\\n  ".join(_joined(lines))


def _joined(lines: Sequence[str], most: int = 88) -> list[str]:
    """Short words stand together in a line."""
    joined: list[str] = []
    for k, line in enumerate(lines):
        if k > 1 and len(joined[-1]) + len(line) < most:
            joined[-1] += f" {line}"
        else:
            joined.append(line)
    return joined


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    return str(value)


def _call(function: str, first: str, options: Mapping[str, Any]) -> str:
    lines = [f"    {first},"]
    for name, value in options.items():
        word = str(value)
        if name in ("data", "partition", "model") and (word.split(":")[0] == PYTHON or word == "given"):
            what = f": a {_word(word.partition(':')[2])}" if ":" in word else ""
            if word != "given":
                lines.append(f"    {name}=...,  # the same {name} from Python again{what}")
        elif name.isidentifier():
            lines.append(f"    {name}={_python(value)},")
        else:
            lines.append(f"    **{{{name!r}: {_python(value)}}},")
    return "import fedfill\n\nfedfill." + function + "(\n" + "\n".join(lines) + "\n)"


def _python(value: Any) -> str:
    return "None" if value == "none" else repr(value)


def _word(text: str) -> str:
    return re.sub(r"\W", "_", text)
