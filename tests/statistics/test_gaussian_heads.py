"""Gaussian heads from sums: hand-worked figures, scikit-learn, the shrinkage, priors, noise, and edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import NearestCentroid
from tests.helpers import refused

from fedfill.statistics.covariance import class_covariances, class_means, oas, toward_sphere, within_covariance
from fedfill.statistics.gaussian_heads import QuadraticHead, lda, naive_bayes, nearest_mean, qda
from fedfill.statistics.heads import LinearHead

Z = torch.tensor([[1, 0], [0.6, 0.8], [0, 1], [0.8, 0.6], [0.8, -0.6]], dtype=torch.float64)
Y = torch.tensor([0, 1, 1, 0, 0])
Sums = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def sums_of(z: torch.Tensor, y: torch.Tensor, classes: int) -> Sums:
    """Class Grams, their sum, moments and counts."""
    targets = torch.eye(classes, dtype=torch.float64)[y]
    grams = torch.einsum("nc,ni,nj->cij", targets, z, z)
    return grams, grams.sum(0), z.T @ targets, targets.sum(0)


def drawn(n: int, d: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """n features, every class with a covariance of its own."""
    stream = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=stream)
    centres = torch.randn(classes, d, generator=stream, dtype=torch.float64)
    shapes = torch.randn(classes, d, d, generator=stream, dtype=torch.float64) / math.sqrt(d)
    noise = torch.randn(n, d, generator=stream, dtype=torch.float64)
    return centres[y] + torch.einsum("ni,nij->nj", noise, shapes[y]), y


def diagonals(grams: torch.Tensor) -> torch.Tensor:
    return grams.diagonal(dim1=1, dim2=2)


GRAMS, G, M, N = sums_of(Z, Y, 2)


def test_means_and_covariance_by_hand():
    assert class_means(M, N).flatten().tolist() == pytest.approx([0.866667, 0, 0.3, 0.9], abs=6e-7)
    within = within_covariance(G, M, N)
    assert within.flatten().tolist() == pytest.approx([0.068889, -0.02, -0.02, 0.246667], abs=6e-7)
    covariances = class_covariances(GRAMS, M, N)
    assert covariances[0].flatten().tolist() == pytest.approx([0.013333, 0, 0, 0.36], abs=6e-7)
    assert covariances[1].flatten().tolist() == pytest.approx([0.18, -0.06, -0.06, 0.02], abs=6e-7)


def test_lda_by_hand():
    head = lda(G, M, N, shrinkage=0.0)
    assert head.weight.T.flatten().tolist() == pytest.approx([12.883929, 5.544643, 1.044643, 4.098214], abs=6e-7)
    assert head.bias.tolist() == pytest.approx([-6.093861, -3.592184], abs=6e-7)
    assert head.scores(Z[3:4]).flatten().tolist() == pytest.approx([4.840067, 3.302459], abs=6e-7)
    head = lda(G, M, N, shrinkage=0.0, prior="uniform")
    assert head.bias.tolist() == pytest.approx([-6.276183, -3.369040], abs=6e-7)
    assert head.scores(Z[3:4]).flatten().tolist() == pytest.approx([4.657746, 3.525603], abs=6e-7)
    head = lda(G, M, N, shrinkage=0.1)
    assert head.weight.T.flatten().tolist() == pytest.approx([11.341554, 4.817510, 0.858566, 4.149737], abs=6e-7)
    assert head.bias.tolist() == pytest.approx([-5.425499, -3.506299], abs=6e-7)


def test_nearest_mean_and_naive_bayes_by_hand():
    assert nearest_mean(M, N).bias.tolist() == pytest.approx([-0.375556, -0.45], abs=6e-7)
    variances = naive_bayes(diagonals(GRAMS), M, N).whitening ** -2
    assert variances.flatten().tolist() == pytest.approx([0.008889, 0.24, 0.09, 0.01], abs=6e-7)


# Against scikit-learn, on records


@pytest.mark.parametrize("share", [0.0, 0.1, 0.7])
def test_lda_is_that_of_scikit_learn(share):
    z, y = drawn(400, 8, 4)
    _, gram, moments, counts = sums_of(z, y, 4)
    # theirs divides by n, ours by n - C
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=share).fit(z.numpy(), y.numpy())
    covariance = toward_sphere(within_covariance(gram, moments, counts), share).numpy() * (400 - 4) / 400
    assert np.abs(covariance - theirs.covariance_).max() < 1e-12
    head = lda(gram, moments, counts, shrinkage=share)
    assert np.abs(head.weight.numpy() * 400 / 396 - theirs.coef_).max() < 1e-9
    logs = np.log(counts.numpy() / 400)
    ours = (head.bias.numpy() - logs) * 400 / 396 + logs
    assert np.abs(ours - theirs.intercept_).max() < 1e-9


def test_lda_of_any_prior_is_the_ratio_of_two_gaussians():
    z, y = drawn(300, 5, 3)
    _, gram, moments, counts = sums_of(z, y, 3)
    weights = torch.tensor([1.0, 6.0, 3.0])
    covariance = toward_sphere(within_covariance(gram, moments, counts), 0.2)
    slow = torch.stack(
        [
            torch.distributions.MultivariateNormal(mean, covariance).log_prob(z) + math.log(w / 10)
            for mean, w in zip(class_means(moments, counts), weights.tolist(), strict=True)
        ],
        1,
    )
    ours = lda(gram, moments, counts, shrinkage=0.2, prior=weights).scores(z)
    assert torch.allclose(torch.log_softmax(ours, 1), torch.log_softmax(slow, 1), atol=1e-9)


def test_qda_without_shrinkage_is_that_of_scikit_learn_and_of_densities():
    z, y = drawn(400, 6, 3)
    grams, _, moments, counts = sums_of(z, y, 3)
    covariances = class_covariances(grams, moments, counts)
    ours = qda(grams, moments, counts, to_sphere=0, to_pooled=0, prior="uniform").scores(z).log_softmax(1)
    slow = [torch.distributions.MultivariateNormal(z[y == c].mean(0), z[y == c].T.cov()).log_prob(z) for c in range(3)]
    assert torch.allclose(ours, torch.stack(slow, 1).log_softmax(1), atol=1e-8)
    theirs = QuadraticDiscriminantAnalysis(store_covariance=True).fit(z.numpy(), y.numpy())
    # releases of theirs differ in the divisor, N_c or N_c - 1
    ratios = [float(torch.as_tensor(theirs.covariance_[c]).trace() / covariances[c].trace()) for c in range(3)]
    assert all(min(abs(r - 1), abs(r - 1 + 1 / n)) < 1e-9 for r, n in zip(ratios, counts.tolist(), strict=True))
    for c, ratio in enumerate(ratios):
        assert np.abs(covariances[c].numpy() * ratio - theirs.covariance_[c]).max() < 1e-12


def test_qda_shrinks_to_the_pooled_covariance_first_and_to_the_sphere_then():
    z, y = drawn(200, 4, 2)
    grams, gram, moments, counts = sums_of(z, y, 2)
    head = qda(grams, moments, counts, to_sphere=0.3, to_pooled=0.2)
    pooled, eye = within_covariance(gram, moments, counts), torch.eye(4, dtype=torch.float64)
    own = 0.8 * z[y == 1].T.cov() + 0.2 * pooled
    own = 0.7 * own + 0.3 * own.trace() / 4 * eye
    assert torch.allclose(head.whitening[1] @ own @ head.whitening[1].T, eye, atol=1e-12)


def test_qda_of_the_pooled_covariance_alone_decides_as_lda():
    z, y = drawn(200, 4, 3)
    grams, gram, moments, counts = sums_of(z, y, 3)
    quadratic = qda(grams, moments, counts, to_sphere=0.1, to_pooled=1.0).scores(z)
    linear = lda(gram, moments, counts, shrinkage=0.1).scores(z)
    assert torch.allclose(quadratic.log_softmax(1), linear.log_softmax(1), atol=1e-9)


def test_naive_bayes_and_nearest_mean_are_those_of_scikit_learn():
    z, y = drawn(300, 5, 3)
    grams, _, moments, counts = sums_of(z, y, 3)
    theirs = GaussianNB(var_smoothing=0).fit(z.numpy(), y.numpy())
    ours = naive_bayes(diagonals(grams), moments, counts).scores(z).log_softmax(1)
    assert np.abs(ours.numpy() - theirs.predict_log_proba(z.numpy())).max() < 1e-8
    nearest = NearestCentroid().fit(z.numpy(), y.numpy()).predict(z.numpy())
    assert nearest_mean(moments, counts).scores(z).argmax(1).tolist() == nearest.tolist()


def test_the_covariance_within_classes_is_that_of_records():
    z, y = drawn(150, 4, 3)
    _, gram, moments, counts = sums_of(z, y, 3)
    centred = torch.cat([z[y == c] - z[y == c].mean(0) for c in range(3)])
    assert torch.allclose(within_covariance(gram, moments, counts), centred.T @ centred / 147, atol=1e-12)


# Shrinkage


def test_oas_of_the_example():
    # the formula gives 1.999207 there, so all goes to the sphere
    within = within_covariance(G, M, N)
    squares, trace = float((within**2).sum()), float(within.trace()) ** 2
    assert trace / ((3 + 1 - 1) * (squares - trace / 2)) == pytest.approx(1.999207, abs=6e-7)
    assert oas(within, 3) == 1.0


def test_oas_is_where_the_oracle_that_is_asked_again_and_again_comes_to_rest():
    # Chen et al. 2010: the oracle's share, with what it needs of the true covariance taken from the estimate so far
    samples = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    s = (samples * torch.tensor([3, 1, 1, 0.5, 0.2, 0.1])).T @ (samples * torch.tensor([3, 1, 1, 0.5, 0.2, 0.1])) / 40
    p, n, share = 6, 40, 0.5
    for _ in range(500):
        estimate = toward_sphere(s, share)
        inner, trace = float((estimate * s).sum()), float(estimate.trace()) ** 2
        share = ((1 - 2 / p) * inner + trace) / ((n + 1 - 2 / p) * inner + (1 - n / p) * trace)
    assert 0.05 < share < 0.5
    assert oas(s, n) == pytest.approx(share, abs=1e-9)


def test_oas_comes_near_the_best_share():
    stream = torch.Generator().manual_seed(1)
    truth = torch.diag(torch.linspace(0.1, 2, 10, dtype=torch.float64))
    shares = torch.linspace(0, 1, 101)
    errors, chosen = torch.zeros(101, dtype=torch.float64), []
    for _ in range(200):
        samples = torch.randn(20, 10, generator=stream, dtype=torch.float64) @ truth.sqrt()
        s = samples.T @ samples / 20
        errors += torch.stack([((toward_sphere(s, float(a)) - truth) ** 2).sum() for a in shares])
        chosen.append(oas(s, 20))
    assert sum(chosen) / 200 == pytest.approx(float(shares[errors.argmin()]), abs=0.1)


def test_oas_in_one_dimension_and_of_a_sphere_changes_nothing():
    for matrix in (torch.eye(5, dtype=torch.float64), torch.tensor([[3.0]]), torch.zeros(3, 3)):
        share = oas(matrix, 10)
        assert share == 1.0
        assert torch.allclose(toward_sphere(matrix, share), matrix)


# Priors


def test_doubling_a_class_leaves_the_means_and_moves_uniform_scores_through_the_covariance_alone():
    z, y = drawn(120, 4, 3)
    *_, moments, counts = sums_of(z, y, 3)
    twice = torch.cat([z, z[y == 1]]), torch.cat([y, y[y == 1]])
    _, gram2, moments2, counts2 = sums_of(*twice, 3)
    assert torch.allclose(class_means(moments, counts), class_means(moments2, counts2), atol=1e-14)
    assert torch.allclose(nearest_mean(moments, counts).scores(z), nearest_mean(moments2, counts2).scores(z))
    ours = lda(gram2, moments2, counts2, shrinkage=0.0, prior="uniform")
    covariance = within_covariance(gram2, moments2, counts2)
    means = class_means(moments, counts)
    weight = torch.linalg.solve(covariance, means.T).T
    assert torch.allclose(ours.weight, weight)
    assert torch.allclose(ours.bias, -(means * weight).sum(1) / 2 - math.log(3))


def test_a_class_of_no_weight_never_wins_and_weights_need_not_sum_to_one():
    z, y = drawn(120, 4, 3)
    _, gram, moments, counts = sums_of(z, y, 3)
    without = lda(gram, moments, counts, prior=torch.tensor([0, 2.0, 5]))
    assert not (without.scores(100 * z).argmax(1) == 0).any()
    same = lda(gram, moments, counts, prior=3 * counts)
    assert torch.allclose(same.bias, lda(gram, moments, counts).bias)


@pytest.mark.parametrize("weights", [[1.0, -1.0], [math.nan, 1.0], [1.0], [0.0, 0.0]])
def test_weights_that_are_none_are_refused(weights):
    with refused("prior"):
        lda(G, M, N, prior=torch.tensor(weights))


def test_two_balanced_classes_have_the_direction_of_least_squares():
    z, y = drawn(200, 4, 2)
    _, gram, moments, counts = sums_of(z, y, 2)
    weight = lda(gram, moments, counts, shrinkage=0.0).weight
    with_intercept = torch.cat([z, torch.ones(200, 1)], 1)
    line = torch.linalg.lstsq(with_intercept, y.double()[:, None]).solution[:4, 0]
    assert torch.nn.functional.cosine_similarity(weight[1] - weight[0], line, dim=0) == pytest.approx(1)


# Noise


def test_under_noise_negative_eigenvalues_go_and_an_eighth_of_the_edge_comes():
    moments, counts = torch.tensor([[1.0, -1], [1, 1]]), torch.tensor([2.0, 2])
    gram = torch.diag(torch.tensor([5.0, -4])) + torch.eye(2)  # within: (4, -5) / 2
    edge = 2 * 0.3 * math.sqrt(2)
    head = lda(gram, moments, counts, off_diagonal_std=0.3)
    scale = torch.tensor([(6 - 1) / 2 + edge / 32, edge / 32], dtype=torch.float64)
    assert torch.allclose(head.weight, torch.tensor([[0.5, 0.5], [-0.5, 0.5]], dtype=torch.float64) / scale)


def test_as_the_noise_ends_lda_tends_to_the_exact_one():
    z, y = drawn(300, 5, 3)
    _, gram, moments, counts = sums_of(z, y, 3)
    noise = 1e-9 * torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noisy = lda(gram + noise + noise.T, moments, counts, off_diagonal_std=1e-9 * math.sqrt(2))
    assert torch.allclose(noisy.scores(z), lda(gram, moments, counts, shrinkage=0.0).scores(z), atol=1e-6)


def test_noise_that_leaves_naive_bayes_no_spread_gives_finite_scores():
    squares, moments = torch.tensor([[-3.0, -1], [-2, 0.1]]), torch.tensor([[1.0, -1], [2, 1]])
    scores = naive_bayes(squares, moments, torch.tensor([2.0, 3])).scores(torch.tensor([[0.5, 1], [-0.3, 0.3]]))
    assert torch.isfinite(scores).all()
    assert scores.argmax(1).tolist() == [0, 1]


# Edges


def heads_of(sums: Sums) -> dict[str, LinearHead | QuadraticHead]:
    grams, gram, moments, counts = sums
    return {
        "lda": lda(gram, moments, counts),
        "noisy": lda(gram, moments, counts, off_diagonal_std=0.1),
        "ncm": nearest_mean(moments, counts),
        "nb": naive_bayes(diagonals(grams), moments, counts),
        "qda": qda(grams, moments, counts),
    }


@pytest.mark.parametrize("name", ["lda", "noisy", "ncm", "nb", "qda"])
@pytest.mark.parametrize(("n", "d", "classes"), [(1, 1, 1), (1, 4, 3), (4, 30, 2), (30, 1, 2), (30, 5, 1), (5, 3, 5)])
def test_few_records_or_one_class_give_finite_scores_and_the_right_classes_stay(name, n, d, classes):
    z, y = drawn(n, d, classes)
    scores = heads_of(sums_of(z, y, classes))[name].scores(torch.cat([z, 1e3 * z, 0 * z]))
    assert torch.isfinite(scores).all()
    assert not (scores.argmax(1)[:, None] == torch.tensor([c for c in range(classes) if c not in y])).any()


@pytest.mark.parametrize("name", ["lda", "noisy", "ncm", "nb", "qda"])
def test_a_class_that_nobody_holds_never_wins(name):
    z, y = drawn(100, 4, 3)
    full, gaps = heads_of(sums_of(z, y, 3))[name], heads_of(sums_of(z, 2 * y, 6))[name]  # nobody holds 1, 3, 5
    far = 1e5 * torch.randn(500, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    features = torch.cat([z, far])
    scores = gaps.scores(features)
    assert torch.isfinite(scores).all()
    assert torch.allclose(scores[:, ::2], full.scores(features), rtol=1e-9)
    assert not (scores.argmax(1) % 2).any()


@pytest.mark.parametrize("name", ["lda", "nb", "qda"])
def test_classes_of_equal_records_are_told_apart_by_the_nearest_mean(name):
    z = torch.tensor([[0.1, 0.7], [0.3, 0.3], [0.9, 0.2]], dtype=torch.float64)
    y = torch.tensor([0] * 9 + [1] + [2] * 3)
    head = heads_of(sums_of(z[y], y, 3))[name]
    scores = head.scores(z)
    assert torch.isfinite(scores).all()
    assert scores.argmax(1).tolist() == [0, 1, 2]
    nearest = nearest_mean(*sums_of(z[y], y, 3)[2:]).scores(z)
    assert torch.allclose(scores.log_softmax(1), nearest.log_softmax(1), atol=1e-9)


@pytest.mark.parametrize("name", ["nb", "qda"])
def test_a_class_of_one_record_takes_the_pooled_spread(name):
    z, y = drawn(100, 3, 2)
    z, y = torch.cat([z, z[:1] + 9]), torch.cat([y, torch.tensor([2])])
    grams, gram, moments, counts = sums_of(z, y, 3)
    head = heads_of((grams, gram, moments, counts))[name]
    if name == "qda":
        assert torch.allclose(class_covariances(grams, moments, counts)[2], within_covariance(gram, moments, counts))
    else:
        spread = sum(z[y == c].var(0, unbiased=False) * (y == c).sum() for c in range(2)) / 101
        assert torch.allclose(head.whitening[2] ** -2, spread)
    assert head.scores(z[-1:]).argmax() == 2


def test_a_feature_without_spread_in_a_class_is_held_above_zero():
    z, y = drawn(60, 4, 2)
    z[y == 0, 1] = 0.5
    grams, _, moments, counts = sums_of(z, y, 2)
    variances = naive_bayes(diagonals(grams), moments, counts).whitening ** -2
    assert float(variances[0, 1]) == pytest.approx(1e-3 * float(z[y == 0].var(0, unbiased=False).mean()))


def test_without_shrinkage_a_singular_covariance_is_refused():
    z, y = drawn(6, 9, 2)
    grams, gram, moments, counts = sums_of(z, y, 2)
    with refused("shrinkage", 0.0, "singular"):
        lda(gram, moments, counts, shrinkage=0.0)
    for share in (-0.1, 1.1, math.nan):
        with refused("shrinkage", share):
            lda(gram, moments, counts, shrinkage=share)
    with refused("shrinkage", "noise"):
        lda(gram, moments, counts, off_diagonal_std=0.0)
    with refused("shrinkage", "class 0", "singular"):
        qda(grams, moments, counts, to_sphere=0.0)


def test_sums_of_nobody_are_refused():
    nothing = [torch.zeros_like(block) for block in (GRAMS, G, M, N)]
    for head in (lambda: lda(*nothing[1:]), lambda: nearest_mean(*nothing[2:]), lambda: qda(nothing[0], *nothing[2:])):
        with refused("head"):
            head()
