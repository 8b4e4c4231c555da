"""FRAug's networks: what it takes, what it shares of them, and what it refuses."""

from pathlib import Path

import pytest
import torch
from tests.algorithms.fraug_world import INPUTS, LABELS, QUICK, WIDE, update_of
from tests.helpers import CLASSES, refused, run_rounds
from torch import Tensor, nn

import fedfill
from fedfill import tree
from fedfill.algorithms.fraug import FRAug
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.synthesis.embeddings import initial


def test_switches():
    both, real, prototypes, none = (
        run_rounds(FRAug(**QUICK, on_real=a, on_prototypes=b), rounds=2, model=WIDE).state.weights
        for a, b in ((True, True), (True, False), (False, True), (False, False))
    )
    assert len({tree.sha256(weights) for weights in (both, real, prototypes, none)}) == 4
    off = run_rounds(FRAug(**QUICK, synthetic_limit=0.0), rounds=2, model=WIDE).state.weights
    assert all(torch.equal(none[n], tensor) for n, tensor in off.items())  # the whole weight is the real loss's then


def test_without_the_transformation_the_generators_embeddings_are_used_as_they_are():
    update = update_of(personalised=False)
    before = weights_of(update.rtnet)
    for _ in range(2):
        update.classification(INPUTS, LABELS)
        update.generation(INPUTS, LABELS)
    assert all(torch.equal(t, before[n]) for n, t in weights_of(update.rtnet).items())
    with torch.no_grad():
        update.generator.eval()
        state = update.stream.get_state()
        found = update.embeddings(torch.full((8, 16), 1e6), LABELS, 0.1)
        update.stream.set_state(state)
        alone = update.generator(torch.randn(8, 8, generator=update.stream), LABELS)
    assert torch.equal(found[0][0], alone)
    assert max(float(made.max()) for made, _ in found) < 100


def test_a_generator_that_nothing_is_made_with_is_not_trained():
    """Not by a bit, statistics of its batch norm included; nor is the transformation."""
    settings = {**QUICK, "on_real": False, "on_prototypes": False}
    once, thrice = (run_rounds(FRAug(**settings), rounds=n, model=WIDE) for n in (1, 3))
    model = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(**WIDE), seed=0)
    drawn = initial(
        FRAug().resolved(rounds=1, model=model, inputs=INPUTS[:1]).makers(model, CLASSES)[0], once.stream("generator")
    )
    assert drawn.keys() == once.state.generator.keys()
    for server in (once, thrice):
        assert all(torch.equal(tensor, server.state.generator[name]) for name, tensor in drawn.items())
    for i, state in once.client_states.items():
        later = thrice.client_states[i]["private"].rtnet
        assert all(torch.equal(tensor, later[name]) for name, tensor in state["private"].rtnet.items())
    # with either of the two it is
    for one in ("on_real", "on_prototypes"):
        trained = run_rounds(FRAug(**{**settings, one: True}), rounds=1, model=WIDE).state.generator
        assert not torch.equal(trained["layers.0.weight"], drawn["layers.0.weight"])


def test_it_takes_adam():
    settings = {**QUICK, "optimizer": "adam", "learning_rate": 0.002}
    server = run_rounds(FRAug(**settings), rounds=2, model=WIDE)
    assert server.lost == []
    kept = server.client_states[0]["private"].momenta
    assert [len(state) for state in kept][1:] == [8, 8]
    assert all({"exp_avg", "exp_avg_sq", "step"} <= set(own) for state in kept for own in state.values())
    # the model's, too: Adam's steps are as long as its rate, whatever the gradient; four of them since the first round
    assert {float(own["step"]) for own in kept[0].values()} == {4.0}
    first = update_of(optimizer="adam", learning_rate=0.01, generator_rate=0.002, rtnet_rate=0.0005)
    first.seen = torch.ones(CLASSES, dtype=torch.bool)
    nets = {"model": (first.model, 0.01), "generator": (first.generator, 0.002), "rtnet": (first.rtnet, 0.0005)}
    before = {name: [p.detach().clone() for p in net.parameters()] for name, (net, _) in nets.items()}
    first.classification(INPUTS, LABELS)
    first.generation(INPUTS, LABELS)
    for name, (net, rate) in nets.items():
        longest = max(
            float((p.detach() - old).abs().max()) for p, old in zip(net.parameters(), before[name], strict=True)
        )
        assert longest == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize(("every", "steps"), [(1, 5), (2, 3), (5, 1), (9, 1)])
def test_generator_every(every: int, steps: int):
    settings = {**QUICK, "local_steps": 5, "generator_every": every}
    server = run_rounds(FRAug(**settings), rounds=1, model=WIDE)
    assert int(server.state.generator["layers.1.num_batches_tracked"]) == steps
    counted = {int(s["private"].rtnet["layers.1.num_batches_tracked"]) for s in server.client_states.values()}
    assert counted == {2 * steps}  # on real embeddings and on prototypes


