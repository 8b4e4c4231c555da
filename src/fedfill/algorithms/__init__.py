"""One file per algorithm. What they share is in `_base`; for those that compose, in `_composition` and `_messages`."""

from fedfill.algorithms._base import Algorithm, find, known_algorithms, parse_variant
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
    "find",
    "known_algorithms",
    "parse_variant",
]
