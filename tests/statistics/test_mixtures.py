"""Mixtures of features by class: fitted, of few records, and drawn from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedfill.statistics.mixtures import LEAST_VARIANCE, Mixture, draw_from, fit_mixtures


def drawn(n: int, d: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Class 0 has two heaps, class 2 one; nobody holds class 1."""
    stream = torch.Generator().manual_seed(0)
    y = torch.tensor([0, 2]).repeat(n)
    heap = torch.where(torch.arange(2 * n) % 4 < 2, -4.0, 4.0)
    z = torch.randn(2 * n, d, generator=stream)
    z[:, 0] += torch.where(y == 0, heap, torch.zeros(2 * n))
    return z, y


@pytest.mark.parametrize("kind", ["full", "diag", "spherical"])
def test_one_component_is_mean_and_covariance(kind: str) -> None:
    z, y = drawn(200)
    fitted = fit_mixtures(z, y, 1, kind, seed=0)
    assert fitted.labels.tolist() == [0, 2]
    assert fitted.sizes.tolist() == [200, 200]
    for k, c in enumerate((0, 2)):
        own = z[y == c].double().numpy()
        wanted = np.cov(own.T, bias=True) + LEAST_VARIANCE * np.eye(3)
        assert np.allclose(fitted.means[k], own.mean(0), atol=1e-5)
        found = fitted.covariances[k].numpy()
        if kind == "full":
            assert np.allclose(found, wanted, atol=1e-4)
        else:
            assert np.allclose(found, np.diag(wanted) if kind == "diag" else np.diag(wanted).mean(), atol=1e-4)


def test_two_heaps_are_found_with_two_components() -> None:
    z, y = drawn(400)
    fitted = fit_mixtures(z, y, 2, "diag", seed=0)
    places = sorted(fitted.means[fitted.labels == 0][:, 0].tolist())
    assert places == pytest.approx([-4, 4], abs=0.3)
    assert float(fitted.sizes[fitted.labels == 0].sum()) == pytest.approx(400, rel=1e-5)


@pytest.mark.parametrize("kind", ["full", "diag", "spherical"])
@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_records_are_few_components(kind: str, n: int) -> None:
    z, y = drawn(3)
    fitted = fit_mixtures(z[:n], y[:n], 10, kind, seed=1)
    assert len(fitted) == n
    assert torch.isfinite(fitted.covariances).all()
    assert fitted.covariances.dim() == {"full": 3, "diag": 2, "spherical": 1}[kind]
    if n:
        assert torch.allclose(fitted.means[:1], z[:1], atol=1e-5)


@pytest.mark.parametrize("kind", ["full", "diag", "spherical"])
def test_draws_are_of_the_components(kind: str) -> None:
    covariance = torch.tensor([[2.0, 0.8], [0.8, 0.5]])
    covariances = {"full": covariance[None], "diag": covariance.diagonal()[None], "spherical": torch.tensor([1.5])}[
        kind
    ]
    mixture = Mixture(torch.tensor([4]), torch.tensor([20000.0]), torch.tensor([[1.0, -2.0]]), covariances)
    z, labels = draw_from(mixture, torch.Generator().manual_seed(0))
    assert z.shape == (20000, 2)
    assert set(labels.tolist()) == {4}
    assert np.allclose(z.mean(0), [1, -2], atol=0.05)
    wanted = {"full": covariance, "diag": torch.diag(covariance.diagonal()), "spherical": 1.5 * torch.eye(2)}[kind]
    assert np.allclose(np.cov(z.T.numpy()), wanted, atol=0.06)
