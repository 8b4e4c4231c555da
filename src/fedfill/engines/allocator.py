"""A faster policy of the memory allocator, for training on CPUs; it is set before anyone knows where a run will train."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory for the next batch in place of handing it back to the kernel after each.

    Activations are allocated and freed for every mini-batch; with glibc's defaults each large buffer is mapped and
    zeroed by the kernel anew. A thread of its own would have an arena of its own, in which glibc keeps no buffer of more
    than 64 MB whatever it is told; so all threads share one, if this is called before the first of them begins. What is
    kept grows with the network: of the 3.8 GB of a run of FRAug's digits it is 1.9. Set ``FEDFILL_ALLOCATOR=default`` to
    leave the allocator alone.
    """
    if os.environ.get("FEDFILL_ALLOCATOR") == "default" or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    done = [mallopt(_M_ARENA_MAX, 1), mallopt(_M_TRIM_THRESHOLD, 2**31 - 1), mallopt(_M_TOP_PAD, 2**26)]
    # glibc before 2.35 takes no threshold of more than half a heap
    done.append(mallopt(_M_MMAP_THRESHOLD, 2**30) or mallopt(_M_MMAP_THRESHOLD, 2**25))
    return all(done)
