"""Networks in operations that other programs know give what the networks themselves give."""

import pytest
import torch
from torch import nn

from fedfill.data.samples import normalise
from fedfill.models.networks import ModelSettings, build
from fedfill.models.plain import plain
from fedfill.models.quadratic import Quadratic

MAPS = [
    ((1, 12, 14), "conv(7, size=4, cells=3) > project(20)"),
    ((3, 12, 12), "conv(5) > relu(20) > clip"),
    ((3, 12, 14), "patches(9, size=5)"),
    ((3, 12, 14), "scatter > fourier(10, width=2)"),
    ((1, 9, 9), "fourier(30)"),
    ((6,), "relu(12) > project(8)"),
]


@pytest.mark.parametrize(("shape", "words"), MAPS)
def test_maps_of_features(shape, words):
    stream = torch.Generator().manual_seed(0)
    network = build("features", shape, 3, ModelSettings(features=words), seed=0).eval()
    if len(shape) == 3:
        inputs = normalise(torch.randint(0, 256, (5, *shape), generator=stream, dtype=torch.uint8))
        inputs[0] = 1.0  # without any contrast
    else:
        inputs = torch.randn(5, *shape, generator=stream) * torch.tensor([[1.0], [10], [1e30], [0], [1e-9]])
    for step in network.encoder:
        for name in ("mean", "whitening", "dictionary"):  # what patches learn from sums
            if name in dict(step.named_buffers()):
                getattr(step, name).add_(torch.randn(getattr(step, name).shape, generator=stream) * 0.1)
    own, made = network.encoder(inputs), plain(network).encoder(inputs)
    assert own.abs().max() > 0.1
    torch.testing.assert_close(made, own, rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(plain(network)(inputs), network(inputs), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("diagonal", [True, False])
def test_a_gaussian_for_each_class(diagonal):
    stream = torch.Generator().manual_seed(0)
    layer = Quadratic(4, 3, diagonal)
    for buffer in (layer.means, layer.whitening, layer.bias):
        buffer.copy_(torch.randn(buffer.shape, generator=stream))
    layer.present[1] = 0
    z = torch.randn(6, 4, generator=stream)
    torch.testing.assert_close(plain(layer)(z), layer(z))


def test_other_networks_stay_as_they_are_and_so_does_what_was_given():
    network = nn.Sequential(nn.Linear(4, 3), nn.Sequential(Quadratic(3, 2)))
    made = plain(network)
    assert made[0] is not network[0]
    assert torch.equal(made[0].weight, network[0].weight)
    assert isinstance(network[1][0], Quadratic)
    assert not isinstance(made[1][0], Quadratic)
