"""Views: tensors chosen by named part and by module type."""

from __future__ import annotations

import torch
from tests.helpers import refused
from torch import nn

from fedfill.models.views import names_by_type, normalisation, part, require_parts, rest, trainable, weights_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(1)
        self.downsample = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1))


class Net(nn.Module):
    """The names are traps: a head whose name begins like the encoder's, and a layer called norm that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Block()
        self.encoder_head = nn.Linear(1, 1)
        self.norm = nn.Linear(1, 1)
        self.scale = nn.Parameter(torch.ones(1))


BUFFERS = ["running_mean", "running_var", "num_batches_tracked"]
NORM = ["weight", "bias", *BUFFERS]


def test_weights_of_copies_parameters_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    weights = weights_of(model)
    assert list(weights) == ["0.weight", "0.bias", *(f"1.{name}" for name in NORM)]
    assert not any(tensor.requires_grad for tensor in weights.values())
    with torch.no_grad():
        model[0].weight.fill_(7)
    assert float(weights["0.weight"]) != 7


def test_part_goes_by_whole_names_of_direct_children() -> None:
    weights = weights_of(Net())
    encoder = ["conv.weight", *(f"norm.{n}" for n in NORM), "downsample.0.weight", *(f"downsample.1.{n}" for n in NORM)]
    assert list(part(weights, "encoder")) == [f"encoder.{name}" for name in encoder]
    assert list(part(weights, "norm", "encoder_head")) == [
        "encoder_head.weight", "encoder_head.bias", "norm.weight", "norm.bias",
    ]  # fmt: skip
    assert list(part(weights, "scale")) == ["scale"]
    assert part(weights, "enc") == part(weights) == {}
    assert part(weights, "norm")["norm.weight"] is weights["norm.weight"]


def test_rest_is_what_part_leaves_out() -> None:
    weights = weights_of(Net())
    assert list(rest(weights, "encoder")) == [
        "scale", "encoder_head.weight", "encoder_head.bias", "norm.weight", "norm.bias",
    ]  # fmt: skip
    assert list(rest(weights, "encoder", "norm", "encoder_head")) == ["scale"]
    assert list(rest(weights, "enc")) == list(rest(weights)) == list(weights)
    assert rest(weights, "norm")["scale"] is weights["scale"]
    for names in (["encoder"], ["norm", "scale"], ["nobody"], []):
        both = {**part(weights, *names), **rest(weights, *names)}
        assert both.keys() == weights.keys()
        assert not part(weights, *names).keys() & rest(weights, *names).keys()


def test_trainable_leaves_out_buffers_and_what_is_frozen() -> None:
    model = Net()
    model.encoder.norm.bias.requires_grad_(False)
    weights = weights_of(model)
    assert set(trainable(model, part(weights, "encoder", "scale"))) == {
        "scale", "encoder.conv.weight", "encoder.norm.weight", "encoder.downsample.0.weight",
        "encoder.downsample.1.weight", "encoder.downsample.1.bias",
    }  # fmt: skip
    assert trainable(model, weights)["norm.weight"] is weights["norm.weight"]  # what was given, not the model's own
    assert trainable(model, {"encoder.norm.running_mean": torch.zeros(1), "nobody": torch.zeros(1)}) == {}


def test_names_by_type_finds_modules_and_not_names() -> None:
    model = Net()
    expected = {f"encoder.norm.{name}" for name in NORM} | {f"encoder.downsample.1.{name}" for name in NORM}
    assert names_by_type(model, nn.BatchNorm2d) == expected
    linear = {"encoder_head.weight", "encoder_head.bias", "norm.weight", "norm.bias"}
    assert names_by_type(model, nn.Linear) == linear
    assert names_by_type(model, nn.Linear, nn.BatchNorm2d) == expected | linear
    assert names_by_type(model, nn.GroupNorm) == set()
    assert names_by_type(nn.BatchNorm1d(1), nn.BatchNorm1d) == set(NORM)  # the model itself


def test_names_by_type_gives_both_names_of_a_module_used_twice() -> None:
    norm = nn.BatchNorm1d(1)
    assert names_by_type(nn.Sequential(norm, nn.Linear(1, 1), norm), nn.BatchNorm1d) == {
        f"{place}.{name}" for place in (0, 2) for name in NORM
    }


def test_every_kind_of_normalisation_layer_is_one() -> None:
    kinds = [
        nn.BatchNorm1d(2),
        nn.BatchNorm3d(2),
        nn.InstanceNorm2d(2, affine=True),
        nn.GroupNorm(1, 2),
        nn.LayerNorm(2),
        nn.RMSNorm(2),
        nn.SyncBatchNorm(2),
    ]
    model = nn.ModuleDict({f"linear{k}": nn.Sequential(kind, nn.Linear(1, 1)) for k, kind in enumerate(kinds)})
    assert normalisation(model) == {f"linear{k}.0.{n}" for k, kind in enumerate(kinds) for n in kind.state_dict()}
    assert normalisation(nn.Linear(1, 1)) == set()


def test_a_missing_part_gives_a_sentence() -> None:
    require_parts(Net(), ["encoder", "norm"], "feddpms")
    require_parts(nn.Linear(1, 1), [], "fedavg")
    with refused("model", "feddpms", "encoder, decoder", "Net has no 'decoder'", "encoder_head"):
        require_parts(Net(), ["encoder", "decoder"], "feddpms")
    with refused("model", "Linear has no 'encoder'", "none"):
        require_parts(nn.Linear(1, 1), ["encoder"], "feddpms")
