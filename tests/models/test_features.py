"""Feature maps that need no data: from the seed alone, bounded for any input, with the same bits in any company."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import refused
from torch.nn import functional

import fedfill
from fedfill.data.samples import Samples, normalise
from fedfill.engines.runner import make_resident
from fedfill.models.feature_words import MOST, STEPS, parse
from fedfill.models.features import Bounded, FeatureMap, default_words, features, synthetic_inputs
from fedfill.models.filters import even_contrast, product, random_filters
from fedfill.models.networks import ModelSettings, build, described, record_of
from fedfill.models.scattering import Scattering, bank
from fedfill.models.views import weights_of
from fedfill.streams import derive, numpy_stream, torch_stream

GREY, COLOUR, ROW = (1, 12, 12), (3, 9, 11), (13,)
CHAINS = [
    ("conv(10)", GREY, 320),
    ("conv(10, size=5, cells=2) > project(40)", COLOUR, 40),
    ("patches(6)", COLOUR, 108),
    ("patches(6) > relu(50)", GREY, 50),
    ("scatter > project(30) > fourier(40, 1)", GREY, 40),
    ("project(7)", GREY, 7),
    ("fourier(64)", ROW, 64),
    ("project(5) > relu(20) > project(6)", ROW, 6),
    ("unit", ROW, 13),
    ("clip", ROW, 13),
]


def made(words: str, shape: tuple[int, ...], seed: int = 0) -> FeatureMap:
    return features(words, shape, seed)[0]


def inputs(n: int, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.rand(n, *shape, generator=torch_stream(seed, "inputs")) * 2 - 1


def buffers(encoder: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(encoder.named_buffers())


@pytest.mark.parametrize(("words", "shape", "size"), CHAINS)
def test_length_bits_and_generators(words: str, shape: tuple[int, ...], size: int) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    encoder, d = features(words, shape, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert d == size
    x = inputs(9, shape)
    kept = x.clone()
    z = encoder(x)
    assert torch.equal(x, kept)
    assert z.shape == (9, size)
    assert z.dtype == torch.float32
    lengths = z.norm(dim=1)
    if words == "clip":
        assert float(lengths.max()) <= 1 + 1e-6
        assert float(lengths.min()) < 0.9
    else:
        torch.testing.assert_close(lengths, torch.ones(9), rtol=0, atol=1e-6)
    again = made(words, shape, 1)
    assert all(torch.equal(tensor, buffers(again)[name]) for name, tensor in buffers(encoder).items())
    assert torch.equal(again(x), z)
    # alone, in pairs and in another order: the same bits
    assert torch.equal(torch.cat([encoder(x[i : i + 1]) for i in range(9)]), z)
    order = torch.randperm(9, generator=torch_stream(0, "order"))
    assert torch.equal(encoder(x[order]), z[order])
    assert torch.equal(encoder(x.to(memory_format=torch.channels_last) if x.dim() == 4 else x), z)
    assert encoder(x[:0]).shape == (0, size)
    assert not list(encoder.parameters())
    if words not in ("unit", "clip"):
        assert not torch.equal(made(words, shape, 2)(x), z)


@pytest.mark.parametrize(("n", "m"), [(13, 3), (13, 8), (25, 10), (40, 15), (7, 16), (100, 17), (300, 1), (64, 33)])
def test_a_row_of_a_product_has_the_same_bits_in_any_company(n: int, m: int) -> None:
    stream = torch_stream(0, "product")
    rows, matrix = torch.randn(130, n, generator=stream), torch.randn(m, n, generator=stream)
    whole = product(rows, matrix)
    torch.testing.assert_close(whole, rows @ matrix.t(), rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.cat([product(row[None], matrix) for row in rows]), whole)
    assert torch.equal(product(rows.flip(0), matrix).flip(0), whole)


@settings(deadline=None, max_examples=30)
@given(
    which=st.sampled_from(range(len(CHAINS))),
    kind=st.sampled_from(["zero", "constant", "one hot", "noise"]),
    exponent=st.integers(-38, 38),
    negative=st.booleans(),
)
def test_no_input_is_longer_than_the_bound(which: int, kind: str, exponent: int, negative: bool) -> None:
    words, shape, _ = CHAINS[which]
    scale = (-1 if negative else 1) * 10.0**exponent
    x = {
        "zero": torch.zeros(1, *shape),
        "constant": torch.full((1, *shape), scale),
        "one hot": torch.zeros(1, *shape),
        "noise": inputs(1, shape) * scale,
    }[kind]
    if kind == "one hot":
        x.view(-1)[3] = scale
    z = MADE[which](x)
    length = float(z.double().norm())
    assert math.isfinite(length)
    assert length <= 1 + 1e-6
    if "fourier" in words:
        assert length >= 1 - 1e-6


MADE = [made(words, shape) for words, shape, _ in CHAINS]


def test_zero_stays_zero_and_what_is_no_number_stays_none() -> None:
    bound = Bounded()
    z = torch.tensor([[0.0, 0], [3, 4], [0.03, 0.04]])
    torch.testing.assert_close(bound(z), torch.tensor([[0, 0], [0.6, 0.8], [0.6, 0.8]]))
    torch.testing.assert_close(Bounded(clip=True)(z), torch.tensor([[0, 0], [0.6, 0.8], [0.03, 0.04]]))
    assert not made("unit", ROW)(torch.zeros(1, 13)).any()
    # a constant image has no contrast, hence no responses; the centre alone is left
    encoder = made("conv(5)", GREY)
    encoder.centred.centre.zero_()  # type: ignore[union-attr, operator]
    assert not encoder(torch.ones(2, *GREY)).any()
    for words, shape in (("conv(5)", GREY), ("patches(5)", GREY), ("fourier(8)", ROW), ("clip", ROW)):
        for value in (math.nan, math.inf):
            x = inputs(2, shape)
            x[1].view(-1)[4] = value
            z = made(words, shape)(x)
            assert z[0].isfinite().all()
            assert not z[1].isfinite().all()


def test_fewer_filters_columns_and_frequencies_are_the_first_of_many() -> None:
    for channels in (1, 3):
        many, few = (random_filters(f, 6, channels, numpy_stream(0, "filters")) for f in (20, 10))
        assert torch.equal(many[:10], few)
        torch.testing.assert_close(many.norm(dim=1), torch.ones(20))
    for shape in (GREY, COLOUR):
        many, few = (buffers(made(f"conv({f})", shape))["conv.weight"] for f in (20, 10))
        assert torch.equal(many[:10], few)
        # filter, sign, cell: so the features of the first filters come first, and their centre too
        wide, narrow = (made(f"conv({f})", shape).before_centre(inputs(3, shape)) for f in (20, 10))
        torch.testing.assert_close(functional.normalize(wide[:, :320]), narrow, rtol=1e-4, atol=1e-5)
        assert torch.equal(
            buffers(made("patches(9)", shape))["patches.dictionary"][:4],
            buffers(made("patches(4)", shape))["patches.dictionary"],
        )
    for step in ("project", "relu", "fourier"):
        many, few = (buffers(made(f"{step}({d})", ROW))[f"{step}.matrix"] for d in (40, 20))
        assert torch.equal(many[: len(few)], few)
    two = buffers(made("project(13) > project(13)", ROW))
    assert not torch.equal(two["project.matrix"], two["project2.matrix"])


def test_most_random_filters_have_no_mean() -> None:
    means = random_filters(400, 6, 3, numpy_stream(0, "filters")).view(400, 3, 36).mean(2).abs().amax(1)
    assert 0.75 < float((means < 1e-6).float().mean()) < 0.93  # with probability .85


def test_contrast_by_hand() -> None:
    x = torch.rand(2, 3, 12, 10, generator=torch_stream(0, "x"))
    box = functional.pad(x.double().mean(1, keepdim=True), [4] * 4, mode="reflect")
    places = functional.unfold(box, 9).view(2, 81, 12, 10)
    mean, variance = places.mean(1, keepdim=True), places.var(1, correction=0, keepdim=True)
    torch.testing.assert_close(even_contrast(x).double(), (x - mean) / (variance + 0.01).sqrt(), rtol=1e-4, atol=1e-4)


def test_filters_by_the_plain_formula() -> None:
    encoder, x = made("conv(7)", COLOUR), inputs(4, COLOUR)
    weight = buffers(encoder)["conv.weight"].view(7, 3, 6, 6)
    r = functional.conv2d(even_contrast((x + 1) / 2), weight, padding=3)
    pooled = [functional.adaptive_avg_pool2d(functional.relu(sign * r - 0.25), 4).flatten(2) for sign in (1, -1)]
    u = torch.stack(pooled, 2).flatten(1)
    v = functional.normalize(u.sqrt())
    torch.testing.assert_close(encoder.before_centre(x), v, rtol=1e-4, atol=1e-6)
    z = functional.normalize(v - buffers(encoder)["centred.centre"])
    torch.testing.assert_close(encoder(x), z, rtol=1e-3, atol=1e-4)


def test_patches_by_the_plain_formula_with_weights_that_were_learned() -> None:
    encoder, x, stream = made("patches(5, size=4, cells=2)", GREY), inputs(3, GREY), torch_stream(0, "learned")
    step = buffers(encoder)
    assert torch.equal(step["patches.whitening"], torch.eye(16))
    assert not step["patches.mean"].any()
    torch.testing.assert_close(step["patches.dictionary"].norm(dim=1), torch.ones(5))
    for tensor in step.values():
        tensor.copy_(torch.randn(tensor.shape, generator=stream) / 4)
    p = functional.unfold((x + 1) * 127.5, 4).transpose(1, 2)  # [3, 81, 16]
    p = (p - p.mean(2, keepdim=True)) / (p.var(2, correction=0, keepdim=True) + 10).sqrt()
    r = (p - step["patches.mean"]) @ step["patches.whitening"].t() @ step["patches.dictionary"].t()
    maps = r.transpose(1, 2).unflatten(2, (9, 9))
    pooled = [functional.adaptive_avg_pool2d(functional.relu(sign * maps - 0.5), 2).flatten(2) for sign in (1, -1)]
    u = functional.normalize(torch.stack(pooled, 2).flatten(1).sqrt())
    torch.testing.assert_close(encoder.before_centre(x), u, rtol=1e-3, atol=1e-5)


def test_the_centre_is_the_mean_feature_of_seeded_inputs_and_can_be_made_again() -> None:
    encoder = made("patches(5)", COLOUR, seed=4)
    x = synthetic_inputs(COLOUR, 4)
    assert x.shape == (500, *COLOUR)
    assert -1 <= float(x.min()) < float(x.max()) <= 1
    assert torch.equal(synthetic_inputs(COLOUR, 4, 30), x[:30])
    centre = buffers(encoder)["centred.centre"]
    torch.testing.assert_close(centre, encoder.before_centre(x).mean(0), rtol=1e-4, atol=1e-6)
    old = centre.clone()
    buffers(encoder)["patches.mean"].fill_(0.5)
    assert torch.equal(centre, old)
    centre.copy_(encoder.seeded_centre())
    assert not torch.allclose(centre, old)
    torch.testing.assert_close(centre, encoder.before_centre(x).mean(0), rtol=1e-4, atol=1e-6)
    assert not buffers(made("fourier(8)", ROW))["centred.centre"].any()


def test_only_what_can_be_learned_is_in_the_state_dict_and_copies_share_the_rest() -> None:
    encoder = made("patches(5) > project(30) > fourier(20)", GREY)
    assert set(encoder.state_dict()) == {
        "patches.mean", "patches.whitening", "patches.dictionary", "centred.centre"
    }  # fmt: skip
    assert not set(made("conv(5) > project(30)", GREY).state_dict()) - {"centred.centre"}
    other = copy.deepcopy(encoder)
    assert buffers(other)["project.matrix"].data_ptr() == buffers(encoder)["project.matrix"].data_ptr()
    assert buffers(other)["patches.mean"].data_ptr() != buffers(encoder)["patches.mean"].data_ptr()
    assert torch.equal(other(inputs(3, GREY)), encoder(inputs(3, GREY)))
    assert len(repr(encoder)) < 600
    assert {tensor.device.type for tensor in encoder.to("meta").buffers()} == {"meta"}


def test_fourier_features_make_the_kernel_and_relu_keeps_lengths_on_average() -> None:
    z = functional.normalize(torch.randn(200, 50, generator=torch_stream(0, "z")))
    psi = made("fourier(2000, width=1)", (50,)).fourier(z)  # type: ignore[union-attr, operator]
    torch.testing.assert_close(psi.norm(dim=1), torch.ones(200), rtol=0, atol=1e-6)
    kernel = torch.exp(-torch.cdist(z, z).square() / 2)
    assert float((psi @ psi.t() - kernel).abs().max()) < 0.15
    wide = made("fourier(2000, width=3)", (50,)).fourier(z)  # type: ignore[union-attr, operator]
    assert float((wide @ wide.t() - torch.exp(-torch.cdist(z, z).square() / 18)).abs().max()) < 0.15
    rectified = made("relu(2000)", (50,)).relu(2 * z)  # type: ignore[union-attr, operator]
    assert 0.97 < float(rectified.square().sum(1).mean()) / 4 < 1.03
    projected = made("project(2000)", (50,)).project(z)  # type: ignore[union-attr, operator]
    assert 0.97 < float(projected.square().sum(1).mean()) * 50 / 2000 < 1.03


def test_the_wavelets() -> None:
    wavelets, low = bank(36, 36)
    assert float(low[0, 0]) == pytest.approx(1, abs=1e-6)
    assert float(wavelets[:, :, 0, 0].abs().max()) < 1e-7
    back = torch.roll(wavelets.flip(-1, -2), (1, 1), (-2, -1))  # at minus the frequency
    total = low**2 + 0.5 * (wavelets**2 + back**2).sum((0, 1))
    assert float(total.max()) <= 1.0005


def test_scattering_sizes_constants_and_lengths() -> None:
    grey = Scattering((1, 28, 28))
    assert grey.features == 81 * 7 * 7
    assert Scattering((3, 32, 32)).features == 243 * 8 * 8
    flat = grey(torch.ones(1, 1, 28, 28)).view(81, 49)
    torch.testing.assert_close(flat[0], torch.ones(49), rtol=0, atol=1e-5)
    assert float(flat[1:].abs().max()) < 1e-5
    x = torch.rand(2, 1, 28, 28, generator=torch_stream(0, "x"))
    torch.testing.assert_close(grey(3 * x), 3 * grey(x), rtol=1e-4, atol=1e-5)
    # waves down the rows answer at angle 0, which stands fourth, those along the columns at its right angle
    waves = (torch.arange(28) * 0.75 * math.pi).cos()
    for k, image in ((3, waves[:, None].expand(28, 28)), (7, waves.expand(28, 28))):
        first = grey(image[None, None]).view(81, 7, 7)[1:9].mean((1, 2))
        assert int(first.argmax()) == k


def test_scattering_by_plain_convolutions() -> None:
    x = torch.rand(1, 1, 8, 8, generator=torch_stream(0, "x"))
    step = Scattering((1, 8, 8))
    found = step(x).view(81, 2, 2)
    wavelets, low = bank(16, 16)
    padded = functional.pad(x, [4] * 4, mode="reflect")[0, 0].double()

    def filtered(image: torch.Tensor, spectrum: torch.Tensor) -> torch.Tensor:
        return torch.fft.ifft2(torch.fft.fft2(image) * spectrum.double())

    def smooth(image: torch.Tensor) -> torch.Tensor:
        return filtered(image, low).real[::4, ::4][1:-1, 1:-1].float()

    torch.testing.assert_close(found[0], smooth(padded), rtol=1e-4, atol=1e-6)
    at = {(j, k): filtered(padded, wavelets[j, k]).abs() for j in range(2) for k in range(8)}
    for (j, k), modulus in at.items():
        torch.testing.assert_close(found[1 + 8 * j + k], smooth(modulus), rtol=1e-4, atol=1e-6)
    for k in range(8):
        for m in range(8):
            second = smooth(filtered(at[0, k], wavelets[1, m]).abs())
            torch.testing.assert_close(found[17 + 8 * k + m], second, rtol=1e-4, atol=1e-6)


def test_words() -> None:
    assert parse(" conv ( 20 , size=5 )> project(7)") == [
        ("conv", {"filters": 20, "size": 5, "cells": 4, "threshold": 0.25}),
        ("project", {"features": 7}),
    ]
    assert parse("conv(20, 5, 2, .5)")[0][1] == {"filters": 20, "size": 5, "cells": 2, "threshold": 0.5}
    assert parse("conv")[0][1] == parse("conv()")[0][1] == parse("conv(200)")[0][1]
    assert default_words(GREY) == default_words(COLOUR) == "conv(200) > project(2048)"
    assert default_words(ROW) == default_words((2, 8, 8)) == "fourier(1024)"
    help_text = ModelSettings.model_fields["features"].description or ""
    assert [step for step in STEPS if step not in help_text] == []


@pytest.mark.parametrize(
    ("words", "shape", "facts"),
    [
        ("cnov(20)", GREY, ["cnov", "conv"]),
        ("", GREY, ["conv(200) > project(2048)"]),
        ("conv(20) >", GREY, ["conv(20) >"]),
        ("conv(20", GREY, ["conv(20"]),
        ("conv(twenty)", GREY, ["twenty", "1..4096"]),
        ("conv(2.5)", GREY, ["2.5", "a whole number"]),
        ("conv(0)", GREY, ["'0'", "1..4096"]),
        ("conv(20, threshold=nan)", GREY, ["nan", "0..100"]),
        ("conv(20, sides=3)", GREY, ["sides=3", "threshold"]),
        ("conv(20, filters=3)", GREY, ["filters=3", "once"]),
        ("conv(20,6,4,1,1)", GREY, ["threshold"]),
        ("scatter(3)", GREY, ["scatter(3)", "no settings"]),
        ("project", ROW, ["project(N)", "1..16384"]),
        ("project(0)", ROW, ["'0'", "1..16384"]),
        (f"project({MOST + 1})", ROW, [MOST + 1, "1..16384"]),
        ("fourier(7)", ROW, ["fourier(7)", "even"]),
        ("fourier(8, 0)", ROW, ["width '0'"]),
        ("conv(20)", ROW, ["conv", [13], "fourier"]),
        ("patches(20)", (2, 8, 8), ["patches", [2, 8, 8]]),
        ("scatter", (64,), ["scatter", [64]]),
        ("project(5) > conv(20)", GREY, ["conv", "first"]),
        ("conv(2) > conv(2)", GREY, ["conv", "first"]),
        ("clip > project(5)", ROW, ["clip", "last"]),
        ("conv(600)", GREY, ["19,200", MOST]),
        ("conv(2000) > project(16384)", GREY, ["project(16384)", "MiB"]),
        ("conv(4096)", (1, 800, 800), ["conv(4096)", "MiB"]),
        ("scatter", (1, 4000, 4000), ["scatter", "MiB"]),
        ("conv(5)", (1, 4, 4), ["4x4", 5]),
        ("patches(5)", (1, 7, 12), ["7x12", 8]),
        ("scatter", (1, 4, 4), ["4x4", 5]),
        ("unit", (), [[]]),
        ("unit", (1, 0, 3), [[1, 0, 3]]),
    ],
)  # fmt: skip
def test_words_that_do_not_do(words: str, shape: tuple[int, ...], facts: list[Any]) -> None:
    with refused("features", *facts) as caught:
        features(words, shape, 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("words", ["conv(5)", "patches(5)", "scatter"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 13), (1, 30, 9)])
def test_images_of_any_size(words: str, shape: tuple[int, ...]) -> None:
    assert made(words, shape)(inputs(2, shape)).isfinite().all()


def test_the_network() -> None:
    given = ModelSettings(features="conv(5) > project(20)")
    model = build("features", (1, 9, 9), 3, given, seed=7)
    assert (model.classifier.in_features, model.classifier.out_features) == (20, 3)
    encoder = made("conv(5) > project(20)", (1, 9, 9), 7)
    assert torch.equal(model.encoder(inputs(2, (1, 9, 9))), encoder(inputs(2, (1, 9, 9))))
    assert set(weights_of(model)) == {"encoder.centred.centre", "classifier.weight", "classifier.bias"}
    assert repr(build("features", (2, 3), 3, ModelSettings(), seed=0).encoder.fourier) == "Fourier(6 to 512)"  # type: ignore[union-attr]
    assert record_of("features", given) == {"projection": None, "features": "conv(5) > project(20)"}
    assert "features" not in ModelSettings().model_dump()
    assert "conv(5) > project(20)" in described("features", (1, 9, 9), given, {})
    assert "fourier(1024)" in described("features", ROW, ModelSettings(), {})
    # a worker's copy takes weights from elsewhere; what the seed makes is there already
    resident = make_resident(model, torch.device("cpu"))
    there = {name: tensor + 1 for name, tensor in weights_of(model).items()}
    loaded = resident.load(there)
    assert all(torch.equal(tensor, there[name]) for name, tensor in weights_of(loaded).items())
    images = Samples(torch.randint(0, 256, (4, 1, 9, 9), dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    x = resident.inputs(images, slice(None))
    assert torch.equal(x, normalise(images.inputs))
    assert not torch.equal(loaded(x), model(x))
    scores = model.train()(x)
    scores.sum().backward()
    assert model.classifier.weight.grad is not None


def test_networks_without_a_map_refuse_one_and_its_inputs_have_no_gradient() -> None:
    with refused("features", "conv(5)", "cnn2"):
        build("cnn2", (1, 8, 8), 3, ModelSettings(features="conv(5)"), seed=0)
    with refused("latent", 5, "features"):
        build("features", (1, 8, 8), 3, ModelSettings(latent=5), seed=0)
    with refused("model", "features", "gradient"):
        made("conv(5)", GREY)(inputs(2, GREY).requires_grad_())


def test_fedavg_trains_the_head_and_no_record_decides_on_the_map(tmp_path: Any) -> None:
    words, budget = "conv(8, cells=3) > project(96)", {"local_epochs": 2, "learning_rate": 0.1}
    found = [
        fedfill.run(
            "fedavg", data="digits", data_fraction=fraction, partition=partition, model="features", out=tmp_path / str(i),
            clients=3, rounds=rounds, features=words, **budget,
        )
        for i, (fraction, partition, rounds) in enumerate([(0.5, "iid", 3), (0.1, "dirichlet:0.1", 1)])
    ]  # fmt: skip
    encoder = made(words, (1, 8, 8), derive(0, "initial weights"))
    for result in found:
        assert torch.equal(result.weights["encoder.centred.centre"], buffers(encoder)["centred.centre"])
    assert found[0].summary["accuracy"] > 0.8
    # the head and the centre are all that is sent, with a few hundred bytes around them
    sent = 4 * (96 * 10 + 10 + encoder.centred.centre.numel())  # type: ignore[union-attr, operator]
    assert sent <= found[0].rounds[0]["bytes_down"] / 3 < sent + 1000
    assert list(inspect.signature(features).parameters) == ["words", "shape", "seed"]
