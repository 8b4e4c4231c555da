"""A look at the clients before anything is trained: what each holds, and how far apart they are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.nn import functional

from fedfill.data.federation import Federation
from fedfill.data.samples import Samples, normalise

MOST = 500
"""Samples of a client that its class means are taken of."""

SIDE = 8
"""Pixels to a side to which images are brought for these means."""

MILD, STRONG = 0.15, 0.55
"""Mean Hellinger distance of a client's labels from all clients' labels, from which label skew is mild or strong."""

DRIFTS = 0.05
"""Share of the variance within classes that lies between clients, from which their inputs are said to look different."""

SHUFFLES = 99
"""How often samples are dealt out anew to see what share chance alone would give."""

FEW = 200
"""Training samples of the median client below which there are few."""


@dataclass(frozen=True)
class Look:
    """What was seen.

    Attributes:
        clients: How many there are.
        samples: Training samples of all.
        median_size: Of a client.
        size_ratio: The largest client's size over the median's.
        coverage: The mean over clients of the share of the classes that they hold.
        hellinger: The mean over clients, by size, of the Hellinger distance of their labels from all clients' labels, 0 to 1.
        drift: Share of the variance of inputs within classes that lies between clients (omega squared), about 0 where inputs
            look alike, 1 where a client's samples of a class are all the same and others' are different.
        drift_by_chance: The largest of these shares when the samples of each class are dealt out anew to the same clients.
        largest_class: Share of the training samples in the largest class.
    """

    clients: int
    samples: int
    median_size: float
    size_ratio: float
    coverage: float
    hellinger: float
    drift: float
    drift_by_chance: float
    largest_class: float

    @property
    def label_skew(self) -> str:
        """``none``, ``mild`` or ``strong``."""
        return "none" if self.hellinger < MILD else "mild" if self.hellinger < STRONG else "strong"

    @property
    def feature_shift(self) -> bool:
        """Whether clients' inputs look different within a class, and more so than by chance."""
        return self.drift >= DRIFTS and self.drift > self.drift_by_chance

    @property
    def few(self) -> bool:
        """Whether a client has few samples."""
        return self.median_size < FEW

    def sentences(self) -> list[str]:
        """What it means, in plain words."""
        skew = {"none": "alike", "mild": "somewhat different", "strong": "very different"}[self.label_skew]
        largest = f", the largest {self.size_ratio:.1f} times as many" if self.size_ratio >= 2 else ""
        apart = "different from client to client" if self.feature_shift else "alike on all clients"
        sizes = f"{self.clients} clients hold {self.samples:,} training samples; the median client has {self.median_size:,.0f}{largest}"
        classes = (
            f"classes are {skew}: a client holds {self.coverage:.0%} of the classes on average, and its labels are {self.hellinger:.2f} "
            "from all clients' labels (Hellinger distance, 0 to 1)"
        )
        inputs = f"samples of one class look {apart}: {max(self.drift, 0):.1%} of their variance lies between clients"
        return [sizes, classes, inputs]

    def document(self) -> dict[str, Any]:
        """As ``study.json`` holds it."""
        return {**asdict(self), "label_skew": self.label_skew, "feature_shift": self.feature_shift, "few": self.few}


def look(federation: Federation) -> Look:
    """Look at a federation's training samples.

    Args:
        federation: Its clients' data are at hand.

    Returns:
        What was seen.
    """
    counts = np.asarray(federation.counts, dtype=float)  # [clients, classes]
    sizes = counts.sum(1)
    median = float(np.median(sizes))
    apart, by_chance = drift([client.train for client in federation.clients])
    return Look(
        clients=len(sizes),
        samples=int(sizes.sum()),
        median_size=median,
        size_ratio=float(sizes.max() / max(median, 1)),
        coverage=float((counts > 0).mean()),
        hellinger=label_distance(counts),
        drift=apart,
        drift_by_chance=by_chance,
        largest_class=float(counts.sum(0).max() / sizes.sum()),
    )


