"""FedProto: mean embeddings are all that crosses, and clients pull theirs towards the global ones."""

from dataclasses import replace

import pytest
import torch
from tests.helpers import CLASSES, refused, run_rounds, scripted, small_federation
from torch import nn

import fedfill
from fedfill.algorithms.fedproto import FedProto, OwnPrototypes, Prototypes
from fedfill.algorithms.local import Local
from fedfill.data.samples import Batch, normalise
from fedfill.models.networks import ModelSettings, build
from fedfill.training.fit import Context

QUICK = {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.01}
NOW = Context({}, torch.Generator(), 0)


def test_without_a_weight_each_client_is_alone_to_the_bit():
    alone, own = (run_rounds(a, rounds=3) for a in (Local(**QUICK), FedProto(**QUICK, proto_weight=0)))
    for i in range(4):
        weights = alone.client_states[i]["weights"]
        assert all(torch.equal(own.client_states[i]["weights"][name], w) for name, w in weights.items())
    judged = run_rounds(FedProto(**QUICK, proto_weight=0, predict="classifier"), rounds=3).evaluation
    assert judged == alone.evaluation


def test_prototypes_are_means_by_samples_and_stay_where_nobody_has_the_class():
    server, engine = scripted(clients=2, weights={"classifier.weight": torch.zeros(4, 2)})
    server.state = type(server.state)(FedProto().server_state(server.initial))
    replies = [
        OwnPrototypes(torch.tensor([[1.0, 0.0], [2.0, 2.0]]), [0, 1], [1, 5]),
        OwnPrototypes(torch.tensor([[4.0, 3.0]]), [0], [2]),
    ]
    engine.script["train"] = lambda i, message, t: replies[i]
    FedProto().round(server, 0)
    assert server.state.prototypes.tolist() == [[3.0, 2.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    assert server.state.present.tolist() == [True, True, False, False]
    replies[0] = OwnPrototypes(torch.tensor([[7.0, 7.0]]), [2], [3])
    FedProto().round(server, 1)
    assert server.state.prototypes.tolist() == [[4.0, 3.0], [2.0, 2.0], [7.0, 7.0], [0.0, 0.0]]
    assert server.state.present.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("means", "classes", "counts"),
    [
        ([[9.0, 9.0]], [4], [1]),  # of 0 to 3
        ([[9.0, 9.0]], [-1], [1]),  # would be the last one
        ([[9.0, 9.0], [9.0, 9.0]], [0, 0], [1, 1]),
        ([[9.0, 9.0]], [0], [-3]),
        ([[9.0, 9.0]], [0], [2**60]),
        ([[9.0, 9.0]], [0], [1, 1]),
        ([[9.0, 9.0]], [0, 1], [1, 1]),
        ([[9.0, 9.0, 9.0]], [0], [1]),
    ],
)
def test_prototypes_that_make_no_sense_are_left_out(means: list[list[float]], classes: list[int], counts: list[int]):
    server, engine = scripted(clients=2, weights={"classifier.weight": torch.zeros(4, 2)})
    server.state = type(server.state)(FedProto().server_state(server.initial))
    replies = [
        OwnPrototypes(torch.tensor(means), classes, counts),
        OwnPrototypes(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [3, 0], [2, 1]),
    ]
    engine.script["train"] = lambda i, message, t: replies[i]
    FedProto().round(server, 0)
    assert [lost["client"] for lost in server.lost] == [0]
    assert server.state.prototypes.tolist() == [[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [1.0, 2.0]]
    assert server.state.present.tolist() == [True, False, False, True]


def test_what_clients_send_is_the_mean_of_what_their_classifier_receives():
    """With its number of samples of each class, which differ from client to client."""
    world = small_federation()
    world = replace(world, clients=tuple(replace(c, train=c.train[: 40 - 11 * i]) for i, c in enumerate(world.clients)))
    run = run_rounds(FedProto(**QUICK), rounds=1, federation=world)
    z = []
    for i, client in enumerate(world.clients):
        model = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), seed=0).eval()
        model.load_state_dict(run.client_states[i]["weights"])
        data = client.train
        with torch.no_grad():
            z.append((model.encoder(normalise(data.inputs)), data.labels))
    for k in range(CLASSES):
        mean = torch.cat([codes[labels == k] for codes, labels in z]).mean(0)
        assert torch.allclose(run.state.prototypes[k], mean, atol=1e-5)


class Identity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(2, 3)
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("distance", "expected"), [("squared", (2 + 0) / 2), ("mean", (1 + 0) / 2)])
def test_a_distance_worked_by_hand(distance: str, expected: float):
    """Embeddings (1, 2) of class 0, whose prototype is (0, 1), and (5, 5) of class 2, which has none."""
    batch = Batch(torch.tensor([[1.0, 2.0], [5.0, 5.0]]), torch.tensor([0, 2]), torch.arange(2))
    known = Prototypes(torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]), torch.tensor([True, False, False]))
    algorithm, model = FedProto(proto_weight=3, proto_distance=distance), Identity()
    term = algorithm.near(known)(model, batch, NOW) - algorithm.loss(model, batch, NOW)
    assert float(term.detach()) == pytest.approx(3 * expected, rel=1e-5)


def test_the_last_layer_decides_for_the_nearest_prototype_among_those_that_there_are():
    stream = torch.Generator().manual_seed(0)
    c, z = torch.randn(3, 2, generator=stream), torch.randn(50, 2, generator=stream)
    for absent in (None, 1):
        present = torch.tensor([absent != k for k in range(3)])
        weights = {**Identity().state_dict(), "prototypes": c, "present": present}
        model = Identity()
        model.load_state_dict(FedProto().personal_weights({}, weights))
        distances = torch.cdist(z, c).masked_fill(~present, float("inf"))
        assert torch.equal(model(z).argmax(1), distances.argmin(1))
        assert not FedProto(predict="classifier").personal_weights({}, weights)["classifier.weight"].any()


def test_participation_and_workers(tmp_path):
    options = {
        "clients": 4,
        "rounds": 3,
        "data_fraction": 0.2,
        "participation": 0.5,
        "local_epochs": 1,
        "partition": "classes:3",
    }
    one, two = (
        fedfill.run("fedproto", **options, workers=n, out=tmp_path / str(n)).summary["weights_sha256"] for n in (1, 2)
    )
    assert one == two


def test_slips():
    model = nn.Sequential()
    model.classifier = nn.Linear(64, 4, bias=False)
    with refused("model", "fedproto", "biases"):
        FedProto().resolved(rounds=1, model=model, inputs=torch.zeros(1, 64))
