"""How hosts score a model on their own splits: what they say of it, and the figures of all hosts together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch

from fedfill.data.samples import Samples
from fedfill.data.survival import grid_size
from fedfill.protocol.messages import HEAVIEST, Message
from fedfill.statistics.survival import NO_RANKING, Pairs, concordance
from fedfill.training.evaluation import Evaluation, score_all
from fedfill.training.fit import Resident


@dataclass(frozen=True)
class Scores(Message):
    """Host to server: how the weights, or its own model, do on its own splits for test and validation.

    Attributes:
        correct: Recognised samples of the test split by class.
        samples: Samples of the test split by class.
        loss: Sum of their losses.
        validated: Recognised samples of the validation split.
        validation: Samples of the validation split.
    """

    correct: list[int]
    samples: list[int]
    loss: float
    validated: int
    validation: int

    @classmethod
    def of(cls, resident: Resident, own: Samples, held: Samples, classes: int) -> Self:
        """Of the model that `resident` holds, on both splits."""
        scored = score_all(resident, own)
        correct = torch.bincount(own.labels[scored.predicted == own.labels], minlength=classes).tolist()
        loss = float(scored.losses.double().sum()) if len(own) else 0.0
        validated = int((score_all(resident, held).predicted == held.labels).sum())
        return cls(correct, own.counts(classes), loss, validated, len(held))

    def plausible(self, classes: int) -> bool:
        """Whether a host with such a task may say so."""
        return (
            len(self.correct) == len(self.samples) == classes
            and all(0 <= hit <= size <= HEAVIEST for hit, size in zip(self.correct, self.samples, strict=True))
            and 0 <= self.loss <= HEAVIEST
            and 0 <= self.validated <= self.validation <= HEAVIEST
        )

    @property
    def own(self) -> float | None:
        """The share that was recognised of the test split; None where there is none."""
        return sum(self.correct) / sum(self.samples) if any(self.samples) else None

    @property
    def held(self) -> float | None:
        """The same of the validation split."""
        return self.validated / self.validation if self.validation else None

    @staticmethod
    def together(scores: Mapping[int, Scores]) -> Evaluation | None:
        """Of all hosts' test splits as one; by client nothing. None where nobody has one."""
        found = list(scores.values())
        classes = range(len(found[0].samples) if found else 0)
        hits = [sum(one.correct[c] for one in found) for c in classes]
        sizes = [sum(one.samples[c] for one in found) for c in classes]
        if not sum(sizes):
            return None
        by_class = [hit / size if size else None for hit, size in zip(hits, sizes, strict=True)]
        loss = sum(one.loss for one in found) / sum(sizes)
        return Evaluation(sum(hits) / sum(sizes), loss, by_class, [], [], None, max(sizes) / sum(sizes))


