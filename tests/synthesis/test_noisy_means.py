"""Noisy means of latent codes: the noise and its price, bounds, what recipients draw, and what makes no sense."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.helpers import CLASSES, refused
from torch import nn

from fedfill.models.networks import ModelSettings, build
from fedfill.synthesis.noisy_means import NoisyMeans, Shared


def shared_by(mechanism: NoisyMeans, means: torch.Tensor, counts: list[int], judge: nn.Module | None = None) -> Any:
    """What a client of so many samples in each class shares of all of them, the most abundant first, and its releases."""
    classes = sorted(range(len(counts)), key=lambda c: -counts[c])
    stream = torch.Generator().manual_seed(0)
    shared, _, releases = mechanism.share(means, classes, counts, judge, stream, lambda: None)
    return shared, releases


@pytest.fixture
def filtered(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the filter was asked for; it accepts the centre itself."""
    asked: list[dict[str, Any]] = []

    def accept(judge: nn.Module, centre: torch.Tensor, std: float, label: int, **_: Any) -> tuple[torch.Tensor, int]:
        asked.append({"centre": centre, "std": std, "label": label})
        return centre[None], 1

    monkeypatch.setattr("fedfill.synthesis.noisy_means.accepted_codes", accept)
    return asked


# What an assisting client adds


def test_single_release_adds_the_noise_that_it_is_charged_for():
    mechanism = NoisyMeans(mechanism="single_release", release_sigma=0.5, latent_bound="sigmoid")
    means = torch.tensor([[0.0], [3.0]]).expand(2, 4000)
    shared, releases = shared_by(mechanism, means, [20, 20])
    assert shared.codes.std(1).tolist() == pytest.approx([0.5, 0.5], abs=0.03)
    assert shared.codes.mean(1).tolist() == pytest.approx([0, 3], abs=0.04)
    assert releases["shared.codes"].mu == pytest.approx(math.sqrt(4000) / 20 / 0.5)


def test_noise_in_multiples_of_the_sensitivity_is_that_of_each_class(filtered: list[dict[str, Any]]):
    mechanism = NoisyMeans(alpha=5, sigma=2.0, noise="sensitivity", latent_bound="sigmoid")
    _, releases = shared_by(mechanism, torch.zeros(2, 16), [40, 20], nn.Identity())
    assert [asked["std"] for asked in filtered] == pytest.approx([2 * 4 / 40, 2 * 4 / 20])  # l = 16
    assert releases["shared.codes"].conditional_mu == pytest.approx(math.sqrt(5) / 2)


# Bounds


def test_sensitivity_noise_scales_with_the_class_size():
    mechanism = NoisyMeans(latent_bound="sigmoid", noise="sensitivity")
    assert mechanism.sensitivity(latent=16, count=20) == pytest.approx(4 / 20)
    assert NoisyMeans(latent_bound="clip", latent_clip=3.0).sensitivity(16, 20) == pytest.approx(2 * 3 / 20)
    assert NoisyMeans(latent_bound="none").sensitivity(16, 20) == math.inf


def resolved(mechanism: NoisyMeans, activation: str) -> NoisyMeans:
    model = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(latent_activation=activation), needs=("decoder",), seed=0)
    filled = mechanism.mechanism_resolved(model, torch.zeros(1, 1, 8, 8, dtype=torch.uint8))
    return mechanism.model_copy(update=filled)


def test_latent_bound_follows_the_network():
    bounded = resolved(NoisyMeans(), "sigmoid")
    assert (bounded.latent_bound, bounded.latent_clip) == ("sigmoid", None)
    # l = 16: no code lies farther from the centre than a sigmoid's, so that no guarantee is lost without one
    for activation in ("none", "relu"):
        free = resolved(NoisyMeans(), activation)
        assert (free.latent_bound, free.latent_clip) == ("clip", 2.0)
        assert free.sensitivity(16, 20) == bounded.sensitivity(16, 20) == 4 / 20
    assert resolved(NoisyMeans(latent_clip=3.0), "none").latent_clip == 3.0
    assert resolved(NoisyMeans(latent_bound="none"), "none").latent_bound == "none"


def test_an_encoder_of_a_users_own_is_clipped_too():
    """Nothing is known of how far its codes go."""
    model = nn.Module()
    model.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Sigmoid())
    filled = NoisyMeans().mechanism_resolved(model, torch.zeros(1, 1, 8, 8, dtype=torch.uint8))
    assert (filled["latent_bound"], filled["latent_clip"]) == ("clip", math.sqrt(9) / 2)


@pytest.mark.parametrize("activation", ["none", "relu"])
def test_sigmoid_bound_is_refused_for_a_network_without_one(activation: str):
    with refused("latent_bound"):
        resolved(NoisyMeans(latent_bound="sigmoid"), activation)


