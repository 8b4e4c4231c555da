"""The allocator's policy, in processes of their own: glibc's settings outlast a test."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

import fedfill.experiment.prepare
from fedfill.engines import allocator
from fedfill.experiment.settings import Experiment

PROGRAM = "from fedfill.engines.allocator import keep_freed_memory; print(keep_freed_memory())"


def answer() -> str:
    return subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="the policy is glibc's")
def test_freed_memory_is_kept_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDFILL_ALLOCATOR", raising=False)
    assert answer() == "True"
    monkeypatch.setenv("FEDFILL_ALLOCATOR", "default")
    assert answer() == "False"


def test_older_releases_of_glibc_take_half_a_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int]] = []

    def mallopt(option: int, value: int) -> int:
        good = (option, value) != (-3, 2**30)
        if good:
            taken.append((option, value))
        return int(good)

    monkeypatch.delenv("FEDFILL_ALLOCATOR", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    assert allocator.keep_freed_memory()
    assert sorted(taken) == [(-8, 1), (-3, 2**25), (-2, 2**26), (-1, 2**31 - 1)]


IN_A_THREAD = """
import resource, threading, torch
from fedfill.engines.allocator import keep_freed_memory

def pages() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work() -> None:
    torch.ones(25_000_000)
    before = pages()
    for _ in range(40):
        torch.ones(25_000_000)  # 100 MB
    print(pages() - before)

keep_freed_memory()
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the policy is glibc's")
def test_threads_keep_large_buffers_too() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_THREAD], check=True, capture_output=True, text=True)
    # One buffer has 24,414 pages, and forty that are mapped anew 976,560; small ones between them split what is kept, so
    # that the first few (five were seen) are new.
    assert int(done.stdout) < 400_000


def test_the_policy_is_set_before_data_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("fedfill.experiment.prepare.keep_freed_memory", lambda: calls.append("policy"))
    monkeypatch.setattr("fedfill.experiment.prepare.federate", lambda *args, **options: calls.append("data"))
    fedfill.experiment.prepare.divide(Experiment(algorithm="fedavg"))
    assert calls == ["policy", "data"]
