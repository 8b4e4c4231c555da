"""A trained model in use: the network with its classes and its scaling, and what it says of new inputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedfill.data.inputs import Inputs, Reader, Records
from fedfill.data.samples import normalise
from fedfill.engines.local import processors
from fedfill.errors import FedfillError
from fedfill.runs.shown import csv_text
from fedfill.statistics.survival import survival_of, total_hazard

SURVIVAL = "survival at "
"""What the name of a column of probabilities begins with; then the time."""
CHUNK = 250
"""Inputs that a thread scores at once."""


@dataclass(frozen=True)
class Predictions:
    """What a model says of some inputs.

    Attributes:
        class_names: Of all classes, in the order of their indices.
        probabilities: ``[n, classes]`` float32: the softmax of the scores.
        files: Where each input was found; empty where they came from Python.
        rows: Its row there, from 0; None of a file that is one image; likewise.
        notes: Sentences on what was changed or left out, such as images of another size.
        grid: Of a model of times to an event: the G times of its schema, and the classes are their 2 G + 1 cells; else empty.
        ranks_only: Whether such a model tells which row has its event before which, and no probability of it.
        numbers: Of a model of a number: one for each input, ``[n]`` float64, in the unit of the target; None of any other. There are no
            probabilities then, ``[n, 0]``.
    """

    class_names: tuple[str, ...]
    probabilities: Tensor
    files: tuple[str, ...] = ()
    rows: tuple[int | None, ...] = ()
    notes: tuple[str, ...] = ()
    grid: tuple[float, ...] = ()
    ranks_only: bool = False
    numbers: Tensor | None = None

    def __len__(self) -> int:
        """How many inputs there were."""
        return len(self.probabilities)

    def __repr__(self) -> str:
        """How many of which classes."""
        if self.grid:
            return f"<{len(self)} predictions of times to an event>"
        if self.numbers is not None:
            return f"<{len(self)} predictions of {self.class_names[0]}>"
        counts = torch.bincount(self.indices, minlength=len(self.class_names)).tolist()
        said = ", ".join(f"{name} {count}" for name, count in zip(self.class_names, counts, strict=True) if count)
        return f"<{len(self)} predictions: {said}>" if len(said) < 200 else f"<{len(self)} predictions>"

    @property
    def indices(self) -> Tensor:
        """The most probable class of each by its index, ``[n]`` int64.

        Raises:
            FedfillError: Where a number was learnt.
        """
        if self.numbers is not None:
            raise FedfillError(
                f"classes: found none in predictions of {self.class_names[0]}, a number; allowed: numbers"
            )
        return self.probabilities.argmax(1)

    @property
    def classes(self) -> list[str]:
        """The most probable class of each by its name."""
        return [self.class_names[c] for c in self.indices.tolist()]

    def top(self, n: int = 1) -> list[list[tuple[str, float]]]:
        """The most probable classes of each.

        Args:
            n: How many; all where there are fewer.

        Returns:
            For each input names and probabilities, the most probable first.

        Raises:
            FedfillError: Where a number was learnt.
        """
        if self.numbers is not None:
            raise FedfillError(
                f"top: found {n} with {self.class_names[0]}, a number, which has no classes; allowed: numbers"
            )
        order = torch.sort(self.probabilities, dim=1, descending=True, stable=True)
        n = min(n, len(self.class_names))
        pairs = zip(order.indices[:, :n].tolist(), order.values[:, :n].tolist(), strict=True)
        return [[(self.class_names[c], p) for c, p in zip(*pair, strict=True)] for pair in pairs]

    @property
    def survival(self) -> Tensor:
        """Of a model of times: the probability that the event has not come by each grid time, ``[n, G]`` float64.

        Raises:
            FedfillError: Where the model only ranks.
        """
        if self.ranks_only:
            raise FedfillError(
                "survival: found none in a model that ranks rows and knows no site's hazard over time; allowed: its risk, or a model of "
                "cox with strata=none"
            )
        return survival_of(self.probabilities)

    @property
    def risk(self) -> Tensor:
        """Of a model of times: the cumulative hazard over the grid, by which rows are ranked, ``[n]`` float64: the higher the sooner."""
        return total_hazard(self.probabilities.double().clamp(min=1e-300).log())

    @property
    def medians(self) -> list[float | None]:
        """Of a model of times: the first grid time by which the event has come with a probability of one half; None: it is later."""
        return [
            next((t for t, s in zip(self.grid, row, strict=True) if s <= 0.5 + 1e-9), None)
            for row in self.survival.tolist()
        ]

    @property
    def _places(self) -> list[tuple[str, str]]:
        """File and row of each, as a table has them."""
        rows = self.rows or range(len(self))
        found = zip(self.files or ("",) * len(self), rows, strict=True)
        return [(file, "" if row is None else str(row)) for file, row in found]

    def _one_each(self, name: str, values: Tensor) -> Iterator[tuple[str, ...]]:
        yield ("file", "row", name)
        for place, value in zip(self._places, values.tolist(), strict=True):
            yield (*place, f"{value:.6g}")

    def _times(self) -> Iterator[tuple[str, ...]]:
        if self.ranks_only:
            yield from self._one_each("risk", self.risk)
            return
        yield ("file", "row", "risk", "median", *(f"{SURVIVAL}{time:g}" for time in self.grid))
        found = zip(self._places, self.risk.tolist(), self.medians, self.survival.tolist(), strict=True)
        for place, risk, median, survival in found:
            half = "" if median is None else f"{median:g}"
            yield (*place, f"{risk:.6g}", half, *(f"{s:.6f}" for s in survival))

    def table(self, top: int = 1) -> Iterator[tuple[str, ...]]:
        """The header and the lines of a tidy table.

        Args:
            top: How many classes of each.

        Yields:
            file, row, with several classes the rank, class, probability. Of a model of times: file, row, risk, median (empty where it
            is after the grid), and the probability that the event has not come by each grid time; of one that only ranks no more than
            the risk. Of a model of a number: file, row, value.

        Raises:
            FedfillError: Where several classes of a model of times or of a number are asked for.
        """
        if self.numbers is not None and top == 1:
            yield from self._one_each("value", self.numbers)
            return
        if self.grid:
            if top > 1:
                raise FedfillError(
                    f"top: found {top} with a model of times to an event, which names no classes; allowed: 1"
                )
            yield from self._times()
            return
        rank = ("rank",) if top > 1 else ()
        yield ("file", "row", *rank, "class", "probability")
        for place, best in zip(self._places, self.top(top), strict=True):
            for k, (name, probability) in enumerate(best, 1):
                yield (*place, *((str(k),) if rank else ()), name, f"{probability:.6f}")

    def to_csv(self, top: int = 1) -> str:
        """The text of `table`."""
        lines = self.table(top)
        return csv_text(next(lines), lines)


class Model(nn.Module):
    """A trained network in evaluation mode, with its classes and its preprocessing.

    Args:
        network: Maps normalised inputs to class scores.
        inputs: What it takes.
        card: The document of ``model.json``.
        client: Whose it is, where clients have models of their own.

    Attributes:
        network: Maps normalised inputs ``[n, ...]`` to class scores.
        inputs: What it takes.
        card: The document of ``model.json``: how it was trained, and what its privacy is.
        class_names: In the order of their indices.
        client: Whose it is; None: everybody's.
    """

    def __init__(self, network: nn.Module, inputs: Inputs, card: Mapping[str, Any], client: str | None = None) -> None:
        super().__init__()
        self.network = network
        self.inputs = inputs
        self.card = card
        self.class_names: tuple[str, ...] = tuple(card["class_names"])
        self.client = client
        self.eval()

    @property
    def grid(self) -> tuple[float, ...]:
        """The times of a model of times to an event; empty of one of classes."""
        return self.inputs.grid

    @property
    def ranks_only(self) -> bool:
        """Whether it tells which row has its event before which, and no probability of it."""
        return bool(self.card["run"].get("ranks_only"))

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores, or numbers.

        Args:
            inputs: As `preprocess` gives them: uint8 images ``[n, channels, height, width]``, or floats ``[n, ...]``.

        Returns:
            ``[n, classes]``; their softmax are the probabilities. Of a number ``[n, 1]``, in the unit of the target.
        """
        scores: Tensor = self.network(normalise(inputs))
        return scores if (number := self.inputs.number) is None else number.in_unit(scores)

    def preprocess(self, data: Any) -> Tensor:
        """Inputs for `forward` from what one has: see `fedfill.data.inputs.Reader.objects`."""
        return Reader(self.inputs).objects(data)

    def predict(self, data: Any, seen: Callable[[int], None] | None = None) -> Predictions:
        """Classes and probabilities.

        Args:
            data: Paths of files or folders, as for `fedfill.predict`; or what `preprocess` takes.
            seen: Of paths, told now and then how many inputs are done.

        Returns:
            One for each input.

        Raises:
            FedfillError: Where the model takes no such data.
        """
        paths = [data] if isinstance(data, str | os.PathLike) else data
        if isinstance(paths, list | tuple) and paths and all(isinstance(path, str | os.PathLike) for path in paths):
            return self.predict_files(paths, seen)
        reader = Reader(self.inputs)
        return self._predictions(self._told(reader.objects(data)), (), (), reader)

    def predict_files(self, paths: Iterable[str | Path], seen: Callable[[int], None] | None = None) -> Predictions:
        """Those of files and folders.

        Args:
            paths: As for `fedfill.predict`.
            seen: Told now and then how many inputs are done.

        Returns:
            One for each input, in their order.
        """
        reader = Reader(self.inputs)
        parts: list[Tensor] = []
        files: list[str] = []
        rows: list[int | None] = []
        records: Records
        for records in reader.files(paths):
            parts.append(self._told(records.inputs))
            files += records.files
            rows += records.rows
            if seen is not None:
                seen(len(files))
        if not parts:
            raise FedfillError("paths: found none; allowed: files and folders")
        return self._predictions(torch.cat(parts), tuple(files), tuple(rows), reader)

    def _predictions(
        self, told: Tensor, files: tuple[str, ...], rows: tuple[int | None, ...], reader: Reader
    ) -> Predictions:
        """What `_told` gave, as people take it."""
        numbers = None
        if self.inputs.number is not None:
            told, numbers = told[:, :0], told[:, 0].double()
        return Predictions(self.class_names, told, files, rows, reader.notes, self.grid, self.ranks_only, numbers)

    def _told(self, inputs: Tensor) -> Tensor:
        """Probabilities ``[n, classes]``, or numbers ``[n, 1]``, on the CPU."""
        self.eval()
        device = next((tensor.device for tensor in self.state_dict().values()), torch.device("cpu"))

        def of(chunk: Tensor) -> Tensor:
            with torch.inference_mode():
                found = self(chunk.to(device)).float()
                return (found.softmax(1) if self.inputs.number is None else found).cpu()  # type: ignore[no-any-return]

        chunks = torch.split(inputs, CHUNK)
        if device.type != "cpu" or len(chunks) == 1:
            return self._meant(torch.cat([of(chunk) for chunk in chunks]), inputs)
        # as in a run: threads over chunks with one torch thread each are faster than threads inside operations
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(processors(), "fedfill", initializer=torch.set_num_threads, initargs=(1,)) as pool:
                return self._meant(torch.cat(list(pool.map(of, chunks))), inputs)
        finally:
            torch.set_num_threads(before)

    def _meant(self, probabilities: Tensor, inputs: Tensor) -> Tensor:
        """The same, or an error where some are NaN or infinite, of which the largest would still name a class."""
        wrong = ~probabilities.isfinite().all(1)
        if wrong.any():
            k = int(wrong.nonzero()[0])
            if not normalise(inputs[k : k + 1]).isfinite().all():
                raise FedfillError(f"data: input {k} holds a NaN or an infinity; allowed: finite numbers")
            raise FedfillError(
                f"model: what it says is no finite number for {int(wrong.sum()):,} of {len(wrong):,} inputs, so its weights are damaged; "
                "allowed: finite weights, such as of the run exported again"
            )
        return probabilities

    def extra_repr(self) -> str:
        """Shown in the module's printed form."""
        whose = "" if self.client is None else f", of client {self.client}"
        what = f"times to an event on {len(self.grid)} grid times" if self.grid else f"{len(self.class_names)} classes"
        what = what if self.inputs.number is None else f"the number {self.class_names[0]}"
        return f"takes {self.inputs.words}, {what}{whose}"
