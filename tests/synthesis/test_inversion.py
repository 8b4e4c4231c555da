"""Inversion: a well-trained small model brings forth its classes, and is left as it was."""

import itertools
from dataclasses import replace

import pytest
import torch
from tests.helpers import CLASSES, bars, refused
from torch import nn

from fedfill.data.samples import Samples, normalise
from fedfill.engines.runner import make_resident
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.streams import torch_stream
from fedfill.synthesis.inversion import (
    Inversion,
    _Moments,
    _statistics,
    invert,
    require_statistics,
    statistics_layers,
    total_variation,
)  # fmt: skip
from fedfill.training.fit import Fit, LocalTraining, fit
from fedfill.training.losses import cross_entropy

CPU = torch.device("cpu")


def trained(name: str, seed: int) -> nn.Module:
    net = build(name, (1, 8, 8), CLASSES, ModelSettings(), seed=seed)
    resident = make_resident(net, CPU)
    data = bars(400, list(range(CLASSES)), seed)
    request = Fit(
        weights_of(net),
        lambda model, batch, _: cross_entropy(model, batch),
        data,
        LocalTraining(epochs=4, batch_size=16),
    )
    weights = fit(resident, request, torch_stream(seed, "order"), torch_stream(seed, "draws")).weights
    return resident.load(weights).eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return trained("cnn2bn", 0)


def stream() -> torch.Generator:
    return torch_stream(0, "inversion")


def test_another_classifier_recognises_the_images_and_both_losses_fall(model: nn.Module):
    found = invert(model, range(CLASSES), bars(1, [0], 0), Inversion(per_class=16), stream())
    oracle = trained("cnn2", 1)
    real = bars(200, list(range(CLASSES)), 7)
    assert (oracle(normalise(real.inputs)).argmax(1) == real.labels).float().mean() > 0.95
    hits = oracle(normalise(found.samples.inputs)).argmax(1) == found.samples.labels
    assert hits.float().mean() > 0.8
    assert found.best[0] < found.first[0] / 20  # statistics
    assert found.best[1] < found.first[1] / 20  # cross-entropy
    assert found.samples.inputs.shape == (4 * 16, 1, 8, 8)
    assert torch.bincount(found.samples.labels).tolist() == [16] * 4


def test_the_model_is_untouched(model: nn.Module):
    before = weights_of(model)
    invert(model, [0, 1], bars(1, [0], 0), Inversion(per_class=4, steps=3), stream())
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training
    assert all(not layer._forward_pre_hooks for layer in model.modules())


def test_the_best_images_are_returned_and_not_the_last(model: nn.Module):
    """With a step size that throws the pixels about, the best is not the last."""
    wild = Inversion(per_class=4, steps=30, learning_rate=3.0, clamp=False)
    losses = []
    for steps in range(0, 31, 5):
        found = invert(model, [0, 1], bars(1, [0], 0), Inversion(**{**wild.__dict__, "steps": steps}), stream())
        losses.append(sum(found.best))
    assert all(later <= earlier + 1e-6 for earlier, later in itertools.pairwise(losses))
    sample = bars(1, [0], 0)
    as_floats = type(sample)(normalise(sample.inputs), sample.labels)
    found = invert(model, [0, 1], as_floats, wild, stream())
    with _statistics(model, "std") as seen, torch.no_grad():
        scores = model(found.samples.inputs)
        entropy = nn.functional.cross_entropy(scores, found.samples.labels)
        assert float(torch.stack(seen).sum()) == pytest.approx(found.best[0], rel=1e-4)
        assert float(entropy) == pytest.approx(found.best[1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("statistic", ["std", "var"])
@pytest.mark.parametrize(
    ("eps", "stored", "seen_spreads", "stored_spreads"),
    [(0.0, [4.0, 1.0], [3, 0], [2, 1]), (16.0, [20.0, 33.0], [5, 4], [6, 7])],
)
def test_statistics_by_hand(
    statistic: str, eps: float, stored: list[float], seen_spreads: list[int], stored_spreads: list[int]
):
    """A spread is the root of a variance and the layer's eps, on both sides."""
    layer = nn.BatchNorm1d(2, eps=eps).eval()
    layer.running_mean.copy_(torch.tensor([1.0, 0.0]))
    layer.running_var.copy_(torch.tensor(stored))
    with _statistics(nn.Sequential(layer), statistic) as seen:
        layer(torch.tensor([[0.0, 1.0], [6.0, 1.0]]))  # means 3 and 1, variances 9 and 0
    means = (3 - 1) ** 2 + (1 - 0) ** 2
    power = 1 if statistic == "std" else 2
    spreads = sum((a**power - b**power) ** 2 for a, b in zip(seen_spreads, stored_spreads, strict=True))
    assert seen[0].item() == pytest.approx(means + spreads, rel=1e-5)


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 5), (4, 3, 2, 5), (2, 3, 2, 2, 2)])
def test_moments_and_their_gradient(shape: tuple[int, ...]):
    """Against two reductions of torch and their gradients; a mean far from 0, where one pass over squares would fail."""
    x = torch.randn(shape, generator=stream(), dtype=torch.float64) + 100
    x.requires_grad_()
    rest = [dim for dim in range(len(shape)) if dim != 1]
    mean, spread = _Moments.apply(x, 1e-5)
    assert torch.allclose(mean, x.mean(rest))
    assert torch.allclose(spread, (x.var(rest, correction=0) + 1e-5).sqrt())
    assert torch.autograd.gradcheck(lambda z: _Moments.apply(z, 1e-5), x)
    single = _Moments.apply(x.detach().float(), 1e-5)
    assert torch.allclose(single[1].double(), spread, rtol=1e-3)


