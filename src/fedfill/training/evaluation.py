"""Evaluation in large batches, split into chunks that any number of workers may share without changing a bit."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfill.data.federation import Federation
from fedfill.data.samples import Samples, normalise
from fedfill.errors import DIVERGED, DivergedError
from fedfill.statistics.survival import NO_RANKING, concordance, total_hazard
from fedfill.training.fit import Resident
from fedfill.training.regression import r_squared, r_squared_by

CHUNK = 1000
FAIRNESS = (
    "mean_client_accuracy", "worst_client_accuracy", "worst_tenth_accuracy", "client_variance", "class_variance",
)  # fmt: skip
"""The figures that `fairness` gives."""


@dataclass(frozen=True)
class Scored:
    """Per-sample outcome of an evaluation.

    Attributes:
        predicted: ``[n]`` int64, the class with the highest score; float32 numbers; or, of times to an event, float64 risks.
        losses: ``[n]`` float32 cross-entropies; of numbers squared errors.
    """

    predicted: Tensor
    losses: Tensor

    def split(self, sizes: Sequence[int]) -> list[Scored]:
        """These outcomes in consecutive parts."""
        predicted, losses = (torch.split(tensor, list(sizes)) for tensor in (self.predicted, self.losses))
        return [Scored(*pair) for pair in zip(predicted, losses, strict=True)]


def score(resident: Resident, samples: Samples, times: int = 0) -> Scored:
    """Score samples with the weights that `resident` holds, in evaluation mode.

    Args:
        resident: A worker's model, loaded.
        samples: At most a few thousand.
        times: Where labels are cells of a time to an event, the number of the grid's times; else 0.

    Returns:
        What each sample was taken for, and its loss.
    """
    resident.model.eval()
    with torch.inference_mode():
        scores = resident.model(resident.inputs(samples, slice(None)))  # [n, classes]
        if samples.of_numbers:
            return Scored(scores[:, 0].float(), (scores[:, 0] - samples.labels).float().square())
        losses = functional.cross_entropy(scores, samples.labels, reduction="none")
        if times:
            return Scored(total_hazard(scores.double().log_softmax(1)), losses)
        return Scored(scores.argmax(1), losses)


def score_all(resident: Resident, samples: Samples, times: int = 0) -> Scored:
    """Score any number of samples in the chunks in which every engine does it.

    Args:
        resident: A model, loaded.
        samples: ``[n, ...]``.
        times: As in `score`.

    Returns:
        The outcome of each, in their order.
    """
    if not len(samples):
        return _unscored(samples, times)
    return _joined([score(resident, samples[start : start + CHUNK], times) for start in range(0, len(samples), CHUNK)])


@dataclass(frozen=True)
class Splits:
    """What a simulation scores models on.

    Attributes:
        test: The test set; empty where the clients' own splits are all there is of it.
        own: All clients' own test splits, one behind the other.
        validation: All clients' validation splits.
        own_sizes: How many samples of `own` are each client's.
        validation_sizes: The same of `validation`.
        times: Where labels are cells of a time to an event, the number of the grid's times; else 0.
    """

    test: Samples
    own: Samples
    validation: Samples
    own_sizes: tuple[int, ...]
    validation_sizes: tuple[int, ...]
    times: int = 0

    @property
    def all(self) -> tuple[Samples, Samples, Samples]:
        """The three, in the order in which they are scored."""
        return self.test, self.own, self.validation

    def places(self) -> list[tuple[slice, slice]]:
        """Where each client's samples are in `own` and in `validation`."""
        ends = (itertools.accumulate(sizes) for sizes in (self.own_sizes, self.validation_sizes))
        columns = zip(*ends, self.own_sizes, self.validation_sizes, strict=True)
        return [(slice(own - n, own), slice(held - m, held)) for own, held, n, m in columns]


