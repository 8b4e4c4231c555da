"""Handlers of several clients in turn, each up to its next local training, and these trainings as one stacked program.

No handler knows of it. Each has a thread of its own, and one of them runs at a time: where it asks for a local training it waits,
and the next goes on. When all of them wait or are done, the trainings of one kind are run together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedfill.training.fit import Fit, Fitted, Resident, fit
from fedfill.training.stacked import NotStackedError, fit_stacked, kind_of

Train = Callable[[Resident, Fit, torch.Generator, torch.Generator], tuple[Fitted, float]]
"""A local training with the streams of its order and its draws: what it brought, and how many seconds it took."""
Job = Callable[[Train], Any]
"""A client's handler, given what trains."""

MOST = 64
"""Clients at a time: beyond it a step takes longer by as much as there are more."""
BYTES = 4 * 2**30
"""Of all stacked models with their gradients and what their optimizers remember."""
MEASURED = 3
"""Calls after which `Calibration` knows."""
COPIES = 6
"""Tensors of a model's size that a stacked training holds for each client: weights, a step's copy, gradients, two of Adam's, one."""


def alone(resident: Resident, request: Fit, order: torch.Generator, draws: torch.Generator) -> tuple[Fitted, float]:
    """One client's local training by itself."""
    start = time.perf_counter()
    return fit(resident, request, order, draws), time.perf_counter() - start


@dataclass
class _Turn:
    """One handler's thread, and what it waits for."""

    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    asked: tuple[Fit, torch.Generator, torch.Generator] | None = None
    answer: tuple[Fitted, float] | Exception | None = None
    result: Any = None
    raised: BaseException | None = None
    done: bool = False


class Together:
    """Runs handlers so that their local trainings are stacked.

    Args:
        resident: The model that all of them use, one at a time.
        most: How many clients at a time; smaller after the device's memory did not do.

    Attributes:
        most: See above.
    """

    def __init__(self, resident: Resident, most: int = MOST) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in resident.tensors.values())
        self.most = max(1, min(most, BYTES // max(COPIES * size, 1)))
        self._resident = resident
        self._refused: list[Any] = []
        self._yielded = threading.Semaphore(0)

    def run(self, jobs: Sequence[Job]) -> list[Any]:
        """Run all jobs to their ends.

        Args:
            jobs: At most `most` of them.

        Returns:
            What they returned, in their order.

        Raises:
            BaseException: What a job raised, the first of them.
        """
        turns = [_Turn() for _ in jobs]
        threads = [
            threading.Thread(target=self._work, args=(job, turn), name="fedfill together", daemon=True)
            for job, turn in zip(jobs, turns, strict=True)
        ]
        for thread in threads:
            thread.start()
        while waiting := [turn for turn in turns if not turn.done]:
            for turn in waiting:
                turn.go.release()
                self._yielded.acquire()
            self._answer([turn for turn in waiting if not turn.done])
        for thread in threads:
            thread.join()
        for turn in turns:
            if turn.raised is not None:
                raise turn.raised
        return [turn.result for turn in turns]

    def _work(self, job: Job, turn: _Turn) -> None:
        torch.set_num_threads(1)
        turn.go.acquire()
        try:
            turn.result = job(lambda _, *asked: self._wait(turn, *asked))
        except BaseException as raised:
            turn.raised = raised
        turn.done = True
        self._yielded.release()

    def _wait(self, turn: _Turn, request: Fit, order: torch.Generator, draws: torch.Generator) -> tuple[Fitted, float]:
        """In a handler's thread: let the others go on until the training is done."""
        turn.asked = request, order, draws
        self._yielded.release()
        turn.go.acquire()
        answer, turn.answer = turn.answer, None
        assert answer is not None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _answer(self, turns: Sequence[_Turn]) -> None:
        """Train for all that wait."""
        kinds: list[tuple[Any, list[_Turn]]] = []
        for turn in turns:
            assert turn.asked is not None
            kind = kind_of(turn.asked[0])
            for known, members in kinds:
                if known == kind:
                    members.append(turn)
                    break
            else:
                kinds.append((kind, [turn]))
        for kind, members in kinds:
            if len(members) > 1 and kind not in self._refused and self._stacked(kind, members):
                continue
            for turn in members:
                assert turn.asked is not None
                try:
                    turn.answer = alone(self._resident, *turn.asked)
                except Exception as error:  # it is the handler's
                    turn.answer = error

    def _stacked(self, kind: Any, turns: Sequence[_Turn]) -> bool:
        """Train as one program; False where that can't be, with all streams as they were."""
        asked = [turn.asked for turn in turns if turn.asked is not None]
        streams = [stream for _, *own in asked for stream in own]
        before = [stream.get_state() for stream in streams]
        start = time.perf_counter()
        try:
            found = fit_stacked(self._resident, *(list(parts) for parts in zip(*asked, strict=True)))
        except (NotStackedError, torch.OutOfMemoryError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                self.most = max(1, self.most // 2)
            else:
                self._refused.append(kind)
            for stream, state in zip(streams, before, strict=True):
                stream.set_state(state)
            return False
        except Exception as error:  # the run is being stopped
            for turn in turns:
                turn.answer = error
            return True
        share = (time.perf_counter() - start) / len(turns)
        for turn, fitted in zip(turns, found, strict=True):
            turn.answer = fitted, share
        return True


class Calibration:
    """Whether stacking pays: a call one client after another, one stacked to warm up, one stacked in earnest; then the faster.

    Args:
        stacks: That it does, whatever it takes.

    Attributes:
        stacks: Whether the next call is to be stacked.
    """

    def __init__(self, *, stacks: bool = False) -> None:
        self.stacks = stacks
        self._calls = MEASURED if stacks else 0
        self._seconds = 0.0

    def took(self, seconds: float, samples: int) -> None:
        """What a call of a whole cohort took.

        Args:
            seconds: Of the call.
            samples: Trained on; 0 where it was no training, and says nothing.
        """
        if not samples or self._calls == MEASURED:
            return
        self._calls += 1
        each = seconds / samples
        if self._calls == 1:
            self._seconds, self.stacks = each, True
        elif self._calls == MEASURED:
            self.stacks = each < self._seconds
