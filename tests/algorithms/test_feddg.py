"""FedDG: the episode by hand, the exchange of amplitudes, and where it is FedAvg on doubled data."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import bars, refused, run_rounds, scripted, small_federation
from torch import nn

import fedfill
from fedfill.algorithms import Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.feddg import FedDG, SharedSpectra, Styled
from fedfill.data.samples import Batch, normalise
from fedfill.protocol.client import Client, client_handler
from fedfill.training.fit import Context
from fedfill.training.losses import cross_entropy
from fedfill.training.spectra import low_amplitudes

SMALL = {"local_epochs": 2, "batch_size": 8}
CONTEXT = Context({}, torch.Generator(), 0)


def test_the_episode_by_hand():
    """The second gradient is taken after a step on the first batch, and steps from where the model is."""
    torch.manual_seed(0)
    model, batches = nn.Linear(3, 2), [torch.randn(4, 3), torch.randn(4, 3)]
    one, other = (Batch(x, torch.tensor([0, 1, 0, 1]), torch.arange(4)) for x in batches)
    FedDG(inner_rate=0.5).episodic(model, one, other, CONTEXT).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}

    model.zero_grad()
    cross_entropy(model, one).backward()
    first = {name: p.grad.clone() for name, p in model.named_parameters()}
    stepped = nn.Linear(3, 2)
    stepped.load_state_dict({name: p.detach() - 0.5 * first[name] for name, p in model.named_parameters()})
    cross_entropy(stepped, other).backward()
    for name, p in stepped.named_parameters():
        assert torch.allclose(found[name], first[name] + p.grad, atol=1e-6)


def test_without_an_episode_the_losses_are_added():
    model = nn.Linear(3, 2)
    one, other = (Batch(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]), torch.arange(4)) for _ in range(2))
    expected = cross_entropy(model, one) + cross_entropy(model, other)
    assert FedDG(episode=False).episodic(model, one, other, CONTEXT).item() == pytest.approx(expected.item())


def test_with_images_as_they_are_it_is_fedavg_at_twice_the_rate():
    sgd = {**SMALL, "optimizer": "sgd"}
    plain = run_rounds(FedAvg(**sgd, learning_rate=0.05), rounds=2).state.weights
    twice = run_rounds(FedDG(**sgd, learning_rate=0.025, mix=0.0, episode=False), rounds=2).state.weights
    assert all(torch.allclose(twice[name], tensor, atol=1e-5) for name, tensor in plain.items())


def test_only_foreign_amplitudes_are_taken_and_labels_stay():
    data = bars(8, [0, 1], 0)
    batch = Batch(normalise(data.inputs), data.labels, torch.arange(8))
    foreign = low_amplitudes(torch.ones(1, 1, 8, 8), 0)  # of a white image
    algorithm = FedDG(mix=1.0)
    styled = algorithm.styled(batch, foreign, torch.Generator().manual_seed(0))
    assert (styled.inputs.mean((1, 2, 3)) > batch.inputs.mean((1, 2, 3))).all()
    assert torch.equal(styled.labels, batch.labels)
    for other in (FedDG(mix=0.0).styled(batch, foreign, CONTEXT.generator), algorithm.styled(batch, foreign[:0], None)):
        assert other is batch


def test_mix_is_the_largest_share_of_a_foreign_amplitude():
    """With frequency 0 alone an image's mean goes that share of the way to the foreign one's."""
    batch = Batch(torch.zeros(200, 1, 8, 8), torch.zeros(200, dtype=torch.int64), torch.arange(200))
    foreign = low_amplitudes(torch.ones(1, 1, 8, 8), 0)
    for mix in (0.25, 1.0):
        styled = FedDG(mix=mix, band=0.0).styled(batch, foreign, torch.Generator().manual_seed(0))
        share = styled.inputs.mean((1, 2, 3))  # from 0 to 1
        assert 0 <= share.min() < 0.05 * mix
        assert 0.95 * mix < share.max() <= mix


def test_a_client_takes_all_others_amplitudes_and_none_of_its_own():
    taken: dict[int, list[torch.Tensor]] = {i: [] for i in range(4)}
    at_work: list[int] = []

    class Seen(FedDG):
        @client_handler
        def train_styled(self, client: Client, message: Styled) -> Update:
            at_work[:] = [client.id]
            return super().train_styled(client, message)

        def styled(self, batch: Batch, foreign: torch.Tensor, generator: torch.Generator) -> Batch:
            taken[at_work[0]].append(foreign)
            return super().styled(batch, foreign, generator)

    world = small_federation()
    run_rounds(Seen(**SMALL, band=0.3, bank_size=5), rounds=2, workers=1, federation=world)
    own = [{row.sum().item() for row in low_amplitudes((normalise(c.train.inputs) + 1) / 2, 2)} for c in world.clients]
    assert all(len(own[i] & own[j]) == 0 for i in range(4) for j in range(i))
    for i, seen in taken.items():
        assert seen
        for foreign in seen:
            sums = [row.sum().item() for row in foreign]
            assert [len(own[j].intersection(sums)) for j in range(4)] == [0 if j == i else 5 for j in range(4)]


def test_amplitudes_travel_once_and_nonsense_is_left_out():
    server, engine = scripted(clients=6, weights={"w": torch.zeros(1)})
    shared = {
        0: torch.ones(2, 1, 1, 1),
        1: torch.ones(2, 1, 3, 3),  # of another size
        2: torch.full((1, 1, 1, 1), 3.0),
        3: torch.ones(1, 1, 1, 1).double(),
        4: -torch.ones(1, 1, 1, 1),
        5: torch.ones(51, 1, 1, 1),  # more than bank_size
    }
    engine.script["share_spectra"] = lambda i, message, t: SharedSpectra(shared[i])
    bank = FedDG().exchange(server)
    assert [lost["client"] for lost in server.lost] == [1, 3, 4, 5]
    assert bank.owners.tolist() == [0, 0, 2]
    assert bank.amplitudes.flatten().tolist() == [1, 1, 3]


def test_it_learns_with_half_of_the_clients_and_keeps_the_bank():
    server = run_rounds(FedDG(**SMALL, band=0.3, bank_size=5), rounds=8, participation=0.5)
    assert server.evaluation.accuracy > 0.8
    assert server.state.bank.amplitudes.shape == (20, 1, 5, 5)
    kept = [state["bank"] for state in server.client_states.values()]
    assert all(torch.equal(bank.amplitudes, server.state.bank.amplitudes) for bank in kept if bank is not None)
    assert sum(bank is not None for bank in kept) == len(server.state.delivered.clients)


def test_a_client_without_images_shares_none():
    world = small_federation()
    world = replace(world, clients=(replace(world.clients[0], train=world.clients[0].train[:0]), *world.clients[1:]))
    lost: list[Any] = []
    server = run_rounds(FedDG(**SMALL), rounds=2, federation=world, after=lambda server, t: lost.extend(server.lost))
    assert lost == []
    assert server.state.bank.owners.unique().tolist() == [1, 2, 3]


def test_others_objectives_and_aggregations_work_and_its_data_leave_the_client():
    taken = run_rounds(FedDG(**SMALL, local="fedprox:mu=1", aggregation="fedadam"), rounds=2)
    assert taken.lost == []
    with refused("aggregation", "feddg"):
        run_rounds(FedDG(aggregation="dpfedavg"), rounds=1)


def test_rows_of_numbers_have_no_amplitudes(tmp_path: Path):
    data = (torch.randn(40, 6), torch.arange(40) % 2, torch.randn(10, 6), torch.arange(10) % 2)
    with refused("data", "feddg", "images as bytes"):
        fedfill.run("feddg", data=data, clients=2, rounds=1, out=tmp_path)
