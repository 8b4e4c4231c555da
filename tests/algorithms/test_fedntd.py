"""FedNTD: the distance by hand, and whose scores it compares."""

import pytest
import torch
from tests.helpers import run_rounds, start_of
from torch import nn

from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.fedbn import FedBN
from fedfill.algorithms.fedntd import FedNTD, not_true_distance
from fedfill.algorithms.fedvae import FedVAE
from fedfill.algorithms.naivemix import NaiveMix
from fedfill.data.samples import Batch
from fedfill.training.fit import Context
from fedfill.training.losses import cross_entropy

SMALL = {"local_epochs": 2, "batch_size": 8}


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, 0.1201), (3.0, 0.1244)])
def test_the_distance_by_hand(temperature: float, expected: float):
    """At 1: the two false classes have 1/2 each at the server and 1/(1 + e^-1) here."""
    z, received = torch.tensor([[2.0, 1.0, 0.0]]), torch.ones(1, 3)
    assert not_true_distance(z, received, torch.tensor([0]), temperature).item() == pytest.approx(expected, abs=1e-4)
    other = z + torch.tensor([9.0, 0.0, 0.0])  # what is said of the true class is free
    assert not_true_distance(other, received, torch.tensor([0]), temperature).item() == pytest.approx(
        expected, abs=1e-4
    )


def test_the_distance_is_from_the_global_model_and_not_towards_it():
    z, received = torch.tensor([[0.0, 3.0, 0.0]]), torch.zeros(1, 3)
    p, q = torch.tensor([0.5, 0.5]), torch.softmax(torch.tensor([3.0, 0.0]), 0)
    distance = not_true_distance(z, received, torch.tensor([0]), 1.0).item()
    assert distance == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-6)
    assert distance != pytest.approx((q * (q / p).log()).sum().item(), abs=0.1)


def test_with_two_classes_there_is_one_false_one_and_no_distance():
    assert not_true_distance(torch.randn(4, 2), torch.randn(4, 2), torch.tensor([0, 1, 0, 1]), 1.0).item() == 0


def batch_and_model() -> tuple[Batch, nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
    received = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return Batch(torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]), torch.arange(6)), model, received


def test_at_the_received_weights_it_adds_nothing_in_evaluation_mode():
    """The global model is asked in evaluation mode; so is the one in training here, and both are the same."""
    batch, model, received = batch_and_model()
    model.eval()
    objective = FedNTD().objective(start_of(received), lambda m, b, context: cross_entropy(m, b))
    loss = objective(model, batch, Context(received, torch.Generator(), 0))
    assert loss.item() == cross_entropy(model, batch).item()


def test_the_loss_is_the_cross_entropy_and_beta_times_the_distance():
    batch, model, received = batch_and_model()
    theirs = {name: w + 0.5 * torch.randn(w.shape) if w.is_floating_point() else w for name, w in received.items()}
    theirs["1.running_var"] = received["1.running_var"]
    z = model.eval()(batch.inputs)
    model.load_state_dict(theirs)
    z_global = model(batch.inputs)
    model.load_state_dict(received)
    objective = FedNTD(beta=3.0, temperature=2.0).objective(start_of(theirs), lambda m, b, c: cross_entropy(m, b))
    found = objective(model, batch, Context(theirs, torch.Generator(), 0))
    distance = not_true_distance(z, z_global, batch.labels, 2.0)
    assert distance > 0.01
    assert found.item() == pytest.approx((cross_entropy(model, batch) + 3 * distance).item(), rel=1e-6)


def test_the_model_keeps_its_mode_its_statistics_and_the_global_models():
    batch, model, received = batch_and_model()
    before = {name: tensor.clone() for name, tensor in received.items()}
    objective = FedNTD().objective(start_of(received), lambda m, b, context: cross_entropy(m, b))
    objective(model.train(), batch, Context(received, torch.Generator(), 0)).backward()
    assert all(layer.training for layer in model.modules())
    assert model[1].num_batches_tracked == 1  # one pass of the batch in training mode
    assert all(torch.equal(received[name], tensor) for name, tensor in before.items())


def test_without_beta_it_is_fedavg_to_the_bit():
    plain = run_rounds(FedAvg(**SMALL), rounds=2).state.weights
    none = run_rounds(FedNTD(**SMALL, beta=0.0), rounds=2).state.weights
    assert all(torch.equal(none[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize("kind", [FedVAE, NaiveMix, FedBN])
def test_others_take_it(kind: type):
    """Of a VAE's loss, of mixed inputs, and with layers of the client's own, which the server does not send."""
    settings = {**SMALL, **({"group_size": 8} if kind is NaiveMix else {})}
    model = {"width": "wide"} if kind is FedBN else {}
    plain = run_rounds(kind(**settings), rounds=2, model=model)
    taken = run_rounds(kind(**settings, local="fedntd:beta=3"), rounds=2, model=model)
    assert taken.lost == []
    assert any(not torch.equal(taken.state.weights[n], tensor) for n, tensor in plain.state.weights.items())
