"""The local engine: one process, resident data, a few threads over clients with one torch thread each."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor, nn

from fedfill import tree
from fedfill.data.federation import Federation
from fedfill.data.samples import Samples
from fedfill.engines.allocator import keep_freed_memory
from fedfill.engines.contract import Client, Message, Outcome, State
from fedfill.errors import ContractError, FedfillError
from fedfill.streams import torch_stream
from fedfill.training.evaluation import CHUNK, Evaluation, Scored, score, summarise
from fedfill.training.local import Fit, Fitted, Interrupted, LocalTraining, Resident, fit, make_optimizer
from fedfill.tree import Tree, Weights


def choose_device(name: str) -> torch.device:
    """The device of this name.

    Args:
        name: ``auto`` (a GPU when there is one), ``cpu``, ``cuda`` or ``cuda:N``.

    Returns:
        The device.

    Raises:
        FedfillError: Where the name is unknown or there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise FedfillError(f"device: found '{name}'; allowed: auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise FedfillError(
            f"device: found '{name}', and this machine has {torch.cuda.device_count()} CUDA devices; use cpu"
        )
    return device


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prefers_channels_last(model: nn.Module) -> bool:
    """Whether convolutions should run in the channels-last layout.

    It is about 1.6 times faster for plain convolutional networks on CPUs, and slower where PReLU layers stand between the
    convolutions. The rule looks at the model alone: a choice by timing would change bits from run to run.
    """
    layers = list(model.modules())
    return any(isinstance(m, nn.Conv2d) for m in layers) and not any(isinstance(m, nn.PReLU) for m in layers)


