"""What an algorithm's round sees: cohorts, calls, lost replies, costs. Every test runs on every engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.helpers import refused
from tests.protocol.world import ALL, Ask, P, Start, mistake
from torch import Tensor, nn

from fedfill.algorithms import Broadcast
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.federation import Federation
from fedfill.data.samples import Samples
from fedfill.errors import ContractError, DivergedError, FedfillError
from fedfill.protocol.messages import reason
from fedfill.training.fit import Batch, Context


def test_what_a_server_writes_into_its_own_tensors_leaves_the_clients_initial_weights_alone(
    start: Start, three: Federation
) -> None:
    server, _ = start(P, three)
    server.state.weights["weight"].add_(5)
    assert [float(reply.value) for reply in server.call(ALL, P.first, Ask()).values()] == [1.0] * 3


def test_parameters_are_what_is_trained_and_a_model_that_is_held_stays_as_it_is(
    start: Start, three: Federation
) -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    network[0].requires_grad_(False)
    server, _ = start(P, three, network)
    held = server.model(server.state.weights)
    doubled = {name: 2 * tensor for name, tensor in server.state.weights.items()}
    found = server.parameters(doubled)
    assert set(found) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert all(found[name] is doubled[name] for name in found)
    assert torch.equal(held.get_parameter("2.weight"), server.state.weights["2.weight"])


def test_a_note_that_is_no_number_is_none_and_told(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    server.note(distance=float("nan"), lengths=[1.0, float("inf")], moved={"0": 2})
    assert server.notes == {"distance": None, "lengths": [1.0, None], "moved": {"0": 2}}
    assert ["'distance'" in server.warnings[0], "'lengths'" in server.warnings[1]] == [True, True]
    assert len(server.warnings) == 2


def test_errors_become_lost_replies_and_the_others_go_on(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    replies = server.call(ALL, P.fail, Ask(listed=[1]))
    assert {i: reply.value for i, reply in replies.items()} == {0: 0, 2: 2}
    assert server.lost == [{"client": 1, "handler": "fail", "reason": "ValueError: boom 1"}]
    assert server.costs.bytes_down == 3 * (12 + 8 + 8)  # three floats, one listed client, one number
    assert server.costs.bytes_up == 2 * (8 + 12)
    assert [entry["clients"] for entry in server.ledger.account()["entries"]] == [2, 2]
    server.begin(1)
    assert server.lost == []
    assert list(server.call(ALL, P.fail, Ask())) == ALL  # it can be asked again


def test_a_part_of_the_cohort_may_fail_altogether(start: Start, three: Federation) -> None:
    """An algorithm that asks one client again must not end the run of the others."""
    server, _ = start(P, three)
    server.begin(0)
    assert server.select(0) == ALL
    assert server.call([1], P.fail, Ask(listed=ALL)) == {}
    assert [(lost["client"], lost["handler"]) for lost in server.lost] == [(1, "fail")]


def test_all_replies_lost_raises(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    server.begin(6)
    with pytest.raises((ContractError, FedfillError), match=r"'fail'") as caught:
        server.call(ALL, P.fail, Ask(listed=ALL))
    if isinstance(caught.value, ContractError):
        assert "round 7" in str(caught.value)
        assert caught.value.__cause__ is not None
        assert reason(caught.value.__cause__) == "ValueError: boom 0"
    else:
        assert str(caught.value).startswith("min_replies: ")
        assert all(fact in str(caught.value) for fact in ("round 7", "0 of 3 clients", "ValueError: boom 0"))
    assert [loss["client"] for loss in server.lost] == ALL


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_replies_that_are_not_finite_are_left_out_and_reported(start: Start, three: Federation, number: float) -> None:
    server, _ = start(P, three)
    assert list(server.call(ALL, P.nan, Ask(listed=[0, 2], number=number))) == [1]
    assert [(loss["client"], loss["reason"]) for loss in server.lost] == [
        (0, "the reply holds a NaN or an infinity"),
        (2, "the reply holds a NaN or an infinity"),
    ]
    assert server.costs.bytes_up == 3 * 8  # they crossed nonetheless
    assert server.ledger.account()["entries"][0]["clients"] == 3
    with refused("training diverged", "round 1", kind=DivergedError):
        server.call(ALL, P.nan, Ask(listed=ALL, number=number))


def test_a_users_slip_ends_the_run_as_it_is(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    with mistake(server, r"mu: found -1"):
        server.call(ALL, P.user_slip, Ask())


@pytest.mark.parametrize("cohort", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_replies_come_in_client_order_whoever_answers_first(start: Start, three: Federation, cohort: list[int]) -> None:
    server, _ = start(P, three, workers=3)
    assert list(server.call(cohort, P.slow, Ask())) == ALL


def test_an_empty_cohort_has_no_replies(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    assert server.call([], P.hello, Ask()) == {}
    assert (server.costs.bytes_down, server.costs.bytes_up) == (0, 0)


def cohorts(start: Start, three: Federation, clients: int, participation: float, seed: int = 0) -> list[list[int]]:
    server, _ = start(P, three, seed=seed, participation=participation)
    server.clients = clients
    return [server.select(t) for t in range(30)]


def test_cohorts_are_sorted_and_depend_on_seed_and_round_alone(start: Start, three: Federation) -> None:
    chosen = cohorts(start, three, 10, 0.3)
    assert all(len(cohort) == 3 and cohort == sorted(set(cohort)) for cohort in chosen)
    assert set().union(*chosen) == set(range(10))
    assert chosen == cohorts(start, three, 10, 0.3)
    assert chosen != cohorts(start, three, 10, 0.3, seed=1)
    assert len({tuple(cohort) for cohort in chosen}) > 10


@pytest.mark.parametrize(
    ("clients", "participation", "size"), [(10, 1.0, 10), (10, 0.01, 1), (7, 0.5, 4), (3, 0.9, 3), (1, 0.1, 1)]
)
def test_size_of_a_cohort(start: Start, three: Federation, clients: int, participation: float, size: int) -> None:
    assert {len(cohort) for cohort in cohorts(start, three, clients, participation)} == {size}


class Squares(FedAvg):
    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        return ((model(batch.inputs)[:, 0] - batch.labels) ** 2).mean()


@pytest.mark.parametrize(("weighting", "expected"), [("samples", 3.8 / 3), ("uniform", 1.15)])
def test_a_round_of_fedavg_by_hand(
    start: Start, make_federation: Callable[..., Federation], weighting: str, expected: float
) -> None:
    # From w = 1. Points (1, 2), (2, 4): errors -1, -2, gradient (2*-1*1 + 2*-2*2) / 2 = -5, w = 1.5.
    # Point (1, 0): error 1, gradient 2, w = 0.8. Mean (2 * 1.5 + 0.8) / 3, or (1.5 + 0.8) / 2 if all count the same.
    clients = [
        Samples(torch.tensor([[1.0], [2.0]]), torch.tensor([2, 4])),
        Samples(torch.tensor([[1.0]]), torch.tensor([0])),
    ]
    program = Squares(local_epochs=1, optimizer="sgd", learning_rate=0.1, weighting=weighting)  # type: ignore[arg-type]
    server, _ = start(program, make_federation(clients, classes=5))
    program.round(server, 0)
    assert server.state.weights["weight"].item() == pytest.approx(expected, rel=1e-6)
    assert server.initial["weight"].item() == 1.0


def test_a_lost_client_is_left_out_of_the_average(start: Start, make_federation: Callable[..., Federation]) -> None:
    points = Samples(torch.tensor([[1.0], [2.0]]), torch.tensor([2, 4]))
    broken = Samples(torch.tensor([[float("nan")]]), torch.tensor([0]))
    program = Squares(local_epochs=1, optimizer="sgd", learning_rate=0.1)
    server, _ = start(program, make_federation([broken, points], classes=5))
    program.round(server, 0)
    assert server.state.weights["weight"].item() == pytest.approx(1.5)
    assert [loss["client"] for loss in server.lost] == [0]


def test_fewer_replies_than_needed_end_the_run(start: Start, three: Federation) -> None:
    server, _ = start(P, three, min_replies=2)
    assert list(server.call(server.select(0), P.fail, Ask(listed=[1]))) == [0, 2]
    with refused("min_replies", "1", "3", "fail"):
        server.call(server.select(0), P.fail, Ask(listed=[0, 1]))


def test_a_part_of_the_cohort_may_be_lost_whole(start: Start, three: Federation) -> None:
    server, _ = start(P, three, min_replies=2)
    server.select(0)
    assert server.call([1], P.nan, Ask(listed=[1], number=float("nan"))) == {}
    assert [loss["client"] for loss in server.lost] == [1]


def test_a_mean_of_nothing_but_nan_is_training_that_diverged(
    start: Start, make_federation: Callable[..., Federation]
) -> None:
    points = Samples(torch.tensor([[1.0], [2.0]]), torch.tensor([2, 4]))
    broken = Samples(torch.tensor([[float("nan")]]), torch.tensor([0]))
    program = Squares(local_epochs=1, optimizer="sgd", learning_rate=0.1)
    server, _ = start(program, make_federation([broken, broken, points], classes=5))
    server.select(0)
    weights = server.state.weights
    with pytest.raises(DivergedError, match="every client's reply held a NaN"):  # of a part of the cohort, too
        server.average([0, 1], program.train, Broadcast(weights), of={"weights": weights}, by="samples", whole=True)
    with refused("engine", "train", "NaN") as caught:  # of other reasons it says all of them
        server.lose(1, "train", "it makes no sense")
        server.average([0], program.train, Broadcast(weights), of={"weights": weights}, by="samples", whole=True)
    assert not isinstance(caught.value, DivergedError)
