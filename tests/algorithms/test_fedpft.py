"""FedPFT: mixtures of features from each client, a head at the server; under noise one Gaussian of each class from sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.algorithms.sums_world import Plane, bundles, fitted, head_of, records
from tests.experiment.world import digits
from tests.helpers import refused, scripted

import fedfill
from fedfill.algorithms._layers import Layer
from fedfill.algorithms.fedpft import FedPFT, Mixtures
from fedfill.experiment.prepare import arrange
from fedfill.models.views import weights_of
from fedfill.protocol.messages import HEAVIEST

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


# What a client says is checked

SHAPES: dict[str, tuple[int, ...]] = {"full": (2, 2), "diag": (2,), "spherical": ()}
LAYER = Layer("classifier", features=2, classes=3, radius=1.0, range=(-1.0, 1.0))


def mixtures(covariance: str = "diag", labels: tuple[int, ...] = (0, 2), **other: torch.Tensor) -> Mixtures:
    """One component of two records for each label, of two features; with other fields in the place of these."""
    m = len(labels)
    own = {
        "labels": torch.tensor(labels, dtype=torch.int64), "sizes": torch.full((m,), 2.0), "means": torch.full((m, 2), 0.5),
        "covariances": torch.ones(m, *SHAPES[covariance]),
    }  # fmt: skip
    return Mixtures(**{**own, **other})


def gathered(replies: dict[int, Mixtures], **settings: Any) -> Any:
    """The server after it has asked scripted clients for mixtures."""
    model = Plane(2, 3)
    server, engine = scripted(len(replies), weights_of(model), model=model)
    engine.script["fit_own"] = lambda i, message, t: replies[i]
    server.state.mixture = FedPFT(**settings).gather(server, LAYER)
    return server


@pytest.mark.parametrize(
    "wrong",
    [
        mixtures(labels=(0, 3)),
        mixtures(labels=(0, -1)),
        mixtures(labels=(1, 1, 1)),
        mixtures(sizes=torch.full((3,), 2.0)),
        mixtures(means=torch.ones(2, 3)),
        mixtures(means=torch.ones(2, 2).double()),
        mixtures(covariances=torch.ones(2)),
        mixtures(covariances=torch.ones(2, 2, 2)),
        mixtures(sizes=torch.tensor([2.0, -1.0])),
        mixtures(sizes=torch.tensor([2.0, 4.0 * HEAVIEST])),
        Mixtures(torch.tensor([0.0, 2.0]), *(getattr(mixtures(), name) for name in ("sizes", "means", "covariances"))),
        Mixtures(torch.tensor([[0, 2]]), *(getattr(mixtures(), name) for name in ("sizes", "means", "covariances"))),
        Mixtures(
            torch.tensor(0), *(getattr(mixtures(labels=(0,)), name) for name in ("sizes", "means", "covariances"))
        ),
    ],
)
def test_mixtures_that_make_no_sense_are_left_out_and_the_others_go_on(wrong: Mixtures) -> None:
    server = gathered({0: mixtures(), 1: wrong, 2: mixtures(labels=(1,))}, components=2)
    assert [lost["client"] for lost in server.lost] == [1]
    assert server.lost[0]["handler"] == "fit_own"
    assert server.state.mixture["labels"].tolist() == [0, 2, 1]


@pytest.mark.parametrize("covariance", ["full", "diag", "spherical"])
def test_mixtures_that_were_asked_for_are_taken(covariance: str) -> None:
    """As many components of a class as were asked for, and none at all of who has no record."""
    whole, none = mixtures(covariance, (0, 0, 2)), mixtures(covariance, ())
    server = gathered({0: whole, 1: none}, components=2, covariance=covariance)
    assert server.lost == []
    assert torch.equal(server.state.mixture["covariances"], whole.covariances)


def test_without_any_mixture_there_is_nothing_to_draw_from() -> None:
    for only in (mixtures(labels=(7,)), mixtures(labels=())):
        with refused("engine", "no client sent a mixture"):
            gathered({0: only})


def test_draws_are_scaled_down_to_what_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 12 draws, 24 numbers, 9 are of the component that stands for 6,000 of 8,000 records, 3 of the other, 1 of one of none."""
    sizes = torch.tensor([6000.0, 2000.0, 0.0])
    algorithm = FedPFT(head_steps=1)
    server = fitted(algorithm, bundles(9, 9, d=2), model=Plane(2, 3))
    server.state.mixture = vars(mixtures(labels=(0, 1, 2), sizes=sizes))
    monkeypatch.setattr("fedfill.algorithms.fedpft.LARGEST", 24)
    z, labels = algorithm.draws(server)
    assert z.shape == (13, 2)
    assert torch.bincount(labels).tolist() == [9, 3, 1]
    assert server.warnings[-1].startswith("The clients' mixtures stand for 8000 records, and 12 features are drawn")
    monkeypatch.setattr("fedfill.algorithms.fedpft.LARGEST", 16000)
    assert len(algorithm.draws(server)[0]) == 8001
    assert len(server.warnings) == 1


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