def label_distance(counts: NDArray[np.float64]) -> float:
    """The mean over clients, by size, of the Hellinger distance of their labels from all clients'.

    Args:
        counts: ``[clients, classes]``, no row of zeros alone.

    Returns:
        0 to 1.
    """
    sizes = counts.sum(1)
    own, all_of_them = counts / sizes[:, None], counts.sum(0) / counts.sum()
    affinity = np.sqrt(own * all_of_them).sum(1)
    return float((sizes * np.sqrt(np.clip(1 - affinity, 0, 1))).sum() / sizes.sum())


def drift(clients: list[Samples]) -> tuple[float, float]:
    """How far clients' inputs are apart within classes, and how far chance alone would put them.

    Omega squared of a one-way analysis of variance in each class, all inputs together: between and within sums of squares are
    added over classes and inputs, and what chance gives on average is taken off, so that it is about 0 for clients that draw
    from the same classes. Where clients hold few samples it varies much about 0; so the samples of each class are also dealt
    out anew to the same clients, `SHUFFLES` times (a permutation test).

    Args:
        clients: Their training samples; some of each are looked at.

    Returns:
        Omega squared, at most 1, and the largest of the shuffled ones; both 0 where no class is on two clients.
    """
    parts = [(_small(samples[:MOST]), samples.labels[:MOST].numpy()) for samples in clients]
    values = np.concatenate([inputs for inputs, _ in parts])
    deviations = values.std(0)
    values = values[:, deviations > 0] / deviations[deviations > 0]  # inputs count the same, whatever their unit
    values -= values.mean(0)
    labels = np.concatenate([own for _, own in parts])
    owners = np.repeat(np.arange(len(parts)), [len(own) for _, own in parts])
    holders = {label: len(np.unique(owners[labels == label])) for label in np.unique(labels)}
    kept = np.isin(labels, [label for label, many in holders.items() if many > 1])
    if not kept.any():
        return 0.0, 0.0
    values, labels, owners = values[kept], labels[kept], owners[kept]
    order = np.lexsort((owners, labels))
    values, labels, owners = (
        values[order],
        labels[order],
        owners[order],
    )  # each class in one piece, each client's part too
    classes = np.flatnonzero(np.diff(labels, prepend=-1))  # where each class begins
    groups = np.flatnonzero((np.diff(labels, prepend=-1) != 0) | (np.diff(owners, prepend=-1) != 0))
    if len(values) <= len(groups):
        return 0.0, 0.0

    def explained(starts: NDArray[np.intp], rows: NDArray[np.float64]) -> float:
        """Sum of squares of the means of pieces, each as often as the piece has rows."""
        sizes = np.diff(starts, append=len(rows))
        return float((np.add.reduceat(rows, starts) ** 2).sum(1) @ (1 / sizes))

    of_classes = explained(classes, values)
    total = float((values**2).sum()) - of_classes

    def omega(rows: NDArray[np.float64]) -> float:
        between = explained(groups, rows) - of_classes
        chance = (total - between) / (len(rows) - len(groups))  # of one degree of freedom, all inputs together
        return (between - (len(groups) - len(classes)) * chance) / (total + chance) if total > 0 else 0.0

    pieces = np.split(np.arange(len(values)), classes[1:])
    generator = np.random.default_rng(0)
    shuffled = [
        omega(values[np.concatenate([generator.permutation(piece) for piece in pieces])]) for _ in range(SHUFFLES)
    ]
    return omega(values), max(shuffled)


def _small(samples: Samples) -> NDArray[np.float64]:
    """Inputs as rows of numbers ``[n, d]``; images are brought to few pixels."""
    inputs = normalise(samples.inputs)
    if inputs.dim() == 4:
        inputs = functional.adaptive_avg_pool2d(inputs, (min(SIDE, inputs.shape[2]), min(SIDE, inputs.shape[3])))
    return inputs.flatten(1).double().numpy()
