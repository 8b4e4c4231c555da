"""Sums over clients: exact on every engine, without the lost, with noise that is nobody else's, and what it all costs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.helpers import refused
from tests.protocol.sums_world import BY_HAND, Points, Question, Summer, drawn, federation_of, pooled
from tests.protocol.world import CPU, Start
from torch import Tensor

from fedfill import tree
from fedfill.engines.local import LocalEngine
from fedfill.engines.runner import make_resident
from fedfill.models.views import weights_of
from fedfill.privacy.keyed import seeded
from fedfill.privacy.sums import MASKED, SUM_ALONE, TRUSTED, isometric, pack
from fedfill.protocol.client import Client, State
from fedfill.protocol.server import Server
from fedfill.protocol.sums import SCALED, Collected, Sums

PLAIN = Summer()
SITE, SECURE, SERVER = (Summer(trust=trust, target_epsilon=3.0) for trust in ("site", "secure", "server"))


@contextmanager
def local(program: Summer, points: Points, workers: int = 1) -> Iterator[Server]:
    """A server on the local engine alone, for what no engine has a part in."""
    model, federation = torch.nn.Linear(2, 2), federation_of(points)
    initial = weights_of(model)
    engine = LocalEngine(program, federation, model, initial, seed=0, device=CPU, workers=workers)
    server = Server(
        engine, clients=len(points), classes=2, rounds=10, participation=1.0, seed=0, initial=initial,
        resident=make_resident(model, CPU), sample=federation.sample,
    )  # fmt: skip
    server.state = State({})
    server.begin(0)
    yield server
    engine.close()


def same(collected: Collected, packed: dict[str, Tensor]) -> bool:
    found = {**collected.sums, "gram": pack(collected.sums["gram"])}
    return found.keys() == packed.keys() and all(torch.equal(x, packed[name]) for name, x in found.items())


# Exact sums


def test_the_sums_of_the_example(start: Start) -> None:
    server, _ = start(PLAIN, federation_of(BY_HAND), torch.nn.Linear(2, 2))
    collected = PLAIN.ask(server)
    # truncated to 2^-12 five points are off by 5 of these at the most
    near = {"rtol": 0, "atol": 5 * 2.0**-12}
    assert torch.allclose(collected.sums["gram"], torch.tensor([[2.64, 0.48], [0.48, 2.36]]).double(), **near)
    assert torch.allclose(collected.sums["moments"], torch.tensor([[2.6, 0.6], [0, 1.8]]).double(), **near)
    assert collected.sums["counts"].tolist() == [3, 2]
    assert torch.equal(collected.sums["gram"], collected.sums["gram"].T)
    assert (collected.replies, collected.stds) == (2, {"moments": 0.0, "counts": 0.0, "gram": 0.0})


@pytest.mark.parametrize("workers", [1, 3])
def test_every_engine_and_every_split_give_the_bits_of_one_place(start: Start, workers: int) -> None:
    """The third client has no record; on local engines some workers serve several clients, on Flower none."""
    points = drawn(7, 40, 0, 13)
    server, _ = start(PLAIN, federation_of(points), torch.nn.Linear(2, 2), workers=workers)
    assert same(PLAIN.ask(server), pooled(points))
    assert server.lost == []
    rows, labels = ([x for part in points for x in part[k]] for k in (0, 1))
    one_by_one: Points = [(rows[k::2], labels[k::2]) for k in (1, 0)]
    assert same(Collected({**unpacked(pooled(one_by_one))}, {}, 2), pooled(points))


def unpacked(packed: dict[str, Tensor]) -> dict[str, Tensor]:
    a, b, c = packed["gram"].tolist()
    return {**packed, "gram": torch.tensor([[a, b], [b, c]], dtype=torch.float64)}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raises", "no power"),
        ("no features", "record 39"),
        ("other shape", "'sums'"),
        ("other names", "'sums'"),
        ("a block less", "'sums'"),
        ("int16", "'sums'"),
        ("float64", "'sums'"),
        ("huge", "2^53"),
        ("least", "2^53"),
        ("below 0", "count below 0"),
    ],
)
def test_a_reply_that_is_no_sum_is_left_out_and_named(start: Start, how: str, why: str) -> None:
    """The answer is exactly that of the others' records: nothing is scaled up, nothing of the bad one is in it."""
    points = drawn(7, 40, 5)
    server, _ = start(PLAIN, federation_of(points), torch.nn.Linear(2, 2))
    collected = PLAIN.ask(server, bad=[1], how=how)
    assert same(collected, pooled(points, 1))
    assert collected.replies == 2
    assert [(loss["client"], loss["handler"]) for loss in server.lost] == [(1, "sums")]
    assert why in server.lost[0]["reason"]
    assert any("2 of 3" in text and text.endswith("not in them: 1.") for text in server.warnings)


