"""NaiveMix: means by hand, one exchange, and the mixed loss."""

import math

import pytest
import torch
from tests.helpers import bars, run_rounds, scripted
from torch import nn

from fedfill.algorithms import Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.naivemix import Means, NaiveMix, SharedMeans, group_means
from fedfill.data.samples import Batch, Samples
from fedfill.protocol.client import State


def test_means_by_hand():
    data = Samples(torch.tensor([[0.0], [2.0], [4.0]]), torch.tensor([0, 1, 1]))
    means = group_means(data, 3, 5, torch.Generator().manual_seed(0))  # fewer samples than a group has
    assert means.inputs.tolist() == [[2.0]]
    assert means.targets[0].tolist() == pytest.approx([1 / 3, 2 / 3, 0])


@pytest.mark.parametrize(("n", "size", "groups"), [(40, 8, 5), (47, 8, 5), (7, 8, 1), (8, 1, 8)])
def test_every_sample_is_in_one_group_and_no_group_is_smaller_than_asked(n: int, size: int, groups: int):
    data = bars(n, [0, 1], 0)
    means = group_means(data, 4, size, torch.Generator().manual_seed(0))
    assert means.inputs.shape == (groups, 1, 8, 8)
    assert torch.allclose(means.targets.sum(1), torch.ones(groups))
    share = means.targets[:, 0]  # groups differ by one sample at most, so that the mean of shares is near the share
    assert abs(share.mean().item() - data.counts(4)[0] / n) < 0.1


def test_images_are_mixed_as_the_network_sees_them():
    data = Samples(torch.tensor([[[[0]]], [[[255]]]], dtype=torch.uint8), torch.tensor([0, 1]))
    means = group_means(data, 2, 2, torch.Generator().manual_seed(0))
    assert means.inputs.flatten().tolist() == pytest.approx([0.0], abs=1e-6)


def test_mixed_loss_by_hand():
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0], [1.0]]))
    batch = Batch(torch.tensor([[2.0]]), torch.tensor([1]), torch.tensor([0]))
    loss = NaiveMix(mix=0.25).mixed_loss(model, batch, torch.tensor([6.0]), torch.tensor([0.5, 0.5]))
    x = 0.75 * 2 + 0.25 * 6  # scores 0 and 3
    entropy = [math.log(1 + math.exp(x)), math.log(1 + math.exp(-x))]
    assert loss.item() == pytest.approx(0.75 * entropy[1] + 0.25 * (entropy[0] + entropy[1]) / 2, rel=1e-6)


def test_means_are_exchanged_once_and_sent_until_they_have_arrived():
    server, engine = scripted(clients=3, weights={"w": torch.tensor([0.0])})
    server.state = State(NaiveMix().server_state(server.state.weights))
    means = Means(torch.zeros(2, *server.sample.inputs.shape[1:]), torch.zeros(2, 4))
    engine.script["share_means"] = lambda i, message, t: SharedMeans(means)
    lost = {(0, 2)}

    def train(i, message, t):
        if (t, i) in lost:
            raise RuntimeError("gone")
        return Update({"w": torch.tensor([1.0])}, 10)

    engine.script["train_mixed"] = train
    for t in range(3):
        server.begin(t)
        NaiveMix().round(server, t)
    assert [(t, i) for t, handler, i, _ in engine.sent if handler == "share_means"] == [(0, 2), (0, 1), (0, 0)]
    sent = {(t, i) for t, handler, i, message in engine.sent if handler == "train_mixed" and message.means is not None}
    assert sent == {(0, 0), (0, 1), (0, 2), (1, 2)}
    assert len(server.state.means.inputs) == 6


def test_samples_are_mixed_with_everybodys_means_each_with_its_own_target():
    mixed = []

    class Watched(NaiveMix):
        def mixed_loss(self, model, batch, mean, target):
            mixed.append((mean, target))
            return super().mixed_loss(model, batch, mean, target)

    means = run_rounds(Watched(local_epochs=1, batch_size=8, group_size=20), rounds=1).state.means
    drawn = set()
    for mean, target in mixed:
        (k,) = [k for k, other in enumerate(means.inputs) if torch.equal(mean, other)]
        assert torch.equal(target, means.targets[k])
        drawn.add(k)
    assert len(means.inputs) == 8
    assert len(drawn) > 4


def test_without_mixing_it_is_fedavg():
    settings = {"local_epochs": 2, "batch_size": 8}
    plain = run_rounds(FedAvg(**settings), rounds=2, participation=0.5).state.weights
    mixed = run_rounds(NaiveMix(**settings, mix=0.0, group_size=8), rounds=2, participation=0.5).state.weights
    assert all(torch.allclose(mixed[n], plain[n], atol=1e-6) for n in plain)


def test_the_account_names_the_means():
    server = run_rounds(NaiveMix(local_epochs=1, group_size=8), rounds=1)
    account = server.ledger.account(1e-5)
    assert "SharedMeans.means" in {entry["released"] for entry in account["entries"]}
    assert account["total_epsilon"] is None


def test_means_of_another_shape_are_their_senders_loss_alone():
    server, engine = scripted(clients=3, weights={"w": torch.tensor([0.0])})
    server.state = State(NaiveMix().server_state(server.state.weights))
    shape = server.sample.inputs.shape[1:]
    sent = [
        Means(torch.zeros(2, 5), torch.zeros(2, 4)),
        Means(torch.ones(2, *shape), torch.ones(2, 4)),
        Means(torch.ones(1, *shape), torch.ones(1, 9)),
    ]
    engine.script["share_means"] = lambda i, message, t: SharedMeans(sent[i])
    found = NaiveMix().exchange(server)
    assert (len(found.inputs), len(found.targets)) == (2, 2)
    assert [lost["client"] for lost in server.lost] == [0, 2]
