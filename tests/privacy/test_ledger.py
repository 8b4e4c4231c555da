"""The ledger: composition per client, what ends a guarantee, its size, its checkpoint and its sentences."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import refused

from fedfill import tree
from fedfill.privacy import accountant
from fedfill.privacy.ledger import Ledger
from fedfill.privacy.releases import Release, dpsgd, gaussian, public, unbounded

DELTA = 1e-5
FIXED = "the encoder is fixed"
FILTER = "no filter looks at the data"
UPDATE = unbounded("model update as trained")
PAPER = gaussian("3 class means", math.sqrt(128) / 50, 4.0, 200, (FIXED, FILTER), met=False)
SINGLE = gaussian("3 class means", math.sqrt(128) / 50, 1.0, conditions=(FIXED,))


def account(ledger: Ledger, delta: float = DELTA) -> dict[str, Any]:
    """The account, after a pass through strict JSON, which has no infinity and no NaN."""
    parsed: dict[str, Any] = json.loads(json.dumps(ledger.account(delta), allow_nan=False))
    return parsed


def entry(ledger: Ledger, released: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = [item for item in account(ledger)["entries"] if item["released"] == released]
    assert len(found) == 1
    return found[0]


def test_constructors() -> None:
    assert public("drawn at random") == Release("drawn at random", 0.0, added_mu=0.0)
    assert unbounded("model update as trained") == Release("model update as trained", None)
    assert unbounded("x", ["a"]).conditions == ("a",)
    assert gaussian("2 class means", 1.0, 2.0, 16).mu == 2.0
    assert gaussian("2 class means", 1.0, 3.0).mechanism == "Gaussian noise (std 3) on 2 class means"
    assert PAPER.mechanism == "Gaussian noise (std 4) on 3 class means, 200 copies each"
    assert PAPER.mu is None
    assert PAPER.conditional_mu == pytest.approx(0.8)
    assert gaussian("sums", 2.0, 4.0, 4, added=1.0) == Release(
        "Gaussian noise (std 4) on sums, 4 copies each", 1.0, added_mu=0.5
    )
    conditional = gaussian("sums", 2.0, 4.0, added=1.0, met=False)
    assert (conditional.conditional_mu, conditional.conditional_added_mu) == (0.5, 0.25)
    assert "std 4 times the sensitivity" in gaussian("means", 1.0, 0.1, noise="std 4 times the sensitivity").mechanism


def test_no_noise_or_no_bound_is_no_guarantee() -> None:
    assert gaussian("means", 1.0, 0.0) == Release("no noise on means", None)
    for met in (True, False):
        release = gaussian("means", math.inf, 3.0, met=met)
        assert release.mu is None
        assert release.conditional_mu is None
    assert Release("x", math.inf).mu is None
    assert Release("x", 1e200).mu is None
    assert Release("x", 0.1, added_mu=math.inf) == Release("x", 0.1)
    # a record replaced is one of each: without a bound for it there is none for one added
    assert Release("x", math.inf, added_mu=1.0) == Release("x", None)
    with pytest.raises(ValueError, match="added_mu"):
        Release("x", None, added_mu=1.0)
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match="0 or more"):
            Release("x", 1.0, added_mu=wrong)
        with pytest.raises(ValueError, match="0 or more"):
            Release("x", None, conditional_added_mu=wrong)
        with pytest.raises(ValueError, match="0 or more"):
            Release("x", wrong)
        with pytest.raises(ValueError, match="0 or more"):
            Release("x", None, (), wrong)
    with refused("the standard deviation of the noise", -3.0):
        gaussian("means", 1.0, -3.0)


@pytest.mark.parametrize("sampled", [
    (0.0, 0.5, 10), (-1.0, 0.5, 10), (math.nan, 0.5, 10), (math.inf, 0.5, 10), (1e10, 0.5, 10), (1.0, 2.0, 10),
    (1.0, 0.0, 10), (1.0, -1.0, 5), (1.0, math.nan, 5), (1.0, 0.5, 0), (1.0, 0.5, -5), (1.0, 0.5, 10**9 + 1), (1.0, 0.5, 3.5),
])  # fmt: skip
def test_steps_that_can_t_be_are_no_release(sampled: Any) -> None:
    with pytest.raises(ValueError, match="of a release"):
        Release("x", 0.0, sampled=sampled)


def test_words_of_a_release_are_bounded() -> None:
    for wrong in (("x" * 1001,), ("x", ("y" * 1001,)), ("x", ("y",) * 21)):
        with pytest.raises(ValueError, match="at the most"):
            Release(wrong[0], 0.0, *wrong[1:])
    assert len(Release("x" * 1000, 0.0, ("y" * 1000,) * 20).conditions) == 20


def test_whole_numbers_too_large_for_floats_are_no_guarantee() -> None:
    ledger = Ledger()
    for mu in (10**153, 10**200, 10**400):
        ledger.add(0, "Reply.a", Release("x", mu))
    assert account(ledger)["total_epsilon"] is None


def test_release_survives_bytes() -> None:
    for release in (UPDATE, PAPER, SINGLE, public("why")):
        assert tree.from_bytes(tree.to_bytes(release)) == release


@pytest.mark.parametrize("name", ["added_mu", "conditional_added_mu"])
@pytest.mark.parametrize("value", [-1.0, math.nan, "1"])
def test_a_release_from_elsewhere_is_checked(name: str, value: Any) -> None:
    release = gaussian("sums", 2.0, 4.0, added=1.0)
    tree.validated(release, Release)
    object.__setattr__(release, name, value)
    with pytest.raises(ValueError, match=f"{name}.*of a"):
        tree.validated(release, Release)


def test_one_client_composes_over_fields_and_rounds() -> None:
    ledger = Ledger()
    for _ in range(4):
        ledger.add(0, "Reply.a", Release("noise", 0.3))
    ledger.add(0, "Reply.b", Release("noise", 0.8))
    figures = {item["released"]: item for item in account(ledger)["entries"]}
    assert figures["Reply.a"]["epsilon"] == pytest.approx(accountant.epsilon(0.6, DELTA))
    assert figures["Reply.a"]["times"] == 4
    assert figures["Reply.b"]["epsilon"] == pytest.approx(accountant.epsilon(0.8, DELTA))
    assert account(ledger)["total_epsilon"] == pytest.approx(accountant.epsilon(1.0, DELTA))


def test_clients_do_not_compose_and_the_worst_one_counts() -> None:
    ledger = Ledger()
    ledger.add(0, "Reply.a", Release("noise", 0.9))
    ledger.add(1, "Reply.a", Release("noise", 0.6))
    ledger.add(1, "Reply.a", Release("noise", 0.6))
    ledger.add(1, "Reply.b", Release("noise", 0.6))
    worst = entry(ledger, "Reply.a")
    assert worst["epsilon"] == pytest.approx(accountant.epsilon(0.9, DELTA))
    assert (worst["clients"], worst["times"]) == (2, 2)
    # client 1 is better in each field, and worst in total
    assert account(ledger)["total_epsilon"] == pytest.approx(accountant.epsilon(0.6 * math.sqrt(3), DELTA))


def test_mechanisms_of_one_field_are_told_apart_and_composed() -> None:
    ledger = Ledger()
    ledger.add(0, "Reply.a", Release("weak noise", 0.8))
    ledger.add(0, "Reply.a", Release("strong noise", 0.6))
    got = account(ledger)
    assert [item["mechanism"] for item in got["entries"]] == ["weak noise", "strong noise"]
    assert got["total_epsilon"] == pytest.approx(accountant.epsilon(1.0, DELTA))


def test_one_unbounded_release_ends_the_guarantee() -> None:
    ledger = Ledger()
    for client in range(10):
        ledger.add(client, "Reply.latents", SINGLE)
    assert account(ledger)["total_epsilon"] == pytest.approx(0.83, abs=5e-3)
    ledger.add(7, "Reply.weights", UPDATE)
    got = account(ledger)
    assert got["total_epsilon"] is None
    assert [item["epsilon"] is None for item in got["entries"]] == [True, False]
    assert got["entries"][0]["released"] == "Reply.weights"
    assert got["entries"][0]["conditional_epsilon"] is None
    assert got["entries"][1]["epsilon"] == pytest.approx(0.83, abs=5e-3)
    assert got["statement"].endswith("In total: no differential-privacy guarantee.")
    # neither a later protected release nor another delta brings it back
    ledger.add(7, "Reply.weights", Release("model update as trained", 0.1))
    assert account(ledger)["total_epsilon"] is None
    assert account(ledger, 0.5)["total_epsilon"] is None


def test_what_the_noise_alone_would_cost() -> None:
    ledger = Ledger()
    ledger.add(0, "Reply.latents", PAPER)
    got = entry(ledger, "Reply.latents")
    assert got["epsilon"] is None
    assert got["conditional_epsilon"] == pytest.approx(3.39, abs=5e-3)
    assert got["conditions"] == [FIXED, FILTER]
    ledger.add(0, "Reply.latents", PAPER)
    assert entry(ledger, "Reply.latents")["conditional_epsilon"] == pytest.approx(
        accountant.epsilon(0.8 * math.sqrt(2), DELTA)
    )
    # one release of a client without any figure, and none is left
    ledger.add(1, "Reply.latents", Release(PAPER.mechanism, None))
    assert entry(ledger, "Reply.latents")["conditional_epsilon"] is None


def test_a_field_with_and_without_a_bound_has_none() -> None:
    ledger = Ledger()
    ledger.add(0, "Reply.latents", Release("noise", 0.6))
    ledger.add(0, "Reply.latents", Release("noise", None, (FILTER,), 0.8))
    got = entry(ledger, "Reply.latents")
    assert got["epsilon"] is None
    assert got["conditional_epsilon"] == pytest.approx(accountant.epsilon(1.0, DELTA))


def test_conditions_are_kept_once_and_in_order() -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger.add(0, "Reply.a", Release("noise", 0.1, ("one", "two")))
        ledger.add(1, "Reply.a", Release("noise", 0.1, ("two", "three")))
    assert entry(ledger, "Reply.a")["conditions"] == ["one", "two", "three"]


def test_order_of_entries() -> None:
    ledger = Ledger()
    ledger.add(0, "Reply.z", public("constant"))
    ledger.add(0, "Reply.a", Release("noise", 0.5))
    ledger.add(0, "Reply.b", Release("noise", 2.0))
    ledger.add(0, "Reply.y", UPDATE)
    ledger.add(0, "Reply.x", UPDATE)
    names = [item["released"] for item in account(ledger)["entries"]]
    assert names == ["Reply.x", "Reply.y", "Reply.b", "Reply.a", "Reply.z"]


def test_a_figure_too_large_to_write_down_is_no_guarantee() -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger.add(0, "Reply.a", Release("noise", 1e154))
    assert account(ledger)["total_epsilon"] is None
    assert entry(ledger, "Reply.a")["epsilon"] is None
    assert "inf" not in account(ledger)["statement"]


def test_an_entry_too_large_to_write_down_leaves_a_client_the_worst_one() -> None:
    # a client whose figure overflows must not be forgotten for one with a small figure
    ledger = Ledger()
    ledger.add(0, "Reply.a", Release("noise", 1e154))
    ledger.add(0, "Reply.a", Release("noise", 1e154))
    ledger.add(1, "Reply.a", Release("noise", 0.1))
    assert account(ledger)["total_epsilon"] is None
    assert account(ledger)["statement"].endswith("In total: no differential-privacy guarantee.")


def test_it_stays_small() -> None:
    ledger = Ledger()

    def rounds(first: int, last: int) -> int:
        for _ in range(first, last):
            for client in range(5):
                ledger.add(client, "Reply.weights", UPDATE)
                ledger.add(client, "Reply.latents", SINGLE)
        return len(tree.to_bytes(ledger.state()))

    after_ten = rounds(0, 10)
    # the counts are tensors of a fixed width
    assert rounds(10, 2000) == after_ten
    assert entry(ledger, "Reply.weights")["times"] == 2000


RELEASES = st.builds(
    Release,
    st.sampled_from(["noise", "as trained"]),
    st.floats(0, 10),
    st.lists(st.sampled_from(["one", "two"]), unique=True).map(tuple),
    added_mu=st.none() | st.floats(0, 10),
    conditional_added_mu=st.none() | st.floats(0, 10),
) | st.builds(
    Release,
    st.sampled_from(["noise", "as trained"]),
    st.none(),
    st.lists(st.sampled_from(["one", "two"]), unique=True).map(tuple),
    st.none() | st.floats(0, 10),
    conditional_added_mu=st.none() | st.floats(0, 10),
)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["Reply.a", "Reply.b"]), RELEASES), max_size=20),
    st.integers(0, 20),
)
def test_a_checkpoint_changes_nothing(bookings: list[tuple[int, str, Release]], stop: int) -> None:
    whole, part = Ledger(), Ledger()
    for booking in bookings:
        whole.add(*booking)
    for booking in bookings[:stop]:
        part.add(*booking)
    part = Ledger.restore(tree.from_bytes(tree.to_bytes(part.state())))
    for booking in bookings[stop:]:
        part.add(*booking)
    assert account(part) == account(whole)
    assert tree.to_bytes(part.state()) == tree.to_bytes(whole.state())


def test_restoring_from_something_else() -> None:
    wrongs: list[Any] = [{}, {"entries": [{}]}, {"entries": 3}, None, []]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="no state of a ledger"):
            Ledger.restore(wrong)
    ledger = Ledger()
    ledger.add(0, "Reply.a", UPDATE)
    state = ledger.state()
    state["entries"][0]["times"] = state["entries"][0]["times"][:0]
    with pytest.raises(ValueError, match="no state of a ledger"):
        Ledger.restore(state)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1])
def test_wrong_delta(delta: float) -> None:
    ledger = Ledger()
    with refused("delta", delta):
        ledger.account(delta)
    ledger.add(0, "Reply.weights", UPDATE)
    with refused("delta", delta):
        ledger.account(delta)


def test_statement_of_model_updates_alone() -> None:
    ledger = Ledger()
    for client in range(3):
        ledger.add(client, "Reply.weights", UPDATE)
        ledger.add(client, "Reply.count", unbounded("number of samples"))
    text = account(ledger)["statement"]
    assert text.startswith("The server sees everything that the clients send")
    assert "No guarantee covers Reply.count and Reply.weights: whoever sees them may learn" in text
    assert text.endswith("In total: no differential-privacy guarantee.")
    # there is no figure, so nothing is said about how figures are meant
    assert "epsilon" not in text
    assert "delta" not in text


def test_statement_of_noisy_means_among_model_updates() -> None:
    ledger = Ledger()
    ledger.add(0, "Reply.weights", UPDATE)
    ledger.add(0, "Reply.latents", SINGLE)
    ledger.add(0, "Reply.drawn", public("drawn from a fixed distribution"))
    text = account(ledger)["statement"]
    assert "No guarantee covers Reply.weights: whoever sees it may learn" in text
    assert (
        "Reply.latents (Gaussian noise (std 1) on 3 class means) is protected with epsilon 0.83 at delta 1e-05, "
        "provided that these conditions hold: the encoder is fixed." in text
    )
    assert "limits nothing that the parts without a guarantee give away" in text
    assert "one record of one client, replaced by another of the same class" in text
    assert "class sizes taken as known" in text
    assert "seed" in text
    assert "If the class of the record may change too" in text
    assert "Independent of the client's own records: Reply.drawn (drawn from a fixed distribution)." in text
    assert text.endswith("In total: no differential-privacy guarantee.")


def test_statement_of_the_papers_mechanism() -> None:
    ledger = Ledger()
    ledger.add(0, "Reply.latents", PAPER)
    ledger.add(0, "Reply.latents", PAPER)
    text = account(ledger)["statement"]
    assert "No guarantee covers Reply.latents" in text
    assert (
        "would cost epsilon 5.05 at delta 1e-05 after 2 releases by one client, "
        "if these conditions held: the encoder is fixed; no filter looks at the data." in text
    )
    assert "is protected" not in text
    assert text.endswith("In total: no differential-privacy guarantee.")


def test_statement_with_a_guarantee() -> None:
    ledger = Ledger()
    ledger.add(0, "Reply.latents", SINGLE)
    text = account(ledger)["statement"]
    assert "No guarantee" not in text
    assert text.endswith("In total: epsilon 0.83 at delta 1e-05, under the conditions above.")
    plain = Ledger()
    plain.add(0, "Reply.latents", Release("noise", 1.0))
    assert account(plain, 1e-6)["statement"].endswith("In total: epsilon 4.89 at delta 1e-06.")


def test_statement_tells_nothing_from_too_little_to_count() -> None:
    ledger = Ledger()
    ledger.add(0, "Reply.drawn", public("drawn from a fixed distribution"))
    assert account(ledger)["total_epsilon"] == 0
    assert account(ledger)["statement"].endswith("as nothing that was sent depends on a client's own records.")
    ledger.add(0, "Reply.faint", Release("strong noise", 1e-8))
    got = account(ledger)
    assert got["total_epsilon"] == 0
    assert "Reply.faint (strong noise) is protected with epsilon 0 at delta 1e-05" in got["statement"]
    assert got["statement"].endswith("In total: epsilon 0 at delta 1e-05.")


def test_empty_ledger() -> None:
    got = account(Ledger())
    assert got["entries"] == []
    assert got["total_epsilon"] == 0
    assert got["unit"] == "one record of one client"
    assert got["delta"] == 1e-5
    assert got["statement"].endswith("In total: epsilon 0, as no client has sent anything.")


# Gaussian mechanisms on Poisson samples

NOISE, SHARE = 1.1, 0.05


def steps(count: int, noise: float = NOISE, probability: float = SHARE, what: str = "a generator") -> Release:
    return dpsgd(what, noise, probability, count)


def test_two_chunks_are_one_release_of_their_sum() -> None:
    once, twice = Ledger(), Ledger()
    once.add(0, "Images.inputs", steps(50))
    for part in (20, 30):
        twice.add(0, "Images.inputs", steps(part))
    whole = accountant.replaced_epsilon(0.0, ((NOISE, SHARE, 50),), DELTA)
    assert account(once)["total_epsilon"] == account(twice)["total_epsilon"] == whole
    assert entry(twice, "Images.inputs")["times"] == 2
    # not the sum of their figures, which would be too much
    parts = sum(accountant.replaced_epsilon(0.0, ((NOISE, SHARE, part),), DELTA) for part in (20, 30))
    assert whole < 0.9 * parts


def test_sampled_steps_of_two_fields_and_a_gaussian_release_compose() -> None:
    ledger = Ledger()
    ledger.add(0, "Images.inputs", steps(20))
    ledger.add(0, "Own.critic", steps(30, what="a critic"))
    ledger.add(0, "Own.other", steps(10, noise=2.0, what="another"))
    ledger.add(0, "Reply.codes", Release("noise", 0.5))
    ledger.add(1, "Reply.codes", Release("noise", 0.6))
    total = accountant.replaced_epsilon(0.5, ((NOISE, SHARE, 50), (2.0, SHARE, 10)), DELTA)
    assert account(ledger)["total_epsilon"] == pytest.approx(total, rel=1e-9)
    assert total > max(item["epsilon"] for item in account(ledger)["entries"])
    assert entry(ledger, "Images.inputs")["epsilon"] == accountant.replaced_epsilon(0.0, ((NOISE, SHARE, 20),), DELTA)
    assert (
        "Images.inputs (DP-SGD (noise multiplier 1.1) behind a generator) is protected" in account(ledger)["statement"]
    )


def test_the_worst_client_counts_of_sampled_ones_too() -> None:
    ledger = Ledger()
    for client, probability in enumerate((0.05, 0.2, 0.1)):
        ledger.add(client, "Images.inputs", dpsgd("x", NOISE, probability, 20, (5.0, DELTA)))
    worst = accountant.replaced_epsilon(0.0, ((NOISE, 0.2, 20),), DELTA)
    assert entry(ledger, "Images.inputs")["epsilon"] == account(ledger)["total_epsilon"] == worst


def test_sampled_steps_survive_a_checkpoint() -> None:
    ledger = Ledger()
    ledger.add(0, "Images.inputs", steps(20))
    ledger.add(0, "Images.inputs", dpsgd("a generator", NOISE, SHARE / 3, 7))
    ledger.add(1, "Images.inputs", steps(5))
    ledger.add(1, "Reply.codes", Release("noise", 0.5))
    again = Ledger.restore(tree.from_bytes(tree.to_bytes(ledger.state())))
    assert again.state()["entries"][0]["sampled"] == ledger.state()["entries"][0]["sampled"]
    for one in (ledger, again):
        one.add(0, "Images.inputs", steps(1))
    assert account(again) == account(ledger)
    old = ledger.state()
    for item in old["entries"]:
        del item["sampled"]  # as ledgers were before there were any
    assert entry(Ledger.restore(old), "Reply.codes")["epsilon"] == pytest.approx(accountant.epsilon(0.5, DELTA))


def test_sampled_steps_beside_model_updates_leave_no_guarantee_in_total() -> None:
    ledger = Ledger()
    ledger.add(0, "Images.inputs", steps(20))
    ledger.add(0, "Reply.weights", UPDATE)
    assert account(ledger)["total_epsilon"] is None
    assert entry(ledger, "Images.inputs")["epsilon"] is not None
    assert "Independent of" not in account(ledger)["statement"]


# A record added or removed, beside one replaced

BOTH = Release("noise", 0.6, ("fixed features",), added_mu=0.4)
COUNTS = Release("noise on counts", 0.0, added_mu=0.3)


def epsilon(*mus: float) -> float:
    return accountant.epsilon(math.hypot(*mus), DELTA)


def test_both_neighbours_are_booked_each_on_its_own() -> None:
    ledger = Ledger()
    for _ in range(2):
        ledger.add(0, "Sums.gram", BOTH)
    ledger.add(0, "Sums.counts", COUNTS)
    ledger.add(1, "Sums.gram", Release("noise", 0.7, added_mu=0.7))
    ledger.add(0, "Sums.seed", public("a setting"))
    got = entry(ledger, "Sums.gram")
    assert got["epsilon"] == pytest.approx(epsilon(0.6, 0.6))
    assert got["epsilon_added"] == pytest.approx(epsilon(0.7))  # the worst client need not be the same
    assert (got["conditional_epsilon"], got["conditional_epsilon_added"]) == (None, None)
    whole = account(ledger)
    assert whole["total_epsilon"] == pytest.approx(epsilon(0.6, 0.6))
    assert whole["total_epsilon_added"] == pytest.approx(epsilon(0.7))
    ledger.add(0, "Sums.gram", BOTH)
    assert account(ledger)["total_epsilon_added"] == pytest.approx(epsilon(0.4, 0.4, 0.4, 0.3))
    assert "Independent of the client's own records: Sums.seed (a setting)." in whole["statement"]


def test_figures_of_a_record_replaced_stand_as_they_did() -> None:
    with_both, alone = Ledger(), Ledger()
    for ledger, added in ((with_both, 0.4), (alone, None)):
        ledger.add(0, "Reply.a", Release("noise", 0.6, added_mu=added))
        ledger.add(1, "Reply.b", Release("noise", None, (FILTER,), 0.8, conditional_added_mu=added))
    one, two = account(with_both), account(alone)
    assert [item["epsilon"] for item in one["entries"]] == [item["epsilon"] for item in two["entries"]]
    assert [item["epsilon_added"] for item in two["entries"]] == [None, None]
    conditional = [item["conditional_epsilon_added"] for item in one["entries"]]
    assert conditional == [pytest.approx(epsilon(0.4)), None]
    assert "added or removed" not in two["statement"]
    assert "one record of one client, replaced by another of the same class" in two["statement"]


def test_the_statement_says_both() -> None:
    ledger = Ledger()
    ledger.add(0, "Sums.gram", BOTH)
    text = account(ledger)["statement"]
    pair = (
        f"epsilon {epsilon(0.4):#.3g} for one record added or removed, {epsilon(0.6):#.3g} for one replaced by another "
        "of the same class, at delta 1e-05"
    )
    assert f"Sums.gram (noise) is protected with {pair}, provided that these conditions hold: fixed features." in text
    assert text.endswith(f"In total: {pair}, under the conditions above.")
    assert text.rsplit(". ", 1)[-1].startswith("In total")  # which the terminal shows of many runs
    assert "seed" in text
    assert "has one figure alone" not in text
    ledger.add(1, "Sums.gram", Release("noise", None, ("a",), 0.8, conditional_added_mu=0.5))
    text = account(ledger)["statement"]
    assert f"would cost epsilon {epsilon(0.5):#.3g} for one record added or removed, " in text
    assert text.endswith("In total: no differential-privacy guarantee.")
    ledger = Ledger()
    ledger.add(0, "Sums.gram", Release("noise", 20.0, added_mu=14.0))
    large = f"epsilon {epsilon(14.0):.0f} for one record added or removed, {epsilon(20.0):.0f} for one replaced"
    assert large in account(ledger)["statement"]


def test_exact_counts_end_the_guarantee_of_a_record_added_alone() -> None:
    ledger = Ledger()
    ledger.add(0, "Sums.gram", BOTH)
    before = account(ledger)["total_epsilon"]
    ledger.add(0, "Sums.counts", Release("class sizes, which count as known", 0.0))
    after = account(ledger)
    assert after["total_epsilon"] == before
    assert after["total_epsilon_added"] is None
    assert entry(ledger, "Sums.gram")["epsilon_added"] is not None
    assert "no guarantee for one added or removed" in after["statement"].rsplit(". ", 1)[-1]
    assert f"epsilon {before:.3g} at delta 1e-05 for one record replaced" in after["statement"]
    # one figure alone is marked as such
    ledger.add(0, "Sums.means", Release("other noise", 0.1))
    assert "has one figure alone" in account(ledger)["statement"]


def test_noisy_counts_are_not_independent_of_the_records() -> None:
    ledger = Ledger()
    ledger.add(0, "Sums.counts", COUNTS)
    text = account(ledger)["statement"]
    assert "Independent" not in text
    assert f"epsilon {epsilon(0.3):#.3g} for one record added or removed, 0.00 for one replaced" in text


def test_sampled_steps_are_told_for_a_record_added_too() -> None:
    ledger = Ledger()
    ledger.add(0, "Images.inputs", steps(50))
    got = entry(ledger, "Images.inputs")
    assert got["epsilon_added"] == pytest.approx(accountant.sampled_epsilon(NOISE, SHARE, 50, DELTA), rel=1e-9)
    assert got["epsilon_added"] < got["epsilon"] < 2.5 * got["epsilon_added"]
    ledger.add(0, "Sums.gram", BOTH)
    total = account(ledger)["total_epsilon_added"]
    assert total == accountant.added_epsilon(0.4, ((NOISE, SHARE, 50),), DELTA)
    assert max(got["epsilon_added"], epsilon(0.4)) < total < got["epsilon_added"] + epsilon(0.4)
    again = Ledger.restore(tree.from_bytes(tree.to_bytes(ledger.state())))
    assert account(again) == account(ledger)


def test_older_states_have_no_figure_for_a_record_added() -> None:
    ledger = Ledger()
    ledger.add(0, "Sums.gram", BOTH)
    ledger.add(0, "Sums.seed", public("a setting"))
    old = ledger.state()
    for item in old["entries"]:
        for name in [name for name in item if name.startswith("added_")]:
            del item[name]
    again = Ledger.restore(old)
    got, was = account(again), account(ledger)
    assert got["total_epsilon"] == was["total_epsilon"]
    assert got["total_epsilon_added"] is None
    again.add(0, "Sums.gram", BOTH)  # what was not booked once is not known later
    assert account(again)["total_epsilon_added"] is None
    assert account(again)["total_epsilon"] == pytest.approx(epsilon(0.6, 0.6))
    broken = ledger.state()
    broken["entries"][0]["added_square"] = broken["entries"][0]["added_square"][:0]
    with pytest.raises(ValueError, match="no state of a ledger"):
        Ledger.restore(broken)
