"""Units in another order: the same function, channels and the columns behind a flattened image together, and refusals."""

from collections.abc import Callable

import pytest
import torch
from tests.helpers import refused
from torch import Tensor, nn
from torch.nn import functional

from fedfill.data.samples import normalise
from fedfill.models.names import NAMES
from fedfill.models.networks import ModelSettings, build
from fedfill.models.units import Layer, layers_in_order, reordered, require_units
from fedfill.models.views import weights_of

IMAGES, ROWS = torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.zeros(1, 5)


class Made(nn.Module):
    """A network of some layers, used as a function says."""

    def __init__(self, forward: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.how = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.how(x, *self.layers)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "hazards"])  # whose data are no images
@pytest.mark.parametrize("width", ["paper", "wide"])
def test_built_in_networks_without_batch_norm_qualify(name: str, width: str):
    own = ModelSettings() if name not in ("auto", "cnn2", "cnn4") else ModelSettings(width=width)
    network = build(name, (1, 8, 8), 4, own, seed=0)
    if name in ("cnn2fc", "cnn2fc-small") or (name in ("auto", "cnn2", "cnn4") and width == "paper"):
        found = require_units(network, IMAGES, "pfnm")
        assert [n for layer in found for n in layer.of(weights_of(network))] == list(weights_of(network))
    else:
        with refused("model", "pfnm", "cnn2fc"):
            require_units(network, IMAGES, "pfnm")


@pytest.mark.parametrize("name", ["cnn2", "cnn4", "cnn2fc-small"])
def test_units_in_another_order_are_the_same_function(name: str):
    network = build(name, (3, 12, 8), 4, ModelSettings(projection=7), seed=0).eval()
    stream = torch.Generator().manual_seed(1)
    inputs = torch.randint(0, 256, (5, 3, 12, 8), generator=stream).to(torch.uint8)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=stream) * 0.2
    layers = require_units(network, inputs[:1], "pfnm")
    with torch.no_grad():
        scores = network(normalise(inputs))
        weights = weights_of(network)
        for n, layer in enumerate(layers[:-1]):
            moved = reordered(weights, layers, n, torch.randperm(layer.outputs, generator=stream))
            assert not torch.equal(moved[f"{layer.path}.weight"], weights[f"{layer.path}.weight"])
            weights = moved
        network.load_state_dict(weights)
        assert torch.allclose(network(normalise(inputs)), scores, atol=1e-5 * float(scores.abs().max()))


def test_a_channel_is_a_block_of_columns_behind_a_flattened_image():
    network = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 2))
    layers = require_units(network, IMAGES, "pfnm")
    assert layers == [Layer("0", 1, 3), Layer("4", 3, 2)]
    weights = {**weights_of(network), "4.weight": torch.arange(54.0).view(2, 27)}
    moved = reordered(weights, layers, 0, torch.tensor([2, 0, 1]))
    assert moved["4.weight"][0].tolist() == [*range(18, 27), *range(9), *range(9, 18)]
    assert moved["4.weight"][1].tolist() == [*range(45, 54), *range(27, 36), *range(36, 45)]
    assert torch.equal(moved["0.weight"], weights["0.weight"][[2, 0, 1]])
    assert torch.equal(moved["0.bias"], weights["0.bias"][[2, 0, 1]])
    assert torch.equal(layers[1].outgoing(weights)[1], torch.cat([torch.arange(9.0, 18), torch.arange(36.0, 45)]))
    assert layers[0].incoming(weights).shape == (3, 9)
    assert layers[0].biases(weights).tolist() == weights["0.bias"][:, None].tolist()


def test_a_network_may_be_written_with_functions_and_without_biases():
    def forward(x: Tensor, first: nn.Module, second: nn.Module, third: nn.Module) -> Tensor:
        x = functional.max_pool2d(functional.relu(first(x)), 2)
        return third(torch.tanh(second(x.flatten(1))))

    network = Made(forward, nn.Conv2d(1, 4, 3, bias=False), nn.Linear(36, 6), nn.Linear(6, 3, bias=False))
    layers = require_units(network, IMAGES, "pfnm")
    assert [(layer.inputs, layer.outputs) for layer in layers] == [(1, 4), (4, 6), (6, 3)]
    assert layers[0].biases(weights_of(network)).shape == (4, 0)
    assert layers_in_order(network, IMAGES) == layers
    assert network.training  # and the network is left as it was


def tied() -> nn.Module:
    network = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    network[2].weight = network[0].weight
    return network


def frozen() -> nn.Module:
    network = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    network[0].requires_grad_(False)
    return network


shared = nn.Linear(5, 5)
REFUSED = {
    "batch norm": (nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), ROWS, "BatchNorm1d"),
    "a slope": (nn.Sequential(nn.Linear(5, 4), nn.PReLU(), nn.Linear(4, 3)), ROWS, "PReLU"),
    "groups": (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 3)), IMAGES, "groups"),
    "tied weights": (tied(), ROWS, "2.weight"),
    "a layer in two places": (nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(5, 3)), ROWS, "0.weight"),
    "a layer twice": (Made(lambda x, a, b: b(a(a(x))), nn.Linear(5, 5), nn.Linear(5, 3)), ROWS, "2 times"),
    "a layer that is left out": (Made(lambda x, a, b: b(x), nn.Linear(5, 5), nn.Linear(5, 3)), ROWS, "0 times"),
    "frozen": (frozen(), ROWS, "does not train"),
    "a softmax": (nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3), nn.Softmax(1)), ROWS, "end"),
    "no linear layer": (nn.Sequential(nn.Conv2d(1, 4, 8), nn.Flatten()), IMAGES, "end"),
    "branches": (
        Made(lambda x, a, b, c: c(a(x) + b(x)), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)), ROWS, "layers.0",
    ),
    "a residual connection": (
        Made(lambda x, a, b, c: c((h := a(x)).relu() + b(h.relu())), nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)), ROWS, "layers.0",
    ),
    "branches put side by side": (
        Made(lambda x, a, b, c: c(torch.cat([(h := a(x)), b(h)], 1)), nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(8, 3)), ROWS, "layers.0",
    ),
    "channels last": (
        Made(lambda x, a, b: b(a(x).movedim(1, 3).flatten(1)), nn.Conv2d(1, 3, 3), nn.Linear(108, 3)), IMAGES, "layers.0",
    ),
    "a row that is cut": (
        Made(lambda x, a, b: b(a(x)[:, :3]), nn.Linear(5, 4), nn.Linear(3, 3)), ROWS, "layers.1",
    ),
    "sums over units": (
        Made(lambda x, a, b: b(a(x).cumsum(1)), nn.Linear(5, 4), nn.Linear(4, 3)), ROWS, "layers.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_networks_whose_units_have_a_place_are_refused(case: str):
    network, inputs, fact = REFUSED[case]
    with refused("model", "fedma", type(network).__name__, fact):
        require_units(network, inputs, "fedma")
