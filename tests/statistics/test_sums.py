"""Sums of bounded records: exact in any order, never longer than they may be, refused where memory would not hold them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import refused
from torch import Tensor

from fedfill.privacy.sums import isometric, pack
from fedfill.statistics.sums import (
    GRID,
    LARGEST,
    Block,
    Statistic,
    as_joined,
    as_sent,
    class_moments,
    plain_sum,
    require_memory,
    summed,
    truncated,
)

STEP = 2.0**-GRID
EVERY = {"gram": True, "by_class": True, "diagonal": True}


def drawn(n: int, d: int, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """n unit vectors and their classes."""
    stream = torch.Generator().manual_seed(seed)
    z = torch.nn.functional.normalize(torch.randn(n, d, generator=stream))
    return z, torch.randint(0, classes, (n,), generator=stream)


def joined(statistic: Statistic, parts: list[tuple[Tensor, Tensor]], chunk: int) -> dict[str, Tensor]:
    """What comes of adding up the parts' sums as they are sent, each made chunk by chunk."""
    total: dict[str, Tensor] = {}
    for z, y in parts:
        ends = range(0, len(y), chunk)
        sent = as_sent(statistic, summed(statistic, ((z[k : k + chunk], y[k : k + chunk]) for k in ends)))
        for name, x in sent.items():
            total[name] = total[name] + x if name in total else x.to(torch.int64 if x.dtype == torch.int32 else x.dtype)
    return as_joined(statistic, total)


@pytest.mark.parametrize("threads", [1, 4])
def test_any_split_order_chunk_and_number_of_threads_give_the_same_bits(threads: int) -> None:
    z, y = drawn(400, 33)
    statistic = class_moments(33, 3, **EVERY)
    wanted = joined(statistic, [(z, y)], 400)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(1))
    splits: dict[str, list[Tensor]] = {
        "one by one, from behind": [torch.tensor([i]) for i in range(399, -1, -1)],
        "by class": [(y == c).nonzero()[:, 0] for c in range(3)],
        "at random": list(order.split([3, 150, 247])),
        "with an empty one": [order[:0], order],
    }
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for words, parts in splits.items():
            for chunk in (1, 7, 400):
                found = joined(statistic, [(z[rows], y[rows]) for rows in parts], chunk)
                assert all(torch.equal(x, wanted[name]) for name, x in found.items()), (words, chunk)
    finally:
        torch.set_num_threads(before)


def test_sums_are_those_of_records() -> None:
    """Against the definition, on the truncated records and within what truncation moves on the others."""
    z, y = drawn(60, 5)
    one_hot = torch.nn.functional.one_hot(y, 3).double()
    for records, near in ((truncated(z), 0.0), (z.double(), 60 * STEP * 2)):
        found = summed(class_moments(5, 3, **EVERY), [(z, y)])
        wanted = {
            "moments": torch.einsum("nd,nc->dc", records, one_hot),
            "counts": one_hot.sum(0),
            "gram": torch.einsum("nd,ne->de", records, records),
            "class_grams": torch.einsum("nd,ne,nc->cde", records, records, one_hot),
            "squares": torch.einsum("nd,nc->dc", records**2, one_hot),
        }
        assert found.keys() == wanted.keys()
        for name, x in wanted.items():
            assert torch.allclose(found[name], x, rtol=0, atol=near), name
        assert torch.equal(found["class_grams"].sum(0), found["gram"])
    plain = summed(plain_sum(5), [(z, y)])
    assert plain["records"].tolist() == [60]
    assert torch.equal(plain["sum"], truncated(z).sum(0))


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=6))
def test_truncation_never_lengthens_and_keeps_zeros_and_signs(values: list[float]) -> None:
    z = torch.tensor([values])
    short = truncated(z)
    assert short.dtype == torch.float64
    assert (short.abs() <= z.double().abs()).all()
    assert (z.double().abs() - short.abs() < STEP).all()
    assert (short * z.double() >= 0).all()
    assert torch.equal(truncated(short), short)


def test_truncation_by_hand() -> None:
    assert truncated(torch.tensor([[0.6, -0.6, 1.0, -STEP, 0.9 * STEP, -0.9 * STEP]])).tolist() == [
        [2457 * STEP, -2457 * STEP, 1.0, -STEP, 0.0, 0.0]
    ]


WORST: list[tuple[str, Callable[[int], Tensor]]] = [
    ("zeros", lambda d: torch.zeros(d)),
    ("one-hot", lambda d: torch.eye(d)[0]),
    ("even", lambda d: torch.full((d,), d**-0.5)),
    ("tiny", lambda d: torch.full((d,), 1e-30)),
    ("signs", lambda d: torch.nn.functional.normalize(torch.arange(d) % 2 * 2.0 - 1, dim=0)),
]


