"""PartialFed: whole models up and down, and what a client begins with, by a mask and by a policy."""

import pytest
import torch
from tests.helpers import CLASSES, Run, bars, refused, run_rounds, start_of
from torch import nn
from torch.nn import functional

import fedfill
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.partialfed import PartialFed
from fedfill.data.samples import Batch, normalise
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import layers_of, weights_of
from fedfill.protocol.client import Client, State
from fedfill.streams import torch_stream
from fedfill.training.fit import Fit, LocalTraining, fit

WIDE = {"width": "wide"}
QUICK = {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.01}


def is_kept(name: str, keep: str) -> bool:
    """By hand: the wide network of 8x8 images has its batch norm at 2, 5 and 9 of the trunk."""
    norm = name.startswith(("encoder.trunk.2.", "encoder.trunk.5.", "encoder.trunk.9."))
    return ("norm" in keep and norm) or ("head" in keep and name.startswith("classifier."))


@pytest.mark.parametrize("keep", ["norm", "head", "norm_head"])
def test_exactly_the_kept_tensors_begin_from_the_clients_last_model(keep: str):
    algorithm = PartialFed(**QUICK, strategy="fixed", keep=keep)
    first, second = (run_rounds(algorithm, rounds=n, model=WIDE) for n in (1, 2))
    run = Run(algorithm, WIDE, 1, 1.0, 2)
    for i in range(4):
        last = first.client_states[i]["own"]
        begin = {n: last[n] if is_kept(n, keep) else tensor for n, tensor in first.state.weights.items()}
        streams = (torch_stream(0, name, 1, i, 0) for name in ("fit", "draws"))
        fitted = fit(
            run.server._resident, Fit(begin, algorithm.loss, run.engine._data[i], algorithm.training(1)), *streams
        )
        assert all(torch.equal(tensor, second.client_states[i]["own"][n]) for n, tensor in fitted.weights.items())
    run.engine.close()


def test_whole_models_go_up_and_down():
    plain = run_rounds(FedAvg(**QUICK), rounds=2, model=WIDE)
    for settings in ({"strategy": "fixed"}, {"strategy": "adaptive", "policy_batches": 1}):
        server = run_rounds(PartialFed(**QUICK, **settings), rounds=2, model=WIDE)
        assert server.costs.legs == plain.costs.legs
        # the server's model is the mean of all that clients have, kept layers too
        last = [server.client_states[i]["own"] for i in range(4)]
        for name, mean in server.state.weights.items():
            if mean.is_floating_point():
                assert torch.allclose(torch.stack([mine[name] for mine in last]).mean(0), mean, atol=1e-6)


def test_the_first_round_is_fedavgs_and_a_policy_without_training_is_always():
    for rounds, settings in ((1, {}), (1, {"strategy": "fixed"}), (3, {"policy_batches": 0})):
        plain = run_rounds(FedAvg(**QUICK), rounds=rounds, model=WIDE)
        partial = run_rounds(PartialFed(**QUICK, **settings), rounds=rounds, model=WIDE)
        assert all(torch.equal(partial.state.weights[n], tensor) for n, tensor in plain.state.weights.items())
        assert partial.costs.train_samples == plain.costs.train_samples


# The policy


def client_with(model: nn.Module, last: dict, batches: list[Batch], policy: torch.Tensor | None = None) -> Client:
    """A client in a test alone, which has these mini-batches."""

    def resident(weights: dict) -> nn.Module:
        model.load_state_dict(weights)
        return model

    return Client(
        id=0, round=3, data=bars(8, [0, 1], 0), classes=CLASSES, state=State({"own": last, "policy": policy}),
        initial=last, seed=0, resident=resident, batches=lambda data, training: iter(batches[: training.steps]),
    )  # fmt: skip


def known_and_lost() -> tuple[nn.Module, dict, dict, list[Batch]]:
    """A net that is right about its batches, its weights, others that are right about nothing, and the batches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
        data = bars(32, list(range(CLASSES)), 0)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(60):
            optimizer.zero_grad()
            functional.cross_entropy(model(normalise(data.inputs)), data.labels).backward()
            optimizer.step()
    good = weights_of(model)
    # a first layer that sees nothing and a head that takes each class for the next; the layer between them is the same
    lost = {**good, "1.weight": good["1.weight"] * 0, "1.bias": good["1.bias"] * 0}
    lost |= {n: good[n].roll(1, 0) for n in ("4.weight", "4.bias")}
    batches = [Batch(normalise(data.inputs), data.labels, torch.arange(32))] * 40
    return model, good, lost, batches


@pytest.mark.parametrize("own_is_better", [True, False])
def test_a_policy_learns_which_layers_are_better(own_is_better: bool):
    model, good, lost, batches = known_and_lost()
    # the head alone differs, so that there is one clear answer
    worse = {n: lost[n] if n.startswith("4.") else tensor for n, tensor in good.items()}
    received, last = (worse, good) if own_is_better else (good, worse)
    client = client_with(model, last, batches)
    algorithm = PartialFed(**QUICK, policy_batches=40)
    begin = algorithm.adapt(client, received, last)
    for name, tensor in good.items():
        assert torch.equal(begin[name], tensor)
    policy = client.state.policy
    assert policy.shape == (3, 2)
    assert float(policy[2, 1] - policy[2, 0]) * (1 if own_is_better else -1) > 1


def test_layers_are_chosen_apart():
    model, good, _, batches = known_and_lost()

    def weaker(layer: str) -> dict:  # of its signal a tenth is left: worse, whatever the other layers are
        return {n: 0.1 * t if n.startswith(layer) else t for n, t in good.items()}

    received, last = weaker("4."), weaker("1.")
    begin = PartialFed(**QUICK, policy_batches=40).adapt(client_with(model, last, batches), received, last)
    assert all(torch.equal(begin[n], tensor) for n, tensor in good.items())


class Layers(nn.Module):
    """Layers of one number each, which it writes down; its scores are 0 and don't depend on them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(layers))
        self.met: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.stack([layer.weight.flatten()[0] for layer in self.layers])
        self.met += numbers.tolist()
        return x.new_zeros(len(x), CLASSES) + 0 * numbers.sum()


