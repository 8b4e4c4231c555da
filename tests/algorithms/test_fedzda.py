"""Fed-ZDAC and Fed-ZDAS: who inverts what, when, and what is trained on it."""

import tomllib
from pathlib import Path

import pytest
import torch
from tests.helpers import CLASSES, Run, bars, refused, run_rounds, scripted

import fedfill
from fedfill import tree
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.fedzda import FedZDAC, FedZDAS, ZeroShot, ZeroShotUpdate
from fedfill.engines.runner import make_resident
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.protocol.client import Client, State
from fedfill.synthesis.inversion import Inversion, Inverted, invert

QUICK = {
    "local_epochs": 1,
    "batch_size": 8,
    "optimizer": "sgd",
    "learning_rate": 0.05,
    "images_per_class": 3,
    "inversion_steps": 5,
}
WIDE = {"width": "wide"}


def model_of(seed: int) -> torch.nn.Module:
    return build("cnn2", (1, 8, 8), CLASSES, ModelSettings(**WIDE), seed=seed)


def client_with(counts: list[int], t: int = 0, **state: object) -> Client:
    """A client in round `t` with so many samples of each class."""
    data = bars(sum(counts), [c for c, count in enumerate(counts) for _ in range(count)], seed=0)
    model = model_of(0)
    return Client(
        id=0, round=t, data=data, classes=CLASSES, state=State(state), initial=weights_of(model), seed=0,
        resident=make_resident(model, torch.device("cpu")).load,
    )  # fmt: skip


