"""A faster memory allocator policy for training on CPUs."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory for the next batch in place of handing it back to the kernel after each.

    Activations are allocated and freed for every mini-batch; with glibc's defaults each large buffer is mapped and
    zeroed by the kernel anew. Costs up to some hundred megabytes more memory. Set ``FEDFILL_ALLOCATOR=default`` to leave
    the allocator alone.

    Returns:
        Whether the policy was set: on Linux with glibc only.
    """
    if os.environ.get("FEDFILL_ALLOCATOR") == "default" or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, 2**30) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_M_TOP_PAD, 2**26)
    )
