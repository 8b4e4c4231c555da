"""Layers that draw from named streams: their law, their independence, and their place in a user's model."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.helpers import refused
from torch import nn

from fedfill.errors import FedfillError
from fedfill.models.layers import Dropout, Gaussian, draws_from, output_of, with_streams
from fedfill.streams import torch_stream


def drawn(layer: nn.Module, *inputs: torch.Tensor, name: str = "x") -> torch.Tensor:
    with draws_from(layer, torch_stream(0, name)):
        return layer(*inputs)


@pytest.mark.parametrize("p", [0.2, 0.5, 0.9])
def test_dropout_drops_each_element_with_probability_p_and_scales_the_rest(p: float) -> None:
    n = 40_000
    out = drawn(Dropout(p), torch.full((n // 8, 8), 3.0))
    dropped = out == 0
    assert torch.allclose(out[~dropped], torch.tensor(3 / (1 - p)))
    assert abs(int(dropped.sum()) - n * p) < 5 * math.sqrt(n * p * (1 - p))
    pairs = (dropped[:, 0] & dropped[:, 1]).double().mean()  # neighbours fall independently
    assert abs(float(pairs) - p * p) < 5 * math.sqrt(p * p * (1 - p * p) / (n // 8))


def test_dropout_of_channels_drops_whole_channels() -> None:
    out = drawn(Dropout(0.5, channels=True), torch.ones(50, 20, 3, 2))
    per_channel = out.flatten(2)
    assert torch.equal(per_channel.amin(2), per_channel.amax(2))
    share = float((per_channel[..., 0] == 0).double().mean())
    assert abs(share - 0.5) < 5 * math.sqrt(0.25 / 1000)
    rows = {tuple(row) for row in (per_channel[..., 0] == 0).tolist()}
    assert len(rows) > 1  # not the same channels for every sample


def test_dropout_passes_gradients_through_its_mask() -> None:
    x = torch.ones(100, requires_grad=True)
    out = drawn(Dropout(0.5), x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


@pytest.mark.parametrize("layer", [Dropout(0.5).eval(), Dropout(0.0), Dropout(0.5, channels=True).eval()])
def test_dropout_that_drops_nothing_draws_nothing(layer: nn.Module) -> None:
    stream = torch_stream(0, "x")
    x = torch.rand(2, 3, 4)
    with draws_from(layer, stream):
        assert torch.equal(layer(x), x)
    assert torch.equal(stream.get_state(), torch_stream(0, "x").get_state())


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_dropout_keeps_the_type(dtype: torch.dtype, channels: bool) -> None:
    assert drawn(Dropout(0.5, channels=channels), torch.ones(2, 3, 4, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (Dropout(0.5), (torch.ones(64),)),
        (Dropout(0.5, channels=True), (torch.ones(8, 8, 2),)),
        (Gaussian(), (torch.zeros(4, 4), torch.zeros(4, 4))),
    ],
)
def test_draws_depend_on_the_stream_alone(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    torch.manual_seed(1)
    first = drawn(layer, *inputs)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(drawn(layer, *inputs), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(drawn(layer, *inputs, name="y"), first)


def test_a_gaussian_draw_has_the_given_mean_and_variance() -> None:
    n = 20_000
    mu = torch.tensor([[1.0, -2.0]]).expand(n, 2)
    logvar = torch.tensor([[math.log(4.0), math.log(0.25)]]).expand(n, 2)
    z = drawn(Gaussian(), mu, logvar).double()
    for k, (mean, std) in enumerate([(1.0, 2.0), (-2.0, 0.5)]):
        assert abs(float(z[:, k].mean()) - mean) < 5 * std / math.sqrt(n)
        assert abs(float(z[:, k].std()) / std - 1) < 5 / math.sqrt(2 * n)
    assert torch.equal(drawn(Gaussian(), mu, torch.full_like(mu, -200.0)), mu)


def test_draws_from_lets_go_of_the_stream_also_after_an_error() -> None:
    model = nn.Sequential(nn.Sequential(Dropout(0.5)), Gaussian())
    stream = torch_stream(0, "x")

    def work() -> None:
        with draws_from(model, stream):
            assert model[0][0].generator is stream
            assert model[1].generator is stream
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert model[0][0].generator is None
    assert model[1].generator is None


def test_a_users_dropout_is_replaced_wherever_it_stands() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.3)
            self.list = nn.ModuleList([nn.Linear(2, 2), nn.Dropout2d(0.4)])
            self.dict = nn.ModuleDict({"a": nn.Dropout1d(0.1), "b": nn.Dropout3d(0.2)})

    model = nn.Sequential(nn.Linear(2, 2), Inner())
    names = list(model.state_dict())
    assert with_streams(model) is model
    inner = model[1]
    found = [inner.drop, inner.list[1], inner.dict["a"], inner.dict["b"]]
    assert [(type(layer), layer.p, layer.channels) for layer in found] == [
        (Dropout, 0.3, False),
        (Dropout, 0.4, True),
        (Dropout, 0.1, True),
        (Dropout, 0.2, True),
    ]
    assert list(model.state_dict()) == names


def test_a_dropout_used_twice_is_replaced_twice() -> None:
    drop = nn.Dropout(0.5)
    model = with_streams(nn.Sequential(nn.Linear(2, 2), drop, nn.Linear(2, 2), drop))
    assert not [layer for layer in model.modules() if isinstance(layer, nn.Dropout)]
    before = torch.get_rng_state()
    drawn(model, torch.ones(3, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_dropout_that_drops_everything_gives_zeros_or_is_refused() -> None:
    try:
        model = with_streams(nn.Sequential(nn.Dropout(1.0)))
    except FedfillError:
        return
    assert torch.equal(drawn(model, torch.ones(3)), torch.zeros(3))


@pytest.mark.parametrize(
    "make",
    [
        nn.AlphaDropout,
        nn.FeatureAlphaDropout,
        nn.RReLU,
        lambda: nn.LSTM(2, 2, 2, dropout=0.5),
        lambda: nn.GRU(2, 2, 2, dropout=0.5),
        lambda: nn.MultiheadAttention(2, 1, dropout=0.1),
        lambda: nn.FractionalMaxPool2d(2, output_size=1),
    ],
    ids=["AlphaDropout", "FeatureAlphaDropout", "RReLU", "LSTM", "GRU", "MultiheadAttention", "FractionalMaxPool2d"],
)
def test_layers_that_draw_from_the_global_generator_are_refused(make: Callable[[], nn.Module]) -> None:
    layer = make()
    with refused("model", "'1'", type(layer).__name__):
        with_streams(nn.Sequential(nn.Linear(2, 2), layer))


@pytest.mark.parametrize("make", [lambda: nn.LSTM(2, 2), lambda: nn.MultiheadAttention(2, 1)])
def test_layers_that_draw_nothing_are_taken(make: Callable[[], nn.Module]) -> None:
    with_streams(nn.Sequential(make()))


def test_output_of_collects_each_call_with_its_graph() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU())
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    model(torch.ones(1, 1))
    with output_of(model[0]) as seen:
        assert seen == []
        model(torch.tensor([[2.0]]))
        model(torch.tensor([[-1.0], [5.0]]))
        assert [codes.flatten().tolist() for codes in seen] == [[6.0], [-3.0, 15.0]]
    model(torch.ones(1, 1))
    assert len(seen) == 2  # and no more
    seen[1].sum().backward()
    assert model[0].weight.grad.item() == 4.0  # -1 + 5


def test_output_of_lets_go_after_an_error() -> None:
    layer = nn.Linear(1, 1)

    def work() -> None:
        with output_of(layer) as seen:
            layer(torch.ones(1, 1))
            assert len(seen) == 1
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert not layer._forward_hooks
