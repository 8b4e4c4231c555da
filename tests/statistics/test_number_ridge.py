"""Ridge regression of a number from sums: scikit-learn's on the records, whoever holds them."""

from __future__ import annotations

import pytest
import torch
from sklearn.linear_model import Ridge

from fedfill.statistics.number_ridge import Centred, number_moments
from fedfill.statistics.ridge import choose_lambda
from fedfill.statistics.sums import GRID
from fedfill.tree import Weights


def summed(z: torch.Tensor, y: torch.Tensor, parts: int = 1) -> Weights:
    statistic = number_moments(z.shape[1], float("inf"))
    total = {name: torch.zeros(block.shape, dtype=torch.float64) for name, block in statistic.blocks.items()}
    for one, own in zip(z.chunk(parts), y.chunk(parts), strict=True):
        statistic.add(total, one, own)
    return total


def noise(std: float) -> dict[str, float]:
    return dict.fromkeys(("gram", "moments", "total", "numbers", "counts"), std)


@pytest.fixture(name="records")
def _records() -> tuple[torch.Tensor, torch.Tensor]:
    z = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
    y = z @ torch.tensor([0.1, -0.2, 0.0, 0.05], dtype=torch.float64) + 0.4
    return z, (y + 0.05 * torch.randn(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).float()


@pytest.mark.parametrize("lam", [0.01, 1.0, 50.0])
def test_it_is_the_regression_of_all_records(records: tuple[torch.Tensor, torch.Tensor], lam: float) -> None:
    z, y = records
    expected = Ridge(alpha=lam).fit(z.numpy(), y.double().numpy())
    for parts in (1, 7):
        head = Centred.of(summed(z, y, parts)).head(lam)
        assert head.weight[0].tolist() == pytest.approx(expected.coef_.tolist(), abs=1e-9)
        assert float(head.bias[0]) == pytest.approx(float(expected.intercept_), abs=1e-9)


def test_the_rule_counts_the_residuals_of_the_centred_numbers(records: tuple[torch.Tensor, torch.Tensor]) -> None:
    z, y = records
    centred = Centred.of(summed(z, y))
    lam = 3.0
    head = centred.head(lam)
    residuals = y.double() - head.scores(z)[:, 0]
    zc = z - z.mean(0)
    df = float(torch.trace(zc @ torch.linalg.inv(zc.T @ zc + lam * torch.eye(4, dtype=torch.float64)) @ zc.T))
    n = len(y) - 1
    gcv = n * float(residuals.square().sum()) / (n - df) ** 2 * centred.scale**2
    assert centred.spectrum.gcv(lam, centred.degrees) == pytest.approx(gcv)
    assert choose_lambda(centred.spectrum, centred.degrees).lam < 3


def test_numbers_that_do_not_vary() -> None:
    z = torch.randn(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    head = Centred.of(summed(z, torch.full((8,), 0.25))).head(1.0)
    assert (head.weight.tolist(), head.bias.tolist()) == ([[0.0, 0.0]], [0.25])


def test_noise_that_is_next_to_nothing_changes_next_to_nothing(records: tuple[torch.Tensor, torch.Tensor]) -> None:
    """And lambda is then the floor, 1e-7 n, which keeps a singular matrix solvable."""
    z, y = records
    exact, noisy = Centred.of(summed(z, y)).head(6e-6), Centred.of(summed(z, y)).noisy_head(noise(1e-12))
    assert torch.allclose(exact.weight, noisy.weight, rtol=1e-9)
    assert torch.allclose(exact.bias, noisy.bias, rtol=1e-9)


def test_noise_costs_more_shrinkage_and_no_negative_eigenvalue(records: tuple[torch.Tensor, torch.Tensor]) -> None:
    z, y = records
    sums = summed(z, y)
    sums["gram"] = sums["gram"] - 500 * torch.eye(4, dtype=torch.float64)  # below anything that a sum of squares can be
    head = Centred.of(sums).noisy_head({**noise(0.0), "gram": 5.0}, 2.0)
    assert bool(torch.isfinite(head.weight).all())
    few = {name: -x for name, x in summed(z, y).items()}  # a count below nothing
    head = Centred.of(few).noisy_head(noise(5.0))
    assert (head.weight.abs().sum(), head.bias[0]) == (0, 0)


def test_noise_alone_is_no_model(records: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Of sums that are mostly noise the model says the mean; what stands out is kept."""
    z, y = records
    exact, kept = summed(z, y), 0
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        noisy = {name: x + 3 * torch.randn(x.shape, generator=draw, dtype=torch.float64) for name, x in exact.items()}
        noisy["moments"] = 3 * torch.randn(4, 1, generator=draw, dtype=torch.float64) + noisy["total"][:, None] * float(
            y.mean()
        )
        head = Centred.of(noisy).noisy_head(noise(3.0))
        kept += bool(head.weight.any())
        if not bool(head.weight.any()):
            assert float(head.bias[0]) == pytest.approx(float(noisy["numbers"][0] / noisy["counts"][0]))
    assert kept <= 4
    assert bool(Centred.of(exact).noisy_head(noise(0.1)).weight.any())


def test_stepped_sums_are_whole_numbers_of_steps_and_bounds_hold() -> None:
    draw = torch.Generator().manual_seed(3)
    z = torch.randn(500, 6, generator=draw, dtype=torch.float64)
    z = (z / z.norm(dim=1, keepdim=True)).mul(2**GRID).trunc().mul(2.0**-GRID)
    y = (2 * torch.rand(500, generator=draw) - 1).clamp(-1, 1)
    statistic = number_moments(6, 1.0, stepped=True)
    one: list[Weights] = []
    for k in range(500):
        sums = {name: torch.zeros(block.shape, dtype=torch.float64) for name, block in statistic.blocks.items()}
        statistic.add(sums, z[k : k + 1], y[k : k + 1])
        one.append(sums)
    for name, block in statistic.blocks.items():
        assert block.bits is not None
        steps = torch.stack([sums[name] for sums in one]) * 2.0**block.bits
        assert bool((steps == steps.round()).all())
        flat = torch.stack([sums[name].flatten() for sums in one])
        assert float(flat.norm(dim=1).max()) <= block.bound.bound + 1e-12
        assert float(torch.cdist(flat, flat).max()) <= block.bound.replaced + 1e-9