def test_same_bits_on_one_and_two_workers():
    one, two = (
        run_rounds(FRAug(**QUICK, generator_norm="local"), rounds=3, model=WIDE, workers=n, participation=0.75)
        for n in (1, 2)
    )
    for name in ("weights", "generator"):
        assert tree.sha256(getattr(one.state, name)) == tree.sha256(getattr(two.state, name))
    for i, state in one.client_states.items():
        assert tree.sha256(state["private"].rtnet) == tree.sha256(two.client_states[i]["private"].rtnet)
    assert one.client_states.keys() == two.client_states.keys()


def test_clients_learn_their_classes_and_torchs_generator_stays():
    torch.manual_seed(4)
    before = torch.get_rng_state()
    server = run_rounds(
        FRAug(**{**QUICK, "local_steps": 5}), rounds=8, model={**WIDE, "latent_activation": "relu"}, workers=1
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert min(server.evaluation.accuracy_by_client) > 0.9


def test_a_network_without_normalisation_is_shared_whole(tmp_path: Path):
    fedfill.run("fraug", clients=2, rounds=2, data_fraction=0.1, local_steps=2, model="cnn2", out=tmp_path)
    kept = tree.from_bytes((tmp_path / "checkpoint" / "state.safetensors").read_bytes())["clients"]
    assert [state["own"] for state in kept.values()] == [{}, {}]
    assert all(bool(state["private"].seen.any()) for state in kept.values())


class Particular(nn.Module):
    """That takes images alone, and has a part that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Shares(), nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8))
        self.classifier = nn.Linear(8, 10)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.encoder(x))


class Shares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if float(x.abs().max()) > 1:
            raise IndexError("no image")
        return x


def test_the_model_is_tried_on_what_samples_may_be(tmp_path: Path):
    given = Particular()
    fedfill.run("fraug", model=given, clients=2, rounds=1, data_fraction=0.1, local_steps=1, out=tmp_path)
    before = weights_of(given)
    FRAug().resolved(rounds=1, model=given, inputs=torch.zeros(1, 1, 8, 8, dtype=torch.uint8))
    assert given.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(given).items())


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8))
        self.classifier = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.encoder(x))


class Between(nn.Module):
    """With a layer that the two parts leave out."""

    def __init__(self, zero: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8))
        self.neck = nn.Linear(8, 8)
        self.classifier = nn.Linear(8, 10)
        if zero:  # all scores are 0 at first, with the neck and without
            nn.init.zeros_(self.classifier.weight)
            nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.neck(self.encoder(x)))


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Pair(nn.Module):
    """Whose encoder makes more than embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), Twice())
        self.classifier = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.encoder(x)[0])


class Tokens(nn.Module):
    """Whose pooling is no part of its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.Unflatten(1, (3, 8)))
        self.classifier = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.encoder(x).mean(1))


class Flat(nn.Module):
    """Whose forward changes the samples before the encoder sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8))
        self.classifier = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.encoder(x.flatten(1)))


@pytest.mark.parametrize(
    ("given", "setting", "facts"),
    [
        ({"model": Flat()}, "model", ["Flat", "does not take x (RuntimeError)"]),
        ({"model": Deep()}, "model", ["linear head named classifier", "Deep has a Sequential there"]),
        ({"model": "cnn2bn", "projection": 5}, "model", ["Classifier has a projection"]),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10))}, "model", ["Sequential has no 'encoder'"]),
        ({"model": Between()}, "model", ["Between makes other scores"]),
        ({"model": Between(zero=True)}, "model", ["Between makes other scores"]),
        ({"model": Pair()}, "model", ["Pair makes a tuple", "shape [samples, 8]"]),
        ({"model": Tokens()}, "model", ["Tokens makes embeddings of shape [1, 3, 8]"]),
        ({"model": "cnn2bn", "embedding_latent": 10**12}, "embedding_latent", ["1000000000000", "at most 65536"]),
        ({"model": "cnn2bn", "local": "fedprox"}, "local", ["fedprox with fraug"]),
        ({"model": "cnn2bn", "aggregation": "fednova"}, "aggregation", ["fednova with fraug"]),
        (
            {"model": "cnn2bn", "residual_schedule": "constant", "residual_gamma": 0.1},
            "residual_gamma",
            ["found 0.1", "residual_schedule=constant"],
        ),
        (
            {"model": "cnn2bn", "residual_schedule": "constant", "residual_gamma": 0},
            "residual_gamma",
            ["found 0 ", "residual_schedule=constant"],
        ),
        ({"model": "cnn2bn", "synthetic_limit": 2}, "synthetic_limit", ["found 2", "at most 1"]),
    ],
)
def test_what_is_refused(given: dict, setting: str, facts: list[str]):
    with refused(setting, *facts) as error:
        fedfill.run("fraug", clients=3, rounds=1, data_fraction=0.2, **given)
    assert "\n" not in str(error.value)
