"""What an algorithm makes when it is asked for so many of each class."""

from __future__ import annotations

import pytest
import torch
from tests.helpers import CLASSES, TINY_GAN, run_rounds

from fedfill.algorithms import find
from fedfill.data.samples import Samples, some_of_each
from fedfill.protocol.server import Server

FAST = {"local_steps": 2, "batch_size": 8}


def made(name: str, per_class: int | None, **settings: object) -> tuple[Samples | None, Server]:
    kind = find(name)
    model = {"width": "wide"} if name.startswith("fedzda") else {}
    algorithm = kind(**{**FAST, **settings})
    server = run_rounds(algorithm, 2, model=model, workers=1)
    server.begin(1)
    resolved = algorithm.resolved(
        rounds=2, model=server.model(algorithm.global_weights(server)), inputs=server.sample.inputs
    )
    return resolved.synthetic(server, per_class), server


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("feddpgan", {**TINY_GAN, "images_per_class": 3}),
        ("fedzdac", {"start_round": 1, "images_per_class": 3, "inversion_steps": 2}),
    ],
)
def test_exactly_as_many_as_are_asked_for(name: str, settings: dict[str, object]):
    samples, _ = made(name, 7, **settings)
    assert samples is not None
    assert samples.counts(CLASSES) == [7] * CLASSES
    assert samples.inputs.shape == (7 * CLASSES, 1, 8, 8)
    assert samples.inputs.dtype == torch.uint8
    again, _ = made(name, 7, **settings)
    assert again is not None
    assert torch.equal(samples.inputs, again.inputs)
    usual, _ = made(name, None, **settings)
    assert usual is not None
    assert usual.counts(CLASSES) == [3] * CLASSES


@pytest.mark.parametrize("name", ["fedzdas", "sdafl-ac"])
def test_a_fixed_set_gives_no_more_than_it_has(name: str):
    settings = {"fedzdas": {"start_round": 1, "images_per_class": 2, "inversion_steps": 2}}.get(
        name, {**TINY_GAN, "images_per_client": 6, "server_steps": 0}
    )
    everything, server = made(name, None, **settings)
    assert everything is not None
    held = everything.counts(CLASSES)
    for most in (2, 1000):
        some, _ = made(name, most, **settings)
        assert some is not None
        assert some.counts(CLASSES) == [min(most, n) for n in held]
    assert server.classes == CLASSES


def test_an_auto_encoder_is_asked_for_what_its_classifier_recognises():
    samples, server = made("fedvae", 3, local_steps=30, learning_rate=0.01)
    assert samples is not None
    assert max(samples.counts(CLASSES)) == 3
    scores = server.model(server.state.weights)(samples.inputs.float() / 127.5 - 1)
    assert torch.equal(scores.argmax(1), samples.labels)
    assert made("fedvae", None)[0] is None  # its runs show no picture


def test_shared_codes_are_decoded_as_far_as_they_go():
    settings = {
        "preliminary_rounds": 1,
        "alpha": 4,
        "n_classes": 2,
        "sigma": 0.1,
        "learning_rate": 0.01,
        "local_steps": 40,
    }
    everything, _ = made("feddpms", None, **settings)
    assert everything is not None
    few, _ = made("feddpms", 2, **settings)
    assert few is not None
    assert few.counts(CLASSES) == [min(2, n) for n in everything.counts(CLASSES)]
    drawn, _ = made("feddpms", 30, mechanism="prior", **settings)
    assert drawn is not None
    assert max(drawn.counts(CLASSES)) == 30  # more than alpha from every sharer together


def test_some_of_each_is_a_draw_without_replacement():
    samples = Samples(torch.arange(9)[:, None].float(), torch.tensor([1, 1, 1, 1, 0, -1, 2, 2, 2]))
    found = some_of_each(samples, 2, torch.Generator().manual_seed(0))
    assert found.labels.tolist() == [0, 1, 1, 2, 2]
    assert len(set(found.inputs.flatten().tolist())) == 5
    seen = set()
    for seed in range(40):
        seen |= set(some_of_each(samples, 1, torch.Generator().manual_seed(seed)).inputs.flatten().tolist())
    assert seen == {0, 1, 2, 3, 4, 6, 7, 8}
