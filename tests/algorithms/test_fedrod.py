"""FedRoD: a balanced loss for what is shared, and a head beside it that never touches it."""

import pytest
import torch
from tests.helpers import CLASSES, bars, refused, run_rounds, small_federation
from torch import nn
from torch.nn import functional

from fedfill.algorithms import fedrod
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.fedrod import FedRoD, both_risks
from fedfill.data.samples import Batch, normalise
from fedfill.models.networks import ModelSettings, build
from fedfill.training.fit import Context

QUICK = {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.01}
NOW = Context({}, torch.Generator(), 0)


class Scores(nn.Module):
    """Scores that are the inputs, and a personal head beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier, self.personal = nn.Linear(3, 3), nn.Linear(3, 3)
        with torch.no_grad():
            self.classifier.weight.copy_(torch.eye(3))
            for parameter in (self.classifier.bias, *self.personal.parameters()):
                parameter.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(x)  # type: ignore[no-any-return]


def test_a_loss_worked_by_hand():
    """Scores (2, 1, 0) of a sample of class 1, samples 8, 2 and 0: ln((8 e^2 + 2 e) / 2 e), and the plain cross-entropy."""
    batch = Batch(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([1]), torch.tensor([0]))
    loss = both_risks(torch.tensor([8, 2, 0]))(Scores(), batch, NOW)
    plain = functional.cross_entropy(batch.inputs, batch.labels)
    assert float((loss - plain).detach()) == pytest.approx(2.4743, abs=1e-4)


def network() -> nn.Module:
    model = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), needs=("classifier", "personal"), seed=0)
    assert not any(bool(parameter.any()) for parameter in model.personal.parameters())
    return model


def test_each_risk_has_its_own_parameters():
    """With a personal head of any size the gradient of what is shared is that of the balanced loss alone, to the bit."""
    data = bars(16, [0, 1], 0)
    batch, counts = Batch(normalise(data.inputs), data.labels, torch.arange(16)), torch.tensor([8, 8, 0, 0])
    found = []
    for size in (0.0, 3.0):
        model = network()
        model.personal.weight.data += size * torch.arange(CLASSES)[:, None]
        both_risks(counts)(model, batch, NOW).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]) is not name.startswith("personal.")
    absent = found[0]["classifier.weight"][2:]
    assert not absent.any()  # rows of classes that the client lacks


def test_what_is_shared_does_not_depend_on_the_personal_heads(monkeypatch: pytest.MonkeyPatch):
    server = run_rounds(FedRoD(**QUICK), rounds=2)
    risks = both_risks

    def without(counts):
        loss = risks(counts)

        def generic(model, batch, context):
            value = loss(model, batch, context)
            return value + 0.0 * sum(p.sum() for p in model.personal.parameters())

        def still(model, batch, context):
            model.personal.requires_grad_(False)
            try:
                return generic(model, batch, context)
            finally:
                model.personal.requires_grad_(True)

        return still

    monkeypatch.setattr(fedrod, "both_risks", without)
    other = run_rounds(FedRoD(**QUICK), rounds=2)
    assert all(torch.equal(other.state.weights[name], w) for name, w in server.state.weights.items())
    moved = [bool(state["own"]["personal.weight"].any()) for state in server.client_states.values()]
    still = [bool(state["own"]["personal.weight"].any()) for state in other.client_states.values()]
    assert (moved, still) == ([True] * 4, [False] * 4)


def test_clients_with_all_classes_alike_are_fedavgs_but_for_rounding():
    federation = small_federation(per_client=4)  # ten samples of each class
    settings = {**QUICK, "optimizer": "sgd"}
    plain = run_rounds(FedAvg(**settings), rounds=2, federation=federation)
    server = run_rounds(FedRoD(**settings), rounds=2, federation=federation)
    assert all(torch.allclose(server.state.weights[name], w, atol=1e-4) for name, w in plain.state.weights.items())
    assert server.costs.legs == plain.costs.legs  # the personal heads never travel


def test_a_clients_model_is_both_heads_on_one_body():
    server = run_rounds(FedRoD(**QUICK), rounds=2)
    x = normalise(bars(8, [0, 1, 2, 3], 5).inputs)
    for state in server.client_states.values():
        model = network().eval()
        model.load_state_dict({**server.state.weights, **state["own"]})
        z = model.encoder(x)
        wanted = model.classifier(z) + model.personal(z)
        model.load_state_dict(FedRoD().personal_weights(state, server.state.weights))
        assert torch.allclose(model(x), wanted, atol=1e-5)
    assert FedRoD(judged="generic").personal_weights(state, server.state.weights) is server.state.weights
    assert FedRoD().personal_weights({"own": None}, server.state.weights) is server.state.weights


def test_slips():
    with refused("local", "fedlc with fedrod"):
        run_rounds(FedRoD(local="fedlc"), rounds=1)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("classifier", nn.Linear(3, 3, bias=False)),
        ("personal", nn.Linear(3, 3, bias=False)),
        ("personal", nn.Linear(2, 3)),
        ("personal", nn.Sequential(nn.Linear(3, 3))),
    ],
)
def test_heads_that_cannot_be_added_up_are_refused(name: str, head: nn.Module):
    model = Scores()
    setattr(model, name, head)
    with refused("model", "fedrod", "biases", "Scores"):
        FedRoD().resolved(rounds=1, model=model, inputs=torch.zeros(1, 3))
    FedRoD().resolved(rounds=1, model=Scores(), inputs=torch.zeros(1, 3))
