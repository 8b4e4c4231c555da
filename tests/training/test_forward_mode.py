"""Forward-mode derivatives of plain networks against torch's, and which networks are refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import functional

from fedfill.algorithms.fedmix import FedMix
from fedfill.data.samples import Batch
from fedfill.models.layers import output_of
from fedfill.models.networks import ModelSettings, build
from fedfill.training import forward_mode
from fedfill.training.forward_mode import is_plain, jvp

STREAM = torch.Generator().manual_seed(0)
X = torch.randn(6, 1, 12, 12, generator=STREAM).double()
DIRECTION = torch.randn(1, 12, 12, generator=STREAM).double()
BATCH = Batch(X, torch.tensor([0, 3, 1, 1, 2, 4]), torch.arange(6))
TARGET = torch.full((5,), 0.2).double()

PLAIN = {
    "cnn2": ("cnn2", ModelSettings()),
    "cnn2 with a projection head": ("cnn2", ModelSettings(projection=8, latent_activation="none")),
    "cnn2fc-small": ("cnn2fc-small", ModelSettings()),
}


def network(name: str) -> nn.Module:
    kind, settings = PLAIN[name]
    return build(kind, (1, 12, 12), 5, settings, seed=0).double().to(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", PLAIN)
def test_it_is_torchs_derivative(name):
    model = network(name)
    assert is_plain(model)
    found = jvp(model, X, DIRECTION)
    scores, tangent = functional.jvp(model, X, DIRECTION.expand_as(X))
    torch.testing.assert_close(found, (scores, tangent), rtol=1e-9, atol=1e-12)
    assert tangent.abs().min() > 1e-6


@pytest.mark.parametrize("name", PLAIN)
def test_fedmix_trains_alike_on_both_ways(name, monkeypatch):
    def gradients() -> list[Tensor]:
        model = network(name)
        loss = FedMix(mix=0.3).mixed_loss(model, BATCH, DIRECTION, TARGET)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    fast = gradients()
    monkeypatch.setattr("fedfill.algorithms.fedmix.is_plain", lambda _: False)
    torch.testing.assert_close(fast, gradients(), rtol=1e-9, atol=1e-12)


def test_overlapping_pools_strides_and_every_rule():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1, padding_mode="circular"), nn.MaxPool2d(3, 2, padding=1, ceil_mode=True), nn.Tanh(),
        nn.Conv2d(3, 6, 2, groups=3, dilation=2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 8), nn.Identity(), nn.Sigmoid(),
        nn.Linear(8, 5),
    ).double()  # fmt: skip
    assert {type(layer) for layer in model} == set(forward_mode.RULES)
    found = jvp(model, X, DIRECTION)
    torch.testing.assert_close(found, functional.jvp(model, X, DIRECTION.expand_as(X)), rtol=1e-9, atol=1e-12)


def test_hooks_of_others_see_one_pass():
    model = network("cnn2")
    with output_of(model.encoder) as seen:
        jvp(model, X, DIRECTION)
    assert len(seen) == 1
    assert not any(layer._forward_hooks for layer in model.modules())


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_may_change_what_goes_on_and_take_the_other_way(register):
    changes = {
        "register_forward_hook": lambda _layer, _inputs, output: 3 * output,
        "register_forward_pre_hook": lambda _layer, inputs: (3 * inputs[0],),
    }

    def gradients(hooked: bool) -> list[Tensor]:
        model = network("cnn2fc-small")
        if hooked:
            getattr(model.classifier, register)(changes[register])
        assert is_plain(model) != hooked
        loss = FedMix(mix=0.3).mixed_loss(model, BATCH, DIRECTION, TARGET)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    # three times the classifier's weights, and its bias where the whole output is changed, are the same change
    model = network("cnn2fc-small")
    with torch.no_grad():
        model.classifier.weight *= 3
        model.classifier.bias *= 3 if register == "register_forward_hook" else 1
    assert is_plain(model)
    expected = FedMix(mix=0.3).mixed_loss(model, BATCH, DIRECTION, TARGET)
    found = gradients(hooked=True)[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert not torch.isclose(found, gradients(hooked=False)[0])


class Between(nn.Module):
    """Layers with a rule, and what no layer sees between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.flat, self.first, self.second, self.between = nn.Flatten(), nn.Linear(144, 5), nn.Linear(5, 5), between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(input=self.between(self.first(self.flat(x))))


@pytest.mark.parametrize(
    "between",
    [torch.exp, lambda h: h.mul_(3), lambda h: nn.functional.relu(h, inplace=True)],
    ids=["exp", "mul_", "relu_"],
)
def test_networks_that_compute_between_their_layers_take_the_other_way(between):
    torch.manual_seed(0)
    model = Between(between).double()
    assert not is_plain(model)
    scores, tangent = functional.jvp(model, 0.7 * X, DIRECTION.expand_as(X))
    slope = scores.softmax(1) - nn.functional.one_hot(BATCH.labels, 5)
    loss = FedMix(mix=0.3)
    with_term, without = (loss.mixed_loss(model, BATCH, d, TARGET).item() for d in (DIRECTION, 0 * DIRECTION))
    assert with_term - without == pytest.approx(0.7 * 0.3 * (slope * tangent).sum().item() / 6, rel=1e-6)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm2d(1), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.GroupNorm(1, 1), nn.Flatten(0, 1), Doubled(12, 12),
     nn.utils.parametrizations.weight_norm(nn.Linear(12, 12)), nn.ModuleList([nn.ReLU()])],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_layers_without_a_rule(layer):
    assert is_plain(nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh())))
    assert not is_plain(nn.Sequential(nn.ReLU(), nn.Sequential(layer)))
