"""Weights from a file: torchvision's names and ours, the head, and files that don't fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.helpers import refused
from torch import Tensor, nn

import fedfill
from fedfill.errors import FedfillError
from fedfill.models.networks import Classifier, ModelSettings, build
from fedfill.models.pretrained import load
from fedfill.models.views import weights_of

TAIL = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]


def network(name: str = "resnet18", shape: tuple[int, ...] = (3, 8, 8), **settings: Any) -> Classifier:
    return build(name, shape, 10, ModelSettings(**settings), seed=0)


def torchvisions(side: int = 3, classes: int = 10) -> dict[str, Tensor]:
    """A state dict of torchvision's resnet18, written down layer by layer, with values that tell its tensors apart."""
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, side, side)}

    def norm(name: str, size: int) -> None:
        shapes.update({f"{name}.{t}": (size,) for t in TAIL[:4]} | {f"{name}.{TAIL[4]}": ()})

    norm("bn1", 64)
    inputs = 64
    for layer, outputs in enumerate((64, 128, 256, 512), start=1):
        for block in (0, 1):
            place = f"layer{layer}.{block}"
            shapes[f"{place}.conv1.weight"] = (outputs, inputs, 3, 3)
            norm(f"{place}.bn1", outputs)
            shapes[f"{place}.conv2.weight"] = (outputs, outputs, 3, 3)
            norm(f"{place}.bn2", outputs)
            if inputs != outputs:
                shapes[f"{place}.downsample.0.weight"] = (outputs, inputs, 1, 1)
                norm(f"{place}.downsample.1", outputs)
            inputs = outputs
    shapes |= {"fc.weight": (classes, 512), "fc.bias": (classes,)}
    return {
        name: torch.tensor(k) if name.endswith(TAIL[4]) else torch.full(shape, k / 1000)
        for k, (name, shape) in enumerate(shapes.items())
    }


def value(model: nn.Module, name: str) -> float:
    return float(model.state_dict()[name].flatten()[0])


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("stem", ["small", "imagenet"])
def test_torchvisions_names(suffix: str, stem: str, tmp_path: Path):
    given = torchvisions(3 if stem == "small" else 7)
    file = tmp_path / f"resnet18.{suffix}"
    safetensors.torch.save_file(given, file) if suffix == "safetensors" else torch.save(given, file)
    model = network(stem=stem)
    note = load(model, str(file))
    assert note == f"The network begins with the weights of {file}, its head among them."
    own = weights_of(model)
    assert len(own) == len(given)
    assert {float(t.flatten()[0]) for t in own.values()} == {float(t.flatten()[0]) for t in given.values()}
    first = 3 if stem == "small" else 4  # where the blocks begin
    for theirs, ours in {
        "conv1.weight": "encoder.0.weight",
        "bn1.running_var": "encoder.1.running_var",
        "layer1.0.conv1.weight": f"encoder.{first}.residual.0.weight",
        "layer1.1.bn2.bias": f"encoder.{first + 1}.residual.4.bias",
        "layer3.0.downsample.0.weight": f"encoder.{first + 4}.shortcut.0.weight",
        "layer3.0.downsample.1.running_mean": f"encoder.{first + 4}.shortcut.1.running_mean",
        "layer4.1.conv2.weight": f"encoder.{first + 7}.residual.3.weight",
        "layer4.1.bn1.num_batches_tracked": f"encoder.{first + 7}.residual.1.num_batches_tracked",
        "fc.bias": "classifier.bias",
    }.items():
        assert value(model, ours) == float(given[theirs].flatten()[0])


def test_a_head_for_other_classes_stays_as_drawn_and_so_does_one_that_is_not_there(tmp_path: Path):
    drawn = network().classifier.state_dict()
    other = torchvisions(classes=1000)
    none = {name: tensor for name, tensor in other.items() if not name.startswith("fc.")}
    half = {**torchvisions(), "fc.bias": torch.zeros(7)}
    for k, given in enumerate((other, none, half)):
        model = network()
        torch.save(given, tmp_path / f"{k}.pt")
        assert "but not its head" in load(model, str(tmp_path / f"{k}.pt"))
        assert all(torch.equal(tensor, drawn[name]) for name, tensor in model.classifier.state_dict().items())
        assert value(model, "encoder.0.weight") == 0


def test_our_own_names_for_any_network(tmp_path: Path):
    trained = build("cnn2bn", (1, 8, 8), 10, ModelSettings(), seed=1)
    file = str(tmp_path / "own.safetensors")
    safetensors.torch.save_file(weights_of(trained), file)
    model = network("cnn2bn", (1, 8, 8))
    load(model, file)
    assert all(torch.equal(tensor, weights_of(trained)[name]) for name, tensor in weights_of(model).items())


def test_files_from_before_batch_norm_counted(tmp_path: Path):
    given = {name: tensor for name, tensor in torchvisions().items() if not name.endswith(TAIL[4])}
    torch.save(given, tmp_path / "old.pth")
    model = network()
    load(model, str(tmp_path / "old.pth"))
    assert value(model, "encoder.1.num_batches_tracked") == 0
    assert value(model, "encoder.1.running_var") == float(given["bn1.running_var"][0])


class Unknown:
    pass