def splits_of(federation: Federation, device: torch.device | str = "cpu") -> Splits:
    """The splits of a federation. By domain, the test set is its clients' own splits, and is not scored twice.

    Args:
        federation: All clients' data.
        device: Where the splits shall lie.

    Returns:
        Test set, own and validation splits.
    """
    own, held = ([getattr(client, part) for client in federation.clients] for part in ("test", "validation"))
    test = federation.test[:0] if federation.domains and any(map(len, own)) else federation.test
    all_own, all_held = (
        Samples(torch.cat([s.inputs for s in parts]), torch.cat([s.labels for s in parts])).to(device)
        for parts in (own, held)
    )
    return Splits(test.to(device), all_own, all_held, tuple(map(len, own)), tuple(map(len, held)), federation.times)


@dataclass(frozen=True)
class Evaluation:
    """Accuracies and losses of one model, or of every client's own; all accuracies are shares in [0, 1].

    Every accuracy is the target's headline figure, by which settings and methods are chosen too: where numbers are learnt, the
    coefficient of determination R² stands in for it, and the mean squared error, on the scale of -1..1, for the loss; where times to an
    event are learnt, the C-index, with .5 where no two samples can be compared.

    "The test set" is one of three things:

    * of one model, the data set's;
    * of personal models in a simulation, the data set's too: each client's own model is scored on all of it, and the figure
      is the plain mean over clients (`PersonalScores`);
    * where nobody has both, in a federation of hosts whose server has no test set, or whose models are personal and never
      leave them, and where each client has a domain: all clients' own test splits together, each sample scored where it
      lies, of personal models by its owner's.

    Attributes:
        accuracy: On the test set.
        loss: Mean cross-entropy on the test set.
        accuracy_by_class: On the test set, by class; None for a class that it lacks.
        accuracy_by_client: On each client's own test split, of its own model where there is one; None for a client without one.
        validation_by_client: The same on each client's validation split; empty where nobody has one, or nobody looked.
        most_predicted: Share of the test set that was taken for one class, the most named one; None where nobody looked.
        largest_class: Share of the test set that is in its largest class; likewise.
    """

    accuracy: float
    loss: float
    accuracy_by_class: list[float | None]
    accuracy_by_client: list[float | None]
    validation_by_client: list[float | None] = field(default_factory=list)
    most_predicted: float | None = None
    largest_class: float | None = None


def divergence(t: int, loss: float) -> DivergedError:
    """What ends a run whose loss is no number any more.

    Args:
        t: The round that is over.
        loss: On the test set.

    Returns:
        The error, to be raised.
    """
    return DivergedError(
        f"{DIVERGED}after round {t + 1} the loss on the test set is {loss}; try a smaller learning_rate"
    )


def gather(scored: Sequence[Scored], splits: Splits, classes: int) -> Evaluation:
    """Accuracies by class and by client from the outcomes of all chunks.

    Args:
        scored: Those of the three splits, in their order.
        splits: What was scored.
        classes: Number of classes.

    Returns:
        The shares, as plain numbers.
    """
    test, own, held = _joined(scored).split([len(part) for part in splits.all])
    return _evaluation(test, own, held, splits, classes)


