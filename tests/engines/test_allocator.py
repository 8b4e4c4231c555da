"""The allocator's policy, in processes of their own: glibc's settings outlast a test."""

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from fedfill.engines.allocator import hand_back_memory, keep_freed_memory

def resident() -> int:
    return int(open("/proc/self/statm").read().split()[1]) * 4096 // 2**20

assert keep_freed_memory()
buffers = [torch.ones(2**18) for _ in range(200)]  # 200 MiB, in pieces
last = torch.ones(2**18)  # what lies behind them, so that no end of the heap is free
del buffers
print(resident(), hand_back_memory(2**30), resident(), hand_back_memory(2**27), resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the policy is glibc's")
def test_freed_memory_is_kept_up_to_a_bound_and_handed_back_above():
    out = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout.split()
    before, little, kept, much, after = (out[0], out[1], out[2], out[3], out[4])
    assert (little, much) == ("False", "True")
    assert abs(int(kept) - int(before)) < 20
    assert int(before) - int(after) > 150


@pytest.mark.skipif(sys.platform != "linux", reason="the policy is glibc's")
def test_the_allocator_is_left_alone_when_asked(monkeypatch):
    monkeypatch.setenv("FEDFILL_ALLOCATOR", "default")
    program = "from fedfill.engines.allocator import *; print(keep_freed_memory(), hand_back_memory(0))"
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert out.split() == ["False", "False"]
