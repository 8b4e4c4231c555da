"""Progress on standard error: one line that moves on a terminal, a plain line for each round elsewhere."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from fedfill.runs.shown import headline_of

if TYPE_CHECKING:
    from fedfill.experiment.loop import OnRound

err = Console(stderr=True, highlight=False, markup=False, emoji=False)


def live() -> bool:
    """Whether standard error shows a line that moves: a terminal, or a notebook that has the widgets for it."""
    return err.is_terminal or (err.is_jupyter and find_spec("ipywidgets") is not None)


class Clock:
    """How long all runs together will still take, from those that are behind.

    Args:
        runs: How many there are in all.
        now: Tells the time in seconds.
    """

    def __init__(self, runs: int, now: Callable[[], float] = time.monotonic) -> None:
        self.runs = runs
        self._now = now
        self._begun = 0
        self._start = now()
        self._share = 0.0
        self._took: list[float] = []

    def begin(self) -> int:
        """The next run starts.

        Returns:
            Its number, from 1.
        """
        self._keep()
        self._begun += 1
        self._start, self._share = self._now(), 0.0
        return self._begun

    def _keep(self) -> None:
        # a run that was finished before is read in no time, and says nothing of the others
        if self._begun and self._share >= 1:
            self._took.append(self._now() - self._start)

    def done(self, share: float) -> None:
        """So much of the run is behind, 0 to 1."""
        self._share = share

    def left(self) -> float | None:
        """Seconds for the rest of this run and all others, each like the mean so far; None before anything is known."""
        if not self._share:
            return None
        whole = (self._now() - self._start) / self._share
        mean = statistics.fmean([*self._took, whole])
        return whole * (1 - self._share) + mean * max(0, self.runs - self._begun)


def duration(seconds: float) -> str:
    """A time as people say it: ``45 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


class _Announced(logging.Handler):
    """Shows what the library says of its long steps."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        """Show one message."""
        self._show(record.getMessage())


@contextmanager
def progress(runs: int = 1) -> Iterator[Callable[[str], OnRound]]:
    """Progress of one run, or of several in a row.

    Args:
        runs: How many there will be.

    Yields:
        Makes the follower of one run from its label, just before the run starts.
    """
    with stages() as begin:
        yield begin("", runs)


@contextmanager
def stages() -> Iterator[Callable[[str, int], Callable[[str], OnRound]]]:
    """Progress of several stages in a row, each of several runs.

    Yields:
        Begins a stage from its name and number of runs, and makes what `progress` yields.
    """
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figure]}"),
        TextColumn("{task.fields[left]}"),
        console=err,
        transient=True,
    )
    clock = Clock(1)
    stage = ""
    task: TaskID = bar.add_task("", total=None, figure="", left="")
    said: list[str] = []
    warned: set[str] = set()
    spoken = time.monotonic()

    def announce(text: str) -> None:
        if live():
            bar.update(task, figure=text)
        elif said[-1:] != [text]:  # a step that comes again in every round is said once
            said.append(text)
            say(f"{bar.tasks[task].description or 'fedfill'}: {text}")

    def follow(label: str) -> OnRound:
        number = clock.begin()
        if clock.runs > 1:
            label = f"{number}/{clock.runs} {label}"
        if stage:
            label = f"{stage} {label}"
        said.clear()
        # the bar moves while data are read and in the first round
        bar.reset(task, total=None, description=label, figure="", left=bar.tasks[task].fields["left"])

        def on_round(record: dict[str, Any], rounds: int) -> None:
            nonlocal spoken
            if "round" in record:
                done, total, when = record["round"], rounds, f"round {record['round']}"
                clock.done(done / total)
            else:
                done, total, when = record["step"], record["steps"], f"preparation {record['step']}"
            figure = figure_of(record)
            left, of_all = clock.left(), f" of {stage or 'all'}" if clock.runs > 1 else ""
            after = "" if left is None else f"about {duration(left)} left{of_all}"
            if not live():
                # steps of a tenth of a second would fill a log
                if "round" in record or done == total or time.monotonic() - spoken >= 5:
                    say(f"{label}: {when}/{total}, {figure}, {record['seconds']:.1f} s")
                    spoken = time.monotonic()
            elif bar.tasks[task].total != total:
                bar.reset(task, total=total, completed=done, figure=figure, left=after)
            else:
                bar.update(task, completed=done, figure=figure, left=after)
            for sentence in record["warnings"]:
                if sentence in warned:  # runs of a comparison give the same one; each run's rounds.jsonl has it
                    continue
                warned.add(sentence)
                say(f"{label}, {when}: {sentence}", "yellow")
            for lost in record["lost"]:
                say(f"{label}, {when}: lost client {lost['client']} ({lost['handler']}): {lost['reason']}", "yellow")

        return on_round

    def begin(name: str, runs: int) -> Callable[[str], OnRound]:
        nonlocal clock, stage
        clock, stage = Clock(runs), name
        return follow

    listener, logger = _Announced(announce), logging.getLogger("fedfill")
    before = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        if live():
            with bar:
                yield begin
        else:
            yield begin
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before)


@contextmanager
def watched(quiet: bool, runs: int = 1) -> Iterator[Callable[[str], OnRound | None]]:
    """Progress of calls from Python: a line that moves where there can be one; elsewhere, of several runs, a line for each that ends.

    Args:
        quiet: Show none.
        runs: How many there will be.

    Yields:
        As `progress` does, or what makes no follower.
    """
    if quiet or (runs == 1 and not live()):
        yield lambda label: None
    elif not live():
        yield _ends(runs)
    else:
        with progress(runs) as follow:
            yield follow


def _ends(runs: int) -> Callable[[str], OnRound]:
    """Followers that say when a run has ended."""
    begun = 0

    def follow(label: str) -> OnRound:
        nonlocal begun
        begun += 1
        number, start = begun, time.monotonic()

        def on_round(record: dict[str, Any], rounds: int) -> None:
            if record.get("round") == rounds:
                took = duration(time.monotonic() - start)
                many = f"{rounds} round{'' if rounds == 1 else 's'}"
                say(f"{number}/{runs} {label}: {many}, {figure_of(record)}, {took}")

        return on_round

    return follow


def both(first: OnRound | None, second: OnRound | None) -> OnRound | None:
    """One follower of a run for two."""
    if first is None or second is None:
        return first or second

    def on_round(record: dict[str, Any], rounds: int) -> None:
        first(record, rounds)
        second(record, rounds)

    return on_round


def figure_of(record: dict[str, Any]) -> str:
    """The figure of a round: on the validation splits where there are any, so that nobody chooses by the test set."""
    if "round" not in record:
        return "preparing"
    held = [share for share in record.get("validation_by_client", ()) if share is not None]
    if held:
        return f"validation {statistics.fmean(held):.4f}"
    return f"{headline_of(record)[0]} {record['accuracy']:.4f}" if "accuracy" in record else "not evaluated"


def say(line: str, style: str | None = None) -> None:
    """A line on standard error, never broken."""
    err.print(line, style=style, soft_wrap=True)