class PersonalScores:
    """Takes the outcomes of personal models, one client after another, and keeps of each as little as the figures need.

    What is kept is made before the first model is scored. An outcome that stayed among the activations of its evaluation would
    keep the allocator from using their memory again: 10 MB for each client were lost.

    Args:
        splits: What is scored.
        classes: Number of classes.
    """

    def __init__(self, splits: Splits, classes: int) -> None:
        self._splits, self._classes, self._places = splits, classes, splits.places()
        self._tests: dict[int, _Tally] = {}
        self._own, self._held = (_unscored(part, splits.times) for part in (splits.own, splits.validation))

    def add(self, i: int, test: Scored, own: Scored, held: Scored) -> None:
        """Take the outcomes of client `i`'s own model on the test set and on its own test and validation splits."""
        labels = self._splits.test.labels
        if len(labels) and not _of_classes(self._splits):
            score = _whole(test, labels, self._splits)
            self._tests[i] = _Tally(score, float(test.losses.double().mean()), [score], [1])
        elif len(labels):
            correct = test.predicted == labels
            self._tests[i] = _Tally(
                float(correct.double().mean()),
                float(test.losses.double().mean()),
                shares(correct, labels, self._classes),
                torch.bincount(test.predicted, minlength=self._classes).tolist(),
            )
        for whole, part, place in zip((self._own, self._held), (own, held), self._places[i], strict=True):
            whole.predicted[place], whole.losses[place] = part.predicted, part.losses

    def gather(self) -> Evaluation:
        """Accuracies of personal models, of all clients.

        Returns:
            The means over clients on the test set, and each client's accuracy on its own splits; without a test set the figures
            of all own splits together.
        """
        splits, own, held = self._splits, self._own, self._held
        labels = splits.test.labels
        if not len(labels):
            return _evaluation(_unscored(splits.test, splits.times), own, held, splits, self._classes)
        tests = [self._tests[i] for i in range(len(splits.own_sizes))]
        by_class = zip(*(test.by_class for test in tests), strict=True)
        named = [sum(column) for column in zip(*(test.named for test in tests), strict=True)]
        return Evaluation(
            accuracy=float(torch.tensor([test.accuracy for test in tests], dtype=torch.float64).mean()),
            loss=float(torch.tensor([test.loss for test in tests], dtype=torch.float64).mean()),
            accuracy_by_class=[None if None in column else sum(column) / len(column) for column in by_class],
            accuracy_by_client=_by_client(own, splits.own, splits.own_sizes, splits.times),
            validation_by_client=_by_client(held, splits.validation, splits.validation_sizes, splits.times)
            if len(splits.validation)
            else [],
            most_predicted=max(named) / sum(named) if _of_classes(splits) else None,
            largest_class=largest_share(labels) if _of_classes(splits) else None,
        )


@dataclass(frozen=True)
class _Tally:
    """What is kept of a model's outcomes on the test set: two means, accuracy by class, and how often each class was named."""

    accuracy: float
    loss: float
    by_class: list[float | None]
    named: list[int]


def _unscored(samples: Samples, times: int) -> Scored:
    """Room for the outcomes of these samples."""
    labels = samples.labels
    kind = torch.float64 if times else labels.dtype
    return Scored(torch.zeros_like(labels, dtype=kind), labels.new_zeros(len(labels), dtype=torch.float32))


def _of_classes(splits: Splits) -> bool:
    """Whether the target is a class, and no number and no time."""
    return not (splits.times or splits.test.of_numbers)


def _whole(scored: Scored, labels: Tensor, splits: Splits) -> float:
    """The headline figure of numbers or times, with what who knows nothing has where it can't be said."""
    if splits.times:
        index = concordance(scored.predicted, labels, splits.times).index
        return NO_RANKING if index is None else index
    return r_squared(scored.predicted, labels) or 0.0


def _evaluation(test: Scored, own: Scored, held: Scored, splits: Splits, classes: int) -> Evaluation:
    labels = splits.test.labels
    if not len(labels):
        test, labels = own, splits.own.labels
    if not _of_classes(splits):
        accuracy = _whole(test, labels, splits)
        by_class: list[float | None] = [accuracy]
    else:
        correct = test.predicted == labels
        accuracy, by_class = float(correct.double().mean()), shares(correct, labels, classes)
    return Evaluation(
        accuracy=accuracy,
        loss=float(test.losses.double().mean()),
        accuracy_by_class=by_class,
        accuracy_by_client=_by_client(own, splits.own, splits.own_sizes, splits.times),
        validation_by_client=_by_client(held, splits.validation, splits.validation_sizes, splits.times)
        if len(splits.validation)
        else [],
        most_predicted=largest_share(test.predicted) if _of_classes(splits) else None,
        largest_class=largest_share(labels) if _of_classes(splits) else None,
    )


