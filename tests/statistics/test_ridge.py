"""Ridge from sums: hand-worked figures, the same from records, the choice of lambda, noise, and edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multivariate_normal
from sklearn.linear_model import Ridge
from tests.helpers import refused

from fedfill.statistics.ridge import Spectrum, choose_lambda, leave_one_out, noisy_ridge, ridge
from fedfill.statistics.spectral_noise import clipped, dimension_for, noise_edge, shrunk

Z = torch.tensor([[1, 0], [0.6, 0.8], [0, 1], [0.8, 0.6], [0.8, -0.6]], dtype=torch.float64)
Y = torch.tensor([0, 1, 1, 0, 0])
A, B = [0, 1], [2, 3, 4]


def sums_of(z: torch.Tensor, y: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    targets = torch.eye(classes, dtype=torch.float64)[y]
    return z.T @ z, z.T @ targets, targets.sum(0)


def one_hot(y: torch.Tensor, classes: int) -> np.ndarray:
    return np.eye(classes)[y.numpy()]


def drawn(n: int, d: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """n unit vectors, gathered around a direction of their class."""
    stream = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=stream)
    centres = torch.randn(classes, d, generator=stream, dtype=torch.float64)
    z = centres[y] + 1.5 * torch.randn(n, d, generator=stream, dtype=torch.float64)
    return z / z.norm(dim=1, keepdim=True), y


G, M, N = sums_of(Z, Y, 2)


def test_the_sums_of_the_example():
    assert torch.allclose(G, torch.tensor([[2.64, 0.48], [0.48, 2.36]], dtype=torch.float64), atol=1e-15)
    assert torch.allclose(M, torch.tensor([[2.6, 0.6], [0, 1.8]], dtype=torch.float64), atol=1e-15)


@pytest.mark.parametrize(
    ("lam", "weight", "rss", "df", "gcv", "evidence"),
    [
        (0.1, [[0.982488, 0.094009], [-0.191705, 0.713364]], [0.345327, 0.607767], 1.920123, 0.502387, 4.534876),
        (1, [[0.728, 0.096], [-0.104, 0.522]], [0.5664, 0.7211], 1.416667, 0.501352, 5.294579),
        (10, [[0.206, 0.042], [-0.008, 0.144]], [2.0394, 1.4906], 0.397436, 0.833192, 3.916683),
    ],
)
def test_the_figures_worked_by_hand(lam, weight, rss, df, gcv, evidence):
    spectrum = Spectrum.of(G, M)
    for head in (ridge(G, M, lam), spectrum.solution(lam)):
        assert head.weight.T.flatten().tolist() == pytest.approx([*weight[0], *weight[1]], abs=6e-7)
        assert head.bias.tolist() == [0, 0]
    assert spectrum.values.tolist() == pytest.approx([2, 3])
    assert spectrum.residuals(lam, N).tolist() == pytest.approx(rss, abs=6e-7)
    assert spectrum.effective_parameters(lam) == pytest.approx(df, abs=6e-7)
    assert spectrum.gcv(lam, 5) == pytest.approx(gcv, abs=6e-7)
    assert spectrum.evidence(lam, 5) == pytest.approx(evidence, abs=6e-7)


def test_scores_of_a_record_by_hand():
    assert ridge(G, M, 1).scores(Z[3:4]).flatten().tolist() == pytest.approx([0.52, 0.39])


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 4), st.floats(-2, 2), st.integers(0, 10_000))
def test_what_the_sums_tell_equals_what_records_tell(n, d, classes, power, seed):
    z, y = drawn(n, d, classes, seed)
    gram, moments, counts = sums_of(z, y, classes)
    lam = 10.0**power
    head = Spectrum.of(gram, moments).solution(lam, counts)
    present = counts > 0
    sk = Ridge(alpha=lam, fit_intercept=False, solver="svd").fit(z.numpy(), one_hot(y, classes))
    assert np.abs(head.weight.numpy() - sk.coef_.reshape(classes, d))[present.numpy()].max() < 1e-9
    left = (torch.as_tensor(one_hot(y, classes)) - z @ torch.as_tensor(sk.coef_.reshape(classes, d)).T) ** 2
    hat = z @ torch.linalg.solve(gram + lam * torch.eye(d, dtype=torch.float64), z.T)
    spectrum = Spectrum.of(gram, moments)
    assert spectrum.residuals(lam, counts).tolist() == pytest.approx(left.sum(0).tolist(), rel=1e-6, abs=1e-11 * n)
    assert spectrum.effective_parameters(lam) == pytest.approx(float(hat.trace()), rel=1e-6)
    outside = torch.eye(n, dtype=torch.float64) - hat
    slow = n * float(left.sum()) / float(outside.trace()) ** 2
    assert spectrum.gcv(lam, n) == pytest.approx(slow, rel=1e-4, abs=1e-12)


def test_ridge_equals_scikit_learn_on_pooled_data():
    z, y = drawn(500, 40, 5)
    gram, moments, _ = sums_of(z, y, 5)
    for lam in (1e-6, 0.1, 30.0):
        theirs = Ridge(alpha=lam, fit_intercept=False).fit(z.numpy(), one_hot(y, 5))
        assert np.abs(ridge(gram, moments, lam).weight.numpy() - theirs.coef_).max() < 1e-9


def test_the_evidence_is_that_of_a_gaussian_process():
    # y_c ~ N(0, v (I + ZZ'/lambda)), with the one v for all classes at which they are most likely
    z, y = drawn(30, 6, 3)
    gram, moments, _ = sums_of(z, y, 3)
    targets = one_hot(y, 3)

    def likelihood(lam: float) -> float:
        kernel = np.eye(30) + z.numpy() @ z.numpy().T / lam
        v = sum(t @ np.linalg.solve(kernel, t) for t in targets.T) / 90
        return sum(multivariate_normal.logpdf(t, np.zeros(30), v * kernel) for t in targets.T)

    spectrum = Spectrum.of(gram, moments)
    rest = [spectrum.evidence(lam, 30) - likelihood(lam) for lam in (0.01, 0.3, 5.0)]
    assert rest == pytest.approx([rest[0]] * 3, abs=1e-8)
    assert rest[0] == pytest.approx(45 * (1 + math.log(2 * math.pi)))


def test_leave_one_out_is_no_function_of_the_sums():
    root = math.sqrt(3)
    sets = [[1, 1, -2, 1], [root, -root, 0, 1]]
    y, exact = torch.tensor([0, 0, 0, 1]), []
    for values in sets:
        z = torch.tensor(values, dtype=torch.float64)[:, None]
        gram, moments, counts = sums_of(z, y, 2)
        spectrum = Spectrum.of(gram, moments)
        assert float(spectrum.residuals(1, counts).sum()) == pytest.approx(3.859375)
        assert spectrum.gcv(1, 4) == pytest.approx(1.5808)
        left = torch.eye(2, dtype=torch.float64)[y] - spectrum.solution(1).scores(z)
        exact.append(float(((left / (1 - z**2 / 8)) ** 2).sum()))
    assert exact == pytest.approx([7.903061, 7.36], abs=6e-7)


@pytest.mark.parametrize(("lam", "exact"), [(0.1, 2.377303), (1.0, 2.459725), (10.0, 4.165731)])
def test_leaving_one_out_is_five_refits(lam: float, exact: float) -> None:
    squares, wrong = leave_one_out(Spectrum.of(G, M), lam, Z, Y)
    assert float(squares.sum()) == pytest.approx(exact, abs=6e-7)
    for i in range(5):
        others = torch.arange(5) != i
        gram, moments, _ = sums_of(Z[others], Y[others], 2)
        scores = ridge(gram, moments, lam).scores(Z[i : i + 1])[0]
        target = torch.eye(2, dtype=torch.float64)[Y[i]]
        assert float(squares[i]) == pytest.approx(float(((target - scores) ** 2).sum()), abs=1e-9)
        assert bool(wrong[i]) == (int(scores.argmax()) != int(Y[i]))
    assert int(wrong.sum()) == 2


def test_merging_as_afl_does_gives_the_same_as_summing():
    eye = torch.eye(2, dtype=torch.float64)
    parts = [sums_of(Z[own], Y[own], 2) for own in (A, B)]
    own = [ridge(gram, moments, 1).weight.T for gram, moments, _ in parts]
    held = [gram + eye for gram, *_ in parts]
    merged = torch.linalg.solve(held[0] + held[1], held[0] @ own[0] + held[1] @ own[1])
    assert torch.allclose(merged, ridge(G, M, 2).weight.T, atol=1e-12)
    restored = torch.linalg.solve(G, (held[0] + held[1]) @ merged)
    assert torch.allclose(restored, ridge(G, M, 0).weight.T, atol=1e-8)
    assert restored.flatten().tolist() == pytest.approx([1.022667, 0.092, -0.208, 0.744], abs=6e-7)


def test_normalised_columns_have_length_one_and_the_same_direction():
    z, y = drawn(50, 6, 3)
    gram, moments, _ = sums_of(z, y, 3)
    plain, scaled = ridge(gram, moments, 0.1).weight, ridge(gram, moments, 0.1, column_norm=True).weight
    assert scaled.norm(dim=1).tolist() == pytest.approx([1, 1, 1])
    assert torch.allclose(scaled * plain.norm(dim=1, keepdim=True), plain)


# The choice of lambda


def test_the_rules_choose_the_best_of_the_example():
    spectrum = Spectrum.of(G, M)
    for rule in ("gcv", "evidence"):
        choice = choose_lambda(spectrum, 5, rule, [10, 0.1, 1])
        assert (choice.lam, choice.end, choice.grid) == (1, None, (0.1, 1, 10))
    assert choice.scores == pytest.approx((-4.534876, -5.294579, -3.916683), abs=6e-7)  # the least is the best


def test_the_grid_reaches_from_a_hundred_millionth_of_n_to_n():
    grid = choose_lambda(Spectrum.of(G, M), 5).grid
    assert len(grid) == 25
    assert (grid[0], grid[-1]) == pytest.approx((5e-8, 5))
    assert grid[1] / grid[0] == pytest.approx(grid[-1] / grid[-2])


def test_a_chosen_end_of_the_grid_is_said():
    spectrum = Spectrum.of(G, M)
    assert choose_lambda(spectrum, 5, "gcv", [1, 10]).end == "lowest"
    assert choose_lambda(spectrum, 5, "gcv", [0.01, 0.1]).end == "highest"
    z, y = drawn(40, 10, 2, seed=3)
    noise = y[torch.randperm(40, generator=torch.Generator().manual_seed(0))]  # labels that features say nothing about
    gram, moments, _ = sums_of(z, noise, 2)
    assert choose_lambda(Spectrum.of(gram, moments), 40, "evidence").lam >= 1


def test_gcv_chooses_about_what_leave_one_out_chooses():
    z, y = drawn(150, 60, 3, seed=1)
    gram, moments, _ = sums_of(z, y, 3)
    choice = choose_lambda(Spectrum.of(gram, moments), 150)
    targets, exact = torch.eye(3, dtype=torch.float64)[y], []
    for lam in choice.grid:
        hat = z @ torch.linalg.solve(gram + lam * torch.eye(60, dtype=torch.float64), z.T)
        exact.append(float((((targets - hat @ targets) / (1 - hat.diagonal())[:, None]) ** 2).sum()))
    assert abs(choice.grid.index(choice.lam) - exact.index(min(exact))) <= 1
    assert choice.end is None


def test_a_grid_without_sense_is_refused():
    for grid in ([], [0.0, 1.0], [-1.0], [math.nan]):
        with refused("ridge_lambda"):
            choose_lambda(Spectrum.of(G, M), 5, grid=grid)
    with refused("head", 0):
        choose_lambda(Spectrum.of(G, M), 0)


def test_the_default_grid_follows_the_scale_of_the_features():
    z, y = drawn(100, 8, 3)
    gram, moments, _ = sums_of(z, y, 3)
    plain, large = (choose_lambda(Spectrum.of(s**2 * gram, s * moments), 100) for s in (1, 1000))
    assert large.lam == pytest.approx(1e6 * plain.lam)
    assert large.scores == pytest.approx(plain.scores)


def test_lambdas_that_leave_a_gram_singular_are_left_out_of_the_grid():
    z, y = drawn(5, 8, 2)
    gram, moments, _ = sums_of(z, y, 2)
    assert choose_lambda(Spectrum.of(gram, moments), 5, grid=[1e-18, 0.1, 1]).grid == (0.1, 1)
    with refused("ridge_lambda", 1e-18, "singular"):
        choose_lambda(Spectrum.of(gram, moments), 5, grid=[1e-18])


@pytest.mark.parametrize("seed", range(6))
def test_a_perfect_fit_has_its_own_small_residuals_and_not_those_of_rounding(seed):
    # 20 unit vectors in 50 dimensions: every residual comes from shrinking, and GCV is a ratio of two small numbers
    z, y = drawn(20, 50, 3, seed)
    gram, moments, counts = sums_of(z, y, 3)
    kernel, targets = z @ z.T, torch.eye(3, dtype=torch.float64)[y]
    spectrum = Spectrum.of(gram, moments)
    for lam in (2e-7, 1e-3, 1.0):
        outside = lam * torch.linalg.inv(
            kernel + lam * torch.eye(20, dtype=torch.float64)
        )  # I - H, without a difference
        left = ((outside @ targets) ** 2).sum(0)
        assert spectrum.residuals(lam, counts).tolist() == pytest.approx(left.tolist(), rel=1e-6, abs=0)
        exact = 20 * float(left.sum()) / float(outside.trace()) ** 2
        assert spectrum.gcv(lam, 20) == pytest.approx(exact, rel=1e-6, abs=0)


# Edges


@pytest.mark.parametrize(("n", "d", "classes"), [(1, 1, 1), (1, 5, 3), (4, 30, 2), (30, 5, 1), (3, 3, 2)])
def test_few_records_or_one_class_give_finite_heads(n, d, classes):
    z, y = drawn(n, d, classes)
    gram, moments, counts = sums_of(z, y, classes)
    spectrum = Spectrum.of(gram, moments)
    for rule in ("gcv", "evidence"):
        choice = choose_lambda(spectrum, n, rule)
        assert all(math.isfinite(score) for score in choice.scores)
        head = spectrum.solution(choice.lam, counts)
        assert torch.isfinite(head.weight).all()
        assert torch.allclose(head.weight, spectrum.solution(choice.lam).weight)
    assert (spectrum.residuals(1e-8 * n, counts) >= 0).all()


def test_repeated_records_are_records_of_greater_weight():
    z, y = drawn(6, 10, 2)
    gram, moments, _ = sums_of(z, y, 2)
    twice = Spectrum.of(2 * gram, 2 * moments)
    assert torch.allclose(twice.solution(0.2).weight, ridge(gram, moments, 0.1).weight, atol=1e-12)
    assert all(math.isfinite(score) for score in choose_lambda(twice, 12).scores)


def test_without_lambda_a_singular_gram_is_refused_and_another_is_least_squares():
    z, y = drawn(4, 6, 2)
    gram, moments, _ = sums_of(z, y, 2)
    for solve in (lambda lam: ridge(gram, moments, lam), Spectrum.of(gram, moments).solution):
        for lam in (0.0, 1e-17):
            with refused("ridge_lambda", f"{lam:g}", "singular"):
                solve(lam)
        for lam in (-1.0, math.nan, math.inf):
            with refused("ridge_lambda", lam):
                solve(lam)
    exact = torch.linalg.lstsq(Z, torch.eye(2, dtype=torch.float64)[Y]).solution
    assert torch.allclose(ridge(G, M, 0).weight.T, exact)


def test_a_class_that_nobody_holds_never_wins():
    z, y = drawn(50, 6, 3)
    gram, moments, counts = sums_of(z, 2 * y, 6)  # nobody holds 1, 3, 5
    head = ridge(gram, moments, 0.1, counts)
    far = 1e6 * torch.randn(500, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for features in (z, far, -z):
        assert not (head.scores(features).argmax(1) % 2).any()
    assert torch.isfinite(head.bias.float() ** 2).all()
    assert torch.isfinite(head.bias).all()


def test_sums_of_nobody_and_sums_that_are_no_numbers_are_refused():
    with refused("head"):
        ridge(torch.zeros(2, 2), torch.zeros(2, 3), 1.0, torch.zeros(3))
    with refused("head"):
        ridge(torch.full((2, 2), torch.nan), torch.ones(2, 3), 1.0)


# Noise


def test_the_edge_of_the_noise_by_hand():
    assert noise_edge(2.637955, 2) == pytest.approx(7.461263, abs=3e-6)
    assert noise_edge(3.230822, 512) == pytest.approx(146.21, abs=0.01)
    assert noise_edge(3.230822, 1024) == pytest.approx(206.77, abs=0.01)
    assert noise_edge(3.230822 * math.sqrt(10), 512) == pytest.approx(462.36, abs=0.01)


def wigner(d: int, std: float, seed: int = 0) -> torch.Tensor:
    """Symmetric noise with this standard deviation off the diagonal."""
    noise = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return std * (noise + noise.T) / math.sqrt(2)


def test_the_edge_is_where_noise_ends_and_shrinking_finds_what_stands_out():
    noise, spike = wigner(600, 1.0), torch.zeros(600, 600, dtype=torch.float64)
    assert float(torch.linalg.eigvalsh(noise).max()) == pytest.approx(noise_edge(1.0, 600), rel=0.02)
    spike[0, 0] = 60
    values, vectors = torch.linalg.eigh(noise + spike)
    assert float(values[-1]) == pytest.approx(60 + 600 / 60, rel=0.03)
    best = float(vectors[:, -1] @ spike @ vectors[:, -1])  # of all multiples of the direction, the nearest to the truth
    assert float(shrunk(values, noise_edge(1.0, 600))[-1]) == pytest.approx(best, rel=0.03)
    assert best == pytest.approx(60 * (1 - 600 / 60**2), rel=0.05)


def test_eigenvalues_below_zero_or_the_edge_are_put_at_zero():
    values = torch.tensor([-3.0, 1.0, 5.0])
    assert clipped(values).tolist() == [0, 1, 5]
    assert shrunk(values, 3.0).tolist() == [0, 0, 4]
    assert shrunk(values, 0.0).tolist() == [0, 1, 5]


def test_dimensions_by_the_budget():
    # std of epsilon 1, 3 and 8 with two thirds of the budget, n = 60,000; once, and at each of 10 sites
    unit = [3.230822 * s / 3.730632 for s in (3.730632, 1.390594, 0.600229)]
    assert [dimension_for(60_000, s) for s in unit] == [1024, 2048, 2048]
    assert [dimension_for(60_000, s * math.sqrt(10)) for s in unit] == [512, 1024, 2048]
    assert dimension_for(60_000, 0.0) == 2048
    assert dimension_for(10, 1e6) == 64


def test_noisy_ridge_by_hand():
    gram = torch.diag(torch.tensor([-1.0, 8.0, 20.0]))
    edge = 2 * 2 * math.sqrt(3)
    head = noisy_ridge(gram, torch.ones(3, 1), 1e6, 2.0)
    assert head.weight.flatten().tolist() == pytest.approx([1 / (w + edge / 8 + 0.1) for w in (0, 8, 20)])
    head = noisy_ridge(gram, torch.ones(3, 1), 1e6, 2.0, shrinkage="spiked")
    kept = (0, math.sqrt(64 - edge**2), math.sqrt(400 - edge**2))
    assert head.weight.flatten().tolist() == pytest.approx([1 / (w + edge / 4 + 0.1) for w in kept])
    head = noisy_ridge(gram, torch.ones(3, 1), 1e6, 2.0, strength=1.0)
    assert head.weight[0, 0] == pytest.approx(1 / (edge + 0.1))


@pytest.mark.parametrize("shrinkage", ["clip", "spiked"])
def test_as_the_noise_ends_noisy_ridge_tends_to_ridge(shrinkage):
    z, y = drawn(400, 12, 3)
    gram, moments, counts = sums_of(z, y, 3)
    noisy = noisy_ridge(gram + wigner(12, 1e-9), moments, 400, 1e-9, counts, shrinkage)
    assert torch.allclose(noisy.scores(z), ridge(gram, moments, 1e-7 * 400).scores(z), atol=1e-6)


def test_clipping_saves_what_a_small_lambda_loses_under_noise():
    z, y = drawn(3000, 128, 4)
    gram, moments, _ = sums_of(z, y, 4)
    std = 4.0
    noisy, lam = gram + wigner(128, std), noise_edge(std, 128) / 8
    heads = [noisy_ridge(noisy, moments, 3000, std, shrinkage=how).weight.T for how in ("clip", "spiked")]
    heads.append(torch.linalg.solve(noisy + lam * torch.eye(128), moments))
    clip, spiked, raw = (float(((z @ weight).argmax(1) == y).double().mean()) for weight in heads)
    assert min(clip, spiked) > 0.95
    assert raw < 0.8
