"""The built-in networks: shapes, the paper's tables, initial weights, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.helpers import refused
from torch import nn
from torch.nn import functional

from fedfill.models.layers import Dropout, draws_from
from fedfill.models.names import NAMES
from fedfill.models.networks import Classifier, ModelSettings, VAEClassifier, build, choose, described
from fedfill.models.residual import BasicBlock
from fedfill.models.views import NORMALISATION, part, weights_of
from fedfill.streams import torch_stream

SHAPES = [(1, 8, 8), (1, 28, 28), (1, 16, 16), (3, 32, 32)]


def make(shape: tuple[int, ...], *, name: str = "auto", decoder: bool = False, seed: int = 0, **settings: Any) -> Any:
    return build(name, shape, 10, ModelSettings(**settings), needs=("decoder",) if decoder else (), seed=seed)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def layers(module: nn.Module, *kinds: type[nn.Module]) -> list[nn.Module]:
    return [layer for layer in module.modules() if isinstance(layer, kinds)]


@pytest.mark.parametrize("shape", [*SHAPES, (1, 8, 12), (3, 4, 4)])
@pytest.mark.parametrize("width", ["paper", "wide"])
@pytest.mark.parametrize("name", ["auto", "cnn2", "cnn4"])
def test_shapes(shape: tuple[int, ...], width: str, name: str) -> None:
    model = make(shape, name=name, decoder=True, width=width, latent=7)
    x = torch.rand(5, *shape) * 2 - 1
    with draws_from(model, torch_stream(0, "x")):
        scores, images, mu, logvar = model.reconstruct(x)
        assert model.sampled_scores(x).shape == (5, 10)
    assert scores.shape == model(x).shape == (5, 10)
    assert images.shape == x.shape
    assert mu.shape == logvar.shape == (5, 7)
    assert 0 < float(images.detach().min()) <= float(images.detach().max()) < 1


@pytest.mark.parametrize(
    ("shape", "latent"), [((1, 8, 8), 16), ((1, 16, 16), 32), ((1, 28, 28), 32), ((3, 32, 32), 128), ((3, 8, 8), 128)]
)
def test_default_size_of_the_latent_layer(shape: tuple[int, ...], latent: int) -> None:
    assert make(shape).encoder.mu.out_features == latent


def channels(module: nn.Module) -> list[tuple[int, int]]:
    return [(m.in_channels, m.out_channels) for m in layers(module, nn.Conv2d, nn.ConvTranspose2d)]  # type: ignore[misc]


def test_grey_network_is_the_papers_table() -> None:
    model = make((1, 28, 28), decoder=True)
    assert channels(model.encoder) == [(1, 16), (16, 32)]
    assert channels(model.decoder) == [(32, 16), (16, 1)]
    assert len(layers(model.encoder, nn.MaxPool2d)) == 2
    # conv 3x3 to 16, to 32; two heads on 7 * 7 * 32 = 1568; classifier 32 -> 10; linear back, two transposed convolutions
    assert count(model.encoder.trunk) == (9 * 16 + 16) + (9 * 16 * 32 + 32) == 4800
    assert count(model.encoder.mu) == count(model.encoder.logvar) == 1568 * 32 + 32
    assert count(model.classifier) == 330
    assert count(model.decoder) == (32 * 1568 + 1568) + (9 * 32 * 16 + 16) + (9 * 16 + 1)
    assert count(make((1, 28, 28))) == 4800 + 50208 + 330


def test_colour_network_is_the_papers_table() -> None:
    model = make((3, 32, 32), decoder=True)
    assert channels(model.encoder) == [(3, 32), (32, 32), (32, 64), (64, 64)]
    kinds = [type(layer) for layer in layers(model.encoder, nn.Conv2d, nn.MaxPool2d)]
    assert kinds == [nn.Conv2d, nn.Conv2d, nn.MaxPool2d] * 2
    assert count(model.encoder.trunk) == 896 + 9248 + 18496 + 36928
    assert count(model.encoder.mu) == count(model.encoder.logvar) == 4096 * 128 + 128
    assert count(model.classifier) == 1290
    assert [out for _, out in channels(model.decoder)] == [64, 64, 32, 3]  # table 2, CIFAR column


def test_wide_networks_have_the_widths_of_the_authors_program() -> None:
    grey, colour = make((1, 28, 28), decoder=True, width="wide"), make((3, 32, 32), decoder=True, width="wide")
    assert channels(grey.encoder) == [(1, 32), (32, 32), (32, 64)]
    assert channels(grey.decoder) == [(64, 64), (64, 32), (32, 1)]
    assert channels(colour.encoder) == [(3, 32), (32, 32), (32, 64), (64, 64)]
    assert channels(colour.decoder) == [(64, 64), (64, 32), (32, 32), (32, 3)]
    assert len(layers(colour.encoder, nn.PReLU)) == len(layers(colour.encoder, nn.BatchNorm2d)) == 4
    assert not layers(grey, Dropout)
    assert [layer.p for layer in layers(colour, Dropout)] == [0.2, 0.2]
    assert [layer.p for layer in layers(make((1, 8, 8), width="wide", dropout=0.4), Dropout)] == [0.4, 0.4]
    assert not layers(make((3, 8, 8), width="wide", dropout=0), Dropout)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", ["paper", "wide"])
def test_shared_parts_start_equal(shape: tuple[int, ...], width: str) -> None:
    plain, vae = weights_of(make(shape, width=width)), weights_of(make(shape, width=width, decoder=True))
    assert all(torch.equal(tensor, vae[name]) for name, tensor in plain.items())
    extra = set(vae) - set(plain)
    assert extra
    assert all(name.startswith(("encoder.logvar.", "decoder.")) for name in extra)


def test_initial_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = weights_of(make((1, 8, 8), seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    second, other = weights_of(make((1, 8, 8), seed=1)), weights_of(make((1, 8, 8), seed=2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["encoder.mu.weight"], other["encoder.mu.weight"])


def test_initial_weights_are_xavier_uniform_with_relu_gain() -> None:
    model = make((3, 32, 32), decoder=True)
    for layer, fans in [
        (model.encoder.mu, 4096 + 128),
        (model.encoder.trunk[0], 9 * (3 + 32)),
        (model.classifier, 138),
    ]:
        bound = math.sqrt(2) * math.sqrt(6 / fans)
        largest = float(layer.weight.detach().abs().max())
        assert 0.9 * bound < largest <= bound * (1 + 1e-6)
    biases = [layer.bias for layer in layers(model, nn.Conv2d, nn.ConvTranspose2d, nn.Linear)]
    assert all(not bias.detach().any() for bias in biases)


@pytest.mark.parametrize(
    ("activation", "low", "high"), [("sigmoid", 0, 1), ("relu", 0, math.inf), ("none", -math.inf, math.inf)]
)
def test_activation_bounds_the_latent_means_of_both_networks(activation: str, low: float, high: float) -> None:
    x = torch.randn(20, 1, 8, 8) * 50
    plain = make((1, 8, 8), latent_activation=activation)
    vae = make((1, 8, 8), latent_activation=activation, decoder=True)
    mu, logvar = vae.encoder.distribution(x)
    assert torch.equal(plain.encoder(x), mu)
    assert low <= float(mu.detach().min())
    assert float(mu.detach().max()) <= high
    assert float(logvar.detach().min()) < 0  # no activation there
    if activation == "none":
        assert float(mu.detach().min()) < 0
    assert torch.equal(vae(x), vae.classifier(mu))  # predictions come from the means


def test_kinds() -> None:
    assert type(make((1, 8, 8))) is Classifier
    assert type(make((1, 8, 8), decoder=True)) is VAEClassifier
    assert {name.split(".")[0] for name in weights_of(make((1, 8, 8), decoder=True))} == {
        "encoder",
        "classifier",
        "decoder",
    }
    assert len(part(weights_of(make((1, 8, 8))), "classifier")) == 2
    with pytest.raises(RuntimeError, match="logvar"):
        make((1, 8, 8)).encoder.distribution(torch.zeros(1, 1, 8, 8))


@pytest.mark.parametrize(
    "shape", [(8, 8), (1, 30, 30), (1, 28, 27), (2, 8, 8), (1, 2, 8, 8), (64,), (), (1, 0, 0), (3, 8, 0)]
)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("mlp", "features", "hazards")])
def test_a_wrong_shape_gives_a_sentence(shape: tuple[int, ...], name: str) -> None:
    if name == "auto" and shape in ((8, 8), (2, 8, 8), (1, 2, 8, 8), (64,), (1, 30, 30), (1, 28, 27)):
        assert choose(shape, ModelSettings(), ())[0] == "mlp"  # no images that halve twice, but numbers all the same
        return
    with refused("model", "multiples of", "shape") as caught:
        make(shape, name=name)
    assert "\n" not in str(caught.value)
    assert str(list(shape)) in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "inputs"), [((1, 10, 10), "grey images of 10x10"), ((3, 32, 30), "colour images of 32x30")]
)
def test_images_that_do_not_halve_twice_get_hidden_layers(shape: tuple[int, ...], inputs: str) -> None:
    for needs in ((), ("projection",), (NORMALISATION,)):
        name, settings = choose(shape, ModelSettings(), needs)
        assert name == "mlp"
        assert build(name, shape, 3, settings, needs=needs, seed=0)(torch.zeros(2, *shape)).shape == (2, 3)
    said = described("mlp", shape, ModelSettings(), {})
    assert inputs in said
    assert "multiples of 4" in said
    assert "multiples" not in described("mlp", (1, 8, 8), ModelSettings(), {})
    with refused("model", "multiples of 4"):
        build("auto", shape, 3, ModelSettings(), needs=("decoder",), seed=0)


def test_dropout_where_there_is_none_is_refused() -> None:
    with refused("dropout", "0.5"):
        build("cnn2", (1, 8, 8), 3, ModelSettings(dropout=0.5), seed=0)
    build("cnn2", (1, 8, 8), 3, ModelSettings(dropout=0.0), seed=0)


def test_an_unknown_name_gives_a_sentence() -> None:
    with refused("model", "cnn3", "did you mean"):
        make((1, 8, 8), name="cnn3")


# The Fed-ZDA paper's


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 12)])
@pytest.mark.parametrize("head", [None, 6])
def test_network_with_batch_norm(shape: tuple[int, ...], head: int | None) -> None:
    model = make(shape, name="cnn2bn", projection=head)
    assert model(torch.rand(5, *shape)).shape == (5, 10)
    assert len(layers(model, nn.BatchNorm2d)) == 2
    grey = shape[0] == 1
    assert channels(model) == ([(1, 16), (16, 32)] if grey else [(3, 16), (16, 16)])
    assert layers(model, nn.Conv2d)[0].kernel_size == ((5, 5) if grey else (3, 3))
    hidden = [] if grey else [80, 60]
    last = [] if head is None else [32 * shape[1] * shape[2] // 16 if grey else 60, head]
    assert [m.out_features for m in layers(model, nn.Linear)] == [*hidden, *last, 10]
    again = make(shape, name="cnn2bn", projection=head)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


ONE_SHAPE = ["cnn2bn", "cnn2fc", "cnn2fc-small", "digits6", "resnet18"]


@pytest.mark.parametrize("name", ONE_SHAPE)
def test_what_networks_of_one_shape_have_not(name: str) -> None:
    with refused("latent"):
        make((1, 16, 16), name=name, latent=3)
    with refused("model", name, "decoder"):
        make((1, 16, 16), name=name, decoder=True)


# The SDA-FL paper's


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 16, 8)])
@pytest.mark.parametrize("name", ONE_SHAPE)
def test_parts_of_networks_of_one_shape(name: str, shape: tuple[int, ...]) -> None:
    x = torch.rand(5, *shape) * 2 - 1
    plain, headed = make(shape, name=name).eval(), make(shape, name=name, projection=6).eval()
    features = {"cnn2fc": 512, "cnn2fc-small": 128, "digits6": 512, "resnet18": 512}.get(
        name, plain.encoder(x).shape[1]
    )
    assert plain.encoder(x).shape == (5, features)
    assert float(plain.encoder(x).detach().min()) >= 0  # a ReLU comes last, or before the mean
    assert torch.equal(plain(x), plain.classifier(plain.encoder(x)))
    assert plain(x).shape == (5, 10)
    assert headed.projection(headed.encoder(x)).shape == (5, 6)
    assert headed(x).shape == (5, 10)
    start, other = weights_of(plain), weights_of(headed)
    assert all(torch.equal(start[k], other[k]) for k in start if k.startswith("encoder."))
    asked = build(name, shape, 10, ModelSettings(), needs=("projection",), seed=0)
    assert asked.projection is not None
    assert asked.projection[-1].out_features == 256  # type: ignore[index]


@pytest.mark.parametrize("name", ONE_SHAPE)
def test_networks_of_one_shape_follow_the_seed_alone(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = weights_of(make((1, 8, 8), name=name, seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    second, other = weights_of(make((1, 8, 8), name=name, seed=1)), weights_of(make((1, 8, 8), name=name, seed=2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert all(not torch.equal(first[key], other[key]) for key in first if first[key].dim() > 1)


def test_network_with_two_convolutions_and_two_linear_layers() -> None:
    # 5x5 to 32, to 64; 7 * 7 * 64 = 3136 to 512, to 10
    parts = (25 * 32 + 32) + (25 * 32 * 64 + 64) + (3136 * 512 + 512) + (512 * 10 + 10)
    assert count(make((1, 28, 28), name="cnn2fc")) == parts == 1_663_370
    small = (25 * 16 + 16) + (25 * 16 * 32 + 32) + (1568 * 128 + 128) + (128 * 10 + 10)
    assert count(make((1, 28, 28), name="cnn2fc-small")) == small
    assert channels(make((3, 8, 8), name="cnn2fc")) == [(3, 32), (32, 64)]
    assert not layers(make((1, 8, 8), name="cnn2fc"), nn.BatchNorm2d)


def test_residual_network_is_resnet_18() -> None:
    def block(inputs: int, outputs: int) -> int:
        shortcut = inputs * outputs + 2 * outputs if inputs != outputs else 0
        return 9 * inputs * outputs + 9 * outputs * outputs + 2 * 2 * outputs + shortcut

    stages = sum(block(i, o) + block(o, o) for i, o in ((64, 64), (64, 128), (128, 256), (256, 512)))
    parts = (9 * 3 * 64 + 2 * 64) + stages + (512 * 10 + 10)
    model = make((3, 32, 32), name="resnet18")
    assert count(model) == parts == 11_173_962
    kernels = [layer.kernel_size for layer in layers(model, nn.Conv2d)]
    assert (kernels.count((3, 3)), kernels.count((1, 1))) == (17, 3)
    assert len(layers(model, nn.BatchNorm2d)) == 20
    assert not layers(model, nn.MaxPool2d)
    # the front keeps the size and three of the stages halve it
    with torch.no_grad():
        assert model.eval().encoder[:-2](torch.zeros(1, 3, 32, 32)).shape == (1, 512, 4, 4)
    for layer in layers(model, nn.Conv2d):
        fan_out = layer.out_channels * layer.kernel_size[0] ** 2  # type: ignore[operator, index]
        assert float(layer.weight.detach().std()) == pytest.approx(math.sqrt(2 / fan_out), rel=0.06)  # type: ignore[operator, union-attr]
    with refused("model", "'resnet18'", "multiples of 8", "[3, 28, 32]"):
        make((3, 28, 32), name="resnet18")


def test_residual_block_by_hand() -> None:
    same, other = BasicBlock(1, 1, 1).eval(), BasicBlock(1, 2, 2).eval()
    x = torch.tensor([[[[1.0, -2.0], [3.0, 4.0]]]])
    with torch.no_grad():
        for layer in layers(same, nn.Conv2d) + layers(other, nn.Conv2d):
            nn.init.zeros_(layer.weight)  # type: ignore[arg-type]
        assert same(x).tolist() == [[[[1, 0], [3, 4]]]]  # what comes in is added before the last ReLU
        for layer in layers(same, nn.Conv2d):
            layer.weight[0, 0, 1, 1] = 2.0  # type: ignore[index, operator]
        # 2 relu(2 x) + x, but for the 1e-5 in the normalisation
        assert same(x).flatten().tolist() == pytest.approx([5, 0, 15, 20], rel=1e-4)
        other.shortcut[0].weight[:, 0, 0, 0] = torch.tensor([3.0, -1.0])  # type: ignore[index]
        assert other(x).flatten().tolist() == pytest.approx([3, 0], rel=1e-4)  # of every other pixel


def test_imagenets_front_brings_images_to_a_quarter_of_their_side() -> None:
    small, large = make((3, 64, 64), name="resnet18"), make((3, 64, 64), name="resnet18", stem="imagenet")
    assert count(large) == count(small) + (49 - 9) * 3 * 64
    with torch.no_grad():
        x = torch.rand(1, 3, 64, 64)
        first = large.eval().encoder[:4](x)
        assert first.shape == (1, 64, 16, 16)
        assert large.encoder[:-2](x).shape == (1, 512, 2, 2)
        # the order of the paper: convolution, norm, ReLU, pooling
        plain = functional.max_pool2d(large.encoder[:2](x).relu(), 3, 2, padding=1)
        assert torch.equal(first, plain)
        assert make((3, 224, 224), name="resnet18", stem="imagenet").eval().encoder[:5](
            torch.rand(1, 3, 224, 224)
        ).shape == (1, 64, 56, 56)
    said = make((3, 64, 64), name="resnet18", stem="small")
    assert all(torch.equal(a, b) for a, b in zip(said.parameters(), small.parameters(), strict=True))
    for name in ("auto", "cnn2fc", "digits6"):
        with refused("stem"):
            make((3, 64, 64), name=name, stem="imagenet")


def test_settings_that_are_not_used_leave_the_record_as_it_was() -> None:
    assert ModelSettings().model_dump().keys() == {"width", "latent", "latent_activation", "dropout", "projection"}
    used = ModelSettings(stem="imagenet", weights="x.pt").model_dump()
    assert (used["stem"], used["weights"]) == ("imagenet", "x.pt")


# FRAug's


def test_six_layers_for_digits() -> None:
    convolutions = (25 * 3 * 64 + 64) + (25 * 64 * 64 + 64) + (25 * 64 * 128 + 128)
    hidden = (8192 * 2048 + 2048) + (2048 * 512 + 512)  # 128 channels of 8x8 come out of the convolutions
    norms = 2 * (64 + 64 + 128 + 2048 + 512)
    model = make((3, 32, 32), name="digits6")
    assert count(model) == convolutions + hidden + norms + (512 * 10 + 10) == 18_151_370
    assert isinstance(model.classifier, nn.Linear)
    assert channels(model) == [(3, 64), (64, 64), (64, 128)]
    kinds = [type(layer).__name__ for layer in model.encoder]
    block = ["Conv2d", "BatchNorm2d", "MaxPool2d", "ReLU"]
    linear = ["Linear", "BatchNorm1d", "ReLU"]
    assert kinds == [*block, *block, "Conv2d", "BatchNorm2d", "ReLU", "Flatten", *linear, *linear]
    with torch.no_grad():
        x = torch.rand(2, 3, 32, 32) * 2 - 1
        assert model.eval().encoder[:4](x).shape == (2, 64, 16, 16)
        assert model.encoder[:11](x).shape == (2, 128, 8, 8)
        # windows of three overlap and reach over the edge: pooling before the ReLU is the same all the same
        behind = functional.max_pool2d(model.encoder[:2](x).relu(), 3, 2, padding=1)
        assert torch.equal(model.encoder[:4](x), behind)
    assert make((1, 28, 28), name="digits6").encoder[12].in_features == 128 * 7 * 7
    with refused("model", "'digits6'", "multiples of 4", "[3, 30, 32]"):
        make((3, 30, 32), name="digits6")


@pytest.mark.parametrize("name", ["cnn2bn", "digits6", "resnet18"])
def test_training_moves_the_running_statistics_and_evaluation_leaves_them(name: str) -> None:
    model = make((1, 8, 8), name=name)
    x = torch.rand(4, 1, 8, 8) * 2 - 1
    start = weights_of(model)
    buffers = [key for key, _ in model.named_buffers()]
    model.eval()(x)
    assert all(torch.equal(start[key], tensor) for key, tensor in weights_of(model).items())
    functional.cross_entropy(model.train()(x), torch.arange(4)).backward()
    end = weights_of(model)
    assert len(buffers) == 3 * len(layers(model, nn.BatchNorm1d, nn.BatchNorm2d))
    assert all(not torch.equal(start[key], end[key]) for key in buffers)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_two_hidden_layers_for_rows_of_numbers() -> None:
    net = build("auto", (7,), 3, ModelSettings(), seed=0)
    counted = (7 * 128 + 128) + 2 * 128 + (128 * 64 + 64) + 2 * 64 + (64 * 3 + 3)
    assert sum(p.numel() for p in net.parameters()) == counted
    assert net(torch.zeros(5, 7)).shape == (5, 3)
    assert build("mlp", (3, 5, 6), 3, ModelSettings(), seed=0)(torch.zeros(5, 3, 5, 6)).shape == (5, 3)
