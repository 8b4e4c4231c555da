"""The floor: the fastest bare PyTorch loops known for the two works that fedfill's speed is measured by.

Nothing here is federated software. Each loop does only what every simulator must do in a round (train each client of
the cohort from the same global weights, then average by sample counts), without messages, records, evaluation or
bit-reproducibility, so its time is what a simulator's can be compared with. The techniques that pay:

* the allocator keeps freed activation buffers instead of giving them back to the kernel (`tune_allocator`);
* two Python threads share the clients, with one torch thread each: torch releases the interpreter lock;
* channels-last memory: the convolutions need not reorder their inputs;
* pooling before the ReLU: both are monotone, so values and gradients are bit for bit the same, on a quarter of the
  elements;
* fused optimizers;
* uint8 samples stay resident, are shuffled once an epoch and normalised batch by batch;
* one resident model per thread, weights copied in place, a running weighted sum.

``plain=True`` is the loop that most people would write, for information: one client after the other with intra-op
threads, contiguous memory, the layers in their usual order, default optimizers, batches indexed one by one. It leaves
the allocator alone, but a process whose allocator was tuned before keeps it so; run this file on its own
(``python bench/floor.py --plain``) for the untuned figure.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Client = tuple[Tensor, Tensor]
"""Inputs ``[n, channels, height, width]`` uint8 and labels ``[n]`` int64."""


def cross_silo_net(pool_first: bool) -> nn.Sequential:
    """The small CNN of W1 (55,338 parameters), on 28x28x1."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        *_relu_and_pool(pool_first),
        nn.Conv2d(16, 32, 3, padding=1),
        *_relu_and_pool(pool_first),
        nn.Flatten(),
        nn.Linear(7 * 7 * 32, 32),
        nn.Sigmoid(),
        nn.Linear(32, 10),
    )


def cross_device_net(pool_first: bool) -> nn.Sequential:
    """The two-layer CNN of W2 (1,626,442 parameters), on 32x32x3."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        *_relu_and_pool(pool_first),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(14 * 14 * 64, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def _relu_and_pool(pool_first: bool) -> list[nn.Module]:
    return [nn.MaxPool2d(2), nn.ReLU()] if pool_first else [nn.ReLU(), nn.MaxPool2d(2)]


@dataclass(frozen=True)
class Work:
    """What a round consists of."""

    shape: tuple[int, int, int]
    clients: int
    samples: int
    cohort: int
    batch_size: int
    optimizer: type[torch.optim.Optimizer]
    learning_rate: float
    net: Callable[[bool], nn.Sequential]


WORKS = {
    "W1": Work((1, 28, 28), 10, 6000, 10, 64, torch.optim.Adam, 1e-3, cross_silo_net),
    "W2": Work((3, 32, 32), 1000, 50, 50, 10, torch.optim.SGD, 0.1, cross_device_net),
    "W3": Work((1, 28, 28), 10, 1500, 10, 64, torch.optim.SGD, 0.05, cross_silo_net),
}
METHODS = ("fedavg", "fedprox", "scaffold", "moon", "fedmix")
"""What a bare loop can do beside plain training: the arithmetic of the method, written as cheaply as we know how."""


def data(work: str, seed: int = 0) -> list[Client]:
    """Random samples for all clients of `work` ("W1" or "W2"); timings do not depend on what they show."""
    size = WORKS[work]
    stream = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, 256, (size.samples, *size.shape), dtype=torch.uint8, generator=stream),
            torch.randint(0, 10, (size.samples,), generator=stream),
        )
        for _ in range(size.clients)
    ]


def tune_allocator() -> bool:
    """Let glibc keep freed memory; process-wide, not to be undone. False where there is no glibc."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # the names' numbers in malloc.h
    settings = ((mmap_threshold, 2**30), (trim_threshold, 2**31 - 1), (top_pad, 64 * 2**20))
    taken = [mallopt(name, value) for name, value in settings]
    return taken == [1, 1, 1]