@pytest.mark.parametrize("how", ["infinite", "nan"])
def test_what_is_not_finite_is_left_out_under_noise_too(start: Start, how: str) -> None:
    server, _ = start(SITE, federation_of(drawn(7, 40, 5)), torch.nn.Linear(2, 2))
    collected = SITE.ask(server, bad=[1], how=how)
    assert [loss["client"] for loss in server.lost] == [1]
    assert all(torch.isfinite(x).all() for x in collected.sums.values())
    whole = SITE.noise(SITE.statistic)
    assert whole is not None
    assert collected.stds == pytest.approx({name: math.sqrt(2) * std for name, std in whole.stds.items()})


def test_noise_of_each_client_takes_counts_below_0_and_the_servers_does_not(start: Start) -> None:
    for program, lost in ((SITE, []), (SERVER, [1])):
        server, _ = start(program, federation_of(drawn(7, 40, 5)), torch.nn.Linear(2, 2))
        program.ask(server, bad=[1], how="below 0")
        assert [loss["client"] for loss in server.lost] == lost


def test_who_was_lost_before_in_the_round_and_answers_now_is_not_named(start: Start) -> None:
    server, _ = start(PLAIN, federation_of(drawn(7, 4, 5)), torch.nn.Linear(2, 2))
    PLAIN.ask(server, bad=[2], how="raises")
    PLAIN.ask(server, bad=[1], how="raises")
    named = [text.rsplit(": ", 1)[1] for text in server.warnings if "not in them" in text]
    assert named == ["2.", "1."]


def test_without_any_reply_there_is_no_sum(start: Start) -> None:
    server, _ = start(PLAIN, federation_of(drawn(3, 4)), torch.nn.Linear(2, 2))
    with refused("min_replies", "2^53"):
        PLAIN.ask(server, bad=[0, 1], how="huge")


@pytest.mark.parametrize("program", [PLAIN, SITE, SERVER])
def test_who_has_no_record_sends_as_much_as_others(program: Summer) -> None:
    """An empty reply would tell that somebody holds nothing."""
    replies = [reply_of(program, i, points) for i, points in enumerate(drawn(0, 6))]
    shapes = [{name: (x.dtype, tuple(x.shape)) for name, x in reply.sums.items()} for reply in replies]
    assert shapes[0] == shapes[1]
    assert {"gram", "moments", "counts"} == shapes[0].keys()
    assert tree.size(replies[0]) == tree.size(replies[1])
    if program is SITE:
        assert all(x.abs().min() > 0 for x in replies[0].sums.values())
    else:
        assert not any(x.any() for x in replies[0].sums.values())


# Noise


def reply_of(
    program: Summer, i: int, points: tuple[list[list[float]], list[int]], t: int = 0, purpose: str = "sums", clients: int = 4
) -> Sums:  # fmt: skip
    """What client i sends in round t."""
    data = federation_of([points]).clients[0].train
    client = Client(
        id=i, round=t, data=data, classes=2, state=State({}), initial={}, seed=0, resident=lambda weights: torch.nn.Linear(2, 2)
    )  # fmt: skip
    return program.sums(client, Question(clients, [], "", purpose))


def flat(sums: dict[str, Tensor]) -> Tensor:
    return torch.cat([x.double().flatten() for x in sums.values()])


@pytest.mark.parametrize(
    ("trust", "honest", "factor"),
    [("site", None, 2.0), ("secure", None, math.sqrt(4 / 3)), ("secure", 2, math.sqrt(2.0)), ("server", None, 1.0)],
)
def test_the_noise_in_the_sum_is_as_large_as_it_says(trust: str, honest: int | None, factor: float) -> None:
    """Four clients, 30 rounds; each block over its own std, in isometric coordinates."""
    program = Summer(trust=trust, honest=honest, target_epsilon=2.0, d=20)
    points = drawn(3, 0, 2, 4, d=20)
    exact, whole = pooled(points), program.noise(program.statistic)
    assert whole is not None
    noises: dict[str, list[Tensor]] = {name: [] for name in exact}
    with local(program, points) as server:
        for t in range(30):
            server.begin(t)
            collected = program.ask(server)
            assert collected.stds == pytest.approx({name: factor * std for name, std in whole.stds.items()})
            packed = {**collected.sums, "gram": pack(collected.sums["gram"])}
            for name, x in packed.items():
                noises[name].append(((x - exact[name]) / collected.stds[name]).flatten())
    for name, drawn_noise in noises.items():
        z = isometric(torch.stack(drawn_noise)) if name == "gram" else torch.stack(drawn_noise)
        assert float(z.pow(2).mean()) == pytest.approx(1, abs=5 * math.sqrt(2 / z.numel()))
        assert abs(float(z.mean())) < 5 / math.sqrt(z.numel())