@pytest.mark.parametrize(("words", "make"), WORST)
@pytest.mark.parametrize("radius", [1.0, 16.0])
def test_no_record_moves_a_block_further_than_its_bound(
    words: str, make: Callable[[int], Tensor], radius: float
) -> None:
    """Added or removed: the bound; replaced by one of the same class: the other. One-hot records reach the first."""
    d = 6
    statistic = class_moments(d, 3, radius=radius, **EVERY)
    label = torch.tensor([1])
    one = summed(statistic, [(radius * make(d)[None], label)])
    for name, block in statistic.blocks.items():
        length = float((isometric(pack(one[name])) if block.symmetric else one[name]).norm())
        assert length <= block.bound.bound * (1 + 1e-9), name
        if words == "one-hot":
            assert length == block.bound.bound
        for _, other in WORST:
            there = summed(statistic, [(radius * other(d)[None], label)])
            moved = one[name] - there[name]
            away = float((isometric(pack(moved)) if block.symmetric else moved).norm())
            assert away <= block.bound.replaced * (1 + 1e-9) + 1e-12, name


def test_a_sum_of_nobody_is_of_full_shape() -> None:
    statistic = class_moments(4, 3, **EVERY)
    empty = as_sent(statistic, summed(statistic, []))
    assert {name: tuple(x.shape) for name, x in empty.items()} == {
        "moments": (4, 3),
        "counts": (3,),
        "gram": (10,),
        "class_grams": (3, 10),
        "squares": (4, 3),
    }
    assert not any(x.any() for x in empty.values())
    template = statistic.template()
    assert {name: x.shape for name, x in template.items()} == {name: x.shape for name, x in empty.items()}
    assert {x.dtype for x in template.values()} == {torch.int64}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_feature_that_is_no_number_is_named_and_not_summed(bad: float) -> None:
    z, y = drawn(9, 4)
    z[7, 2] = bad
    with pytest.raises(ValueError, match="record 7"):
        summed(class_moments(4, 3), [(z[:5], y[:5]), (z[5:], y[5:])])


# On the wire


def test_whole_numbers_are_as_narrow_as_they_fit() -> None:
    """2^-24 steps of a second moment fill 32 bits at 128, 2^-12 steps of a moment at 524,288."""
    statistic = class_moments(2, 1)
    one = torch.tensor([[1.0, 0.0]])
    for n, wide in ((127, torch.int32), (128, torch.int64)):
        sent = as_sent(statistic, summed(statistic, [(one.expand(n, 2), torch.zeros(n, dtype=torch.int64))]))
        assert {name: x.dtype for name, x in sent.items()} == {
            "moments": torch.int32, "counts": torch.int32, "gram": wide,
        }  # fmt: skip
        assert sent["gram"].tolist() == [n * 2**24, 0, 0]
        assert sent["moments"].tolist() == [[n * 2**12], [0]]
        assert as_joined(statistic, sent)["gram"].tolist() == [n, 0, 0]
    far = {"moments": torch.tensor([[-524288.0], [0.0]], dtype=torch.float64)}
    alone = Statistic({"moments": statistic.blocks["moments"]}, statistic.add, "")
    assert as_sent(alone, far)["moments"].dtype == torch.int64
    assert as_sent(alone, {"moments": far["moments"] + 1})["moments"].dtype == torch.int32


@pytest.mark.parametrize(("radius", "whole"), [(1.0, True), (256.0, True), (257.0, False), (math.inf, False)])
def test_features_that_nothing_bounds_are_summed_as_they_are(radius: float, whole: bool) -> None:
    statistic = class_moments(3, 2, radius=radius)
    sent = as_sent(statistic, summed(statistic, [drawn(5, 3, 2)]))
    assert (sent["gram"].dtype, sent["moments"].dtype) == ((torch.int32,) * 2 if whole else (torch.float64,) * 2)
    assert sent["counts"].dtype == torch.int32
    assert {name: x.dtype for name, x in statistic.template().items()} == {
        "moments": torch.int64 if whole else torch.float64, "counts": torch.int64,
        "gram": torch.int64 if whole else torch.float64,
    }  # fmt: skip


def test_as_many_records_as_are_exact() -> None:
    """2^29 records of length 1: one more would need a bit more than float64 has."""
    statistic = class_moments(1, 1)
    n = 2**29
    big = {"moments": torch.tensor([[float(n)]]).double(), "gram": torch.tensor([[float(n)]]).double()}
    big["counts"] = torch.tensor([float(n)]).double()
    least = {"moments": STEP, "gram": STEP**2, "counts": 1.0}
    for name, x in big.items():
        below = {**big, name: x - least[name]}
        assert (
            as_joined(statistic, as_sent(statistic, below))[name] != as_joined(statistic, as_sent(statistic, big))[name]
        )


# Memory


@pytest.mark.parametrize(
    ("d", "classes", "blocks"),
    [(2048, 100, {"gram": False, "by_class": True}), (40_000, 10, {}), (300_000, 1000, {"gram": False})],
)
def test_what_memory_would_not_hold_is_refused_with_what_fits(d: int, classes: int, blocks: dict[str, Any]) -> None:
    """Before anything is allocated; as many features as are named do fit, and one more does not."""
    with refused("features", f"{d} features", "project(") as caught:
        class_moments(d, classes, **blocks)
    words = str(caught.value)
    fits = int(words.rsplit("project(", 1)[1].split(")")[0])
    class_moments(fits, classes, **blocks)
    with refused("features"):
        class_moments(fits + 1, classes, **blocks)


def test_what_memory_holds_is_taken() -> None:
    block = Block((LARGEST,), plain_sum(LARGEST).blocks["sum"].bound)
    require_memory(1, {"sum": block})
    with refused("features"):
        require_memory(1, {"sum": block, "more": block})