def _by_client(scored: Scored, samples: Samples, sizes: Sequence[int], times: int) -> list[float | None]:
    """The share of recognised samples of each client, or what stands in for it."""
    if samples.of_numbers:
        return r_squared_by(scored.predicted, samples.labels, list(sizes))
    if times:
        risks, cells_of = torch.split(scored.predicted, list(sizes)), torch.split(samples.labels, list(sizes))
        parts = zip(risks, cells_of, strict=True)
        return [concordance(risk, cells, times).index for risk, cells in parts]
    device = samples.labels.device
    owners = torch.arange(len(sizes), device=device).repeat_interleave(torch.tensor(sizes, device=device))
    return shares(scored.predicted == samples.labels, owners, len(sizes))


def largest_share(classes: Tensor) -> float | None:
    """The share of the most frequent of some classes, ``[n]``; None where there are none, and of numbers."""
    if classes.is_floating_point():
        return None
    return float(torch.bincount(classes).max()) / len(classes) if len(classes) else None


def _joined(parts: Sequence[Scored]) -> Scored:
    return Scored(torch.cat([part.predicted for part in parts]), torch.cat([part.losses for part in parts]))


def fairness(evaluation: Evaluation) -> dict[str, float | None]:
    """How evenly an accuracy is spread over clients and over classes.

    Args:
        evaluation: Of one model, or of everybody's own.

    Returns:
        By name: ``mean_client_accuracy``, ``worst_client_accuracy`` and ``worst_tenth_accuracy`` (the mean of the worst
        tenth of the clients, at least of one) are shares; ``client_variance`` and ``class_variance`` are population
        variances of percentages, as in the Fed-ZDA paper. None where no client has a test split of its own.
    """
    clients = sorted(value for value in evaluation.accuracy_by_client if value is not None)
    worst = clients[: max(1, round(len(clients) / 10))]
    return {
        "mean_client_accuracy": statistics.fmean(clients) if clients else None,
        "worst_client_accuracy": min(clients, default=None),
        "worst_tenth_accuracy": statistics.fmean(worst) if worst else None,
        "client_variance": _variance(clients),
        "class_variance": _variance([value for value in evaluation.accuracy_by_class if value is not None]),
    }


def _variance(shares: list[float]) -> float | None:
    return statistics.pvariance([100 * share for share in shares]) if shares else None


def shares(correct: Tensor, group: Tensor, groups: int) -> list[float | None]:
    """The share of recognised samples in each group, ``[n]`` bool and ``[n]`` numbers; None for an empty one."""
    hits = torch.bincount(group, weights=correct.double(), minlength=groups).tolist()
    sizes = torch.bincount(group, minlength=groups).tolist()
    return [hit / size if size else None for hit, size in zip(hits, sizes, strict=True)]


@torch.no_grad()
def in_chunks(function: Callable[[Tensor], Tensor], samples: Samples) -> Tensor:
    """What a function, such as a model in evaluation mode, makes of samples, in chunks of a fixed size.

    Args:
        function: Maps normalised inputs ``[b, ...]`` to ``[b, ...]``.
        samples: ``[n, ...]``, at least one.

    Returns:
        ``[n, ...]``, without a graph.
    """
    starts = range(0, len(samples), CHUNK)
    return torch.cat([function(normalise(samples.inputs[start : start + CHUNK])) for start in starts])


def mean_loss(model: nn.Module, samples: Samples) -> float:
    """Mean cross-entropy of a model in evaluation mode on samples, at least one; of numbers the mean squared error."""
    scores = in_chunks(model, samples)  # [n, classes]
    if samples.of_numbers:
        return float(functional.mse_loss(scores[:, 0].double(), samples.labels.double()))
    return float(functional.cross_entropy(scores.double(), samples.labels))
