"""Named streams: equal for equal names, different as soon as any part differs."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfill.streams import derive, numpy_stream, torch_stream

names = st.lists(st.integers(-5, 2000) | st.text(max_size=4), max_size=4)
seeds = st.integers(0, 2**64)


@given(seeds, names, seeds, names)
def test_equal_names_and_only_they_give_equal_seeds(
    seed: int, name: list[str | int], other_seed: int, other: list[str | int]
) -> None:
    assert derive(seed, *name) == derive(seed, *name)
    assert (derive(seed, *name) == derive(other_seed, *other)) == ((seed, name) == (other_seed, other))
    assert 0 <= derive(seed, *name) < 2**63


@given(seeds, names.filter(bool), st.data())
def test_every_part_of_the_name_matters(seed: int, name: list[str | int], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(name) - 1))
    changed = [*name[:k], str(name[k]) + "'", *name[k + 1 :]]
    seen = {
        derive(seed, *name),
        derive(seed + 1, *name),
        derive(seed, *changed),
        derive(seed, *name[:k], *name[k + 1 :]),
        derive(seed, *name, 0),
    }
    assert len(seen) == 5


def test_names_are_not_run_together() -> None:
    assert len({derive(0, "ab"), derive(0, "a", "b"), derive(0, "a, b"), derive(0, "", "ab"), derive(0, "a', 'b")}) == 5
    assert len({derive(0, 1), derive(0, "1"), derive(1, 0), derive(1), derive(0, 1, 0)}) == 5


def test_seeds_stay_what_they_are() -> None:
    """Results of older versions can be had again only as long as this holds."""
    digest = hashlib.sha256(b"(3, 'fit', 1, 2)").hexdigest()
    assert derive(3, "fit", 1, 2) == int(digest[:16], 16) // 2


def test_streams_start_anew_at_each_call() -> None:
    def draws(*name: str | int) -> tuple[list[float], list[float]]:
        return torch.rand(4, generator=torch_stream(7, *name)).tolist(), numpy_stream(7, *name).random(4).tolist()

    assert draws("a", 1) == draws("a", 1)
    assert draws("a", 1)[0] != draws("a", 2)[0]
    assert draws("a", 1)[1] != draws("a", 2)[1]


def test_global_generators_are_left_alone() -> None:
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    torch.rand(3, generator=torch_stream(0, "x"))
    numpy_stream(0, "x").random(3)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
