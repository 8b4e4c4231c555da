"""One file per algorithm. What they share is in `fedfill.algorithm` and, for those that compose, in `fedfill.composition`."""

from fedfill.algorithm import Algorithm, find, known_algorithms, parse_variant
from fedfill.composition import CONTRIBUTED, Composable, Contribution, Start

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
