"""How good a model's probabilities are: ranking, Brier score and calibration. Accuracy looks at the largest one alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FIGURES = {
    "auc": "area under the ROC curve",
    "auc_within_clients": "the same within clients, mean",
    "brier": "Brier score",
    "calibration_error": "calibration error",
}
"""What is measured of a run's probabilities: names in its summary, and words for people."""
BINS = 15
"""Of confidence, in `calibration_error`; as in Guo et al. 2017."""


def auc(labels: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float | None:
    """Area under the receiver operating characteristic: how often a sample of a class is ranked above one of another.

    Args:
        labels: ``[n]``, 0..classes-1.
        probabilities: ``[n, classes]``.

    Returns:
        0..1, ties counted half. Of two classes that of the second; of more the mean over classes of one against the rest, without the
        classes that no sample has. None where all samples are of one class.
    """
    present = np.unique(labels)
    if len(present) < 2:
        return None
    chosen = [1] if probabilities.shape[1] == 2 else [int(c) for c in present]
    return float(np.mean([_area(labels == c, probabilities[:, c]) for c in chosen]))


def _area(positive: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """The area of one class, from the ranks of its scores (Mann and Whitney 1947)."""
    # not scikit-learn's, which a run would load for this alone, longer than torch; the tests hold the two together
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # equal scores share the mean of their ranks
    own, n = float(ranks[place.reshape(-1)][positive].sum()), int(positive.sum())
    return (own - n * (n + 1) / 2) / (n * (len(scores) - n))


def brier(labels: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float | None:
    """Brier score: half the mean squared distance between the probabilities and the truth (Brier 1950).

    Args:
        labels: ``[n]``, 0..classes-1.
        probabilities: ``[n, classes]``, which add up to 1.

    Returns:
        0..1, the less the better; of two classes the mean of (p - y)^2. None without samples.
    """
    if not len(labels):
        return None
    truth = np.eye(probabilities.shape[1])[labels]
    return float(((probabilities - truth) ** 2).sum(axis=1).mean() / 2)


def calibration_error(labels: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float | None:
    """Expected calibration error: how far the confidence is from the accuracy (Naeini et al. 2015; Guo et al. 2017, eq. 3).

    The confidence is the largest probability. Samples fall into `BINS` bins of it, of one width; the bins' differences count by
    their samples. With few samples it is too large even of a perfect model, as each bin's accuracy is by chance.

    Args:
        labels: ``[n]``, 0..classes-1.
        probabilities: ``[n, classes]``.

    Returns:
        0..1, the less the better. None without samples.
    """
    if not len(labels):
        return None
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    bins = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)  # (0, 1/15], (1/15, 2/15], ...
    off = np.bincount(bins, weights=right - confidence, minlength=BINS)
    return float(np.abs(off).sum() / len(labels))
