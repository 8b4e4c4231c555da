"""FedPFT: mixtures of features from each client, a head at the server; under noise one Gaussian of each class from sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.algorithms.sums_world import Plane, bundles, fitted, head_of, records
from tests.experiment.world import digits
from tests.helpers import refused

import fedfill
from fedfill.algorithms.fedpft import FedPFT
from fedfill.experiment.prepare import arrange

ONE: dict[str, Any] = {"features": "conv(12) > project(32)", "client_test": 0.0, "clients": 3}


def images(n: int = 400) -> tuple[Any, ...]:
    x, y = digits()
    return x[:n], y[:n], x[1000:1300], y[1000:1300]


@pytest.mark.parametrize("covariance", ["full", "diag", "spherical"])
@pytest.mark.parametrize("components", [1, 3])
def test_the_head_tells_classes_apart(covariance: str, components: int) -> None:
    points = bundles(80, 60, 70, d=4)
    server = fitted(FedPFT(components=components, covariance=covariance, head_steps=300), points, model=Plane(4, 3))
    w, b = head_of(server)
    z, y = records(points)
    assert ((z @ w + b).argmax(1) == y).mean() > 0.7


@pytest.mark.parametrize("classifier", ["ridge", "lda"])
def test_other_heads_see_the_draws_alone(classifier: str, tmp_path: Path) -> None:
    settings = {**ONE, "features": "conv(40) > project(64)", "components": 3, "partition": "classes:2", "clients": 5}
    result = fedfill.run("fedpft", data=images(), **settings, classifier=classifier, out=tmp_path)
    assert result.summary["accuracy"] > 0.75


def test_ridge_and_lda_of_one_tight_gaussian_for_each_class_are_those_of_its_means() -> None:
    """Two classes of equal records: draws are all but their means, and both heads part the plane half way between them."""
    points = [([[1.0, 0.0]] * 9, [0] * 9), ([[0.0, 1.0]] * 9, [1] * 9)]
    for classifier in ("ridge", "lda"):
        server = fitted(FedPFT(components=1, covariance="full", classifier=classifier), points)
        w, b = head_of(server)
        across = w[:, 0] - w[:, 1]
        assert across[0] == pytest.approx(-across[1], rel=0.05)
        assert across[0] > 0
        assert b[0] - b[1] == pytest.approx(0, abs=0.05 * across[0])


def test_a_discriminant_needs_a_bias() -> None:
    with refused("classifier", "lda", "ridge"):
        fitted(FedPFT(classifier="lda"), bundles(9, 9, d=2), model=Plane(2, 3, bias=False))
    fitted(FedPFT(classifier="ridge"), bundles(9, 9, d=2), model=Plane(2, 3, bias=False))


def test_everybody_sends_components_of_its_own_classes() -> None:
    points = [([[1.0, 0.0]] * 9, [0] * 9), ([[0.0, 1.0]] * 2 + [[0.6, 0.8]], [1, 1, 1]), ([], [])]
    server = fitted(FedPFT(components=2, head_steps=50), points)
    mixture = server.state.mixture
    assert mixture["labels"].tolist() == [0, 0, 1, 1]
    assert mixture["sizes"].sum() == pytest.approx(12)
    assert set(server.lost) == set()


@pytest.mark.parametrize("classifier", ["softmax", "ridge", "lda"])
def test_a_class_that_nobody_holds_never_wins(classifier: str) -> None:
    server = fitted(FedPFT(head_steps=50, classifier=classifier), bundles(30, 20, d=3), model=Plane(3, 5))
    w, b = head_of(server)
    assert any(text.startswith("No client holds class 3, 4") for text in server.warnings)
    z = torch.randn(100, 3, generator=torch.Generator().manual_seed(0)).numpy() * 50
    assert set((z @ w + b).argmax(1)) <= {0, 1, 2}


@pytest.mark.parametrize("noise", [{}, {"target_epsilon": 10.0, "components": 1, "covariance": "full"}])
def test_the_same_bits_for_any_number_of_workers(noise: dict[str, Any], tmp_path: Path) -> None:
    found = {
        fedfill.run("fedpft", data=images(), **ONE, **noise, workers=workers, out=tmp_path / f"{workers}").summary["weights_sha256"]
        for workers in (1, 3)
    }  # fmt: skip
    assert len(found) == 1


def test_a_guarantee_is_for_one_gaussian_of_each_class(tmp_path: Path) -> None:
    noisy = {"target_epsilon": 10.0, "components": 1, "covariance": "full", "trust": "server"}
    result = fedfill.run("fedpft", data=images(), **ONE, **noisy, out=tmp_path / "server")
    site = fedfill.run("fedpft", data=images(), **ONE, **{**noisy, "trust": "site"}, out=tmp_path / "site")
    assert result.summary["privacy"]["total_epsilon_added"] is None  # the server is trusted, and not bound
    assert site.summary["privacy"]["total_epsilon_added"] == pytest.approx(10, rel=1e-6)
    for more in ({"components": 2, "covariance": "full"}, {"components": 1, "covariance": "diag"}, {}):
        with refused("components", "target_epsilon"):
            arrange("fedpft", data=images(), model="auto", partition="iid", **ONE, target_epsilon=1.0, **more)


def test_slips() -> None:
    for words, facts in (
        ({"components": 0}, ("components",)),
        ({"covariance": "tied"}, ("covariance", "tied", "diag")),
        ({"head_steps": 0}, ("head_steps",)),
        ({"classifier": "fed3r"}, ("classifier", "fed3r", "ridge", "lda")),
        ({"trust": "server"}, ("trust", "target_epsilon")),
    ):
        with refused(*facts):
            arrange("fedpft", data=images(), model="auto", partition="iid", **ONE, **words)