@pytest.fixture
def inverted(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The classifiers of the models that were inverted, one after the other; no step of it is taken."""
    seen = []

    def look(model, classes, *_):
        seen.append(model.classifier.weight.detach().clone())
        return Inverted(bars(len(classes), list(classes), 0), (2.0, 2.0), (1.0, 1.0))

    monkeypatch.setattr("fedfill.algorithms.fedzda.invert", look)
    return seen


@pytest.mark.parametrize("kind", [FedZDAC, FedZDAS])
def test_before_the_first_round_with_images_it_is_fedavg_to_the_bit(kind: type):
    settings = {k: v for k, v in QUICK.items() if k in FedAvg.model_fields}
    plain = run_rounds(FedAvg(**settings, weighting="uniform"), rounds=2, model=WIDE, participation=0.5)
    early = run_rounds(kind(**QUICK, start_round=2), rounds=3, model=WIDE, participation=0.5, after=None)
    again = run_rounds(kind(**QUICK, start_round=1), rounds=2, model=WIDE, participation=0.5)
    states = []
    run_rounds(
        kind(**QUICK, start_round=2), rounds=3, model=WIDE, participation=0.5,
        after=lambda server, t: states.append(server.state.weights),
    )  # fmt: skip
    assert all(torch.equal(states[1][name], tensor) for name, tensor in plain.state.weights.items())
    assert not all(torch.equal(again.state.weights[name], tensor) for name, tensor in plain.state.weights.items())
    assert all(torch.equal(states[2][name], tensor) for name, tensor in early.state.weights.items())


def test_the_first_round_is_after_four_fifths():
    assert fedzdac_start(10) == 8
    assert fedzdac_start(1) == 0
    assert fedzdac_start(100) == 80


def fedzdac_start(rounds: int) -> int:
    from fedfill.experiment.prepare import arrange

    return arrange("fedzdac", data="digits", partition="iid", model="cnn2bn", rounds=rounds).algorithm.start_round


def test_clients_train_on_real_and_synthetic_images():
    server = run_rounds(FedZDAC(**QUICK, start_round=1), rounds=2, model=WIDE)
    # 40 real samples of each of four clients, and 3 images of each of 4 classes in the second round
    assert server.costs.train_samples == 4 * 40 + 4 * (40 + 12)
    made = server.client_states[0]["made"]
    assert made.samples.labels.tolist() == [c for c in range(4) for _ in range(3)]
    assert made.samples.inputs.dtype == torch.uint8
    assert made.round == 1
    assert set(server.history[1]["losses"]) == {"0", "1", "2", "3"}


def test_missing_classes_alone():
    server = run_rounds(FedZDAC(**QUICK, start_round=0, augmented_classes="missing"), rounds=1, model=WIDE)
    for i, state in server.client_states.items():
        assert set(state["made"].samples.labels.tolist()) == set(range(4)) - {i, (i + 1) % 4}
    told = {entry["released"]: entry["epsilon"] for entry in server.ledger.account(1e-5)["entries"]}
    assert told["ZeroShotUpdate.losses"] is None  # they tell which classes are missing
    all_classes = run_rounds(FedZDAC(**QUICK, start_round=0), rounds=1, model=WIDE).ledger.account(1e-5)["entries"]
    assert {entry["released"]: entry["epsilon"] for entry in all_classes}["ZeroShotUpdate.losses"] == 0


def test_the_server_makes_one_set_for_all_and_it_is_counted():
    server = run_rounds(FedZDAC(**QUICK, start_round=0, generate_at="server_broadcast"), rounds=1, model=WIDE)
    model = sum(t.numel() * t.element_size() for t in server.state.weights.values())
    images = 12 * (64 + 8)  # uint8 pixels and int64 labels
    assert server.costs.legs["train_augmented"][0] == 4 * (model + 1 + images)
    assert server.costs.train_samples == 4 * (40 + 12)
    assert all(state["made"] is None for state in server.client_states.values())
    assert len(server.state.synthetic) == 12

    few = FedZDAC(**QUICK, start_round=0, generate_at="server_broadcast", augmented_classes="missing")
    assert run_rounds(few, rounds=1, model=WIDE).costs.train_samples == 4 * (40 + 6)  # two of four classes


def test_a_class_is_missing_with_fewer_samples_than_few():
    algorithm = FedZDAC(augmented_classes="missing", few=5)
    assert algorithm.wanted(client_with([5, 4, 0, 9])) == [1, 2]
    assert FedZDAC(few=5).wanted(client_with([5, 4, 0, 9])) == [0, 1, 2, 3]


def test_a_client_counts_real_images_alone():
    run = Run(FedZDAC(**QUICK, start_round=0), WIDE, workers=1, participation=1.0, rounds=1)
    message = ZeroShot(run.server.state.weights, True, None)
    replies = run.server.call([0, 1], run.algorithm.train_augmented, message)
    run.engine.close()
    assert [reply.samples for reply in replies.values()] == [40, 40]
    assert run.server.costs.train_samples == 2 * (40 + 12)


def test_images_from_the_same_model_are_not_made_anew(inverted: list[torch.Tensor]):
    algorithm, client = FedZDAC(**QUICK, reuse_rounds=1), client_with([4, 4, 0, 0], made=None)
    first = algorithm.make(client, weights_of(model_of(1)), [2, 3])
    later = client_with([4, 4, 0, 0], t=7, made=first)
    assert algorithm.make(later, weights_of(model_of(1)), [2, 3]) is first
    assert len(inverted) == 1
    other = algorithm.make(later, weights_of(model_of(2)), [2, 3])
    assert [torch.equal(inverted[k], model_of(k + 1).classifier.weight) for k in range(2)] == [True, True]
    assert (other.round, later.state.made) == (7, other)


def test_images_are_kept_for_as_long_as_asked():
    rounds = []

    def after(server, t):
        rounds.append({state["made"].round for state in server._engine.states().values()})

    run_rounds(FedZDAC(**QUICK, start_round=0, reuse_rounds=2), rounds=4, model=WIDE, after=after)
    assert rounds == [{0}, {0}, {2}, {2}]


def test_the_server_inverts_each_model_and_trains_the_average():
    server = run_rounds(FedZDAS(**QUICK, start_round=1), rounds=2, model=WIDE, participation=0.5)
    assert server.costs.train_samples == 2 * 2 * 40  # clients see real images alone
    assert len(server.state.synthetic) == 2 * 12
    assert torch.bincount(server.state.synthetic.labels).tolist() == [6] * 4
    assert len(server.history[1]["inversion"]) == 2
    model = sum(t.numel() * t.element_size() for t in server.state.weights.values())
    assert server.costs.legs["train_real"] == [2 * 2 * (model + 1), 2 * 2 * (model + 8)]


def test_the_server_inverts_the_clients_models_and_not_their_average(inverted: list[torch.Tensor]):
    run = Run(FedZDAS(**QUICK, start_round=0), WIDE, workers=1, participation=1.0, rounds=1)
    replies = {i: ZeroShotUpdate(weights_of(model_of(i)), 10, None, None) for i in (3, 1)}
    made = run.algorithm.invert_models(run.server, replies)
    run.engine.close()
    assert len(made) == 2 * CLASSES
    assert [torch.equal(own, model_of(i).classifier.weight) for own, i in zip(inverted, (1, 3), strict=True)] == [
        True
    ] * 2
    assert list(run.server.notes["inversion"]) == ["1", "3"]


def test_the_server_trains_by_epochs_and_mini_batches_of_its_own(inverted: list[torch.Tensor]):
    algorithm = FedZDAS(**{**QUICK, "local_steps": 2}, server_epochs=3, server_batch_size=4, start_round=0)
    run = Run(algorithm, WIDE, workers=1, participation=1.0, rounds=1)
    trained, fit = [], run.server.fit

    def watched(weights, loss, training, **options):
        fitted = fit(weights, loss, training, **options)
        trained.append((training.epochs, training.batch_size, training.steps, fitted.samples, fitted.steps))
        return fitted

    run.server.fit = watched
    run.algorithm.round(run.server, 0)
    run.engine.close()
    # an image of each of four classes from each of four clients' models, in four mini-batches
    assert trained == [(3, 4, None, 3 * 16, 3 * 4)]


def test_the_servers_step_moves_parameters_and_statistics_only_where_asked():
    runs = {
        buffers: run_rounds(FedZDAS(**QUICK, start_round=0, server_buffers=buffers), rounds=1, model=WIDE).state.weights
        for buffers in ("average", "frozen")
    }
    mean = run_rounds(FedZDAS(**QUICK, start_round=1), rounds=2, model=WIDE, after=None)
    plain = []
    run_rounds(FedZDAS(**QUICK, start_round=1), rounds=2, model=WIDE, after=lambda s, t: plain.append(s.state.weights))
    running = [name for name in plain[0] if "running" in name]
    assert all(torch.equal(runs["frozen"][name], plain[0][name]) for name in running)
    assert not any(torch.equal(runs["average"][name], plain[0][name]) for name in running)
    for weights in runs.values():
        assert not torch.equal(weights["classifier.weight"], plain[0]["classifier.weight"])
    assert mean.lost == []


@pytest.mark.parametrize("kind", [FedZDAC, FedZDAS])
@pytest.mark.parametrize(
    "value", [{"local": "fedprox:mu=0.5"}, {"aggregation": "qffl:q=0.5"}, {"aggregation": "fednova"}]
)
def test_on_top_of_others(kind: type, value: dict):
    server = run_rounds(kind(**QUICK, start_round=0, **value), rounds=2, model=WIDE)
    assert server.lost == []
    assert server.evaluation.accuracy > 0
    if kind is FedZDAS:
        # the models themselves are inverted, and not what the aggregation sends
        own = 4 * sum(t.numel() * t.element_size() for t in server.state.weights.values())
        assert (server.costs.legs["train_real"][1] > 2 * 1.9 * own) is ("aggregation" in value)


def test_both_at_once():
    server = run_rounds(FedZDAC(**QUICK, start_round=0, server_step="zdas"), rounds=1, model=WIDE)
    assert server.costs.train_samples == 4 * (40 + 12)
    assert len(server.state.synthetic) == 4 * 12


def test_networks_without_running_statistics_are_refused():
    with refused("model", "fedzdac needs normalisation layers"):
        fedfill.run("fedzdac", model="cnn2", rounds=1, clients=3)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.GroupNorm(2, 4), torch.nn.Flatten(), torch.nn.Linear(144, 10)
    )
    with refused("model", "Sequential has none", "GroupNorm"):
        fedfill.run("fedzdas", model=net, rounds=1, clients=3)


def test_slips():
    with refused("start_round", "found 5", "which is 4"):
        fedfill.run("fedzdac", model="cnn2bn", rounds=5, start_round=5, clients=3)


def test_the_account_says_no_guarantee():
    server = run_rounds(FedZDAS(**QUICK, start_round=0), rounds=1, model=WIDE)
    assert server.ledger.account(1e-5)["total_epsilon"] is None


def test_floats_have_the_range_that_they_have_and_no_picture(tmp_path: Path):
    """Standardised inputs go beyond -1..1; and a run on them ends with a summary, though no picture can be drawn."""
    generator = torch.Generator().manual_seed(0)
    inputs, labels = 3 * torch.randn(80, 1, 8, 8, generator=generator), torch.arange(80) % 4
    options = {**QUICK, "inversion_steps": 40, "start_round": 0, "width": "wide"}
    result = fedfill.run(
        "fedzdas", data=(inputs, labels), partition="iid", clients=2, rounds=1, out=tmp_path / "run", **options
    )
    assert result.summary["accuracy"] >= 0
    assert tomllib.loads((tmp_path / "run" / "experiment.toml").read_text())["settings"]["clamp"] is False
    made = tree.from_bytes((tmp_path / "run" / "checkpoint" / "state.safetensors").read_bytes())["server"]["synthetic"]
    assert float(made.inputs.abs().max()) > 1


def test_a_late_client_ends_at_its_next_step():
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise TimeoutError

    model = build("cnn2", (1, 8, 8), 4, ModelSettings(width="wide"), seed=0).eval()
    with pytest.raises(TimeoutError):
        invert(model, [0, 1], bars(1, [0], 0), Inversion(per_class=2, steps=50), torch.Generator(), check)
    assert len(calls) == 3


def test_a_client_without_a_model_to_invert_is_left_out():
    """Under another aggregation the model comes beside what that wants, where nobody checked it."""
    server, _ = scripted(clients=3, weights={"w": torch.zeros(2)})
    model = {"w": torch.ones(2)}
    sent = [model, {"x": torch.ones(2)}, None]
    replies = {i: ZeroShotUpdate(model, 10, beside, None, scale=1.0) for i, beside in enumerate(sent)}
    assert list(FedZDAS(aggregation="qffl").models_of(server, replies)) == [0]
    assert [lost["client"] for lost in server.lost] == [1, 2]
    assert list(FedZDAS().models_of(server, replies)) == [0, 1, 2]  # nobody asked for it
    with refused("engine", "no client"):
        FedZDAS(aggregation="qffl").models_of(server, {2: replies[2]})
