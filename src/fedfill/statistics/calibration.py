"""CCVR: a linear head that is trained on Gaussian samples of each class, or on a bound that needs no samples.

Luo et al., "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data", NeurIPS 2021.
Its way of merging the clients' covariances equals sums of class Grams, whatever the split. The bound is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedfill.errors import FedfillError
from fedfill.statistics.covariance import class_covariances, class_means, within_covariance
from fedfill.statistics.gaussian_heads import Prior, log_weights
from fedfill.statistics.heads import MARGIN, LinearHead, linear, somebody, sums
from fedfill.statistics.spectral_noise import clipped, noise_edge

JITTER = 1e-4
"""What is added to every variance of the features, so that no direction is without spread."""


@dataclass(frozen=True)
class ClassGaussians:
    """A Gaussian for each class.

    Attributes:
        means: ``[C, d]`` float64; zeros for a class that nobody holds.
        covariances: ``[C, d, d]``.
        counts: N, ``[C]``, of the records behind them.
    """

    means: Tensor
    covariances: Tensor
    counts: Tensor


def class_gaussians(class_grams: Tensor, moments: Tensor, counts: Tensor) -> ClassGaussians:
    """Means and covariances of classes, of which those with few records lean on the pooled one.

    Args:
        class_grams: Q, ``[C, d, d]``.
        moments: M, ``[d, C]``.
        counts: N, ``[C]``.

    Returns:
        Covariances with the divisor N_c - 1; the pooled one below 2 records; (1 - a) S_c + a S_w with a = d / (d + N_c)
        below d records (the share is ours).
    """
    class_grams, moments, counts = sums(class_grams, moments, counts)
    somebody(counts > 0)
    d = len(moments)
    pooled = within_covariance(_held(class_grams, counts).sum(0), moments, counts)
    share = torch.where(counts < d, d / (d + counts.clamp(min=0)), 0.0)[:, None, None]
    covariances = (1 - share) * class_covariances(class_grams, moments, counts) + share * pooled
    return ClassGaussians(class_means(moments, counts), covariances, counts)


def noisy_class_gaussians(
    class_grams: Tensor, moments: Tensor, counts: Tensor, off_diagonal_std: float, strength: float = 1 / 8
) -> ClassGaussians:
    """Means and covariances of classes from noisy sums.

    Args:
        class_grams: With noise, ``[C, d, d]``, symmetric.
        moments: With noise, ``[d, C]``.
        counts: N, ``[C]``; those too small to tell from noise put at 0.
        off_diagonal_std: Of the noise in each class's Gram off the diagonal.
        strength: What is added to all eigenvalues of Q_c / N_c - mu mu', in shares of the noise's edge over N_c; the
            negative ones are put at 0 first.

    Returns:
        The Gaussians.
    """
    class_grams, moments, counts = sums(class_grams, moments, counts)
    somebody(counts > 0)
    means, held = class_means(moments, counts), torch.where(counts > 0, counts, 1.0)[:, None]
    second = _held(class_grams, counts) / held[:, :, None]
    values, vectors = torch.linalg.eigh(second - means[:, :, None] * means[:, None, :])
    values = clipped(values) + strength * noise_edge(off_diagonal_std, len(moments)) / held
    return ClassGaussians(means, (vectors * values[:, None, :]) @ vectors.mT, counts)


def gaussian_samples(
    gaussians: ClassGaussians,
    per_class: int | Sequence[int],
    generator_for: Callable[[int], torch.Generator],
    jitter: float = JITTER,
) -> tuple[Tensor, Tensor]:
    """Features drawn from the Gaussian of each class that somebody holds.

    Args:
        gaussians: Of the classes.
        per_class: Draws of each class, or of every one.
        generator_for: The stream of class c, at its start: so the draws of a class do not depend on the others.
        jitter: Added to every variance.

    Returns:
        ``[n, d]`` float64 and labels ``[n]`` int64, class after class.
    """
    classes, d = gaussians.means.shape
    wanted = [per_class] * classes if isinstance(per_class, int) else list(per_class)
    drawn = [c for c in range(classes) if gaussians.counts[c] > 0 and wanted[c] > 0]
    samples = [gaussians.means.new_empty(0, d)]
    for c in drawn:
        stream = generator_for(c)
        draws = torch.randn(wanted[c], d, generator=stream, dtype=torch.float64, device=stream.device).cpu()
        samples.append(gaussians.means[c] + draws @ _root(gaussians.covariances[c], jitter).T)
    labels = torch.tensor([c for c in drawn for _ in range(wanted[c])], dtype=torch.int64)
    return torch.cat(samples), labels


def train_on_samples(
    head: LinearHead, z: Tensor, labels: Tensor, generator: torch.Generator,
    steps: int = 400, batch_size: int = 256, learning_rate: float = 0.01, clamp: tuple[float, float] | None = None,
) -> LinearHead:  # fmt: skip
    """The head after some steps of Adam on the cross-entropy of samples.

    Args:
        head: Where it starts.
        z: ``[n, d]``, one sample or more.
        labels: ``[n]`` int64; a class that has none never wins.
        generator: Stream of the batches, which are drawn with replacement.
        steps: Batches.
        batch_size: Samples of each.
        learning_rate: Adam's.
        clamp: Range of what stands before the layer, such as (0, 1) after a sigmoid; samples are clamped to it.

    Returns:
        The trained head.
    """
    z = z.double() if clamp is None else z.double().clamp(*clamp)
    rows = torch.zeros(len(head.bias), dtype=torch.bool)
    rows[labels] = True
    somebody(rows)
    target = (rows.cumsum(0) - 1)[labels]
    weight, bias = _start(head, rows)
    optimizer = torch.optim.Adam([weight, bias], lr=learning_rate)
    for _ in range(steps):
        picked = torch.randint(len(z), (batch_size,), generator=generator, device=generator.device).cpu()
        optimizer.zero_grad()
        cross_entropy(z[picked] @ weight.T + bias, target[picked]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return _full(weight, bias, rows)


def jensen_bound(weight: Tensor, bias: Tensor, gaussians: ClassGaussians, prior: Tensor, jitter: float = 0.0) -> Tensor:
    """What the cross-entropy on endless samples is at the most, by Jensen's inequality.

    The mean of a log is at most the log of the mean, and exp of a Gaussian has a mean in closed form. It is convex in
    the head, and tends to the cross-entropy as classes grow tight.

    Args:
        weight: ``[C, d]`` float64.
        bias: ``[C]``.
        gaussians: Of the same classes, all of which somebody holds.
        prior: pi, ``[C]``.
        jitter: Added to every variance.

    Returns:
        sum_c pi_c log sum_j exp(v_jc'mu_c + b_j - b_c + v_jc' S_c v_jc / 2) with v_jc = w_j - w_c.
    """
    terms = []
    for c in range(len(bias)):
        away = weight - weight[c]
        spread = ((away @ gaussians.covariances[c]) * away).sum(1) + jitter * (away**2).sum(1)
        terms.append(torch.logsumexp(away @ gaussians.means[c] + bias - bias[c] + spread / 2, 0))
    return prior @ torch.stack(terms)


def minimise_bound(
    head: LinearHead, gaussians: ClassGaussians, prior: Prior = "uniform", steps: int = 50, jitter: float = JITTER
) -> LinearHead:
    """The head of the least `jensen_bound`, by L-BFGS: CCVR without samples, and so without a draw.

    Args:
        head: Where it starts.
        gaussians: Of the classes.
        prior: See `Prior`; a class of weight 0 never wins.
        steps: Of L-BFGS, at the most.
        jitter: Added to every variance; without any, tight classes would let the weights grow for ever.

    Returns:
        The head.

    Raises:
        FedfillError: Where the head is no longer finite.
    """
    log_prior, rows = log_weights(prior, gaussians.counts)
    weight, bias = _start(head, rows)
    own = ClassGaussians(gaussians.means[rows], gaussians.covariances[rows], gaussians.counts[rows])
    shares = log_prior[rows].exp()
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=steps, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = jensen_bound(weight, bias, own, shares, jitter)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    if not (torch.isfinite(weight).all() and torch.isfinite(bias).all()):
        raise FedfillError("head: found weights that are no finite numbers after calibration; allowed: finite ones")
    return _full(weight, bias, rows)


def _held(class_grams: Tensor, counts: Tensor) -> Tensor:
    return torch.where((counts > 0)[:, None, None], class_grams, 0.0)


def _root(covariance: Tensor, jitter: float) -> Tensor:
    """A matrix R with RR' = S + jitter I: the Cholesky factor, or where there is none, by eigenvalues."""
    raised = covariance + jitter * torch.eye(len(covariance), dtype=covariance.dtype)
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(raised)
    if failed:
        values, vectors = torch.linalg.eigh(raised)
        factor = vectors * clipped(values).sqrt()
    return factor


def _start(head: LinearHead, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a head, to be trained; a class that nobody held when it was made (see `linear`) starts at zero."""
    weight, bias = head.weight.detach().double()[rows], head.bias.detach().double()[rows]
    bias = torch.where(bias > -MARGIN / 2, bias, 0.0)
    return weight.clone().requires_grad_(), bias.clone().requires_grad_()


def _full(weight: Tensor, bias: Tensor, rows: Tensor) -> LinearHead:
    """A head of all classes from the trained rows."""
    whole = torch.zeros(len(rows), weight.shape[1], dtype=weight.dtype)
    whole[rows] = weight.detach()
    biases = torch.zeros(len(rows), dtype=weight.dtype)
    biases[rows] = bias.detach()
    return linear(whole, biases, rows)
