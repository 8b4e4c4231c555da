"""fedfill's speed as ratios to the best bare loop, measured in turn in one process; ``make bench``.

For both works of `floor` a round of the bare loop and a round of fedfill's FedAvg alternate on the same data, and the
ratio is the median over pairs, so that a machine whose speed drifts disturbs both alike. A third figure is the time of a
round in which 1,000 clients answer at once with nothing to do. Start-up seconds and peak memory are of processes of their
own.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from torch import nn

from fedfill import tree
from fedfill.algorithms import Algorithm, find
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.federation import ClientData, Federation
from fedfill.data.samples import Samples
from fedfill.engines.local import LocalEngine
from fedfill.engines.runner import make_resident
from fedfill.models.classifiers import Classifier
from fedfill.models.layers import with_streams
from fedfill.models.views import weights_of
from fedfill.protocol.client import State, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.training.precision import Precision
from floor import METHODS, WORKS, Client, Floor, data

METHOD_SETTINGS = {
    "fedavg": {},
    "fedprox": {"mu": 0.01},
    "scaffold": {"weighting": "samples"},
    "moon": {"contrast": "logits"},
    "fedmix": {"group_size": 64},
}
SETTINGS = {
    "W1": {"local_epochs": 1, "batch_size": 64, "optimizer": "adam", "learning_rate": 1e-3},
    "W2": {"local_epochs": 1, "batch_size": 10, "optimizer": "sgd", "learning_rate": 0.1},
    "W3": {"local_epochs": 1, "batch_size": 64, "optimizer": "sgd", "learning_rate": 0.05},
}


@dataclass(frozen=True)
class Nothing(Message):
    """An answer with no content."""


class Null(Algorithm):
    """Clients that answer at once."""

    name: ClassVar[str] = "null"

    def round(self, server: Server, t: int) -> None:
        """One exchange of empty messages."""
        server.call(server.select(t), self.answer, Nothing())

    @client_handler
    def answer(self, client: Client, message: Nothing) -> Nothing:
        """Nothing to do."""
        return message


class Run:
    """fedfill on a work: an engine and a server, one round at a time."""

    def __init__(
        self, algorithm: Algorithm, net: nn.Module, clients: list[Client], participation: float, *,
        device: str = "cpu", workers: int | None = 2, stack: int | None = None, precision: Precision = "float32",
    ) -> None:  # fmt: skip
        samples = [Samples(inputs, labels) for inputs, labels in clients]
        none = samples[0][:0]
        federation = Federation(
            name="bench",
            clients=tuple(ClientData(train, none) for train in samples),
            test=samples[0][:1],
            class_names=tuple(map(str, range(10))),
            notes=(),
            fingerprint="",
        )
        net = with_streams(net)
        place = torch.device(device)
        initial = tree.to(weights_of(net), place)
        self.algorithm = algorithm
        self.engine = LocalEngine(
            algorithm, federation, net, initial, seed=0, device=place, workers=workers, stack=stack,
            precision=precision,
        )  # fmt: skip
        self.server = Server(
            self.engine, clients=len(samples), classes=10, rounds=10**6, participation=participation, seed=0,
            initial=initial, resident=make_resident(net, place), sample=federation.sample.to(place),
        )  # fmt: skip
        self.server.state = State(algorithm.server_state(initial))
        self.t = 0

    def round(self) -> None:
        self.server.begin(self.t)
        self.algorithm.round(self.server, self.t)
        self.t += 1


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compare(work: str, pairs: int, precision: Precision) -> str:
    """fedfill beside the bare loop, which computes in float32."""
    clients = data(work)
    floor = Floor(work, clients)
    cohort = WORKS[work].cohort / WORKS[work].clients
    ours = Run(FedAvg(**SETTINGS[work]), WORKS[work].net(True), clients, cohort, precision=precision)
    floor.round(), ours.round()  # warm up
    times = [(seconds(floor.round), seconds(ours.round)) for _ in range(pairs)]
    ratios = sorted(b / a for a, b in times)
    bare, own = (statistics.median(column) for column in zip(*times, strict=True))
    floor.close()
    ours.engine.close()
    return f"{work}: bare loop {bare:.2f} s, fedfill {own:.2f} s, ratio {statistics.median(ratios):.3f} (from {ratios[0]:.3f} to {ratios[-1]:.3f}, {pairs} pairs)"


def methods(pairs: int, names: Sequence[str] = METHODS) -> str:
    """Each method beside its own bare loop, and beside FedAvg in fedfill."""
    clients = data("W3")
    net = WORKS["W3"].net(True)
    net = Classifier(net[:-1], net[-1])
    floors = {name: Floor("W3", clients, method=name) for name in names}
    runs = {name: Run(find(name)(**{**SETTINGS["W3"], **METHOD_SETTINGS[name]}), net, clients, 1.0) for name in names}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for repeat in range(pairs + 1):
        for name in names:
            pair = seconds(floors[name].round), seconds(runs[name].round)
            if repeat:
                times[name].append(pair)
    lines = ["method: bare loop, fedfill, ratio (range); times FedAvg bare, fedfill"]
    base = [statistics.median(column) for column in zip(*times["fedavg"], strict=True)]
    for name in names:
        ratios = sorted(own / bare for bare, own in times[name])
        bare, own = (statistics.median(column) for column in zip(*times[name], strict=True))
        lines.append(
            f"{name}: {bare:.2f} s, {own:.2f} s, {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}); "
            f"{bare / base[0]:.2f}, {own / base[1]:.2f}"
        )
        floors[name].close()
        runs[name].engine.close()
    return "\n".join(lines)


def stacking(device: str, rounds: int) -> str:
    """W2's and W1's cohorts on a device: one client after another, all as one program, and as the engine chooses."""
    lines = [f"{device}: ms a round one after another, stacked, as chosen; times as fast"]
    for work in ("W2", "W1"):
        clients, size = data(work), WORKS[work]
        kinds = {
            kind: Run(
                FedAvg(**SETTINGS[work]), size.net(True), clients, size.cohort / size.clients, device=device,
                workers=None if device != "cpu" or stack == 1 else 1, stack=stack,
            )
            for kind, stack in {"alone": 1, "stacked": size.cohort, "chosen": None}.items()
        }  # fmt: skip
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for repeat in range(rounds + WARM):
            for kind, run in kinds.items():
                took = seconds(run.round)
                if repeat >= WARM:
                    times[kind].append(took * 1e3)
        medians = {kind: statistics.median(values) for kind, values in times.items()}
        lines.append(
            f"{work}: {medians['alone']:.0f}, {medians['stacked']:.0f}, {medians['chosen']:.0f}; "
            f"{medians['alone'] / medians['stacked']:.1f}, {medians['alone'] / medians['chosen']:.1f}"
        )
        for run in kinds.values():
            run.engine.close()
    return "\n".join(lines)


WARM = 3
"""Rounds in which the engine finds out whether to stack."""


def null(rounds: int, clients: int, workers: int) -> str:
    """A round in which clients answer at once."""
    one = (torch.zeros(1, 1, 4, 4, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    run = Run(Null(), nn.Sequential(nn.Flatten(), nn.Linear(16, 10)), [one] * clients, 1.0, workers=workers)
    run.round()
    took = statistics.median(seconds(run.round) for _ in range(rounds))
    run.engine.close()
    return (
        f"{clients:,} clients with nothing to do, {workers} workers: {took * 1e3:.1f} ms a round, "
        f"{took / clients * 1e3:.4f} ms a client"
    )


FIRST_BATCH = """
import os, tempfile, fedfill
from fedfill.algorithms.fedavg import FedAvg
FedAvg.loss = lambda *_: os._exit(0)
with tempfile.TemporaryDirectory() as folder:
    fedfill.run("fedavg", data="digits", out=folder + "/run")
