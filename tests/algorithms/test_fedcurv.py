"""FedCurv: the penalty by hand, whose the sums are, and where it is FedAvg."""

from typing import Any

import pytest
import torch
from tests.helpers import refused, run_rounds, scripted, start_of
from torch import nn

from fedfill.algorithms import Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.fedbn import FedBN
from fedfill.algorithms.fedcurv import FedCurv
from fedfill.algorithms.feddpms import FedDPMS
from fedfill.data.samples import Samples
from fedfill.training.fit import Context

SMALL = {"local_epochs": 2, "batch_size": 8}


class One(nn.Module):
    def __init__(self, w: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w]))
        self.register_buffer("mean", torch.zeros(1))


def sums(f: float, fw: float) -> dict[str, torch.Tensor]:
    return {"F w": torch.tensor([f]), "Fw w": torch.tensor([fw])}


@pytest.mark.parametrize(("sent_in", "f", "fw"), [(4, 5 - 2, 7 - 2), (3, 5, 7), (None, 5, 7)])
def test_the_penalty_by_hand_is_of_the_others_alone(sent_in: int | None, f: float, fw: float):
    """The client's own part, 2 and 2, is in the sums if it took part in the last round."""
    start = start_of({"w": torch.tensor([1.0])}, control=sums(5.0, 7.0), model=One(), curvature=sums(2.0, 2.0))
    start.client.state.sent_in, start.client.round = sent_in, 5
    model = One(3.0)
    objective = FedCurv(curv_lambda=0.5).objective(start, lambda m, b, c: 4 * m.w.sum())
    objective(model, None, Context({}, torch.Generator(), 0)).backward()
    assert model.w.grad.item() == pytest.approx(4 + 0.5 * 2 * (f * 3 - fw))


def test_a_sum_that_rounding_leaves_below_zero_holds_nothing():
    start = start_of({"w": torch.tensor([1.0])}, control=sums(5.0, 7.0), model=One(), curvature=sums(5.5, 2.0))
    start.client.state.sent_in, start.client.round = 4, 5
    model = One(3.0)
    objective = FedCurv().objective(start, lambda m, b, c: 4 * m.w.sum())
    objective(model, None, Context({}, torch.Generator(), 0)).backward()
    assert model.w.grad.item() == 4


def test_a_client_sends_the_information_at_its_trained_model_and_where_that_is():
    model, samples = nn.Linear(1, 2), Samples(torch.tensor([[2.0], [0.0]]), torch.tensor([0, 1]))
    received = {name: torch.ones_like(w) for name, w in model.state_dict().items()}
    trained = {"weight": torch.zeros(2, 1), "bias": torch.tensor([3.0, 3.0])}  # scores are equal, as above
    start = start_of(received, control=sums(0.0, 0.0), model=model, data=samples, curvature=None, sent_in=None)
    start.client.round = 4
    sent = FedCurv().up(start, trained, 1)
    expected = {
        "F weight": [[0.5], [0.5]],
        "F bias": [0.25, 0.25],
        "Fw weight": [[0.0], [0.0]],
        "Fw bias": [0.75, 0.75],
    }
    assert {name: tensor.tolist() for name, tensor in sent.items()} == expected
    assert start.client.state.curvature is sent
    assert start.client.state.sent_in == 4


def test_the_server_adds_up_the_last_cohort():
    server, engine = scripted(clients=4, weights={"w": torch.tensor([1.0])}, participation=0.5, model=One())
    server.state.curvature = sums(100.0, 100.0)
    engine.script["train"] = lambda i, message, t: Update(
        {"w": torch.tensor([2.0])}, samples=1 + 9 * i, control=sums(i + 1.0, 2.0)
    )
    FedCurv().round(server, 0)
    cohort = [i for _, _, i, _ in engine.sent]
    assert {name: tensor.item() for name, tensor in server.state.curvature.items()} == {
        "F w": sum(cohort) + 2.0,
        "Fw w": 4.0,
    }


def test_without_a_weight_it_is_fedavg_to_the_bit_and_to_the_byte():
    plain, none = run_rounds(FedAvg(**SMALL), rounds=2), run_rounds(FedCurv(**SMALL, curv_lambda=0.0), rounds=2)
    assert all(torch.equal(none.state.weights[name], tensor) for name, tensor in plain.state.weights.items())
    assert none.costs.legs == plain.costs.legs


def test_the_first_round_is_fedavg_and_the_second_is_not():
    for rounds, same in ((1, True), (2, False)):
        plain, curved = (run_rounds(kind(**SMALL), rounds=rounds).state.weights for kind in (FedAvg, FedCurv))
        assert all(torch.equal(curved[name], tensor) for name, tensor in plain.items()) is same


def test_others_take_it_but_for_those_that_share_a_part():
    own: dict[str, Any] = {"alpha": 5, "max_candidates": 50, "preliminary_rounds": 1, "local_epochs": 1}
    taken = run_rounds(FedDPMS(batch_size=8, **own, local="fedcurv"), rounds=3, participation=0.5)
    assert taken.lost == []
    with refused("local", "fedcurv with fedbn"):
        run_rounds(FedBN(local="fedcurv"), rounds=1, model={"width": "wide"})
