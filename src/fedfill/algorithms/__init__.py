"""One file per algorithm. What they share is in `_base` and, for those that compose, in `_composition`."""

from fedfill.algorithms._base import Algorithm, find, known_algorithms, parse_variant
from fedfill.algorithms._composition import CONTRIBUTED, Composable, Contribution, Start

__all__ = [
    "CONTRIBUTED",
    "Algorithm",
    "Composable",
    "Contribution",
    "Start",
    "find",
    "known_algorithms",
    "parse_variant",
]
