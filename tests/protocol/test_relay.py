"""Relay: what one client made and others receive."""

from fedfill.algorithms.feddpms import match


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
