"""One file per algorithm. What they share is in `_base`; for those that compose, in `_composition` and `_messages`."""

from fedfill.algorithms._base import Algorithm, as_algorithm, find, known_algorithms, labels_of, lookup, parse_variant
from fedfill.algorithms._composition import Composable
from fedfill.algorithms._messages import Broadcast, Contribution, Request, Start, Update

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
