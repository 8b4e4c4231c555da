"""Ditto: the global model is FedAvg's, and each client's own goes its way, held close to it."""

import pytest
import torch
from tests.algorithms.toy import number, trained
from tests.helpers import Run, run_rounds

from fedfill import tree
from fedfill.algorithms.ditto import Ditto
from fedfill.algorithms.fedavg import FedAvg
from fedfill.streams import torch_stream
from fedfill.training.fit import Fit, fit

QUICK = {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.01}
STEP = {"optimizer": "sgd", "learning_rate": 0.1, "local_steps": 1}


class Toy(Ditto):
    def loss(self, model, batch, context):
        return (model.weight.sum() - 3) ** 2 / 2


def test_a_step_worked_by_hand():
    """F(w) = (w - 3)^2 / 2: v - .1 ((v - 3) + lambda (v - w)), and w - .1 (w - 3)."""
    for lam, expected in ((1.0, 0.4), (2.0, 0.5), (0.0, 0.3)):
        sent, client = trained(Toy(**STEP, ditto_lambda=lam), 1.0, own=number(0.0))
        assert sent == pytest.approx(1.2)
        assert float(client.state.own["weight"]) == pytest.approx(expected)
    _, newcomer = trained(Toy(**STEP), 1.0, initial=2.0)
    assert float(newcomer.state.own["weight"]) == pytest.approx(2 - 0.1 * (-1 + 1))


def test_where_rate_times_lambda_is_one_the_step_begins_at_the_global_model():
    for v in (-5.0, 0.0, 7.0):
        _, client = trained(Toy(**STEP, ditto_lambda=10.0), 1.0, own=number(v))
        assert float(client.state.own["weight"]) == pytest.approx(1 - 0.1 * (v - 3), abs=1e-6)


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_what_is_shared_is_fedavgs_to_the_bit_with_the_same_bytes_and_twice_the_work(lam: float):
    plain, own = (run_rounds(a, rounds=3) for a in (FedAvg(**QUICK), Ditto(**QUICK, ditto_lambda=lam)))
    assert all(torch.equal(own.state.weights[name], tensor) for name, tensor in plain.state.weights.items())
    assert own.costs.legs == plain.costs.legs
    assert own.costs.train_samples == 2 * plain.costs.train_samples


def test_with_lambda_zero_each_client_trains_alone_from_where_it_was():
    algorithm = Ditto(**QUICK, ditto_lambda=0)
    server = run_rounds(algorithm, rounds=2, model={"width": "wide"})
    run = Run(algorithm, {"width": "wide"}, 1, 1.0, 2)
    for i in range(4):
        v = server.initial
        for t in range(2):
            streams = (torch_stream(0, name, t, i, 1) for name in ("fit", "draws"))  # the second training of each round
            v = fit(
                run.server._resident, Fit(v, algorithm.loss, run.engine._data[i], algorithm.training(t)), *streams
            ).weights
        assert all(torch.equal(v[name], tensor) for name, tensor in server.client_states[i]["own"].items())
    run.engine.close()


def test_the_local_objective_is_for_the_global_half():
    both = [run_rounds(Ditto(**QUICK, local=f"fedprox:mu={mu}"), rounds=1) for mu in (0, 50)]
    assert tree.sha256(both[0].state.weights) != tree.sha256(both[1].state.weights)
    for i in range(4):
        assert tree.sha256(both[0].client_states[i]["own"]) == tree.sha256(both[1].client_states[i]["own"])