def _along(model: nn.Sequential, x: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
    """Scores, and their derivative towards `tangent`, one for all samples, in one pass over both."""
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            x, tangent = layer(x), functional.conv2d(tangent, layer.weight, None, layer.stride, layer.padding)
        elif isinstance(layer, nn.MaxPool2d):
            x, index = functional.max_pool2d(x, layer.kernel_size, return_indices=True)
            b, c, height, width = x.shape
            places = index.permute(0, 2, 3, 1).reshape(b, height * width, c)
            values = tangent.permute(0, 2, 3, 1).reshape(len(tangent), -1, c).expand(b, -1, -1)
            tangent = values.gather(1, places).reshape(b, height, width, c).permute(0, 3, 1, 2)
        elif isinstance(layer, nn.Linear):
            x, tangent = layer(x), functional.linear(tangent, layer.weight)
        else:
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                tangent = tangent * (x > 0)
            elif isinstance(layer, nn.Sigmoid):
                tangent = tangent * (x * (1 - x))
            else:
                tangent = layer(tangent)  # Flatten
    return x, tangent


class Floor:
    """A work built once, whose rounds can be run and timed again and again.

    Attributes:
        work: Sizes and settings.
        weights: The global parameters, in the order of the network's own.
        samples_per_round: Samples that pass through local training in a round.
    """

    def __init__(
        self,
        work: str,
        clients: list[Client] | None = None,
        *,
        plain: bool = False,
        method: str = "fedavg",
        seed: int = 0,
    ) -> None:
        """Build data, networks and threads.

        Args:
            work: "W1" or "W2".
            clients: The clients' samples, as `data` gives them; None draws them.
            plain: Whether to run the plain loop for information, not the fast one.
            method: One of `METHODS`.
            seed: For weights, cohorts and, where not given, samples.
        """
        self.work = WORKS[work]
        self.samples_per_round = self.work.cohort * self.work.samples
        self._plain = plain
        self._method = method
        self._stream = torch.Generator().manual_seed(seed)
        clients = data(work, seed) if clients is None else clients
        if not plain:
            tune_allocator()
            clients = [(inputs.contiguous(memory_format=torch.channels_last), labels) for inputs, labels in clients]
        self._clients = clients
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            models = [self.work.net(not plain) for _ in range(1 if plain else 2)]
        if not plain:
            models = [model.to(memory_format=torch.channels_last) for model in models]
        self._models = models
        self.weights = [parameter.detach().clone() for parameter in models[0].parameters()]
        self._threads = ThreadPoolExecutor(len(models), "floor")
        # what methods keep: stand-ins of the right shapes
        self._correction = [torch.full_like(weight, 1e-4) for weight in self.weights]
        self._mean = torch.zeros(self.work.shape)
        self._target = torch.full((10,), 0.1)

    def round(self) -> None:
        """Train a cohort from the global weights and average the results into the new ones."""
        cohort = torch.randperm(self.work.clients, generator=self._stream)[: self.work.cohort].tolist()
        queue = iter(cohort)  # a thread takes the next client as soon as it has finished one
        with _torch_threads(2 if self._plain else 1):
            if self._plain:
                sums = [self._train(self._models[0], queue)]
            else:
                sums = list(self._threads.map(lambda model: self._train(model, queue), self._models))
        total, samples = sums[0]
        for other, more in sums[1:]:
            torch._foreach_add_(total, other)
            samples += more
        torch._foreach_div_(total, samples)
        self.weights = total

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _train(self, model: nn.Sequential, queue: Iterator[int]) -> tuple[list[Tensor], int]:
        """Train clients from the queue until it is empty; returns sample-weighted sums and how many samples."""
        torch.set_num_threads(2 if self._plain else 1)  # OpenMP keeps this number for each thread
        model.train()
        parameters: list[Tensor] = list(model.parameters())
        sums = [torch.zeros_like(weight) for weight in self.weights]
        samples = 0
        for client in queue:
            inputs, labels = self._clients[client]
            with torch.no_grad():
                torch._foreach_copy_(parameters, self.weights)
            fixed = [self._scores(model, parameters, inputs) for _ in range(2)] if self._method == "moon" else []
            self._epoch(model, parameters, inputs, labels, fixed)
            with torch.no_grad():
                torch._foreach_add_(sums, parameters, alpha=len(labels))
            samples += len(labels)
        return sums, samples

    @torch.no_grad()
    def _scores(self, model: nn.Sequential, parameters: list[Tensor], inputs: Tensor) -> Tensor:
        """MOON: the scores of a fixed model for all of a client's samples."""
        torch._foreach_copy_(parameters, self.weights)
        return torch.cat([model(part.to(torch.float32).mul_(1 / 127.5).sub_(1.0)) for part in inputs.split(1000)])

    def _loss(self, model: nn.Sequential, images: Tensor, labels: Tensor, fixed: list[Tensor]) -> Tensor:
        if self._method == "moon":
            scores = model(images)
            near, far = (functional.cosine_similarity(scores, other) / 0.5 for other in fixed)
            return functional.cross_entropy(scores, labels) + functional.softplus(far - near).mean()
        if self._method == "fedmix":
            scores, tangent = _along(model, images.mul_(0.95), self._mean.unsqueeze(0))
            own = functional.cross_entropy(scores, labels)
            slope = scores.softmax(1) - functional.one_hot(labels, 10)
            theirs = functional.cross_entropy(scores, self._target.expand_as(scores))
            return 0.95 * own + 0.95 * 0.05 * (slope * tangent).sum() / len(labels) + 0.05 * theirs
        return functional.cross_entropy(model(images), labels)

    def _epoch(
        self, model: nn.Sequential, parameters: list[Tensor], inputs: Tensor, labels: Tensor, fixed: list[Tensor]
    ) -> None:
        fused = None if self._plain else True
        optimizer = self.work.optimizer(parameters, lr=self.work.learning_rate, fused=fused)  # type: ignore[call-arg]
        order = torch.randperm(len(labels))
        if not self._plain:
            inputs, labels, fixed = inputs[order], labels[order], [scores[order] for scores in fixed]
        for start in range(0, len(labels), self.work.batch_size):
            batch = slice(start, start + self.work.batch_size)
            index = order[batch] if self._plain else batch
            images = inputs[index].to(torch.float32).mul_(1 / 127.5).sub_(1.0)
            self._loss(model, images, labels[index], [scores[index] for scores in fixed]).backward()
            if self._method == "fedprox":
                with torch.no_grad():
                    apart = torch._foreach_sub(parameters, self.weights)
                    torch._foreach_add_([parameter.grad for parameter in parameters], apart, alpha=0.01)
            if self._method == "scaffold":
                torch._foreach_add_([parameter.grad for parameter in parameters], self._correction)
            optimizer.step()
            optimizer.zero_grad()


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Run with `count` intra-op threads, and leave the caller's number as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main() -> None:
    """Print the seconds of a round of each work."""
    parser = argparse.ArgumentParser(description="Seconds per round of the bare PyTorch loops.")
    parser.add_argument("--plain", action="store_true", help="the plain loops, with the allocator as it comes")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of each work, after one to warm up")
    options = parser.parse_args()
    floors = {work: Floor(work, plain=options.plain) for work in ("W1", "W2")}
    seconds: dict[str, list[float]] = {work: [] for work in floors}
    for repeat in range(options.rounds + 1):
        for work, floor in floors.items():
            start = time.perf_counter()
            floor.round()
            if repeat:
                seconds[work].append(time.perf_counter() - start)
    for work, times in seconds.items():
        print(f"{work}: {statistics.median(times):.2f} s a round (median of {len(times)}, least {min(times):.2f})")


if __name__ == "__main__":
    main()