def test_options(model: nn.Module):
    sample = bars(1, [0], 0)
    smooth, rough = (
        invert(model, [0, 1], sample, Inversion(per_class=8, steps=60, tv_weight=weight), stream())
        for weight in (5.0, 0.0)
    )
    as_floats = [normalise(found.samples.inputs) for found in (smooth, rough)]
    assert total_variation(as_floats[0]) < 0.7 * total_variation(as_floats[1])
    dark = invert(model, [0, 1], sample, Inversion(per_class=8, steps=60, l2_weight=50.0), stream())
    assert normalise(dark.samples.inputs).square().mean() < 0.5 * as_floats[1].square().mean()
    rolled = invert(model, [0, 1], sample, Inversion(per_class=8, steps=10, jitter=2), stream())
    still = invert(model, [0, 1], sample, Inversion(per_class=8, steps=10), stream())
    assert not torch.equal(rolled.samples.inputs, still.samples.inputs)
    again = invert(model, [0, 1], sample, Inversion(per_class=8, steps=10, jitter=2), stream())
    assert torch.equal(rolled.samples.inputs, again.samples.inputs)


def test_weights_of_both_losses(model: nn.Module):
    """What has no weight moves no pixel."""
    still = Inversion(per_class=4, steps=5, statistics_weight=0.0, class_weight=0.0, clamp=False)
    found = invert(model, [0, 1], bars(1, [0], 0), still, stream())
    assert found.best == found.first
    for weight, falls in (("statistics_weight", 0), ("class_weight", 1)):
        found = invert(model, [0, 1], bars(1, [0], 0), replace(still, **{weight: 1.0}), stream())
        assert found.best[falls] < 0.9 * found.first[falls]


def test_pixels_are_kept_in_the_range_of_real_images_only_where_asked(model: nn.Module):
    floats = Samples(torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.int64))
    furthest = {
        clamp: invert(model, [0, 1], floats, Inversion(per_class=4, steps=5, clamp=clamp), stream())
        .samples.inputs.abs()
        .max()
        for clamp in (True, False)
    }
    assert furthest[True] == 1  # noise went beyond it at first
    assert furthest[False] > 1.5


def test_total_variation_by_hand():
    image = torch.tensor([[[[0.0, 1.0], [4.0, 1.0]]]])
    assert total_variation(image).item() == pytest.approx((4 + 0) / 2 + (1 + 3) / 2)


def test_layers_are_found_by_what_they_keep_and_missing_ones_are_named():
    kept = nn.Sequential(nn.BatchNorm2d(2), nn.InstanceNorm2d(2, track_running_stats=True), nn.GroupNorm(1, 2))
    assert statistics_layers(kept) == [kept[0], kept[1]]
    require_statistics(kept, "fedzdac")
    with refused("model", "fedzdac", "Sequential", "GroupNorm and LayerNorm"):
        require_statistics(nn.Sequential(nn.GroupNorm(1, 2), nn.LayerNorm(2)), "fedzdac")
    with refused("model", "fedzdas", "Linear"):
        require_statistics(nn.Linear(1, 1), "fedzdas")