def test_noise_is_shared_by_no_two_exchanges_rounds_or_clients() -> None:
    """The same points everywhere, so that replies differ by their noise alone; each with each, all coordinates differ."""
    points = drawn(5)[0]
    cases = [(i, t, purpose) for i in (0, 1) for t in (0, 1) for purpose in ("sums", "centre")]
    replies = [flat(reply_of(SITE, i, points, t, purpose).sums) for i, t, purpose in cases]
    for k, one in enumerate(replies):
        for other in replies[:k]:
            assert ((one - other).abs() > 1e-9).all()
    exact = flat(pooled([points]))
    noises = torch.stack([reply - exact for reply in replies])
    assert noises.numel() == len(set(noises.flatten().tolist()))  # nor two blocks of one reply


def test_a_repeated_round_has_the_same_noise_whatever_it_is_added_to() -> None:
    one, other = drawn(5, 9)
    again = [flat(reply_of(SITE, 2, one, 3).sums) for _ in range(2)]
    assert torch.equal(*again)
    moved = flat(reply_of(SITE, 2, other, 3).sums) - again[0]
    assert torch.allclose(moved, flat(pooled([other])) - flat(pooled([one])), rtol=0, atol=1e-5)
    with local(SERVER, [one]) as server:
        first = SERVER.ask(server)
        server.begin(0)
        assert all(torch.equal(x, first.sums[name]) for name, x in SERVER.ask(server).sums.items())
        assert not torch.equal(SERVER.ask(server, purpose="centre").sums["moments"], first.sums["moments"])


def test_every_engine_adds_the_same_noise(start: Start) -> None:
    """That of the client's stream, in the order of the blocks, rounded to float32 behind the addition and not before it."""
    points, std = drawn(300, 5), SITE.noise(SITE.statistic)
    assert std is not None
    server, _ = start(SITE, federation_of(points), torch.nn.Linear(2, 2))
    collected = SITE.ask(server)
    expected: dict[str, Tensor] = {}
    for i, mine in enumerate(points):
        stream = seeded(0, "sums", 0, i)
        for name, exact in pooled([mine]).items():
            draws = stream.normal(exact.shape)
            if name == "gram":
                draws /= torch.tensor([1, 2**0.5, 1], dtype=torch.float64)
            rounded = (exact + std.stds[name] * draws).float().double()
            expected[name] = expected.get(name, 0.0) + rounded
    assert same(collected, expected)


def test_what_noise_is_added_to_was_not_rounded() -> None:
    """A noise that is tiny beside the sum: rounded before, the sum would be another float32 than it is rounded behind."""
    points = drawn(20_000)[0]
    program = Summer(target_epsilon=1e9, target_delta=0.5)
    exact, sent = pooled([points]), reply_of(program, 0, points).sums
    std = program.noise(program.statistic)
    assert std is not None
    assert max(std.stds.values()) < 1e-3
    assert all(x.dtype == torch.float32 for x in sent.values())
    before = exact["gram"].float().double()
    draws = seeded(0, "sums", 0, 0)
    noise = {name: draws.normal(x.shape) * std.stds[name] for name, x in exact.items()}
    noise["gram"][1] /= 2**0.5
    assert torch.equal(sent["gram"], (exact["gram"] + noise["gram"]).float())
    assert not torch.equal(before, exact["gram"])


def test_too_few_shares_of_the_noise_are_not_opened(start: Start) -> None:
    """Of four clients three have to be there; the run ends before anybody sees the sum, with the round's name for a resume."""
    server, _ = start(SECURE, federation_of(drawn(3, 4, 5, 6)), torch.nn.Linear(2, 2))
    collected = SECURE.ask(server, bad=[3], how="raises")
    assert collected.replies == 3
    with refused("honest", "2 of 4", "trust=secure", "resume"):
        SECURE.ask(server, bad=[0, 3], how="raises")


