"""Whether an algorithm can learn what is to be told of a row: a class, or a number."""

from __future__ import annotations

from fedfill.algorithms import Algorithm, known_algorithms
from fedfill.data.federation import Federation
from fedfill.errors import FedfillError


def require_target(algorithm: Algorithm, federation: Federation) -> None:
    """Refuse to learn a number with what needs classes.

    Args:
        algorithm: With its settings.
        federation: The clients' data.

    Raises:
        FedfillError: With the part that needs classes.
    """
    if not federation.of_numbers:
        return
    target = federation.class_names[0]
    parts = {
        "algorithm": algorithm,
        **{axis: getattr(algorithm, axis, None) for axis in ("local", "aggregation", "head")},
    }
    for setting, part in parts.items():
        if part is not None and not type(part).numbers:
            able = ", ".join(name for name, kind in known_algorithms().items() if kind.numbers)
            raise FedfillError(
                f"{setting}: found {part.name}, which needs classes, with the target '{target}', a number; allowed: {able}"
            )
