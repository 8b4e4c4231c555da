"""One file per algorithm. What they share is in `_base`, their names in `_names`; for those that compose, in `_composition` and `_messages`."""

from fedfill.algorithms._base import Algorithm
from fedfill.algorithms._composition import Composable
from fedfill.algorithms._messages import Broadcast, Contribution, Request, Start, Update
from fedfill.algorithms._names import as_algorithm, find, known_algorithms, labels_of, lookup, parse_variant

__all__ = [
    "Algorithm",
    "Broadcast",
    "Composable",
    "Contribution",
    "Request",
    "Start",
    "Update",
    "as_algorithm",
    "find",
    "known_algorithms",
    "labels_of",
    "lookup",
    "parse_variant",
]
