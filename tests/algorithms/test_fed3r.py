"""Fed3R: ridge by hand through the algorithm, the same whatever the split, AFL's law, who is missing, noise and its account."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import Ridge
from tests.algorithms.sums_world import BY_HAND, Plane, bundles, fitted, head_of, records, split
from tests.experiment.world import digits
from tests.helpers import refused
from tests.protocol.sums_world import drawn
from torch import Tensor, nn

import fedfill
from fedfill import tree
from fedfill.algorithms.fed3r import Fed3R, sharpness
from fedfill.statistics.ridge import Spectrum, choose_lambda
from fedfill.statistics.sums import one_hot
from fedfill.streams import torch_stream

ONE = {"features": "conv(12) > project(32)", "client_test": 0.0}


def images(n: int = 300) -> tuple[Any, ...]:
    x, y = digits()
    return x[:n], y[:n], x[1000:1300], y[1000:1300]


@pytest.mark.parametrize(
    ("lam", "weight", "df"),
    [
        (0.1, [[0.982488, 0.094009], [-0.191705, 0.713364]], 1.920123),
        (1.0, [[0.728, 0.096], [-0.104, 0.522]], 1.416667),
        (10.0, [[0.206, 0.042], [-0.008, 0.144]], 0.397436),
    ],
)
@pytest.mark.parametrize("sizes", [None, (5,), (1, 1, 0, 3)])
def test_by_hand_through_the_algorithm(
    lam: float, weight: list[list[float]], df: float, sizes: tuple[int, ...] | None
) -> None:
    """The table of ridge regressions on five points of two clients; points are truncated to 2^-12."""
    points = BY_HAND if sizes is None else split(BY_HAND, *sizes)
    server = fitted(Fed3R(ridge_lambda=lam, scale=1), points)
    w, b = head_of(server)
    assert np.allclose(w, weight, atol=1e-3)
    assert not b.any()
    assert server.notes["ridge_lambda"] == lam
    assert server.notes["effective_parameters"] == pytest.approx(df, abs=1e-3)


def test_it_is_scikit_learns_ridge_on_pooled_records() -> None:
    points = drawn(30, 0, 7, 60, d=5)
    z, y = records(points)
    for lam in (0.003, 2.0):
        w, _ = head_of(fitted(Fed3R(ridge_lambda=lam, scale=1), points, model=Plane(5)))
        other = Ridge(alpha=lam, fit_intercept=False, solver="cholesky").fit(z, np.eye(2)[y])
        assert np.allclose(w, other.coef_.T, atol=1e-6)


def test_afls_law_of_merging_gives_the_same() -> None:
    """He et al.: W = (C_u + C_v)^-1 (C_u W_u + C_v W_v) over clients, gamma taken out at the end; then ridge as it is."""
    points, gamma, lam = drawn(9, 4, 30, d=3), 1.0, 0.5
    w, c = None, None
    for client in points:
        z, y = records([client])
        own_c = z.T @ z + gamma * np.eye(3)
        own_w = np.linalg.solve(own_c, z.T @ np.eye(2)[y])
        w = own_w if w is None else np.linalg.solve(c + own_c, c @ w + own_c @ own_w)
        c = own_c if c is None else c + own_c
    merged = np.linalg.solve(c - 3 * gamma * np.eye(3) + lam * np.eye(3), c @ w)
    found, _ = head_of(fitted(Fed3R(ridge_lambda=lam, scale=1), points, model=Plane(3)))
    assert np.allclose(found, merged, atol=1e-6)


@pytest.mark.parametrize("rule", ["gcv", "evidence"])
def test_the_penalty_is_chosen_from_the_sums_as_records_would_have_it(rule: str) -> None:
    z, noise = torch.randn(100, 4, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
    z = torch.nn.functional.normalize(z + torch.tensor([1.0, 0, 0, 0]))
    labels = (z[:, 1] + 0.3 * torch.randn(100, generator=noise) > 0).long()
    points = [(z[:40].tolist(), labels[:40].tolist()), (z[40:].tolist(), labels[40:].tolist())]
    rows, y = records(points)
    n, targets, grid = 100, np.eye(2)[y], [float((rows**2).sum()) * 10 ** (k / 3 - 8) for k in range(25)]

    def score(lam: float) -> float:
        hat = rows @ np.linalg.solve(rows.T @ rows + lam * np.eye(4), rows.T)
        if rule == "gcv":
            return float(n * ((targets - hat @ targets) ** 2).sum() / (n - np.trace(hat)) ** 2)
        kernel = np.eye(n) + rows @ rows.T / lam
        q = float((targets * np.linalg.solve(kernel, targets)).sum())
        return n * math.log(q) + float(np.linalg.slogdet(kernel)[1])

    server = fitted(Fed3R(ridge_lambda=rule), points, model=Plane(4))
    best = min(range(25), key=lambda k: score(grid[k]))
    assert 0 < best < 24
    assert server.notes["ridge_lambda"] == pytest.approx(grid[best])
    assert not any("ridge_lambda" in text for text in server.warnings)


def test_a_rule_that_chose_the_end_of_its_grid_says_so() -> None:
    """Labels that follow from nothing: no penalty is too large."""
    z = [[math.cos(k), math.sin(k)] for k in range(48)]
    server = fitted(Fed3R(ridge_lambda="evidence"), [(z, [k * k % 7 % 2 for k in range(48)])])
    assert any(text.startswith("ridge_lambda: evidence chose the highest") for text in server.warnings)


@pytest.mark.parametrize("engine", ["local", "ray", "flower"])
def test_leave_one_out_chooses_the_lambda_of_fewest_errors_by_refits(engine: str) -> None:
    """Each of 60 records left out in turn, for each of 25 lambdas; a client without records takes part."""
    points = [*bundles(25, 20, 15, d=6), ([], [])]
    z, y = records(points)
    grid = [float((z**2).sum()) * 10 ** (k / 3 - 8) for k in range(25)]
    errors, squares = [], []
    for lam in grid:
        residuals = []
        for i in range(60):
            others = np.arange(60) != i
            a, b = z[others], np.eye(3)[y[others]]
            residuals.append(np.eye(3)[y[i]] - z[i] @ np.linalg.solve(a.T @ a + lam * np.eye(6), a.T @ b))
        errors.append(sum(int((np.eye(3)[y] - residuals)[i].argmax() != y[i]) for i in range(60)))
        squares.append(float((np.array(residuals) ** 2).sum()))
    best = min(range(25), key=lambda k: (errors[k], squares[k]))
    server = fitted(Fed3R(ridge_lambda="loo"), points, model=Plane(6, 3), engine=engine)
    assert server.notes["ridge_lambda"] == pytest.approx(grid[best])
    assert server.notes["error_left_out"] == pytest.approx(errors[best] / 60)


def test_leave_one_out_is_the_same_whatever_the_split() -> None:
    points = bundles(40, 30, 20)
    found = {
        tree.sha256(fitted(Fed3R(ridge_lambda="loo"), p, model=Plane(4, 3)).state.weights)
        for p in (points, split(points, 90), split(points, 1, 0, 60, 29))
    }
    assert len(found) == 1


def test_held_out_records_are_in_no_sum_and_choose_lambda() -> None:
    """The same sums as of the other records alone, and the same choice as by trying all heads on those held out."""
    points = bundles(40, 9, 50)
    seen: list[Any] = []
    algorithm = Fed3R(ridge_lambda="holdout", scale=1)
    server = fitted(algorithm, points, model=Plane(4, 3))
    for i, (rows, labels) in enumerate(points):
        n = len(labels)
        held = torch.randperm(n, generator=torch_stream(0, "held out", 0, i))[: n // 10].tolist()
        seen.append((held, [k for k in range(n) if k not in held], rows, labels))
    assert [len(held) for held, *_ in seen] == [4, 0, 5]
    a = torch.tensor([rows[k] for _, kept, rows, _ in seen for k in kept], dtype=torch.float32).double()
    y = np.array([labels[k] for _, kept, _, labels in seen for k in kept])
    a = np.trunc(a.numpy() * 4096) / 4096
    tried = np.array([rows[k] for held, _, rows, _ in seen for k in held])
    truth = np.array([labels[k] for held, _, _, labels in seen for k in held])
    best = None
    for k in range(25):
        lam = float((a**2).sum()) * 10 ** (k / 3 - 8)
        w = np.linalg.solve(a.T @ a + lam * np.eye(4), a.T @ np.eye(3)[y])
        scores = tried @ w
        found = (int((scores.argmax(1) != truth).sum()), float(((np.eye(3)[truth] - scores) ** 2).sum()), lam, w)
        best = found if best is None or found[:2] < best[:2] else best
    assert best is not None
    assert server.notes["ridge_lambda"] == pytest.approx(best[2])
    assert server.notes["error_left_out"] == pytest.approx(best[0] / 9)
    assert np.allclose(head_of(server)[0], best[3], atol=1e-3)


@pytest.mark.parametrize("rule", ["loo", "holdout"])
def test_choosing_by_errors_goes_without_noise_and_with_enough_records(rule: str) -> None:
    with refused("ridge_lambda", rule, "target_epsilon"):
        fitted(Fed3R(ridge_lambda=rule, target_epsilon=3.0), bundles(30, 30), model=Plane(4, 3))
    with refused("ridge_lambda", "holdout", "10 records"):
        fitted(Fed3R(ridge_lambda="holdout"), bundles(9, 5), model=Plane(4, 3))


@pytest.mark.parametrize("rule", ["loo", "holdout"])
def test_choosing_by_errors_is_a_head_like_any_other(rule: str, tmp_path: Path) -> None:
    """With two exchanges, which are booked and counted; as a head of another algorithm, with other features each time."""
    result = fedfill.run("fed3r", data=images(), **ONE, ridge_lambda=rule, clients=3, out=tmp_path / "one")
    assert result.summary["accuracy"] > 0.6
    assert 0 <= result.rounds[-1]["error_left_out"] < 0.4
    assert len([e for e in result.summary["privacy"]["entries"] if "sums" in e["released"].lower()]) == 2
    trained = fedfill.run(
        "fedavg", data=images(), clients=3, client_test=0.0, rounds=2, head=f"fed3r:ridge_lambda={rule}", head_every=1,
        out=tmp_path / "two",
    )  # fmt: skip
    assert trained.rounds[-1]["accuracy"] > 0.5
    own = fedfill.run("pfed3r", data=images(), **ONE, ridge_lambda=rule, clients=3, out=tmp_path / "three")
    assert "error_left_out" in own.rounds[-1]


def test_a_sharper_head_says_the_same() -> None:
    """By the spread of the scores: the same multiple of W, whatever the split."""
    points, model = bundles(80, 60, 70), Plane(4, 3)
    plain, sharp = (head_of(fitted(Fed3R(scale=scale), points, model=model))[0] for scale in (1, "auto"))
    tau = float((sharp / plain).mean())
    assert np.allclose(sharp, tau * plain, rtol=1e-4)
    assert 1 < tau < 1000
    pooled = [([row for rows, _ in points for row in rows], [label for _, labels in points for label in labels])]
    assert np.allclose(head_of(fitted(Fed3R(), pooled, model=model))[0], sharp, rtol=1e-5)
    assert np.allclose(head_of(fitted(Fed3R(scale=7), points, model=model))[0], 7 * plain, rtol=1e-5)


def test_normed_columns_keep_the_scale_of_their_scores() -> None:
    """Each class's weights have the mean length of those that tau was found for, times tau."""
    points, model = bundles(80, 60, 70), Plane(4, 3)
    sharp, normed = (head_of(fitted(Fed3R(column_norm=norm), points, model=model))[0] for norm in (False, True))
    lengths = np.linalg.norm(sharp, axis=0)
    assert lengths.std() > 0.01 * lengths.mean()
    assert np.allclose(np.linalg.norm(normed, axis=0), lengths.mean(), rtol=1e-4)