"""
STARTS = {
    "import torch": "import torch",
    "fedfill.run is there": "import fedfill; fedfill.run",
    "the first mini-batch": FIRST_BATCH,
}


def startup(times: int) -> str:
    """Seconds of fresh processes, medians of alternated turns."""
    took: dict[str, list[float]] = {what: [] for what in STARTS}
    for _ in range(times):
        for what, code in STARTS.items():
            took[what].append(seconds(lambda code=code: subprocess.run([sys.executable, "-c", code], check=True)))
    return "start-up: " + ", ".join(f"{what} {statistics.median(each):.2f} s" for what, each in took.items())


def small() -> None:
    """What a run costs beside training."""
    for clients, rounds in {1_000: 20, 100_000: 3}.items():
        for workers in (1, 2):
            print(null(rounds, clients, workers), flush=True)
    print(startup(7), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7, help="pairs of rounds for each work")
    parser.add_argument("--work", action="append", choices=list(WORKS), help="only this work")
    parser.add_argument("--method", action="append", choices=METHODS[1:], help="with W3: only this one beside fedavg")
    parser.add_argument("--precision", choices=get_args(Precision), default="float32", help="of fedfill, in W1 and W2")
    parser.add_argument(
        "--stacked", metavar="DEVICE", help="only this: clients as one program on a device, such as cuda"
    )
    parser.add_argument("--small", action="store_true", help="only this: clients with nothing to do, and start-up")
    options = parser.parse_args()
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} processors, torch {torch.__version__}")
    if options.small:
        small()
        return
    if options.stacked:
        print(stacking(options.stacked, options.pairs))
        return
    for work in [name for name in options.work or WORKS if name != "W3"]:
        print(compare(work, options.pairs, options.precision), flush=True)
    if not options.work or "W3" in options.work:
        print(methods(options.pairs, ["fedavg", *(options.method or METHODS[1:])]), flush=True)
    if not options.work:
        small()
    print(f"peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