def test_how_many_are_relied_on_is_fixed_before_they_are_asked() -> None:
    points = drawn(3, 4, 5, 6)
    strict = Summer(trust="secure", honest=4, target_epsilon=3.0)
    with local(strict, points) as server, refused("honest", "3 of 4"):
        strict.ask(server, bad=[2], how="raises")
    with local(SECURE, points) as server:  # not two thirds of the three that are left
        whole = SECURE.noise(SECURE.statistic)
        assert whole is not None
        stds = SECURE.ask(server, bad=[2], how="raises").stds
        assert stds == pytest.approx({name: std * math.sqrt(3 / 3) for name, std in whole.stds.items()})
    more = Summer(trust="secure", honest=40, target_epsilon=3.0)
    with local(more, points) as server, refused("honest", 40, "1 to 4"):
        more.ask(server)


# The account


def account(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.ledger.account(1e-5)
    return found


def test_noise_at_each_client_keeps_the_promise_for_a_record_added(start: Start) -> None:
    server, _ = start(SITE, federation_of(drawn(3, 4)), torch.nn.Linear(2, 2))
    SITE.ask(server)
    kept = account(server)
    assert kept["total_epsilon_added"] == pytest.approx(3, rel=1e-6)
    assert kept["total_epsilon_added"] <= 3
    assert 3 < kept["total_epsilon"] < 6  # for a record that is replaced: more, and less than twice as much
    assert [entry["released"] for entry in kept["entries"]] == ["Sums.sums"]
    assert kept["entries"][0]["conditions"] == [SCALED]  # these are numbers, and no images


def test_shares_of_two_exchanges_and_of_rounds_add_up_to_the_promise() -> None:
    program = Summer(target_epsilon=3.0, share=0.25)
    with local(program, drawn(3, 4)) as server:
        for t in (0, 1):
            server.begin(t)
            program.ask(server)
            program.ask(server, purpose="centre")
        assert account(server)["total_epsilon_added"] == pytest.approx(3, rel=1e-6)
        program.ask(server, purpose="once too often")
        assert account(server)["total_epsilon_added"] > 3.2


def test_shares_protect_only_where_single_replies_are_hidden(start: Start, request: pytest.FixtureRequest) -> None:
    """Masks hide them in a federation, on a condition of their own; elsewhere it is a condition as such."""
    server, _ = start(SECURE, federation_of(drawn(3, 4, 5, 6)), torch.nn.Linear(2, 2))
    SECURE.ask(server)
    kept = account(server)
    (entry,) = kept["entries"]
    assert kept["total_epsilon_added"] == pytest.approx(3, rel=1e-6)
    hidden, share = MASKED if "flower" in request.node.name else SUM_ALONE, "at least 3 of the 4 clients"
    for condition in (hidden, share):
        assert any(condition in text for text in entry["conditions"])
        assert condition in kept["statement"]


def test_noise_of_the_server_is_a_condition(start: Start) -> None:
    server, _ = start(SERVER, federation_of(drawn(3, 4)), torch.nn.Linear(2, 2))
    SERVER.ask(server)
    kept = account(server)
    (entry,) = kept["entries"]
    assert (kept["total_epsilon"], kept["total_epsilon_added"]) == (None, None)
    assert entry["conditional_epsilon_added"] == pytest.approx(3, rel=1e-6)
    assert TRUSTED in entry["conditions"]
    assert TRUSTED in kept["statement"]


def test_without_noise_the_account_says_none_and_why(start: Start) -> None:
    server, _ = start(PLAIN, federation_of(drawn(3, 4)), torch.nn.Linear(2, 2))
    PLAIN.ask(server)
    kept = account(server)
    (entry,) = kept["entries"]
    assert (kept["total_epsilon"], kept["total_epsilon_added"], entry["conditional_epsilon_added"]) == (None,) * 3
    for way_out in ("gives its records' features away", "trust=site", "trust=secure"):
        assert way_out in entry["mechanism"]


def test_the_account_tells_adjacency_unit_and_delta() -> None:
    with local(SITE, drawn(3, 4)) as server:
        SITE.ask(server)
        kept = account(server)
    statement = kept["statement"]
    for word in ("added or removed", "replace", "one record", "1e-05", "at each client"):
        assert word in statement or word in kept["adjacency"] or word in kept["unit"], word
