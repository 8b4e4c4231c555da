"""LG-FedAvg: the classifier is FedAvg's, and what stands before it is each client's own."""

import torch
from tests.helpers import CLASSES, Run, bars, run_rounds, scripted

import fedfill
from fedfill.algorithms import Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.lgfedavg import Global, LGFedAvg
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import part, rest, weights_of
from fedfill.protocol.client import Client, State
from fedfill.streams import torch_stream
from fedfill.training.fit import Fit, Fitted, fit

QUICK = {"batch_size": 8, "local_epochs": 1, "learning_rate": 0.01}
P_H = 4 * (16 * 4 + 4)  # bytes of a classifier of 16 features and four classes


def test_the_classifier_alone_travels():
    server = run_rounds(LGFedAvg(**QUICK), rounds=2)
    assert server.costs.legs == {"train_divided": [2 * 4 * P_H, 2 * 4 * (P_H + 8)]}
    own = [server.client_states[i]["own"] for i in range(4)]
    assert all(name.startswith("encoder.") for mine in own for name in mine)
    assert not torch.equal(own[0]["encoder.mu.weight"], own[1]["encoder.mu.weight"])
    for name, tensor in server.state.weights.items():
        assert torch.equal(tensor, server.initial[name]) is name.startswith("encoder.")


def test_a_client_alone_is_fedavgs_to_the_bit(tmp_path):
    options = {"partition": "iid", "clients": 1, "rounds": 3, "data_fraction": 0.1, "local_epochs": 1}
    plain = fedfill.run("fedavg", **options, out=tmp_path / "fedavg")
    for warm in (0, 2):
        own = fedfill.run("lgfedavg", **options, warm_rounds=warm, out=tmp_path / f"{warm}")
        assert all(torch.equal(own.weights[f"0.{name}"], tensor) for name, tensor in plain.weights.items())


def test_warm_rounds_are_fedavgs_to_the_bit():
    plain, warm = (run_rounds(a, rounds=2) for a in (FedAvg(**QUICK), LGFedAvg(**QUICK, warm_rounds=2)))
    assert all(torch.equal(warm.state.weights[name], tensor) for name, tensor in plain.state.weights.items())
    assert warm.costs.legs["train_divided"] == plain.costs.legs["train"]
    assert [state["own"] for state in warm.client_states.values()] == [None] * 4
    assert warm.evaluation == plain.evaluation or warm.evaluation.accuracy == plain.evaluation.accuracy


def test_after_warm_rounds_everybody_begins_with_the_average_which_is_sent_once():
    algorithm = LGFedAvg(**QUICK, warm_rounds=1)
    first, second, third = (run_rounds(algorithm, rounds=n) for n in (1, 2, 3))
    whole = first.costs.legs["train_divided"][0]
    assert [server.costs.legs["train_divided"][0] for server in (second, third)] == [2 * whole, 2 * whole + 4 * P_H]
    run = Run(algorithm, {}, 1, 1.0, 2)
    for i in range(4):
        streams = (torch_stream(0, name, 1, i, 0) for name in ("fit", "draws"))
        request = Fit(first.state.weights, algorithm.loss, run.engine._data[i], algorithm.training(1))
        alone = fit(run.server._resident, request, *streams)
        own = second.client_states[i]["own"]
        assert own
        assert all(torch.equal(tensor, alone.weights[name]) for name, tensor in own.items())
    run.engine.close()


def test_who_was_away_gets_the_warm_model_when_it_comes():
    server = run_rounds(LGFedAvg(**QUICK, warm_rounds=1), rounds=4, participation=0.5)
    assert server.state.begun == sorted(i for i, state in server.client_states.items() if state["own"])
    plain = run_rounds(FedAvg(**QUICK), rounds=1, participation=0.5)
    newcomer = LGFedAvg().personal_weights({}, server.state.weights)
    assert torch.equal(newcomer["encoder.mu.weight"], plain.state.weights["encoder.mu.weight"])


def test_who_was_not_heard_gets_the_warm_model_again():
    model = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), seed=0)
    weights = weights_of(model)
    server, engine = scripted(2, weights, model=model)
    algorithm = LGFedAvg(warm_rounds=1)
    server.state = State(algorithm.server_state(weights))

    def train(i: int, message: Global, t: int) -> Update:
        if (t, i) == (1, 1):
            raise RuntimeError("away")
        return Update(message.weights, 1)

    engine.script["train_divided"] = train
    for t in range(4):
        server.begin(t)
        algorithm.round(server, t)
    got = {(t, i): message.rest is not None for t, _, i, message in engine.sent}
    assert [[got[t, i] for t in range(4)] for i in range(2)] == [
        [False, True, False, False],
        [False, True, True, False],
    ]


def test_who_has_a_representation_keeps_it_when_the_warm_model_comes_again():
    """Its reply was lost on the way."""
    model, started = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), seed=0), []

    def still(request: Fit) -> Fitted:
        started.append(request.weights)
        return Fitted(request.weights, 1, 8, 0.0)

    head, warm = (part(weights_of(model), "classifier"), rest(weights_of(model), "classifier"))
    client = Client(
        id=0, round=1, data=bars(8, [0, 1], 0), classes=CLASSES, state=State(LGFedAvg().client_state()),
        initial=weights_of(model), seed=0, resident=lambda weights: model, fit=still,
    )  # fmt: skip
    LGFedAvg().train_divided(client, Global(head, warm))
    own = {name: w + 1 for name, w in warm.items()}
    client.state.own = own
    LGFedAvg().train_divided(client, Global(head, warm))
    for found, expected in zip(started, (warm, own), strict=True):
        assert all(torch.equal(found[name], w) for name, w in {**expected, **head}.items())
