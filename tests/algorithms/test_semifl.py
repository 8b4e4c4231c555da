"""SemiFL: the round, the losses and the statistics by hand, who drops out, and what the server is given."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers import bars, refused, run_rounds, scripted, small_federation, weighted_mean
from torch import nn

import fedfill
from fedfill.algorithms import Broadcast, semifl
from fedfill.algorithms.semifl import Labelled, SemiFL, Trained, recomputed, statistics_of
from fedfill.data.federation import Federation
from fedfill.data.samples import Batch, Samples, draw, fits
from fedfill.errors import checked
from fedfill.models.networks import ModelSettings, build
from fedfill.protocol.client import Client, State
from fedfill.streams import numpy_stream
from fedfill.training.fit import Context, Fit, Fitted
from fedfill.training.mixup import draw_lambda
from fedfill.training.pseudo_labels import predicted

SMALL = {"learning_rate": 0.05, "local_steps": 2, "unlabelled_batch_size": 8, "batch_size": 8, "server_steps": 3}


def entropy(scores: list[float], label: int) -> float:
    return math.log(sum(map(math.exp, scores))) - scores[label]


def stub(monkeypatch: pytest.MonkeyPatch, weak: float, strong: float) -> None:
    monkeypatch.setattr(semifl, "weak", lambda images, generator, flip: weak * images)
    monkeypatch.setattr(semifl, "strong", lambda images, generator, flip: strong * images)


def test_fix_and_mix_by_hand(monkeypatch: pytest.MonkeyPatch):
    """A network whose scores are its inputs, which weak augmentation doubles and strong halves."""
    stub(monkeypatch, 2.0, 0.5)
    x, y = torch.tensor([[0.0, 4.0], [3.0, 0.0]]), torch.tensor([1, 0])
    guessed = Samples(torch.tensor([[0.0, 4.0], [3.0, 0.0], [0.1, 0.0], [0.0, 0.2]]), torch.tensor([1, 0, 0, 1]))
    stream, again = (torch.Generator().manual_seed(2) for _ in range(2))
    found = SemiFL().fix_mix(guessed)(nn.Identity(), Batch(x, y, torch.arange(2)), Context({}, stream, 0))

    others, labels = draw(guessed, 2, again)
    lam = draw_lambda(0.75, again)
    assert 0 < lam < 1
    assert float(others.max(1).values.min()) < 1  # one that nobody is sure of is mixed in
    fix = (entropy([0.0, 2.0], 1) + entropy([1.5, 0.0], 0)) / 2
    mix = 0.0
    for a, label, b, other in zip(x.tolist(), y.tolist(), others.tolist(), labels.tolist(), strict=True):
        m = [2 * (lam * u + (1 - lam) * v) for u, v in zip(a, b, strict=True)]
        mix += (lam * entropy(m, label) + (1 - lam) * entropy(m, other)) / 2
    assert found.item() == pytest.approx(fix + mix, rel=1e-5)


class One(nn.Module):
    """A network of one parameter, and one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.register_buffer("b", torch.zeros(1))


def test_rounds_by_hand():
    """v = v/2 + (w - mean), w = w - v, for clients that came back; the server's training adds 0.5 each time."""
    server, engine = scripted(3, {"w": torch.tensor([1.0]), "b": torch.tensor([0.0])}, model=One())
    algorithm = SemiFL(**SemiFL.paper[""])
    server.state = State(algorithm.server_state(server.state.weights))
    server.state.pool = bars(20, [0, 1], 0)
    trained: list[Any] = []

    def fit(weights: Any, loss: Any, training: Any, *, data: Samples) -> Any:
        assert loss == algorithm.weakly
        trained.append((float(weights["w"]), training.steps, training.batch_size, len(data)))
        return SimpleNamespace(weights={**weights, "w": weights["w"] + 0.5})

    server.fit = fit  # type: ignore[method-assign]
    answers = [{0: 3.0, 2: 5.0}, {}, {1: 7.0}]

    def train(i: int, message: Any, t: int) -> Trained:
        if i not in answers[t]:
            return Trained(None, 0)
        return Trained({"w": torch.tensor([answers[t][i]]), "b": torch.tensor([float(t + 1)])}, 4)

    engine.script["train_confident"] = train
    seen = []
    for t in range(3):
        server.begin(t)
        algorithm.round(server, t)
        seen.append((float(server.state.weights["w"]), float(server.state.weights["b"]), server.notes["confident"]))
    # mean 4: v = -3, w = 4, then 4.5; nobody: 4.5, then 5; mean 7: v = -1.5 - 2 = -3.5, w = 8.5, then 9
    assert trained == [(4.0, 40, 16, 20), (4.5, 40, 16, 20), (8.5, 40, 16, 20)]
    assert [s[0] for s in seen] == [4.5, 5.0, 9.0]
    assert [s[1] for s in seen] == [1.0, 1.0, 3.0]  # buffers are averaged, and stay where nobody came back
    assert [s[2] for s in seen] == [{"0": 4, "1": 0, "2": 4}, {"0": 0, "1": 0, "2": 0}, {"0": 0, "1": 4, "2": 0}]
    assert server.state.velocity["w"].item() == -3.5
    assert "b" not in server.state.velocity