def test_layers_are_drawn_as_often_as_the_policy_says():
    model = Layers(200)
    received, last = ({f"layers.{k}.weight": torch.full((1, 1), v) for k in range(200)} for v in (0.0, 1.0))
    data = bars(8, [0, 1], 0)
    batches = [Batch(normalise(data.inputs), data.labels, torch.arange(8))] * 5
    # odds of three to one for one's own, which a loss without slope leaves as they are
    client = client_with(model, last, batches, torch.tensor([0.0, 1.0986123]).repeat(200, 1))
    PartialFed(**QUICK, policy_batches=5).adapt(client, received, last)
    assert client.state.policy.unique().tolist() == [0.0, pytest.approx(1.0986123)]
    assert {round(number, 5) for number in model.met} == {0.0, 1.0}  # hard draws
    assert len(model.met) == 1000
    assert sum(model.met) / 1000 == pytest.approx(0.75, abs=0.05)  # of one draw 0.43, of their mean 0.014


def test_a_policy_goes_on_from_where_it_was_and_takes_as_many_mini_batches_as_asked():
    model, good, lost, batches = known_and_lost()
    # the policy's mini-batches are its own, whatever the training has
    algorithm = PartialFed(**QUICK, local_steps=1, policy_batches=2, policy_rate=0.1)
    taken = []

    def counted(data: object, training: LocalTraining):
        for batch in batches[: training.steps]:
            taken.append(1)
            yield batch

    before = torch.tensor([[0.0, 9.0], [0.0, 9.0], [0.0, 9.0]])
    client = client_with(model, lost, batches, before)
    client._batches = counted
    begin = algorithm.adapt(client, good, lost)
    assert len(taken) == 2
    assert all(torch.equal(begin[n], tensor) for n, tensor in lost.items())  # two steps don't turn it round
    moved = (client.state.policy - before).abs()
    assert 0 < float(moved.max()) < 0.21  # Adam's first steps are as long as its rate
    assert before.tolist() == [[0, 9]] * 3


def test_a_policy_follows_the_streams_alone():
    model, good, lost, batches = known_and_lost()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    runs = []
    for _ in range(2):
        client = client_with(model, lost, batches)
        PartialFed(**QUICK, policy_batches=5).adapt(client, good, lost)
        runs.append(client.state.policy)
    assert torch.equal(*runs)
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_are_those_of_the_model():
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1, bias=False)))
    assert layers_of(weights_of(model)) == [
        ["0.weight", "0.bias"],
        [f"1.0.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")],
        ["1.1.weight"],
    ]


@pytest.mark.parametrize("strategy", ["fixed", "adaptive"])
def test_same_bits_on_one_and_two_workers(strategy: str):
    one, two = (
        run_rounds(PartialFed(**QUICK, strategy=strategy), rounds=3, model=WIDE, workers=n, participation=0.75)
        for n in (1, 2)
    )
    assert all(torch.equal(one.state.weights[n], tensor) for n, tensor in two.state.weights.items())


def test_a_local_objective_is_held_to_what_the_training_began_with():
    begin = {"w": torch.ones(1)}
    assert start_of(begin).weights is begin
    server = run_rounds(PartialFed(**QUICK, strategy="fixed", local="fedprox:mu=0.1"), rounds=2, model=WIDE)
    assert server.lost == []


def test_slips():
    with refused("model"):
        fedfill.run("partialfed", model="cnn2", strategy="fixed", clients=3, rounds=1)
    with refused("keep", "found norm", "strategy=adaptive"):
        fedfill.run("partialfed", strategy="adaptive", keep="norm", clients=3, rounds=1)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with refused("model"):
        fedfill.run("partialfed", model=plain, strategy="fixed", keep="head", clients=3, rounds=1)
    for name in ("fednova", "dpfedavg"):
        with refused("aggregation", f"{name} with partialfed"):
            fedfill.run("partialfed", aggregation=name, clients=3, rounds=1)


def test_what_is_learnt_can_t_be_kept_too() -> None:
    with refused("keep", "norm", "adaptive"):
        PartialFed(strategy="adaptive", keep="norm").resolved(
            rounds=1, model=build("cnn2bn", (1, 8, 8), 3, ModelSettings(), seed=0), inputs=torch.zeros(1, 1, 8, 8)
        )


@pytest.mark.parametrize(("name", "found"), [("policy_batches", 9), ("policy_rate", 0.2), ("policy_temperature", 2.0)])
def test_a_policy_that_nobody_learns_is_refused(name: str, found: float) -> None:
    words = {
        "rounds": 1, "model": build("cnn2bn", (1, 8, 8), 3, ModelSettings(), seed=0), "inputs": torch.zeros(1, 1, 8, 8),
    }  # fmt: skip
    with refused(name, f"{found:g}", "strategy=fixed"):
        PartialFed(strategy="fixed", **{name: found}).resolved(**words)
    default = PartialFed.model_fields[name].default
    asked = PartialFed(strategy="fixed", **{name: default}).resolved(**words)  # as every record has it
    assert asked == PartialFed(strategy="fixed").resolved(**words)
