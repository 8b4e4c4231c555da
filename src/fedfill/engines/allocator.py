"""The policy of the memory allocator for training on CPUs: fast, and within bounds."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import Any

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3

KEPT = 2**30
"""Bytes of freed memory that a process keeps between two calls of clients."""


_BEFORE = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")


class _Statistics(ctypes.Structure):
    """``struct mallinfo2`` of glibc; ``fordblks`` are the bytes in free blocks."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (*_BEFORE, "fordblks", "keepcost"))


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory for the next batch in place of handing it back to the kernel after each.

    Activations are allocated and freed for every mini-batch; with glibc's defaults each large buffer is mapped and
    zeroed by the kernel anew. What is kept goes to pieces, in which the next large buffer finds no room, and grows from
    round to round: see `hand_back_memory`. Set ``FEDFILL_ALLOCATOR=default`` to leave the allocator alone.

    Returns:
        Whether the policy was set: on Linux with glibc only.
    """
    mallopt = _of_glibc("mallopt")
    return mallopt is not None and bool(
        mallopt(_M_MMAP_THRESHOLD, 2**30) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_M_TOP_PAD, 2**26)
    )


def hand_back_memory(above: int = KEPT) -> bool:
    """Give freed memory back to the kernel where more of it is kept than that.

    Without it a training whose tensors take 2 GB holds 6 GB after eight rounds, and more with each.

    Args:
        above: Bytes.

    Returns:
        Whether something was given back: on Linux with glibc 2.33 or later only.
    """
    statistics, trim = _of_glibc("mallinfo2"), _of_glibc("malloc_trim")
    if statistics is None or trim is None:
        return False
    statistics.restype = _Statistics
    return bool(statistics().fordblks > above and trim(0))


@functools.cache
def _of_glibc(function: str) -> Any:
    if os.environ.get("FEDFILL_ALLOCATOR") == "default" or not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL("libc.so.6"), function, None)
    except OSError:
        return None
