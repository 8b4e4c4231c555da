"""FedDA: the merged codes by hand, which classes are filled, and what stays at home."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.helpers import refused, run_rounds, scripted, small_federation

from fedfill.algorithms.fedda_cvae import FedDACVAE, Knowledge, OwnKnowledge, merged
from fedfill.data.samples import Samples
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.protocol.client import Client, State

SMALL = {"local_epochs": 2, "batch_size": 8}


def test_codes_are_merged_by_attention_towards_their_mean():
    one, other = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 0.0])
    # the mean is (1, 0): attention 2 / root 2 and 0
    a = math.exp(2**0.5) / (math.exp(2**0.5) + 1)
    assert torch.allclose(merged([one, other]), torch.tensor([2 * a, 0.0]))
    assert torch.equal(merged([one]), one)
    assert torch.allclose(merged([one, one, one]), one)


def filled(labels: list[int], known: list[bool], spread: float = 0.0) -> Samples:
    """What a client with these labels makes, of codes that are all zeros but for the class's number in front."""
    net = build("cnn2", (1, 8, 8), 4, ModelSettings(), needs=FedDACVAE.parts, seed=0)
    size = net.encoder.mu.out_features
    codes = torch.arange(4.0)[:, None] * torch.eye(1, size)
    data = Samples(torch.zeros(len(labels), 1, 8, 8, dtype=torch.uint8), torch.tensor(labels))
    initial = weights_of(net)
    client = Client(
        id=0, round=0, data=data, classes=4, state=State({}), initial=initial, seed=0, resident=lambda weights: net
    )
    return FedDACVAE(spread=spread).fill(client, initial, Knowledge(codes, torch.tensor(known)))


def test_scarce_classes_reach_the_median_of_those_that_are_there():
    # 5, 3 and 1 samples: the median is 3
    made = filled([0] * 5 + [1] * 3 + [2], known=[True] * 4)
    assert made.counts(4) == [0, 0, 2, 3]
    # of a class that nobody knows there is no image
    assert filled([0] * 5 + [1] * 3 + [2], known=[True, True, True, False]).counts(4) == [0, 0, 2, 0]
    assert len(filled([0, 1, 2, 3], known=[True] * 4)) == 0


def test_images_are_of_the_class_s_code_and_of_noise_around_it():
    made = filled([0] * 4, known=[True] * 4)
    images = {c: made.inputs[made.labels == c] for c in (1, 2)}
    assert all(torch.equal(own[0], own[1]) for own in images.values())
    assert not torch.equal(images[1][0], images[2][0])
    around = filled([0] * 4, known=[True] * 4, spread=3.0)
    assert not torch.equal(around.inputs[0], around.inputs[1])


def test_the_exchange_leaves_out_nonsense_and_knows_what_nobody_has():
    net = build("cnn2", (1, 8, 8), 4, ModelSettings(), needs=FedDACVAE.parts, seed=0)
    size = net.encoder.mu.out_features
    server, engine = scripted(clients=6, weights=weights_of(net), model=net)
    replies = {
        0: OwnKnowledge(torch.ones(2, size), [0, 1]),
        1: OwnKnowledge(torch.ones(1, size), [7]),  # there are 4 classes
        2: OwnKnowledge(3 * torch.ones(1, size), [0]),
        3: OwnKnowledge(torch.ones(2, size), [1, 1]),
        4: OwnKnowledge(torch.ones(1, size).double(), [1]),
        5: OwnKnowledge(torch.ones(1, size), [1, 2]),
    }
    engine.script["share_knowledge"] = lambda i, message, t: replies[i]
    found = FedDACVAE().exchange(server)
    assert [lost["client"] for lost in server.lost] == [1, 3, 4, 5]
    assert found.known.tolist() == [True, True, False, False]
    assert torch.allclose(found.codes[1], torch.ones(size))
    assert 1 < found.codes[0, 0].item() < 3


def test_decoders_stay_at_home_and_every_client_gets_the_codes_once():
    server = run_rounds(FedDACVAE(**SMALL, knowledge_round=2), rounds=6, participation=0.5)
    assert not any(name.startswith("decoder") for name in server.state.weights)
    states = server.client_states
    assert set(server.state.delivered.clients) == {i for i, state in states.items() if state["knowledge"] is not None}
    made = [state["synthetic"] for state in states.values() if state["synthetic"] is not None]
    assert made
    # each client has two of four classes, and as many of both
    assert all(sorted(own.counts(4)) == [0, 0, 20, 20] for own in made)


def test_a_client_without_images_shares_no_codes_and_fills_nothing():
    world = small_federation()
    world = replace(world, clients=(replace(world.clients[0], train=world.clients[0].train[:0]), *world.clients[1:]))
    lost: list[Any] = []
    server = run_rounds(
        FedDACVAE(**SMALL, knowledge_round=1),
        rounds=3,
        federation=world,
        after=lambda server, t: lost.extend(server.lost),
    )
    assert lost == []
    assert server.state.knowledge.known.all()
    assert len(server.client_states[0]["synthetic"]) == 0


def test_before_the_exchange_nobody_has_an_image_and_it_learns():
    server = run_rounds(FedDACVAE(**SMALL, knowledge_round=8), rounds=8)
    assert all(state["synthetic"] is None for state in server.client_states.values())
    assert server.state.knowledge is None
    assert server.evaluation.accuracy > 0.8


def test_others_objectives_work_and_slips_are_named():
    assert run_rounds(FedDACVAE(**SMALL, local="fedlc", aggregation="fedavgm"), rounds=3).lost == []
    with refused("knowledge_round", 3, "rounds, which is 2"):
        run_rounds(FedDACVAE(knowledge_round=3), rounds=2)
    with refused("aggregation", "fedda-cvae"):
        run_rounds(FedDACVAE(aggregation="dpfedavg"), rounds=2)


def test_no_image_where_all_have_all_classes():
    federation = small_federation(per_client=4)
    run = run_rounds(FedDACVAE(**SMALL, knowledge_round=1), rounds=2, federation=federation)
    assert all(len(state["synthetic"]) == 0 for state in run.client_states.values())


@pytest.mark.parametrize("labels", [[0] * 6, [0] * 6 + [1]])
def test_a_client_with_one_class_or_one_sample_of_a_class_is_filled(labels: list[int]):
    made = filled(labels, known=[True] * 4)
    assert sum(made.counts(4)) > 0
