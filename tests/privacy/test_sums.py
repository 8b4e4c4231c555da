"""Noisy sums: hand-worked figures, the worst pair of neighbours, the law of the noise, who adds it, what is booked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize
from tests.helpers import refused
from torch import Tensor

from fedfill.privacy import accountant, sums
from fedfill.privacy.keyed import seeded
from fedfill.privacy.ledger import Ledger
from fedfill.privacy.sums import BlockBound, counts, gram, moments, mu_added, mu_replaced, other, shares, stds

DELTA = 1e-5
TWO = {"gram": gram(1.0, 2), "moments": moments(1.0, 2, 2)}
THREE = {**TWO, "counts": counts(2)}
DRAWS = 2000  # the std of so many has an error of 1.6 %


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Figures worked by hand


@pytest.mark.parametrize(
    ("epsilon", "mu", "sigma"), [(1, 0.268051, 3.730632), (3, 0.719117, 1.390594), (8, 1.666031, 0.600229)]
)
def test_the_noise_that_a_promise_needs(epsilon: float, mu: float, sigma: float) -> None:
    got = sums.mu_for(epsilon, DELTA)
    assert got == pytest.approx(mu, abs=5e-7)
    assert 1 / got == pytest.approx(sigma, abs=6e-7)
    assert accountant.epsilon(got, DELTA) == pytest.approx(epsilon, rel=1e-8)
    assert accountant.epsilon(got, DELTA) <= epsilon
    assert stds({"gram": gram(1.0, 2)}, {"gram": 1.0}, got)["gram"] == pytest.approx(sigma, abs=6e-7)


def test_a_gram_matrix_and_moments_of_unit_vectors() -> None:
    mu = sums.mu_for(1.0, DELTA)
    noise = stds(TWO, shares(TWO), mu)
    assert noise["gram"] == pytest.approx(4.569072, abs=5e-7)
    assert noise["gram"] / math.sqrt(2) == pytest.approx(3.230822, abs=5e-7)
    assert noise["moments"] == pytest.approx(6.461644, abs=5e-7)
    assert mu_added(TWO, noise) == pytest.approx(mu, rel=1e-12)
    assert mu_replaced(TWO, noise) ** 2 == pytest.approx(mu**2 * 25 / 12, rel=1e-12)
    assert mu_replaced(TWO, noise) == pytest.approx(0.386898, abs=6e-7)
    assert accountant.epsilon(mu_replaced(TWO, noise), DELTA) == pytest.approx(1.498655, abs=1e-6)


def test_where_moments_have_most_of_the_noise() -> None:
    # b**2 = .75 > 2 a**2 = .5: the worst record is replaced by its opposite, whose Gram matrix is the same
    noise = stds(TWO, {"gram": 0.25, "moments": 0.75}, 1.0)
    assert mu_replaced(TWO, noise) == pytest.approx(math.sqrt(4 * 0.75))
    # at b**2 = 2 a**2 both forms meet
    noise = stds(TWO, {"gram": 1 / 3, "moments": 2 / 3}, 1.0)
    assert mu_replaced(TWO, noise) == pytest.approx(math.sqrt(8 / 3))


def test_the_length_of_a_record_in_isometric_coordinates() -> None:
    z = torch.tensor([0.6, 0.8], dtype=torch.float64)
    packed = sums.pack(torch.outer(z, z))
    assert packed.tolist() == pytest.approx([0.36, 0.48, 0.64])
    assert sums.isometric(packed).norm().item() == pytest.approx(1.0, abs=1e-15)
    # in plain coordinates the sensitivity would depend on the direction, and seem smaller
    assert packed.norm().item() == pytest.approx(0.877268, abs=6e-7)


def test_bounds_of_the_known_blocks() -> None:
    assert gram(2.0, 3) == BlockBound(4.0, 4 * math.sqrt(2), 6, "gram")
    assert gram(2.0, 3, classes=5) == BlockBound(4.0, 4 * math.sqrt(2), 30, "gram")
    assert moments(2.0, 3, 5) == BlockBound(2.0, 4.0, 15, "moments")
    assert counts(5) == BlockBound(1.0, 0.0, 5, "counts")
    assert other(0.5, 7) == BlockBound(0.5, 1.0, 7, "other")
    for wrong in ((0.0, 0.0, 1), (math.inf, 1.0, 1), (math.nan, 1.0, 1), (1.0, 2.1, 1), (1.0, -0.1, 1), (1.0, 1.0, 0)):
        with pytest.raises(ValueError, match="bounds no block"):
            BlockBound(*wrong)


# The worst pair of neighbours


def moved(blocks: dict[str, BlockBound], noise: dict[str, float], z: np.ndarray, w: np.ndarray) -> float:
    """How far apart two records of one class move the noisy sums, in stds of the noise: from the blocks themselves."""
    square = 0.0
    for name, block in blocks.items():
        if block.kind == "gram":
            difference = sums.isometric(sums.pack(torch.from_numpy(np.outer(z, z) - np.outer(w, w))))
            square += float((difference / noise[name]).square().sum())
        elif block.kind == "moments":
            square += float(np.sum(((z - w) / noise[name]) ** 2))
    return square


def worst(blocks: dict[str, BlockBound], noise: dict[str, float], radius: float, replaced: bool) -> float:
    """The largest mu over pairs of vectors in a ball in three dimensions, from many starts."""

    def vector(x: np.ndarray) -> np.ndarray:  # length, two angles
        r, t, p = x
        return r * np.array([math.sin(t) * math.cos(p), math.sin(t) * math.sin(p), math.cos(t)])

    def loss(x: np.ndarray) -> float:
        return -moved(blocks, noise, vector(x[:3]), vector(x[3:]) if replaced else np.zeros(3))

    rng = np.random.default_rng(1)
    limits = [(0.0, radius), (-4.0, 4.0), (-7.0, 7.0)] * (2 if replaced else 1)
    ends = [
        optimize.minimize(loss, [rng.uniform(*limit) for limit in limits], bounds=limits, tol=1e-14).fun
        for _ in range(6)
    ]
    return math.sqrt(-min(ends))


@pytest.mark.parametrize(
    ("radius", "parts"),
    [
        (1.0, {"gram": 2 / 3, "moments": 1 / 3}),
        (1.0, {"gram": 0.3, "moments": 0.7}),
        (2.5, {"gram": 0.9, "moments": 0.1}),
        (0.4, {"gram": 0.36, "moments": 0.64}),
        (1.3, {"gram": 1.0}),
        (1.3, {"moments": 1.0}),
    ],
)
def test_no_pair_of_neighbours_moves_further_and_one_reaches_it(radius: float, parts: dict[str, float]) -> None:
    known = {"gram": gram(radius, 3), "moments": moments(radius, 3, 2)}
    blocks = {name: known[name] for name in parts}
    noise = stds(blocks, parts, 0.7)
    assert worst(blocks, noise, radius, replaced=False) == pytest.approx(mu_added(blocks, noise), abs=1e-6)
    assert worst(blocks, noise, radius, replaced=True) == pytest.approx(mu_replaced(blocks, noise), abs=1e-6)
    rng = np.random.default_rng(2)
    for _ in range(300):
        z, w = (v * rng.uniform(0.5, 1) * radius / np.linalg.norm(v) for v in rng.normal(size=(2, 3)))
        assert moved(blocks, noise, z, w) <= mu_replaced(blocks, noise) ** 2 * (1 + 1e-12)


def test_the_constructed_neighbours_reach_the_bound() -> None:
    noise = stds(TWO, shares(TWO), 1.0)
    a2, b2 = 2 / 3, 1 / 3
    u = -b2 / (2 * a2)
    z, w = np.array([1.0, 0.0]), np.array([u, math.sqrt(1 - u * u)])
    assert math.sqrt(moved(TWO, noise, z, w)) == pytest.approx(mu_replaced(TWO, noise), abs=1e-9)
    assert math.sqrt(moved(TWO, noise, z, np.zeros(2))) == pytest.approx(mu_added(TWO, noise), abs=1e-9)


@given(st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.floats(0.1, 10.0))
def test_a_replaced_record_costs_twice_one_added_at_the_most(g: float, m: float, c: float, radius: float) -> None:
    blocks = {"gram": gram(radius, 4), "moments": moments(radius, 4, 3), "counts": counts(3)}
    parts = {"gram": g / (g + m + c), "moments": m / (g + m + c), "counts": c / (g + m + c)}
    noise = stds(blocks, parts, 1.0)
    added, replaced = mu_added(blocks, noise), mu_replaced(blocks, noise)
    assert added == pytest.approx(1.0, rel=1e-12)  # however it is split
    separate = math.hypot(*(b.replaced / noise[name] for name, b in blocks.items()))
    alone = max(b.replaced / noise[name] for name, b in blocks.items())
    assert alone * (1 - 1e-12) <= replaced <= separate * (1 + 1e-12) <= 2 * added * (1 + 1e-9)


def test_a_split_moves_the_figure_of_a_replaced_record_alone() -> None:
    figures = [mu_replaced(TWO, stds(TWO, {"gram": s, "moments": 1 - s}, 1.0)) for s in (0.9, 0.6, 0.3)]
    assert figures == sorted(figures)
    assert figures[2] - figures[0] > 0.2


def test_blocks_of_other_features_are_not_put_together() -> None:
    # moments of another radius are of other features: their worst case may fall on that of the Gram matrix
    blocks = {"gram": gram(1.0, 2), "moments": moments(0.5, 2, 2)}
    noise = {"gram": 1.0, "moments": 0.5}
    assert mu_replaced(blocks, noise) == pytest.approx(math.sqrt(2 + 4))
    # nor what is known by its length alone
    blocks = {**TWO, "embedding": other(1.0, 9)}
    noise = {"gram": 1.0, "moments": 1.0, "embedding": 2.0}
    assert mu_replaced(blocks, noise) == pytest.approx(math.sqrt(2 + 2 + 0.5 + 1.0))
    assert mu_added(blocks, noise) == pytest.approx(1.5)


def test_no_noise_on_a_block_that_moves_is_no_bound() -> None:
    assert mu_added(THREE, {"gram": 1.0, "moments": 1.0, "counts": 0.0}) == math.inf
    # but class sizes are known where a record is replaced by one of its class
    assert mu_replaced(THREE, {"gram": 1.0, "moments": 1.0, "counts": 0.0}) < math.inf
    assert mu_replaced(THREE, {"gram": 0.0, "moments": 0.0, "counts": 1.0}) == math.inf


# Shares


def test_default_shares() -> None:
    assert shares(TWO) == pytest.approx({"gram": 2 / 3, "moments": 1 / 3})
    assert shares(THREE) == pytest.approx({"gram": 0.98 * 2 / 3, "moments": 0.98 / 3, "counts": 0.02})
    assert shares({"moments": moments(1.0, 2, 2), "counts": counts(2)}) == pytest.approx(
        {"moments": 0.98, "counts": 0.02}
    )
    assert shares({"counts": counts(3)}) == {"counts": 1.0}
    assert shares({"a": other(1.0, 4), "b": other(3.0, 1)}) == pytest.approx({"a": 0.4, "b": 0.6})


def test_shares_by_harm_are_the_best() -> None:
    blocks = {"gram": gram(1.5, 6), "moments": moments(1.5, 6, 3), "rest": other(0.2, 40)}
    harm = {"gram": 0.3, "moments": 2.0, "rest": 9.0}

    def error(parts: dict[str, float]) -> float:
        noise = stds(blocks, parts, 1.0)
        return sum(harm[name] * b.count * noise[name] ** 2 for name, b in blocks.items())

    best = shares(blocks, harm)
    assert sum(best.values()) == pytest.approx(1.0, abs=1e-15)
    for one, two in (("gram", "moments"), ("moments", "rest"), ("rest", "gram")):
        for step in (0.01, -0.01):
            assert error({**best, one: best[one] + step, two: best[two] - step}) > error(best)


def test_shares_of_a_ridge_head() -> None:
    # its error is C sigma_M**2 and ||W||**2 sigma_G**2 / 2, both times the same
    d, classes, radius, norm = 5, 4, 0.7, 3.0
    blocks = {"gram": gram(radius, d), "moments": moments(radius, d, classes)}
    harm = {"gram": norm**2 / 2 / blocks["gram"].count, "moments": classes / blocks["moments"].count}
    omega = radius * norm / math.sqrt(classes)
    assert shares(blocks, harm)["moments"] == pytest.approx(1 / (1 + omega / math.sqrt(2)))


def test_wrong_shares() -> None:
    with refused("blocks", "none"):
        shares({})
    for harm in ({"gram": 1.0}, {"gram": 1.0, "moments": 0.0}, {"gram": 1.0, "moments": math.nan}):
        with refused("harm", "gram, moments"):
            shares(TWO, harm)
    for parts in ({"gram": 1.0}, {"gram": 0.5, "moments": 0.4}, {"gram": 1.0, "moments": 0.0}):
        with refused("share", "add up to 1"):
            stds(TWO, parts, 1.0)
    for mu in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="mu of"):
            stds(TWO, shares(TWO), mu)
    assert stds(TWO, shares(TWO), math.inf) == {"gram": 0.0, "moments": 0.0}


# Noise


matrices = st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, 1000))


@given(matrices)
def test_packing_is_undone_and_keeps_lengths(shape: tuple[int, int, int]) -> None:
    batch, d, seed = shape
    full = torch.randn(batch, d, d, generator=stream(seed), dtype=torch.float64)
    full = full + full.mT
    packed = sums.pack(full)
    assert packed.shape == (batch, d * (d + 1) // 2)
    assert torch.equal(sums.unpack(packed), full)
    assert torch.equal(sums.pack(sums.unpack(packed)), packed)
    torch.testing.assert_close(
        sums.isometric(packed).norm(dim=-1), torch.linalg.matrix_norm(full), rtol=1e-14, atol=1e-14
    )


def test_packing_goes_row_by_row() -> None:
    full = torch.tensor([[1, 2, 3], [2, 4, 5], [3, 5, 6]])
    assert sums.pack(full).tolist() == [1, 2, 3, 4, 5, 6]
    for wrong in (0, 2, 4, 5):
        with pytest.raises(ValueError, match="upper triangle"):
            sums.unpack(torch.zeros(wrong))


def test_the_noise_of_a_symmetric_block() -> None:
    d, sigma = 4, 3.0
    zero = torch.zeros(DRAWS, d * (d + 1) // 2, dtype=torch.float64)
    noise = sums.unpack(sums.add_noise(zero, sigma, True, seeded(0)))
    assert torch.equal(noise, noise.mT)
    wanted = sigma * torch.where(torch.eye(d, dtype=torch.bool), 1.0, math.sqrt(0.5))
    torch.testing.assert_close(noise.std(0), wanted.double(), rtol=0.05, atol=0.0)
    # a full matrix, averaged with its transpose, has the same law
    full = torch.randn(DRAWS, d, d, generator=stream(1), dtype=torch.float64) * sigma
    reference = (full + full.mT) / 2
    torch.testing.assert_close(noise.std(0), reference.std(0), rtol=0.1, atol=0.0)
    # and along any record's own direction it is as strong as anywhere: mu is 1 / sigma for all
    for z in (torch.tensor([1.0, 0, 0, 0]), torch.tensor([0.5, 0.5, 0.5, 0.5]), torch.tensor([0.6, 0, -0.8, 0])):
        z = z.double()
        along = torch.einsum("nij,i,j->n", noise, z, z)
        assert along.std().item() == pytest.approx(sigma, rel=0.05)


def test_the_edge_of_the_noise_in_eigenvalues() -> None:
    d, sigma = 400, 2.0
    noise = sums.unpack(sums.add_noise(torch.zeros(d * (d + 1) // 2, dtype=torch.float64), sigma, True, seeded(0)))
    assert torch.linalg.eigvalsh(noise).abs().max().item() == pytest.approx(sigma * math.sqrt(2 * d), rel=0.03)
    # the figures of a budget
    parts = stds(TWO, shares(TWO), sums.mu_for(1.0, DELTA))
    edges = [2 * parts["gram"] / math.sqrt(2) * math.sqrt(d) for d in (512, 1024)]
    assert edges == pytest.approx([146.21, 206.77], abs=5e-3)
    assert [edge * sums.sum_factor("site", 10, 1) for edge in edges] == pytest.approx([462.36, 653.87], abs=5e-3)


def test_the_noise_of_a_plain_block() -> None:
    block = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    generator = seeded(0)
    noisy = torch.stack([sums.add_noise(block, 0.5, False, generator) for _ in range(DRAWS)])
    torch.testing.assert_close(noisy.std(0), torch.full((2, 3), 0.5, dtype=torch.float64), rtol=0.05, atol=0.0)
    torch.testing.assert_close(noisy.mean(0), block, rtol=0.0, atol=0.05)
    assert torch.equal(block, torch.arange(6.0, dtype=torch.float64).reshape(2, 3))  # the sum itself is left alone


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_same_stream_gives_the_same_noise_to_other_data(symmetric: bool) -> None:
    one, two = torch.zeros(3, 6, dtype=torch.float64), torch.randn(3, 6, generator=stream(7), dtype=torch.float64)
    noisy = [sums.add_noise(block, 2.0, symmetric, seeded(5)) for block in (one, two)]
    torch.testing.assert_close(noisy[1] - noisy[0], two - one, rtol=0.0, atol=1e-14)
    assert torch.equal(sums.add_noise(two, 0.0, symmetric, seeded(5)), two)
    generator = seeded(5)
    first, second = (sums.add_noise(one, 2.0, symmetric, generator) for _ in range(2))
    assert not torch.equal(first, second)


def test_nothing_is_rounded_before_the_noise() -> None:
    with pytest.raises(ValueError, match="float32"):
        sums.add_noise(torch.zeros(3), 1.0, False, seeded(0))
    for std in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="standard deviation"):
            sums.add_noise(torch.zeros(3, dtype=torch.float64), std, False, seeded(0))
    with pytest.raises(ValueError, match="upper triangle"):
        sums.add_noise(torch.zeros(4, dtype=torch.float64), 1.0, True, seeded(0))


# Who adds it


def summed(trust: Any, replies: int, honest: int, std: float) -> Tensor:
    """Sums of the noise of all clients and the server, `DRAWS` coordinates."""
    zero, generator = torch.zeros(DRAWS, dtype=torch.float64), seeded(3)
    part = sums.client_factor(trust, replies, honest) * std
    total = sum((sums.add_noise(zero, part, False, generator) for _ in range(replies)), zero)
    return sums.add_noise(total, std, False, generator) if trust == "server" else total


@pytest.mark.parametrize(
    ("trust", "replies", "honest", "wanted"),
    [
        ("none", 10, 7, 0.0),
        ("site", 2, 1, 5.275910),
        ("secure", 10, 7, 4.458958),
        ("secure", 10, 10, 3.730632),
        ("server", 10, 7, 3.730632),
    ],
)
def test_the_noise_in_the_sum(trust: Any, replies: int, honest: int, wanted: float) -> None:
    std = 1 / sums.mu_for(1.0, DELTA)
    assert std * sums.sum_factor(trust, replies, honest) == pytest.approx(wanted, abs=1e-6)
    assert summed(trust, replies, honest, std).std().item() == pytest.approx(wanted, rel=0.05)


def test_the_shares_of_the_honest_alone_keep_the_promise() -> None:
    std = 2.0
    for replies, honest in ((10, 7), (10, 10), (3, 1)):
        part = sums.client_factor("secure", replies, honest) * std
        assert math.sqrt(honest) * part == pytest.approx(std)
    # without a margin a missing share costs mu a factor
    part = sums.client_factor("secure", 10, 10) / sums.mu_for(1.0, DELTA)
    assert accountant.gaussian_mu(1.0, math.sqrt(9) * part) == pytest.approx(0.282551, abs=1e-6)


def test_how_many_are_relied_on() -> None:
    assert [sums.honest_default(m) for m in (1, 2, 3, 4, 9, 10, 300)] == [1, 2, 2, 3, 6, 7, 200]
    for factor in (sums.client_factor, sums.sum_factor):
        for replies, honest in ((6, 7), (3, 0)):  # the sum of too few is not opened
            with refused("honest", honest, f"1 to {replies}"):
                factor("secure", replies, honest)
        with refused("trust", "sites", "did you mean 'site'?"):
            factor("sites", 3, 2)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="a reply or more"):
            factor("site", 0, 0)
        assert factor("site", 1, 0) == 1.0  # nobody is relied on


# What is booked


def booked(trust: Any, hidden: bool = False, blocks: dict[str, BlockBound] = TWO) -> Any:
    noise = stds(blocks, shares(blocks), sums.mu_for(1.0, DELTA))
    return sums.released(
        "sums of features",
        blocks,
        noise,
        trust,
        10,
        7,
        sums.SUM_ALONE if hidden else "",
        ["features are of one record alone"],
    )


def test_noise_at_each_client_is_booked_for_both_neighbours() -> None:
    release = booked("site")
    assert (release.added_mu, release.mu) == pytest.approx((0.268051, 0.386898), abs=1e-6)
    assert release.conditions == ("features are of one record alone",)
    ledger = Ledger()
    ledger.add(0, "Sums.blocks", release)
    account = ledger.account(DELTA)
    assert account["total_epsilon_added"] == pytest.approx(1.0, abs=1e-6)
    assert account["total_epsilon"] == pytest.approx(1.498655, abs=1e-6)
    told = "epsilon 1.00 for one record added or removed, 1.50 for one replaced by another of the same class, at delta 1e-05"
    assert account["statement"].count(told) == 2
    assert "one record of one client" in account["statement"]
    assert "at each client" in account["statement"]


def test_shared_noise_has_two_conditions() -> None:
    met, unmet = booked("secure", hidden=True), booked("secure", hidden=False)
    assert (met.added_mu, met.mu) == (booked("site").added_mu, booked("site").mu)
    assert (met.conditional_mu, met.conditional_added_mu) == (None, None)
    assert (unmet.mu, unmet.added_mu) == (None, None)
    assert (unmet.conditional_mu, unmet.conditional_added_mu) == (met.mu, met.added_mu)
    for release in (met, unmet):
        words = "; ".join(release.conditions)
        assert "no single reply" in words
        assert "at least 7 of the 10 clients in the sum" in words
        assert "Discrete Gaussian" in release.mechanism
        assert len(release.conditions) == 3
    ledger = Ledger()
    ledger.add(0, "Sums.blocks", unmet)
    account = ledger.account(DELTA)
    assert (account["total_epsilon"], account["total_epsilon_added"]) == (None, None)
    assert "would cost epsilon 1.00 for one record added or removed, 1.50 for" in account["statement"]
    assert all(condition in account["statement"] for condition in unmet.conditions)


def test_noise_of_the_server_is_none_towards_the_server() -> None:
    for hidden in (False, True):
        release = booked("server", hidden)
        assert (release.mu, release.added_mu) == (None, None)
        assert (release.conditional_mu, release.conditional_added_mu) == (booked("site").mu, booked("site").added_mu)
        assert "forgets the single replies" in release.conditions[0]


def test_sums_as_they_are_have_no_figure_and_name_the_ways_out() -> None:
    release = booked("none", hidden=True)
    assert (release.mu, release.conditional_mu, release.added_mu, release.conditional_added_mu) == (None,) * 4
    assert release.mechanism.startswith("sums, sent as they are")
    for words in ("fewer records than features", "target_epsilon", "trust=site", "trust=secure"):
        assert words in release.mechanism
    assert "Gram" not in booked("none", blocks={"moments": moments(1.0, 2, 2)}).mechanism


def test_words_of_a_mechanism_do_not_change_with_the_clients() -> None:
    few = sums.released("sums", TWO, {"gram": 1.0, "moments": 1.0}, "secure", 3, 2, sums.SUM_ALONE)
    many = sums.released("sums", TWO, {"gram": 2.0, "moments": 2.0}, "secure", 9, 6, sums.SUM_ALONE)
    assert few.mechanism == many.mechanism
    with refused("honest", 4, "1 to 3"):
        sums.released("sums", TWO, {"gram": 1.0, "moments": 1.0}, "secure", 3, 4)