# What a recipient draws


@pytest.mark.parametrize(
    ("mechanism", "bound", "centre", "std"),
    [
        ("single_release", "sigmoid", [0.25, 3.0], 1.6),
        ("prior", "sigmoid", [0.5, 0.5], 2.0),
        ("prior", "none", [0.0, 0.0], 2.0),
    ],
)
def test_a_recipient_draws_around_the_one_mean_or_the_prior_with_the_noise_that_is_left(
    mechanism: Any, bound: Any, centre: list[float], std: float, filtered: list[dict[str, Any]]
):
    means = NoisyMeans(mechanism=mechanism, sigma=2.0, release_sigma=1.2, latent_bound=bound)
    codes = torch.tensor([[0.25, 3.0]])[: mechanism == "single_release"]
    model = nn.Module()
    model.decoder = nn.Unflatten(1, (1, 1, 2))
    images, _ = means.synthesise(model, [Shared([3], [len(codes)], codes)], torch.Generator())
    (asked,) = filtered
    assert asked["centre"].tolist() == centre
    assert asked["std"] == pytest.approx(std)
    assert images.labels.tolist() == [3]


class Yes(nn.Module):
    """A model whose codes are its images, and which takes everything for class 0."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Unflatten(1, (1, 1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[1.0, 0.0]]).expand(len(x), 2)


def test_codes_around_a_mean_have_the_noise_that_was_asked_for():
    means = NoisyMeans(alpha=4000, sigma=2.0, mechanism="prior", latent_bound="none", max_candidates=4000)
    nothing = Shared([0], [0], torch.empty(0, 2))
    images, rows = means.synthesise(Yes(), [nothing], torch.Generator().manual_seed(0))
    assert rows == [[0, 4000, 4000]]
    assert len(images) == 4000
    # codes are N(0, 4); the share of pixels that the decoder's clamp to [0, 1] leaves at 1 is P(N > 1/2)
    share = (images.inputs == 255).double().mean().item()
    assert share == pytest.approx(0.5 * math.erfc((1 - 0.5 / 255) / 2 / math.sqrt(2)), abs=0.02)


# What is shared


def test_some_classes_of_what_is_shared():
    shared = Shared([3, 5, 7], [2, 1, 2], torch.arange(10.0).reshape(5, 2))
    kept = shared.only([7, 3, 1])
    assert kept.classes == [3, 7]
    assert kept.counts == [2, 2]
    assert kept.codes.tolist() == [[0, 1], [2, 3], [6, 7], [8, 9]]
    assert shared.only(range(8)).codes.tolist() == shared.codes.tolist()


def test_classes_without_codes_are_offered_where_they_have_a_prior():
    shared = Shared([4, 1, 2], [0, 2, 0], torch.zeros(2, 3))
    assert shared.offered() == [1]
    assert shared.offered(empty=True) == [4, 1, 2]


CODES = torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("classes", "counts", "codes", "field"),
    [
        ([0, 3], [2, 1], CODES, None),
        ([0], [2, 1], CODES, "classes"),
        ([0, 0], [2, 1], CODES, "classes"),
        ([0, 4], [2, 1], CODES, "classes"),
        ([-1, 3], [2, 1], CODES, "classes"),
        ([0, 3], [6, -3], CODES, "classes"),
        ([0, 3], [0, 6], torch.zeros(6, 2), "classes"),  # five at the most
        ([0, 3], [2, 2], CODES, "codes"),
        ([0, 3], [2, 1], CODES[:, :1], "codes"),
        ([0, 3], [2, 1], CODES.double(), "codes"),
    ],
)
def test_what_a_client_shares_must_make_sense(
    classes: list[int], counts: list[int], codes: torch.Tensor, field: str | None
):
    flaw = NoisyMeans(max_candidates=5).flaw(Shared(classes, counts, codes), [], classes=4, clients=3, latent=2)
    assert flaw is None if field is None else f"'{field}'" in str(flaw)


@pytest.mark.parametrize(
    ("rows", "sound"),
    [
        ([[3, 0, 5], [0, 5, 5]], True),
        ([[3, 0]], False),
        ([[4, 0, 5]], False),
        ([[-1, 0, 5]], False),
        ([[0, 3, 2]], False),
        ([[0, -1, 2]], False),
        ([[0, 1, 6]], False),
        ([[0, 1, 2]] * 12, True),
        ([[0, 1, 2]] * 13, False),  # three clients of four classes
    ],
)
def test_rows_of_a_filter_must_make_sense(rows: list[list[int]], sound: bool):
    flaw = NoisyMeans(max_candidates=5).flaw(None, rows, classes=4, clients=3, latent=2)
    assert flaw is None if sound else "'acceptance'" in str(flaw)