def changed(**tensors: Tensor | None) -> dict[str, Tensor]:
    given = {**torchvisions(), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
    return {name: tensor for name, tensor in given.items() if tensor is not None}


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (changed(bn1__bias=None), ("no 'encoder.1.bias'",)),
        (changed(extra=torch.zeros(1)), ("'extra'",)),
        ({**torchvisions(), "layer1.2.conv1.weight": torch.zeros(1)}, ("'layer1.2.conv1.weight'",)),
        ({**torchvisions(), "layer1.0.conv3.weight": torch.zeros(1)}, ("'layer1.0.conv3.weight'",)),
        (torchvisions(7), ("'conv1.weight'", "float32[64, 3, 7, 7]", "float32[64, 3, 3, 3]")),
        (changed(bn1__bias=torch.zeros(64, dtype=torch.int64)), ("int64[64]", "float32[64]")),
        (changed(bn1__bias=torch.full((64,), float("nan"))), ("'bn1.bias'", "NaN")),
        (changed(bn1__bias=torch.full((64,), 1e300, dtype=torch.float64)), ("'bn1.bias'", "torch.float32")),
        (changed(bn1__running_var=torch.full((64,), -1.0)), ("'bn1.running_var'", "negative")),
        (changed(bn1__num_batches_tracked=torch.tensor(-1)), ("'bn1.num_batches_tracked'", "negative")),
        (changed(bn1__num_batches_tracked=torch.tensor(1j)), ("complex64[]", "int64[]")),
        (changed(bn1__bias=torch.zeros(64).to(torch.float8_e4m3fn)), ("float8_e4m3fn[64]", "float32[64]")),
        (changed(bn1__bias=torch.zeros(64).to_sparse()), ("'bn1.bias'", "sparse")),
        (changed(bn1__bias=torch.zeros(64, device="meta")), ("'bn1.bias'", "without values")),
        ({**torchvisions(), "encoder.1.bias": torch.zeros(64)}, ("'bn1.bias'", "'encoder.1.bias'", "one tensor")),
        ({"state_dict": torchvisions()}, ("'state_dict'", "no tensor")),
        ([torch.zeros(1)], ("a list", "a state dict")),
        (Unknown(), ("UnpicklingError",)),
    ],
)
def test_what_does_not_fit_gives_a_sentence_and_leaves_the_model(given: Any, facts: tuple[str, ...], tmp_path: Path):
    model = network()
    before = weights_of(model)
    file = str(tmp_path / "x.pt")
    torch.save(given, file)
    with refused("model.weights", file, *facts) as caught:
        load(model, file)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(model).items())


def test_files_that_are_none(tmp_path: Path):
    whole = tmp_path / "whole.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(100)}, whole)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole.read_bytes()[:-8])
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 nothing")
    (tmp_path / "folder.pt").mkdir()
    for name, fact in [
        ("cut.safetensors", "can't be read"),
        ("cut.pt", "can't be read"),
        ("folder.pt", "found no file"),
        ("none.pth", "found no file"),
        ("weights.bin", ".safetensors, .pt or .pth"),
        (f"{'x' * 300}.pt", "too long"),
    ]:
        with refused("model.weights", tmp_path / name, fact) as caught:
            load(network("cnn2bn"), str(tmp_path / name))
        assert "\n" not in str(caught.value)


def test_homes_and_capital_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    given = network("cnn2bn")
    safetensors.torch.save_file(weights_of(given), tmp_path / "W.SafeTensors")
    assert load(network("cnn2bn"), "~/W.SafeTensors").startswith(
        "The network begins with the weights of ~/W.SafeTensors"
    )
    with refused("model.weights", "~nobody.of.this.name/x.pt"):
        load(given, "~nobody.of.this.name/x.pt")


def test_an_experiment_begins_with_them_and_says_so(tmp_path: Path):
    file = tmp_path / "own.safetensors"
    trained = build("cnn2bn", (1, 8, 8), 7, ModelSettings(), seed=1)
    safetensors.torch.save_file(weights_of(trained), file)
    options = {"data": "digits", "clients": 2, "rounds": 1, "local_epochs": 1, "data_fraction": 0.1, "model": "cnn2bn"}
    result = fedfill.run("fedavg", **options, **{"model.weights": file}, out=tmp_path / "a")
    assert any(
        note.startswith(f"The network begins with the weights of {file}, but not its head")
        for note in result.summary["notes"]
    )
    plain = fedfill.run("fedavg", **options, out=tmp_path / "b")
    assert not any("weights" in note for note in plain.summary["notes"])
    assert "weights" not in (tmp_path / "b" / "experiment.toml").read_text().split("[model_settings]")[-1]
    assert f'\nweights = "{file}"\n' in (tmp_path / "a" / "experiment.toml").read_text()
    assert fedfill.resume(tmp_path / "b").was_finished
    assert fedfill.resume(tmp_path / "a").summary == result.summary
    other = {name: tensor + 1 for name, tensor in weights_of(trained).items()}
    safetensors.torch.save_file(other, file)
    with pytest.raises(FedfillError):
        fedfill.resume(tmp_path / "a")  # another start is another experiment
    with refused("model.weights", "no file", "nowhere.pt"):
        fedfill.run("fedavg", **options, **{"model.weights": "nowhere.pt"}, out=tmp_path / "c")
    assert not (tmp_path / "c").exists()