def asked(scores: torch.Tensor, tau: float) -> Any:
    """What a client does: the request for training that it makes, or its reply where it makes none."""
    client = Client(
        id=0, round=0, data=Samples(scores[:1], torch.tensor([0])), classes=2, state=State({}), initial={}, seed=0,
        resident=lambda weights: nn.Identity(), fit=stop_at, unlabelled=Samples(scores, torch.full((len(scores),), -1)),
    )  # fmt: skip
    try:
        return SemiFL(tau=tau, **SemiFL.paper[""]).train_confident(client, Broadcast({}))
    except StopIteration as stopped:
        return stopped.value


def stop_at(request: Fit) -> Fitted:
    """In place of a training: the handler ends here."""
    raise StopIteration(request)


def test_who_is_not_sure_of_two_samples_drops_out(monkeypatch: pytest.MonkeyPatch):
    mixed: list[list[int]] = []
    original = SemiFL.fix_mix
    monkeypatch.setattr(
        SemiFL, "fix_mix", lambda self, guessed: mixed.append(guessed.labels.tolist()) or original(self, guessed)
    )
    scores = torch.tensor([[0.0, 5.0], [0.2, 0.0], [2.0, 0.0]])  # probabilities 0.993, 0.550, 0.881
    for tau in (0.9, 1.0):
        assert asked(scores, tau) == Trained(None, 0)
    request = asked(scores, 0.8)
    assert isinstance(request, Fit)
    assert request.data.inputs.tolist() == scores[[0, 2]].tolist()
    assert request.data.labels.tolist() == [1, 0]
    assert mixed == [[1, 0, 0]]  # those that nobody is sure of are mixed in
    assert (request.training.batch_size, request.training.steps, request.training.learning_rate) == (64, 40, 0.03)
    assert asked(scores[:0], 0.0) == Trained(None, 0)


def test_the_server_is_given_all_labelled_samples_once_and_the_account_says_so():
    server = run_rounds(SemiFL(**SMALL), 3, labelled=10)
    members = [c.with_labels(10, numpy_stream(0, "labelled", i)) for i, c in enumerate(small_federation().clients)]
    assert torch.equal(server.state.pool.inputs, torch.cat([member.train.inputs for member in members]))
    assert torch.equal(server.state.pool.labels, torch.cat([member.train.labels for member in members]))
    assert server.costs.legs["share"] == [0, 4 * (10 * (64 + 8) + 8)]
    account = server.ledger.account()
    entry = next(entry for entry in account["entries"] if entry["released"] == "Labelled.samples")
    assert "raw data leave" in entry["mechanism"]
    assert (entry["times"], account["total_epsilon"]) == (1, None)


def test_with_a_threshold_that_nobody_reaches_the_server_trains_alone():
    one, other = (run_rounds(SemiFL(**{**SMALL, "tau": 1.0, "local_steps": s}), 2, labelled=10) for s in (1, 5))
    assert one.costs.legs["train_confident"][1] == 2 * 4 * 8  # a number from each client
    assert one.costs.train_samples == 0
    assert one.state.velocity == {}
    assert all(torch.equal(one.state.weights[n], other.state.weights[n]) for n in one.state.weights)
    assert any(not torch.equal(one.state.weights[n], one.initial[n]) for n in one.initial)
    idle = run_rounds(SemiFL(**{**SMALL, "tau": 1.0, "server_steps": 0}), 2, labelled=10)
    assert all(torch.equal(idle.state.weights[n], idle.initial[n]) for n in idle.initial)


def test_clients_train_where_they_are_sure():
    server = run_rounds(SemiFL(**SMALL, tau=0.0), 2, labelled=10)
    assert [record["confident"] for record in server.history] == [{str(i): 30 for i in range(4)}] * 2
    assert server.costs.train_samples == 2 * 4 * 2 * 8
    assert set(server.state.velocity) == set(server.state.weights)


