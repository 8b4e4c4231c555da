"""Personal ridge regressions around the shared one: by hand, near and far, and who has nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.algorithms.sums_world import BY_HAND, Plane, bundles, fitted, head_of, records
from tests.algorithms.test_fed3r import images
from tests.protocol.sums_world import Points

import fedfill
from fedfill import tree
from fedfill.algorithms.ccvr import CCVR
from fedfill.algorithms.fed3r import Fed3R
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.pfed3r import PFed3R
from fedfill.algorithms.softmax import Softmax


def own_heads(algorithm: PFed3R, points: Points, model: Any = None) -> list[Any]:
    """W of each client ``[d, classes]``; None where it has none of its own."""
    server = fitted(algorithm, points, model=model)
    found = []
    for i in range(len(points)):
        own = server.client_states.get(i, {}).get("own_head")
        found.append(None if own is None else own["classifier.weight"].T.double().numpy())
    return found


def test_by_hand() -> None:
    """The personal ridge of the first client of two, with lambda_p = 1 around the shared head of lambda = 1."""
    first, _ = own_heads(PFed3R(ridge_lambda=1.0, nearness=0.5), BY_HAND)
    assert np.allclose(first, [[0.792264, 0.139253], [-0.295297, 0.765341]], atol=1e-3)


@pytest.mark.parametrize("nearness", [1e-3, 0.1, 10.0])
def test_it_is_the_least_of_its_own_errors_and_the_distance(nearness: float) -> None:
    points = bundles(20, 60)
    shared = head_of(fitted(Fed3R(ridge_lambda=0.5, scale=1), points, model=Plane(4, 3)))[0]
    for client, own in zip(
        points, own_heads(PFed3R(ridge_lambda=0.5, nearness=nearness), points, Plane(4, 3)), strict=True
    ):
        z, y = records([client])
        lam = nearness * len(y)
        pull = lam * (own - shared) + z.T @ (z @ own - np.eye(3)[y])
        assert np.abs(pull).max() < 1e-3 * max(1.0, lam)


def test_far_heads_are_the_clients_and_near_ones_the_shared_one() -> None:
    points = bundles(40, 60)
    shared = head_of(fitted(Fed3R(scale=1), points, model=Plane(4, 3)))[0]
    near = own_heads(PFed3R(nearness=1e6), points, Plane(4, 3))
    assert all(np.allclose(own, shared, atol=1e-3) for own in near)
    far = own_heads(PFed3R(nearness=1e-9), points, Plane(4, 3))
    for client, own in zip(points, far, strict=True):
        z, y = records([client])
        assert np.allclose(own, np.linalg.lstsq(z, np.eye(3)[y], rcond=None)[0], atol=1e-2)


@pytest.mark.parametrize("engine", ["ray", "flower"])
@pytest.mark.parametrize(
    ("algorithm", "rounds"),
    [
        (PFed3R(), 1), (Fed3R(target_epsilon=3.0, trust="server"), 1), (CCVR(samples=20), 1),
        (Softmax(target_epsilon=3.0), 2), (FedAvg(head="fed3r", head_every=1, head_mode="replace", local_epochs=1), 2),
    ],
)  # fmt: skip
def test_every_engine_gives_the_bits_of_one_process(algorithm: Any, rounds: int, engine: str) -> None:
    """Also the noise, and what stays with clients."""
    points = bundles(20, 0, 30)
    one, other = (
        fitted(algorithm, points, model=Plane(4, 3), rounds=rounds, workers=2, engine=e) for e in ("local", engine)
    )
    assert tree.sha256(one.state.weights) == tree.sha256(other.state.weights)
    mine, theirs = ({i: s.get("own_head") for i, s in server.client_states.items()} for server in (one, other))
    for i, head in mine.items():
        assert (head is None) == (theirs.get(i) is None)
        assert head is None or tree.sha256(head) == tree.sha256(theirs[i])
    if algorithm.name != "fedavg":
        spent = [server.ledger.account(1e-5)["total_epsilon_added"] for server in (one, other)]
        assert spent[0] == spent[1]


def test_who_has_no_record_keeps_the_shared_head() -> None:
    assert own_heads(PFed3R(), [*BY_HAND, ([], [])])[2] is None


def test_a_run_judges_each_by_its_own_and_sends_no_more(tmp_path: Path) -> None:
    """The sums that leave a client are Fed3R's; with every client's own classes alone, its own head is better at home."""
    options = {
        "data": images(),
        "features": "conv(10) > project(16)",
        "clients": 4,
        "partition": "classes:3",
        "client_test": 0.2,
    }
    shared = fedfill.run("fed3r", **options, scale=1, out=tmp_path / "shared")
    own = fedfill.run("pfed3r", **options, out=tmp_path / "own")
    assert own.summary["bytes_up"] == shared.summary["bytes_up"]
    assert own.summary["mean_client_accuracy"] > shared.summary["mean_client_accuracy"]