@dataclass(frozen=True)
class Errors:
    """Sums over some samples with numbers y, predicted as p: what R² needs, and the mean squared error.

    Attributes:
        samples: How many there are.
        loss: Sum of (y - p)^2.
        total: Sum of y, of -1..1.
        squares: Sum of y^2.
    """

    samples: int
    loss: float
    total: float
    squares: float

    @classmethod
    def of(cls, resident: Resident, samples: Samples) -> Errors:
        """Of the model that `resident` holds."""
        y, p = samples.labels.double(), score_all(resident, samples).predicted.double()
        return cls(len(samples), float((y - p).square().sum()), float(y.sum()), float(y.square().sum()))

    @property
    def plausible(self) -> bool:
        """Whether numbers of -1..1 can have such sums."""
        n = self.samples
        bounds = 0 <= n <= HEAVIEST and 0 <= self.loss <= HEAVIEST and abs(self.total) <= n and 0 <= self.squares <= n
        return bounds and self.total**2 <= n * self.squares * (1 + 1e-9)

    @property
    def r_squared(self) -> float | None:
        """R²; None where the numbers don't vary."""
        spread = self.squares - self.total**2 / self.samples if self.samples else 0.0
        return 1 - self.loss / spread if spread > 1e-12 * self.samples else None

    def __add__(self, other: Errors) -> Errors:
        """Of both together."""
        return Errors(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class NumberScores(Message):
    """Host to server: the same where a number is learnt.

    Attributes:
        test: Samples of the test split, sums of their squared errors, of their numbers and of the squares of these, on the scale of
            -1..1.
        validation: The same of the validation split.
    """

    test: list[float]
    validation: list[float]

    @classmethod
    def of(cls, resident: Resident, own: Samples, held: Samples, classes: int) -> Self:
        """Of the model that `resident` holds, on both splits."""
        return cls(*([float(x) for x in vars(Errors.of(resident, part)).values()] for part in (own, held)))

    def plausible(self, classes: int) -> bool:
        """Whether a host with such a task may say so."""
        parts = self.test, self.validation
        return all(len(part) == 4 and part[0] % 1 == 0 and _errors(part).plausible for part in parts)

    @property
    def loss(self) -> float:
        """Sum of the squared errors on the test split."""
        return self.test[1] if len(self.test) == 4 else 0.0

    @property
    def own(self) -> float | None:
        """R² on the test split; None where there is none, or its numbers don't vary."""
        return _errors(self.test).r_squared

    @property
    def held(self) -> float | None:
        """The same of the validation split."""
        return _errors(self.validation).r_squared

    @staticmethod
    def together(scores: Mapping[int, NumberScores]) -> Evaluation | None:
        """Of all hosts' test splits as one; by client nothing. None where nobody has one."""
        whole = sum((_errors(one.test) for one in scores.values()), Errors(0, 0.0, 0.0, 0.0))
        if not whole.samples:
            return None
        score = whole.r_squared or 0.0
        return Evaluation(score, whole.loss / whole.samples, [score], [], [])


def _errors(part: list[float]) -> Errors:
    n, loss, total, squares = part
    return Errors(int(n), loss, total, squares)


@dataclass(frozen=True)
class TimeScores(Message):
    """Host to server: the same where a time to an event is learnt.

    Attributes:
        samples: Samples of the test split.
        loss: Sum of their losses.
        test: Pairs of its rows that the model ranks right, ties, and all that can be compared.
        validation: The same of the validation split.
    """

    samples: int
    loss: float
    test: list[float]
    validation: list[float]

    @classmethod
    def of(cls, resident: Resident, own: Samples, held: Samples, classes: int) -> Self:
        """Of the model that `resident` holds, on both splits."""
        times = grid_size(classes) or 0
        tested, kept = (score_all(resident, part, times) for part in (own, held))
        pairs = (concordance(one.predicted, part.labels, times) for one, part in ((tested, own), (kept, held)))
        test, validation = ([one.right, one.tied, one.comparable] for one in pairs)
        return cls(len(own), float(tested.losses.double().sum()), test, validation)

    def plausible(self, classes: int) -> bool:
        """Whether a host with such a task may say so."""
        return (
            0 <= self.samples <= HEAVIEST
            and 0 <= self.loss <= HEAVIEST
            and all(len(part) == 3 and _plausible(*part) for part in (self.test, self.validation))
            and 2 * self.test[2] <= self.samples * (self.samples - 1)
        )

    @property
    def own(self) -> float | None:
        """The C-index on the test split; None where no two of its rows can be compared."""
        return Pairs(*self.test).index

    @property
    def held(self) -> float | None:
        """The same of the validation split."""
        return Pairs(*self.validation).index

    @staticmethod
    def together(scores: Mapping[int, TimeScores]) -> Evaluation | None:
        """Of the pairs within all hosts' test splits; by client nothing. None where nobody has one."""
        samples = sum(one.samples for one in scores.values())
        if not samples:
            return None
        index = sum((Pairs(*one.test) for one in scores.values()), Pairs(0.0, 0.0, 0.0)).index
        score = NO_RANKING if index is None else index
        return Evaluation(score, sum(one.loss for one in scores.values()) / samples, [score], [], [])


def _plausible(right: float, tied: float, comparable: float) -> bool:
    return min(right, tied) >= 0 and right + tied <= comparable <= HEAVIEST


AnyScores = Scores | NumberScores | TimeScores


def kind_of(samples: Samples, times: int) -> type[AnyScores]:
    """What hosts say of a target: where it is a time to an event, on a grid of `times` times; else this is 0."""
    return TimeScores if times else NumberScores if samples.of_numbers else Scores


def lossless(scores: AnyScores) -> AnyScores:
    """The same scores with a loss of 0: whether all but the loss is plausible."""
    if isinstance(scores, Scores | TimeScores):
        return replace(scores, loss=0.0)
    return replace(scores, test=[0.0 if k == 1 else x for k, x in enumerate(scores.test)])