def real_digits(features: int, records: int, wrong: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The 8 x 8 digits as random ReLU features of length 1, some labels drawn anew; to fit and to try."""
    bunch, draw = load_digits(), torch.Generator().manual_seed(0)
    order = torch.randperm(len(bunch.target), generator=draw)
    x, y = torch.tensor(bunch.data / 16)[order], torch.tensor(bunch.target, dtype=torch.int64)[order]
    z = torch.relu((x - 0.3) @ torch.randn(64, features, generator=draw, dtype=torch.float64))
    anew = torch.rand(len(y), generator=draw) < wrong
    y = torch.where(anew, torch.randint(10, y.shape, generator=draw), y)
    z = torch.nn.functional.normalize(z)
    return z[:records], y[:records], z[1200:], y[1200:]


@pytest.mark.parametrize(
    ("features", "count", "wrong"), [(64, 200, 0.0), (64, 1200, 0.1), (512, 200, 0.0), (512, 600, 0.1), (1024, 600, 0)]
)
def test_probabilities_are_about_as_sure_as_they_are_right(features: int, count: int, wrong: float) -> None:
    """On new records, fewer than features or more; the residuals of the fit alone would be sure of everything."""
    z, y, new, truth = real_digits(features, count, wrong)
    sums = {"gram": z.T @ z, "moments": z.T @ one_hot(y, 10), "counts": one_hot(y, 10).sum(0)}
    spectrum = Spectrum.of(sums["gram"], sums["moments"])
    lam = choose_lambda(spectrum, count).lam
    tau, scores = sharpness(spectrum, lam, sums), new @ spectrum.solution(lam).weight.T

    def loss(times: float) -> float:
        return float(torch.nn.functional.cross_entropy(times * scores, truth))

    best = min(loss(2 ** (k / 2)) for k in range(21))
    assert loss(tau) < 1.25 * best
    sure = float(torch.softmax(tau * scores, 1).max(1).values.mean())
    assert abs(sure - float((scores.argmax(1) == truth).double().mean())) < 0.1
    assert sure < 0.99


# Whatever the split


@pytest.mark.parametrize(
    "features",
    ["conv(12) > project(32)", "patches(6, size=4, cells=1)", "conv(8) > fourier(32)", "scatter > project(16)"],
)
def test_every_split_gives_the_same_bits(features: str, tmp_path: Path) -> None:
    """Filters that are learned from patches too; one client is central training."""
    splits = {"iid": 4, "dirichlet:0.1": 3, "classes:1": 10, "one": 1}
    found = {}
    for k, (partition, clients) in enumerate(splits.items()):
        result = fedfill.run(
            "fed3r", data=images(), partition="iid" if partition == "one" else partition, clients=clients, client_test=0.0,
            features=features, workers=1 + k % 3, seed=0, out=tmp_path / partition.replace(":", "-"),
            **({"filter_steps": 3} if features.startswith("patches") else {}),
        )  # fmt: skip
        found[partition] = (result.summary["weights_sha256"], result.summary["accuracy"])
    assert len(set(found.values())) == 1, found
    assert found["iid"][1] > 0.6


def test_learned_filters_are_learned_and_the_centre_follows_them(tmp_path: Path) -> None:
    def run(steps: int) -> dict[str, torch.Tensor]:
        options = {"data": images(), "features": "patches(6, size=4, cells=1)", "clients": 4, "filter_steps": steps}
        return fedfill.run("fed3r", **options, out=tmp_path / str(steps)).weights

    drawn_ones, one, two = run(0), run(1), run(2)
    patch = next(name.removesuffix("dictionary") for name in one if name.endswith("dictionary"))
    centre = next(name for name in one if name.endswith("centre"))
    assert not drawn_ones[f"{patch}mean"].any()
    assert torch.equal(one[f"{patch}whitening"], two[f"{patch}whitening"])
    assert not torch.equal(one[f"{patch}whitening"], drawn_ones[f"{patch}whitening"])
    for a, b in ((drawn_ones, one), (one, two)):
        assert not torch.equal(a[f"{patch}dictionary"], b[f"{patch}dictionary"])
        assert not torch.equal(a[centre], b[centre])
    assert torch.allclose(two[f"{patch}dictionary"].norm(dim=1), torch.ones(6), atol=1e-5)


# Who is missing


def test_without_a_client_the_answer_is_that_of_the_others_exactly() -> None:
    """One holds a point that is no number: its features are refused at home, and it is named."""
    points = drawn(20, 9, 30)
    broken = [*points[:1], ([[float("nan"), 0.0], *points[1][0]], [0, *points[1][1]]), *points[2:]]
    server, others = fitted(Fed3R(), broken), fitted(Fed3R(), [points[0], points[2]])
    assert tree.sha256(server.state.weights) == tree.sha256(others.state.weights)
    assert [loss["client"] for loss in server.lost] == [1]
    assert "record 0" in server.lost[0]["reason"]
    assert any("2 of 3" in text and "not in them: 1" in text for text in server.warnings)


@pytest.mark.parametrize("column_norm", [False, True])
def test_a_class_that_nobody_holds_never_wins(column_norm: bool) -> None:
    server = fitted(Fed3R(column_norm=column_norm, scale=1), drawn(20, 30), model=Plane(2, 3))
    w, b = head_of(server)
    assert np.isfinite(w).all()
    assert np.isfinite(b).all()
    z = np.random.default_rng(0).normal(size=(200, 2)) * 100
    assert set((z @ w + b).argmax(1)) <= {0, 1}
    assert any(text.startswith("No client holds class 2") for text in server.warnings)
    if column_norm:
        assert np.allclose(np.linalg.norm(w[:, :2], axis=0), 1, atol=1e-6)


@pytest.mark.parametrize(
    "points",
    [
        [([[1.0, 0.0]], [0])],
        [([[0.6, 0.8]] * 5, [1] * 5), ([], [])],
        [([[0.0, 0.0], [0.0, 0.0]], [0, 1])],
        [([[1.0, 0.0], [1.0, 0.0]], [0, 1])],
    ],
)
def test_few_equal_or_empty_records_give_finite_heads(points: Any) -> None:
    w, b = head_of(fitted(Fed3R(), points))
    assert np.isfinite(w).all()
    assert np.isfinite(b).all()


def test_without_any_penalty_a_singular_gram_matrix_is_a_sentence() -> None:
    with refused("ridge_lambda", "found 0 ", "singular"):
        fitted(Fed3R(ridge_lambda=0), [([[1.0, 0.0]] * 3, [0, 1, 0])])
    w, _ = head_of(fitted(Fed3R(ridge_lambda=0, scale=1), BY_HAND))
    z, y = records(BY_HAND)
    assert np.allclose(w, np.linalg.lstsq(z, np.eye(2)[y], rcond=None)[0], atol=1e-6)


# Noise


@pytest.mark.parametrize("trust", ["site", "secure", "server"])
def test_as_noise_ends_it_tends_to_the_exact_head(trust: str) -> None:
    """To that of lambda = 1e-7 n, which is what is left of the noisy rule."""
    points = drawn(300, 500, d=4)
    exact, _ = head_of(fitted(Fed3R(ridge_lambda=1e-7 * 800, scale=1), points, model=Plane(4)))
    far = [
        np.abs(head_of(fitted(Fed3R(trust=trust, target_epsilon=e), points, model=Plane(4)))[0] - exact).max()
        for e in (1e1, 1e3, 1e9)
    ]
    assert far[2] < 1e-4
    assert far[0] > far[1] > far[2]


def test_a_penalty_under_noise_is_in_multiples_of_its_edge() -> None:
    points = drawn(300, 500, d=4)
    small, large = (
        np.linalg.norm(
            head_of(fitted(Fed3R(target_epsilon=3.0, ridge_lambda=f), points, model=Plane(4)))[0]
        )
        for f in (0.125, 100.0)
    )  # fmt: skip
    assert large < small / 3
    default = head_of(fitted(Fed3R(target_epsilon=3.0), points, model=Plane(4)))[0]
    assert np.linalg.norm(default) == small


@pytest.mark.parametrize(("epsilon", "least", "most"), [(0.01, 8, 10), (20.0, 0, 0)])
def test_an_epsilon_that_is_too_small_for_any_use_is_said(epsilon: float, least: int, most: int) -> None:
    """By whether the classes stand out of the noise in the sums of their features."""
    said = 0
    for seed in range(10):
        server = fitted(Fed3R(target_epsilon=epsilon), bundles(60, 60, 60), model=Plane(4, 3), seed=seed)
        assert all(text.startswith(f"target_epsilon: with {epsilon:g}") for text in server.warnings)
        assert torch.isfinite(server.state.weights["classifier.weight"]).all()
        said += bool(server.warnings)
    assert least <= said <= most


def test_noise_on_features_that_nothing_bounds_is_refused() -> None:
    with refused("target_epsilon", 3, "bounds"):
        fitted(Fed3R(target_epsilon=3.0), model=Plane(bounded=False))
    fitted(Fed3R(), model=Plane(bounded=False))


def test_the_account_is_of_all_exchanges(tmp_path: Path) -> None:
    """The centre has its part of the promise; counts are not asked for, as nothing needs them."""
    result = fedfill.run("fed3r", data=images(), **ONE, target_epsilon=3.0, clients=3, out=tmp_path)
    kept = result.summary["privacy"]
    assert kept["total_epsilon_added"] == pytest.approx(3, rel=1e-6)
    assert 3 < kept["total_epsilon"] < 6
    by_words = {
        entry["mechanism"].rsplit(" on ", 1)[-1]: entry
        for entry in kept["entries"]
        if "sums" in entry["released"].lower()
    }
    assert len(by_words) == 2
    assert not any("counts" in words for words in by_words)
    parts = [entry["epsilon_added"] for entry in by_words.values()]
    assert max(parts) < 3
    assert min(parts) < 0.6  # 2 % of the squared mu
    settings = tomllib.loads((tmp_path / "experiment.toml").read_text())["settings"]
    assert (settings["centre"], settings["filter_steps"]) == ("federated", 0)


@pytest.mark.parametrize("delta", [1e-5, 1e-7])
def test_a_smaller_epsilon_has_more_noise_and_fewer_features(delta: float, tmp_path: Path) -> None:
    """By rule of public numbers: how many records, clients, and how much noise."""
    found = []
    for epsilon in (0.5, 50.0):
        prepared = fedfill.experiment.prepare.arrange(
            "fed3r", data=images(), partition="iid", model="auto", target_epsilon=epsilon, target_delta=delta, clients=4
        )
        found.append(prepared.initial["classifier.weight"].shape[1])
    assert found[0] < found[1]
    assert all(math.log2(d).is_integer() for d in found)


def test_bias_is_not_needed(tmp_path: Path) -> None:
    server = fitted(Fed3R(ridge_lambda=1.0, scale=1), model=Plane(bias=False))
    assert np.allclose(server.state.weights["classifier.weight"].T, [[0.728, 0.096], [-0.104, 0.522]], atol=1e-3)
    assert "classifier.bias" not in server.state.weights


def test_another_network_than_a_map_of_features_is_taken() -> None:
    """Its last linear layer is fitted, on what that receives; the others stay."""
    net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 2))
    before = {name: x.clone() for name, x in net.state_dict().items()}
    server = fitted(Fed3R(ridge_lambda=0.1, scale=1), drawn(30, 40), model=net)
    after = server.state.weights
    assert all(torch.equal(after[name], before[name]) for name in ("0.weight", "0.bias"))
    z, y = records(drawn(30, 40))
    points = torch.tensor([row for rows, _ in drawn(30, 40) for row in rows])
    hidden = net[1](net[0](points)).detach().double().numpy()
    hidden = np.trunc(hidden * 4096) / 4096
    wanted = np.linalg.solve(hidden.T @ hidden + 0.1 * np.eye(6), hidden.T @ np.eye(2)[y])
    assert len(z) == 70
    assert np.allclose(after["2.weight"].T, wanted, atol=1e-4)
