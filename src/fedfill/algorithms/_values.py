"""Algorithms as values of other algorithms' settings: a local objective, an aggregation, a head."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, ValidationInfo

from fedfill.algorithms._base import Algorithm
from fedfill.algorithms._names import find, known_algorithms, lookup, parse_variant
from fedfill.errors import FedfillError, checked, did_you_mean
from fedfill.own_parts import is_reference


def _method(given: Any, info: ValidationInfo) -> Any:
    """An algorithm whose local objective, or aggregation, another one takes; from ``"fedprox:mu=0.01"`` or an instance."""
    axis = str(info.field_name)
    if given is None or str(given).lower() == "none":
        return None
    if isinstance(given, Algorithm):
        kind = type(given)
        _check_axis(kind, axis)
        inherited = [name for name in given.model_fields_set if name not in kind.own_settings()]
        if inherited:
            raise FedfillError(
                f"{axis}: {kind.name} takes no '{min(inherited)}' here, which the algorithm that takes it has; leave it out"
            )
        return given
    # ";" between settings where a "," would end the setting itself, as in a comparison's fedavg:local=moon:mu=1;temperature=0.2
    name, settings = parse_variant(str(given).replace(";", ","))
    if not is_reference(name) and lookup(name) is None:
        raise FedfillError(f"{axis}: found '{name}'; {did_you_mean(name, [*able(axis), 'none'])}")
    kind = find(name)
    _check_axis(kind, axis)
    own = kind.own_settings()
    for key in settings:
        if key not in own:
            raise FedfillError(
                f"{axis}: {name} takes no '{key}' here; {did_you_mean(key, own) if own else 'it has no settings'}"
            )
    return checked(kind, settings)


def _check_axis(kind: type[Algorithm], axis: str) -> None:
    """Refuse an algorithm that has nothing of its own on an axis, or that is a whole of both."""
    axes = kind.axes()
    if axes == [axis]:
        return
    why = "has none of its own"
    if len(axes) == 2:
        why = "has a local objective and a server's step that make sense together alone"
    elif axes:
        why = f"is one for {axes[0]}={kind.name}"
    raise FedfillError(f"{axis}: found {kind.name}, which {why}; allowed: {', '.join(able(axis))}, none")


def able(axis: str) -> list[str]:
    """Names of the algorithms that are a value for an axis."""
    return [kind.name for kind in known_algorithms().values() if kind.name and kind.axes() == [axis]]


def _text(method: Algorithm | None) -> str | None:
    if method is None:
        return None
    values = {name: getattr(method, name) for name in method.own_settings()}
    settings = ",".join(f"{name}={'none' if value is None else value}" for name, value in values.items())
    return f"{method.name}:{settings}" if settings else method.name


Method = Annotated[Any, BeforeValidator(_method), PlainSerializer(_text)]
