"""Relay: what one client made and others receive."""

from collections.abc import Sequence
from typing import Any, cast

from fedfill.algorithms import Request
from fedfill.protocol.relay import Delivered, collect, match


def test_match_takes_the_largest_overlap():
    assert match(9, [0, 1, 2], {3: [0, 5], 4: [1, 2], 5: [7]}) == [4]


def test_match_breaks_ties_by_the_lowest_number():
    assert match(9, [0, 1], {7: [1], 3: [0], 5: [0]}) == [3]


def test_match_never_chooses_the_recipient_itself():
    assert match(3, [0, 1], {3: [0, 1], 8: [1]}) == [8]


def test_match_finds_nobody_without_overlap():
    assert match(9, [0], {1: [5], 2: [6]}) == []
    assert match(9, [0], {}) == []


def test_several_assistants_cover_what_is_still_open():
    # 1 covers two classes; then 4 adds one more, while 2 would only repeat what is covered
    assert match(9, [0, 1, 2], {1: [0, 1], 2: [0, 1], 4: [1, 2]}, most=3) == [1, 4]


def test_what_was_delivered_is_not_sent_again() -> None:
    held = Delivered().acknowledged([2, 0])
    assert held.clients == [0, 2]
    assert [held.once(i, "pool") for i in range(3)] == [None, "pool", None]
    assert held.acknowledged([0, 1]).clients == [0, 1, 2]


class Asked:
    """A server whose clients answer in turn."""

    def __init__(self, *answers: dict[int, str]) -> None:
        self.clients, self.answers, self.asked, self.lost = 3, list(answers), list[list[int]](), list[tuple[int, str]]()

    def call(self, cohort: Sequence[int], handler: Any, message: Any) -> dict[int, str]:
        self.asked.append(list(cohort))
        return {i: reply for i, reply in self.answers.pop(0).items() if i in cohort}

    def lose(self, client: int, handler: str, reason: str) -> None:
        self.lost.append((client, reason))


def test_who_was_not_heard_of_is_asked_again_and_nobody_else() -> None:
    server = Asked({2: "good", 0: "bad"}, {0: "good"}, {1: "good"})
    found = collect(cast(Any, server), len, Request(), lambda reply: None if reply == "good" else "it is bad")  # type: ignore[arg-type]
    assert server.asked == [[0, 1, 2], [0, 1], [1]]
    assert list(found) == [0, 1, 2]
    assert server.lost == [(0, "it is bad")]


def test_after_so_many_attempts_it_goes_on_without_them() -> None:
    server = Asked({0: "good"}, {}, {})
    assert list(collect(cast(Any, server), len, Request(), lambda reply: None, attempts=3)) == [0]  # type: ignore[arg-type]
    assert server.asked == [[0, 1, 2], [1, 2], [1, 2]]