@pytest.mark.parametrize("momentum", [None, 0.1])
def test_statistics_by_hand(monkeypatch: pytest.MonkeyPatch, momentum: float | None):
    monkeypatch.setattr(semifl, "CHUNK", 2)
    model = nn.Sequential(nn.BatchNorm1d(1, momentum=momentum), nn.Dropout()).eval()
    model[0].running_mean.fill_(9.0)
    found = recomputed(model, torch.tensor([[0.0], [2.0], [4.0], [8.0]]))
    # chunks of means 1 and 6, and of unbiased variances 2 and 8
    assert {name: float(tensor) for name, tensor in found.items()} == {
        "0.running_mean": 3.5, "0.running_var": 5.0, "0.num_batches_tracked": 2.0
    }  # fmt: skip
    assert model[0].momentum == momentum
    assert not any(layer.training for layer in model.modules())


def test_no_chunk_of_a_single_sample(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(semifl, "CHUNK", 4)
    model = nn.BatchNorm1d(1).eval()
    assert int(recomputed(model, torch.arange(5.0)[:, None])["num_batches_tracked"]) == 2


def test_statistics_are_named_as_in_the_state_dict_and_nothing_else():
    shared = nn.BatchNorm1d(2)
    model = nn.Sequential(shared, nn.Linear(2, 2), nn.GroupNorm(1, 2), shared)
    expected = {f"{k}.{n}" for k in (0, 3) for n in ("running_mean", "running_var", "num_batches_tracked")}
    assert set(statistics_of(model)) == expected
    assert expected < set(model.state_dict())
    assert statistics_of(nn.Linear(2, 2)) == {}


def test_after_a_round_statistics_are_those_of_all_samples_under_the_new_weights():
    server = run_rounds(SemiFL(**SMALL, tau=0.0), 2, labelled=10, model={"width": "wide"})
    weights, net = server.state.weights, build("cnn2", (1, 8, 8), 4, ModelSettings(width="wide"), seed=0)
    net.load_state_dict(weights)
    updates = []
    for i, client in enumerate(small_federation().clients):
        member = client.with_labels(10, numpy_stream(0, "labelled", i))
        updates.append((recomputed(net.eval(), (member.train + member.unlabelled).inputs), 40))
    mean = weighted_mean(updates)
    assert len(mean) >= 6
    assert all(torch.allclose(weights[n].double(), mean[n].double(), atol=1e-5) for n in mean)
    down = sum(w.numel() * w.element_size() for w in weights.values())
    up = sum(w.numel() * w.element_size() for w in mean.values())
    assert server.costs.legs["recompute"] == [3 * 4 * down, 3 * 4 * (up + 8)]  # before round 1 and after each


def test_weighting_by_confident_samples():
    net = build("cnn2", (1, 8, 8), 4, ModelSettings(), seed=0)
    tau = float(predicted(net, small_federation().clients[0].train.inputs)[0].median())
    uniform, samples = (
        run_rounds(SemiFL(**SMALL, tau=tau, weighting=weighting), 1, labelled=10)
        for weighting in ("uniform", "samples")
    )
    assert len(set(uniform.history[0]["confident"].values())) > 1
    assert any(not torch.equal(uniform.state.weights[n], samples.state.weights[n]) for n in uniform.state.weights)


@pytest.mark.parametrize("values", [{}, {"local": "fedprox:mu=1"}, {"local": "moon"}])
def test_same_bits_for_any_number_of_workers(values: dict[str, Any]):
    algorithm = SemiFL(**SMALL, tau=0.3, **values)
    one, two = (
        run_rounds(algorithm, 3, labelled=8, participation=0.75, workers=workers, model={"width": "wide"})
        for workers in (1, 2)
    )
    assert one.lost == []
    assert max(one.history[-1]["confident"].values()) > 1
    assert all(torch.equal(one.state.weights[n], two.state.weights[n]) for n in one.state.weights)


def test_fedprox_with_no_weight_is_none_and_with_some_is_not():
    plain, zero, some = (
        run_rounds(SemiFL(**SMALL, tau=0.0, local=local), 2, labelled=8).state.weights
        for local in (None, "fedprox:mu=0", "fedprox:mu=5")
    )
    assert all(torch.allclose(zero[n], plain[n], atol=1e-6) for n in plain)
    assert any((some[n] - plain[n]).abs().max() > 1e-4 for n in plain)


@pytest.mark.parametrize(
    ("settings", "axis"),
    [
        ({"aggregation": "qffl"}, "aggregation"),
        ({"aggregation": "dpfedavg", "local": "fedprox"}, "aggregation"),
        ({"local": "scaffold"}, "local"),
    ],
)
def test_what_does_not_go_with_it(settings: dict[str, str], axis: str):
    with refused(axis, f"{settings[axis]} with semifl"):
        run_rounds(SemiFL(**settings), 1, labelled=8)


def lone(samples: int) -> Federation:
    """Client 0 has so many labelled samples, the others have none, and all have some without labels."""
    whole = small_federation()
    clients = tuple(
        replace(c, train=c.train[: samples if i == 0 else 0], unlabelled=c.train[20:].unlabelled())
        for i, c in enumerate(whole.clients)
    )
    return replace(whole, clients=clients)


@pytest.mark.parametrize(("samples", "batch_size", "setting"), [(1, 8, "labelled_per_client"), (20, 1, "batch_size")])
def test_batch_norm_at_the_server_needs_two_samples(samples: int, batch_size: int, setting: str):
    settings = {**SMALL, "batch_size": batch_size, "tau": 1.0}
    with refused(setting, "found 1,", "at least 2", "buffers=frozen") as error:
        run_rounds(SemiFL(**settings), 1, federation=lone(samples), model={"width": "wide"})
    assert "\n" not in str(error.value)
    # what the sentence allows: two of them, frozen statistics, no batch norm; and a server that does not train
    for more, federation, width in (
        ({"batch_size": 2}, lone(20), "wide"),
        ({"buffers": "frozen"}, lone(samples), "wide"),
        ({}, lone(samples), "paper"),
        ({"server_steps": 0}, lone(samples), "wide"),
    ):
        server = run_rounds(SemiFL(**{**settings, **more}), 1, federation=federation, model={"width": width})
        assert server.lost == []


def test_slips(tmp_path: Path):
    with refused("data", "semifl", "[6]"):
        SemiFL().resolved(rounds=1, model=nn.Linear(6, 2), inputs=torch.zeros(1, 6))
    for setting, value in (("server_momentum", 1), ("server_learning_rate", 0), ("unlabelled_batch_size", 1)):
        with refused(setting, f"found {value!r};", "allowed: "):
            checked(SemiFL, {setting: value})
    with refused("labelled_per_client"):
        fedfill.run("semifl", clients=2, rounds=1, data_fraction=0.1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


SAMPLE = bars(1, [0], 0)
GOOD = bars(6, [0, 3], 1)


@pytest.mark.parametrize(
    "bad",
    [
        Samples(GOOD.inputs, GOOD.labels + 1),
        Samples(GOOD.inputs, GOOD.labels - 1),
        Samples(GOOD.inputs, GOOD.labels.float()),
        Samples(GOOD.inputs.float(), GOOD.labels),
        Samples(GOOD.inputs[:5], GOOD.labels),
        Samples(GOOD.inputs[..., :4], GOOD.labels),
        Samples(GOOD.inputs, GOOD.labels[:, None]),
    ],
)
def test_what_makes_no_sense_stays_out_of_the_pool(bad: Samples):
    assert fits(GOOD, SAMPLE, 4)
    assert not fits(bad, SAMPLE, 4)
    server, engine = scripted(3, {"w": torch.tensor([1.0])}, model=One())
    server.state = State(SemiFL().server_state(server.state.weights))
    calls: list[int] = []

    def share(i: int, message: Any, t: int) -> Labelled:
        calls.append(i)
        if i == 0 and calls.count(0) == 1:
            raise RuntimeError("gone")
        return Labelled(bad if i == 1 else GOOD, 5)

    engine.script["share"] = share
    server.begin(-1)
    SemiFL().pretrain(server, 0)
    assert sorted(calls) == [0, 0, 1, 1, 1, 2]
    assert server.state.pool.labels.tolist() == [*GOOD.labels.tolist(), *GOOD.labels.tolist()]
    assert server.warnings == ["the server's pool is without the labelled samples of client 1"]
    assert {loss["reason"] for loss in server.lost if loss["client"] == 1} == {"its samples are none of this task"}


def test_a_lone_sample_under_batch_norm_is_one_sentence(tmp_path: Path) -> None:
    options = {"data": "digits", "model": "cnn2bn", "clients": 2, "labelled_per_client": 10, "rounds": 1}
    with refused("batch_size", "1"):
        fedfill.run("semifl", batch_size=1, out=tmp_path, **options)