class LocalEngine:
    """Runs every client in this process.

    Args:
        program: The algorithm: its handlers are looked up by name.
        federation: The clients' data and the test set.
        template: The model.
        initial: The experiment's initial weights.
        seed: Of the experiment.
        device: Where data and models live.
        workers: Threads over clients, each with its own model; None: one for each processor, one on a GPU.
    """

    def __init__(
        self,
        program: Any,
        federation: Federation,
        template: nn.Module,
        initial: Weights,
        *,
        seed: int,
        device: torch.device,
        workers: int | None = None,
    ) -> None:
        self.device = device
        self.workers = workers or (processors() if device.type == "cpu" else 1)
        if device.type == "cpu":
            keep_freed_memory()
        # one torch thread for each worker: faster than threads inside operations, and the same bits for any number
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(1)
        channels_last = prefers_channels_last(template)
        self._residents = [Resident(template, device, channels_last) for _ in range(self.workers)]
        self._pool = ThreadPoolExecutor(self.workers, "fedfill", initializer=torch.set_num_threads, initargs=(1,))
        # the first optimizer of a process imports a good second's worth of torch: that is start-up and not a round
        make_optimizer([nn.Parameter(torch.zeros(1))], LocalTraining())
        self._program = program
        self._classes = federation.classes
        self._data = [client.train.to(device) for client in federation.clients]
        self._test = federation.test.to(device)
        own = [client.test for client in federation.clients]
        self._own = Samples(torch.cat([s.inputs for s in own]), torch.cat([s.labels for s in own])).to(device)
        self._owners = torch.repeat_interleave(torch.arange(len(own)), torch.tensor([len(s) for s in own])).to(device)
        self._initial = tree.clone(tree.to(initial, device))
        self._seed = seed
        self._states: dict[int, dict[str, Tree]] = {}

    def call(self, handler: str, messages: Mapping[int, Message], t: int) -> Mapping[int, Outcome]:
        """Run a handler on every client that has a message.

        Args:
            handler: Name of a method of the algorithm.
            messages: By client.
            t: The round.

        Returns:
            An outcome for every client, in no particular order.

        Raises:
            ContractError: Where a handler wrote into the initial weights.
        """
        function = getattr(self._program, handler)
        # the largest clients first, so that no worker is left with a long one at the end
        queue = deque(sorted(messages, key=lambda i: (-len(self._data[i]), i)))
        outcomes: dict[int, Outcome] = {}
        initial = tree.Unchanged(self._initial)

        def work(resident: Resident) -> None:
            while queue:
                try:
                    i = queue.popleft()
                except IndexError:
                    return
                outcomes[i] = self._serve(resident, function, i, messages[i], t)

        self._run(work, queue, len(messages))
        if not initial.holds():
            raise ContractError(f"'{handler}' wrote into the initial weights; make a copy first")
        return outcomes

    def evaluate(self, weights: Weights) -> Evaluation:
        """Score weights on the test set and on the clients' own test splits.

        Args:
            weights: Of the whole model.

        Returns:
            Accuracies and losses.
        """
        chunks = [(data, start) for data in (self._test, self._own) for start in range(0, len(data), CHUNK)]
        queue = deque(enumerate(chunks))
        scored: dict[int, Scored] = {}

        def work(resident: Resident) -> None:
            resident.load(weights)
            while queue:
                try:
                    k, (data, start) = queue.popleft()
                except IndexError:
                    return
                scored[k] = score(resident, data[start : start + CHUNK])

        self._run(work, queue, len(chunks))
        ordered = [scored[k] for k in range(len(chunks))]
        correct = torch.cat([part.correct for part in ordered])
        losses = torch.cat([part.losses for part in ordered])
        n = len(self._test)
        return summarise(
            Scored(correct[:n], losses[:n]),
            self._test.labels,
            self._classes,
            Scored(correct[n:], losses[n:]),
            self._owners,
            len(self._data),
        )

    def states(self) -> dict[int, Tree]:
        """The committed states of the clients that have one."""
        return dict(sorted(self._states.items()))

    def restore(self, states: Mapping[int, Tree]) -> None:
        """Put the clients' states back.

        Args:
            states: What `states` returned.
        """
        self._states = {i: tree.to(state, self.device) for i, state in states.items()}

    def close(self) -> None:
        """Stop the workers and give torch its threads back."""
        self._pool.shutdown()
        torch.set_num_threads(self._threads_before)

    def _run(self, work: Callable[[Resident], None], queue: deque[Any], jobs: int) -> None:
        futures: list[Future[None]] = [self._pool.submit(work, resident) for resident in self._residents[:jobs]]
        try:
            wait(futures)
        except BaseException:  # Ctrl-C: the workers stop at their next mini-batch
            queue.clear()
            for resident in self._residents:
                resident.stop = True
            wait(futures)
            raise
        for future in futures:
            future.result()

    def _serve(self, resident: Resident, function: Callable[..., Any], i: int, message: Message, t: int) -> Outcome:
        """Run one handler: on its own containers, with the state committed only if it returns and kept the rules."""
        message = tree.copy(message)
        state = State(tree.copy(self._states.get(i) or self._program.client_state()))
        given = (message, self._data[i].inputs, self._data[i].labels)
        untouched = tree.Unchanged((given, state.tree()))
        client = Client(
            id=i,
            round=t,
            data=self._data[i],
            classes=self._classes,
            state=state,
            initial=self._initial,
            seed=self._seed,
            resident=resident.load,
        )
        fits = _Fits(resident, (self._seed, t, i), self.device)
        reply, error = None, None
        try:
            reply = _drive(function(client, message), fits)
        except Interrupted:
            raise
        except Exception as raised:  # an error is a reply; its traceback stays attached
            error = raised
        try:
            if not untouched.holds():
                raise ContractError("wrote into a received message, its data or a stored tensor; make a copy first")
            if error is not None:
                return Outcome(error=error, fit_seconds=fits.seconds, train_samples=fits.samples)
            if not isinstance(reply, Message):
                raise ContractError(f"returned a {type(reply).__name__} in place of a Message")
            # neither a reply nor a state shares memory with what others hold, or with the worker's model
            others = (given, self._initial, resident.tensors)
            reply = _unshared(reply, (others, state.tree()))
            values = _unshared(state.tree(), (others, reply))
        except (ContractError, TypeError) as broken:
            return Outcome(error=ContractError(f"'{function.__name__}' {broken}"))
        if values:
            self._states[i] = values
        return Outcome(reply, None, client.releases, fits.seconds, fits.samples)


class _Fits:
    """The local trainings of one call of a handler."""

    def __init__(self, resident: Resident, stream: tuple[int, int, int], device: torch.device) -> None:
        self.seconds, self.samples, self._done = 0.0, 0, 0
        self._resident, self._stream, self._device = resident, stream, device

    def __call__(self, request: Fit) -> Fitted:
        seed, t, i = self._stream
        start = time.perf_counter()
        fitted = fit(self._resident, request, torch_stream(seed, "fit", t, i, self._done, device=self._device))
        self._done += 1
        self.seconds += time.perf_counter() - start
        self.samples += fitted.samples
        return fitted


def _drive(handling: Coroutine[Fit, Fitted, Any], fits: _Fits) -> Any:
    """Run a handler to its end, training whenever it waits; an error of the training is raised inside it."""
    try:
        request = handling.send(None)  # type: ignore[arg-type]  # a coroutine's first value is None
        while True:
            try:
                fitted = fits(request)
            except Exception as error:
                request = handling.throw(error)
            else:
                request = handling.send(fitted)
    except StopIteration as stop:
        return stop.value
    finally:
        handling.close()


def _unshared(kept: Tree, others: Tree) -> Tree:
    """The tree with copies in the place of tensors whose memory belongs to `others`."""
    if all(False for _ in tree.tensors(kept)):
        return tree.copy(kept)
    theirs = {_place(tensor) for tensor in tree.tensors(others)}
    return tree.map_tensors(kept, lambda x: x.detach().clone() if _place(x) in theirs else x.detach())


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
