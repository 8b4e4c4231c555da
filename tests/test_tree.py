"""Trees: the round trip through bytes, sizes worked by hand, copies, and the notice of writes."""

from __future__ import annotations

import gc
import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedfill import tree
from fedfill.tree import Record

DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int64, torch.bool,
]  # fmt: skip


@dataclass(frozen=True)
class Pair(Record):
    left: Any
    right: Any = None


@dataclass(frozen=True)
class Empty(Record):
    pass


def same(a: Any, b: Any) -> bool:
    """Equal in types, structure, order and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        plain = a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*plain)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, Record):
        return same(vars(a), vars(b))
    return repr(a) == repr(b)  # tells 0.0 from -0.0, and takes NaN for itself


@st.composite
def some_tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    stream = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    return torch.randint(-5, 5, shape, generator=stream).to(draw(st.sampled_from(DTYPES)))


leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | some_tensors()
trees = st.recursive(
    leaf,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.just(Empty())
    ),
    max_leaves=12,
)


@given(trees)
def test_a_tree_survives_the_round_trip_through_bytes(value: Any) -> None:
    assert same(tree.from_bytes(tree.to_bytes(value)), value)


@given(trees)
def test_equal_trees_give_equal_bytes(value: Any) -> None:
    assert tree.to_bytes(value) == tree.to_bytes(tree.clone(value))


def test_dicts_that_look_like_the_encoding_survive() -> None:
    value = {"tensor": "0", "tuple": [1], "dict": {"record": "x", "fields": {}}, 1: "one", "1": "uno"}
    assert same(tree.from_bytes(tree.to_bytes(value)), value)


def test_shared_memory_comes_back_equal_and_apart() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    value = {"whole": base, "again": base, "row": base[1], "turned": base.T, "wide": base[:1].expand(3, 4)}
    back = tree.from_bytes(tree.to_bytes(value))
    assert same(back, value)
    back["whole"].zero_()
    assert same(back["again"], base)
    assert same(back["row"], base[1])


def test_channels_last_and_trained_tensors_come_back_plain() -> None:
    image = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    parameter = torch.nn.Parameter(torch.ones(2))
    back = tree.from_bytes(tree.to_bytes([image, parameter]))
    assert same(back[0], image)
    assert back[0].is_contiguous()
    assert same(back[1], parameter.detach())


def test_bytes_hold_the_values_of_their_time() -> None:
    tensor = torch.ones(2)
    data = tree.to_bytes(tensor)
    tensor.zero_()
    assert same(tree.from_bytes(data), torch.ones(2))


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        np.zeros(2),
        b"bytes",
        1j,
        object(),
        {1.5: 0},
        {True: 0},
        {None: 0},
        [{"deep": (0, {1})}],
        Pair(np.int64(1)),
    ],
)
def test_what_is_no_tree_is_not_written(value: Any) -> None:
    with pytest.raises(TypeError, match="can't be sent or stored"):
        tree.to_bytes(value)


def test_bytes_leave_no_copies_behind() -> None:
    def floats() -> int:
        return sum(x.numel() for x in gc.get_objects() if type(x) is Tensor)

    gc.collect()
    gc.disable()  # what waits for the next collection of cycles may be gigabytes
    try:
        value = {"w": [torch.ones(1000)]}
        before = floats()
        tree.to_bytes(value)
        assert floats() < before + 1000
    finally:
        gc.enable()


SOME = tree.to_bytes({"w": torch.arange(6.0), "n": 3, "pair": Pair((1, 2), "x")})


@given(st.integers(0, len(SOME) - 1))
def test_cut_bytes_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match="these bytes hold"):
        tree.from_bytes(SOME[:length])


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="these bytes hold"):
        tree.from_bytes(data)


@given(st.integers(0, len(SOME) - 1), st.integers(1, 255))
def test_a_changed_byte_gives_a_tree_or_a_value_error(place: int, flip: int) -> None:
    data = bytearray(SOME)
    data[place] ^= flip
    try:
        found = tree.from_bytes(bytes(data))
    except ValueError:
        return
    tree.to_bytes(found)


def with_structure(structure: str) -> bytes:
    header = json.dumps({"__metadata__": {"tree": structure}}).encode()
    return struct.pack("<Q", len(header)) + header


KIND = f"{Pair.__module__}.{Pair.__qualname__}"


@pytest.mark.parametrize(
    "structure",
    [
        '{"tensor": "0"}',
        '{"tensor": [1]}',
        '{"tuple": 3}',
        '{"dict": [[1]]}',
        '{"dict": [[[], 1]]}',
        '{"other": 1}',
        '{"record": "os.system", "fields": {}}',
        '{"record": ["x"], "fields": {}}',
        json.dumps({"record": KIND}),
        json.dumps({"record": KIND, "fields": [1]}),
        json.dumps({"record": KIND, "fields": {"left": 1, "top": 2}}),
        "[" * 100_000 + "]" * 100_000,
        "not JSON",
    ],
    ids=lambda text: text[:40],
)
def test_a_wrong_structure_is_refused(structure: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - several sentences
        tree.from_bytes(with_structure(structure))


def test_other_safetensors_are_refused() -> None:
    with pytest.raises(ValueError, match="no tree"):
        tree.from_bytes(safetensors.torch.save({"w": torch.ones(1)}))
    with pytest.raises(ValueError, match="no tree"):
        tree.from_bytes(SOME + b"more")


@pytest.mark.parametrize(
    ("fields", "fit"), [("left", True), ("left right", True), ("right", False), ("left rite", False)]
)
def test_a_record_with_other_fields_is_named(fields: str, fit: bool) -> None:
    values = dict.fromkeys(fields.split(), 1)
    data = with_structure(json.dumps({"record": tree._kind(Pair), "fields": values}))
    if fit:
        assert tree.from_bytes(data) == Pair(**values)
        return
    with pytest.raises(tree.UnknownKindError, match="Pair' with other fields"):
        tree.from_bytes(data)
    assert tree.from_bytes(data, unknown=True) == values


def test_an_unknown_record_is_named() -> None:
    with pytest.raises(ValueError, match=r"nobody\.Knows"):
        tree.from_bytes(with_structure('{"record": "nobody.Knows", "fields": {}}'))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, 0),
        (True, 1),
        (7, 8),
        (0.5, 8),
        ("é", 2),
        (torch.zeros(()), 4),
        (torch.zeros(0, 5), 0),
        (torch.zeros(2, 3), 24),
        (torch.zeros(1).expand(10), 40),
        ([torch.zeros(5, dtype=torch.uint8), (torch.zeros(2, dtype=torch.float16), False)], 5 + 4 + 1),
        ({"a long name": 1, 12345: torch.ones(3, dtype=torch.bool)}, 8 + 3),
        (Pair(torch.zeros((), dtype=torch.float64), {"x": "ab"}), 8 + 2),
        (Empty(), 0),
    ],
)
def test_sizes_by_hand(value: Any, expected: int) -> None:
    assert tree.size(value) == expected


@given(trees)
def test_size_is_kept_by_the_round_trip(value: Any) -> None:
    assert tree.size(tree.from_bytes(tree.to_bytes(value))) == tree.size(value)


@pytest.mark.parametrize("value", [np.zeros(1000), {1, 2}, [object()]])
def test_what_cannot_be_sent_has_no_size(value: Any) -> None:
    with pytest.raises(TypeError, match="can't be sent or stored"):
        tree.size(value)


def test_copy_makes_containers_and_clone_makes_tensors() -> None:
    tensor = torch.ones(2, requires_grad=True)
    value = {"list": [tensor], "pair": Pair((tensor,))}
    copied, cloned = tree.copy(value), tree.clone(value)
    assert copied["list"] is not value["list"]
    assert copied["list"][0] is tensor
    assert copied["pair"].left[0] is tensor
    assert cloned["list"][0].data_ptr() != tensor.data_ptr()
    assert not cloned["list"][0].requires_grad
    copied["list"].append(1)
    assert len(value["list"]) == 1


def test_map_tensors_goes_in_order_and_refuses_strangers() -> None:
    value = {"b": torch.tensor(1), "a": [torch.tensor(2), Pair(torch.tensor(3), torch.tensor(4))]}
    seen: list[int] = []
    tree.map_tensors(value, lambda x: (seen.append(int(x)), x)[1])
    assert seen == [1, 2, 3, 4]
    assert [int(x) for x in tree.tensors(value)] == seen
    with pytest.raises(TypeError, match="ndarray"):
        tree.map_tensors([np.zeros(1)], lambda x: x)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1.0, torch.zeros(3), "nan", None, 10**400], True),
        (torch.zeros(0), True),
        (torch.tensor([1, 2]), True),
        ({"x": float("nan")}, False),
        ((float("-inf"),), False),
        (Pair(torch.tensor([0.0, float("nan")])), False),
        (torch.tensor([float("inf"), float("-inf")]), False),
        (torch.tensor([[1.0], [float("-inf")]], dtype=torch.float16), False),
    ],
)
def test_is_finite(value: Any, expected: bool) -> None:
    assert tree.is_finite(value) is expected


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((1000,), 100.0, dtype=torch.float16),
        torch.tensor([3e38, 3e38]),
        torch.full((2,), 1e308, dtype=torch.float64),
    ],
)
def test_finite_numbers_with_a_sum_out_of_range_are_finite(tensor: Tensor) -> None:
    assert tree.is_finite(tensor)


def test_what_is_no_finite_number_is_none_for_json() -> None:
    value = {"a": [1.0, float("nan")], "b": (float("-inf"), 2), "c": "nan", "d": {"e": None, "f": 1e308}}
    expected = {"a": [1.0, None], "b": (None, 2), "c": "nan", "d": {"e": None, "f": 1e308}}
    assert tree.finite_or_none(value) == expected


def test_unchanged_notices_writes() -> None:
    value = {"a": torch.zeros(3), "b": [torch.zeros(2)]}
    watch = tree.Unchanged(value)
    _ = value["a"] + 1
    assert watch.holds()
    value["b"][0][1:].fill_(1)  # through a view
    assert not watch.holds()
    watch = tree.Unchanged(value)
    with torch.no_grad():
        value["a"].detach().mul_(2)
    assert not watch.holds()


def test_sha256_is_of_names_types_shapes_and_values() -> None:
    base = {"a": torch.zeros(2, 2), "b": torch.ones(1, dtype=torch.int64)}
    digest = tree.sha256(base)
    assert tree.sha256(dict(reversed(base.items()))) == digest
    assert tree.sha256({**base, "a": torch.zeros(2, 2).T}) == digest
    others = [
        {**base, "a": torch.zeros(4)},
        {**base, "a": torch.zeros(2, 2, dtype=torch.int32)},
        {**base, "a": torch.tensor([[0.0, 0.0], [0.0, 1e-30]])},
        {"c": base["a"], "b": base["b"]},
        {"a": base["a"]},
    ]
    assert len({digest, *map(tree.sha256, others)}) == len(others) + 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_sha256_takes_every_type(dtype: torch.dtype) -> None:
    one, other = torch.tensor([1, 0]).to(dtype), torch.tensor([0, 1]).to(dtype)
    assert tree.sha256({"a": one}) != tree.sha256({"a": other})


LARGE = 1 << 18  # float32 values of a megabyte


def test_equal_large_tensors_are_stored_once() -> None:
    pool = torch.arange(LARGE, dtype=torch.float32)
    one, ten = tree.to_bytes({0: pool}), tree.to_bytes({i: pool.clone() for i in range(10)})
    assert len(ten) < len(one) + 1000
    back = tree.from_bytes(ten)
    assert list(back) == list(range(10))
    assert all(torch.equal(tensor, pool) for tensor in back.values())


@pytest.mark.parametrize(
    "other",
    [
        torch.cat([torch.arange(LARGE - 1, dtype=torch.float32), torch.zeros(1)]),  # the last value
        torch.arange(LARGE, dtype=torch.float32).reshape(2, -1),  # the shape
        torch.arange(LARGE, dtype=torch.float32).view(torch.int32),  # the type
        -torch.arange(LARGE, dtype=torch.float32).neg().flip(0),  # the order
    ],
)
def test_large_tensors_that_differ_are_both_stored(other: Tensor) -> None:
    pool = torch.arange(LARGE, dtype=torch.float32)
    value = [pool, other, torch.ones(3), pool]
    data = tree.to_bytes(value)
    assert 2 * 4 * LARGE < len(data) < 2 * 4 * LARGE + 2000
    assert same(tree.from_bytes(data), value)


def test_small_tensors_are_stored_each_for_itself_and_come_back_apart() -> None:
    small = torch.zeros(LARGE - 1)
    data = tree.to_bytes([small, small])
    assert len(data) > 2 * 4 * (LARGE - 1)
    back = tree.from_bytes(data)
    back[0].fill_(1)
    assert torch.equal(back[1], small)
