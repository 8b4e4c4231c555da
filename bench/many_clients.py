"""Many clients on one machine: memory beside that of the data set and the model, seconds and bytes per round.

One algorithm with a cohort of 100 on random images. All processes that the run needs are measured while it goes on: this one,
the workers, and with engine ray those of Ray itself. PSS divides what processes share among them, so that its sum is
what the machine really spends; USS is what a process has for itself. Shared memory is the object store.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from fedfill import tree
from fedfill.algorithms import find
from fedfill.data.federation import ClientData, Federation
from fedfill.data.samples import Samples
from fedfill.engines.local import LocalEngine
from fedfill.engines.runner import make_resident
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.protocol.client import State
from fedfill.protocol.server import Server

MB = 1e6


def family() -> dict[int, str]:
    """This process and its descendants, by what they are."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # gone
                continue
            children[parent].append(int(entry.name))
    found = {os.getpid(): "driver"}
    left = [os.getpid()]
    while left:
        for pid in children[left.pop()]:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_text()
            except OSError:
                continue
            found[pid] = "workers" if command.startswith("ray::Actor") else "Ray itself"
            left.append(pid)
    return found


def memory() -> dict[str, dict[str, float]]:
    """Megabytes by role: PSS, USS and the share of the PSS that is shared memory."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(("PSS", "USS", "shared"), 0.0))
    for pid, role in family().items():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:
            continue
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 / MB for line in lines}
        sums[role]["PSS"] += sizes["Pss"]
        sums[role]["USS"] += sizes["Private_Clean"] + sizes["Private_Dirty"]
        sums[role]["shared"] += sizes.get("Pss_Shmem", 0.0)
    return sums


class Peak:
    """Looks at the memory every now and then, and keeps the sight with the largest sum."""

    def __init__(self) -> None:
        self.sight: dict[str, dict[str, float]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        highest = 0.0
        while not self._over.wait(0.2):
            sight = memory()
            total = sum(sizes["PSS"] for sizes in sight.values())
            if total > highest:
                highest, self.sight = total, sight


def federate(clients: int, samples: int) -> Federation:
    """Random images, the same number for each client."""
    stream = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (samples, 1, 28, 28), dtype=torch.uint8, generator=stream)
    labels = torch.randint(0, 10, (samples,), generator=stream)
    everything = Samples(images, labels)
    each = samples // clients
    members = tuple(ClientData(everything[i * each : (i + 1) * each], everything[:0]) for i in range(clients))
    return Federation("bench", members, everything[:1000], tuple(map(str, range(10))), (), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default="fedavg")
    parser.add_argument("--engine", choices=["local", "ray"], default="ray")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()

    before = memory()["driver"]["PSS"]
    federation = federate(options.clients, options.samples)
    net = build("cnn2", (1, 28, 28), 10, ModelSettings(), seed=0)
    initial = weights_of(net)
    algorithm = find(options.algorithm)(local_epochs=1, batch_size=64)
    kind: Any = LocalEngine
    if options.engine == "ray":
        from fedfill.engines.ray import RayEngine as kind  # here: it needs an extra
    with Peak() as peak:
        start = time.perf_counter()
        engine = kind(algorithm, federation, net, initial, seed=0, device=torch.device("cpu"), workers=options.workers)
        ready = time.perf_counter() - start
        server = Server(
            engine, clients=options.clients, classes=10, rounds=options.rounds,
            participation=options.cohort / options.clients, seed=0, initial=initial, resident=make_resident(net, torch.device("cpu")),
            sample=federation.sample,
        )  # fmt: skip
        server.state = State(algorithm.server_state(initial))
        times = []
        for t in range(options.rounds):
            start = time.perf_counter()
            server.begin(t)
            algorithm.round(server, t)
            engine.evaluate(server.state.weights, t)
            times.append(time.perf_counter() - start)
        digest = tree.sha256(server.state.weights)[:12]
        costs = server.costs
        start = time.perf_counter()
        states = tree.size(list(engine.states().values())) / MB
        gathered = time.perf_counter() - start
    engine.close()

    whole = sum(tree.size(client.train) for client in federation.clients) / MB
    print(
        f"{options.algorithm}, {options.engine}, {options.workers} workers, {options.clients:,} clients, cohort {options.cohort}: "
        f"data set {whole:.1f} MB, model {tree.size(initial) / MB:.2f} MB, this process before both {before:.0f} MB"
    )
    print(
        f"start-up {ready:.1f} s, round {statistics.median(times):.2f} s (median of {options.rounds}), weights {digest}"
    )
    print(
        f"a round: {costs.bytes_down / options.rounds / MB:.2f} MB down, {costs.bytes_up / options.rounds / MB:.2f} MB up; "
        f"clients' states {states:.1f} MB, gathered in {gathered:.2f} s"
    )
    for role, sizes in peak.sight.items():
        print(f"{role:>12}: " + ", ".join(f"{name} {size:.0f} MB" for name, size in sizes.items()))
    print(f"{'all':>12}: PSS {sum(sizes['PSS'] for sizes in peak.sight.values()):.0f} MB at its peak")


if __name__ == "__main__":
    main()
