"""A trained model in use: the network with its classes and its scaling, and what it says of new inputs."""

from __future__ import annotations

import csv
import io
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
    """

    class_names: tuple[str, ...]
    probabilities: Tensor
    files: tuple[str, ...] = ()
    rows: tuple[int | None, ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """How many inputs there were."""
        return len(self.probabilities)

    def __repr__(self) -> str:
        """How many of which classes."""
        counts = torch.bincount(self.indices, minlength=len(self.class_names)).tolist()
        said = ", ".join(f"{name} {count}" for name, count in zip(self.class_names, counts, strict=True) if count)
        return f"<{len(self)} predictions: {said}>" if len(said) < 200 else f"<{len(self)} predictions>"

    @property
    def indices(self) -> Tensor:
        """The most probable class of each by its index, ``[n]`` int64."""
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
        """
        order = torch.sort(self.probabilities, dim=1, descending=True, stable=True)
        n = min(n, len(self.class_names))
        pairs = zip(order.indices[:, :n].tolist(), order.values[:, :n].tolist(), strict=True)
        return [[(self.class_names[c], p) for c, p in zip(*pair, strict=True)] for pair in pairs]

    def table(self, top: int = 1) -> Iterator[tuple[str, ...]]:
        """The header and the lines of a tidy table: file, row, with several classes the rank, class, probability."""
        rank = ("rank",) if top > 1 else ()
        yield ("file", "row", *rank, "class", "probability")
        files, rows = self.files or ("",) * len(self), self.rows or range(len(self))
        for file, row, best in zip(files, rows, self.top(top), strict=True):
            for place, (name, probability) in enumerate(best, 1):
                yield (
                    file, "" if row is None else str(row), *((str(place),) if rank else ()), name, f"{probability:.6f}",
                )  # fmt: skip

    def to_csv(self, top: int = 1) -> str:
        """The text of `table`."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.table(top))
        return text.getvalue()


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

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores.

        Args:
            inputs: As `preprocess` gives them: uint8 images ``[n, channels, height, width]``, or floats ``[n, ...]``.

        Returns:
            ``[n, classes]``; their softmax are the probabilities.
        """
        return self.network(normalise(inputs))  # type: ignore[no-any-return]

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
        probabilities = self._probabilities(reader.objects(data))
        return Predictions(self.class_names, probabilities, notes=reader.notes)

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
            parts.append(self._probabilities(records.inputs))
            files += records.files
            rows += records.rows
            if seen is not None:
                seen(len(files))
        if not parts:
            raise FedfillError("paths: found none; allowed: files and folders")
        return Predictions(self.class_names, torch.cat(parts), tuple(files), tuple(rows), reader.notes)

    def _probabilities(self, inputs: Tensor) -> Tensor:
        """``[n, classes]`` on the CPU."""
        self.eval()
        device = next((tensor.device for tensor in self.state_dict().values()), torch.device("cpu"))

        def of(chunk: Tensor) -> Tensor:
            with torch.inference_mode():
                return self(chunk.to(device)).float().softmax(1).cpu()  # type: ignore[no-any-return]

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
        """The same, or an error where some are no numbers, of which the largest would still name a class."""
        wrong = ~probabilities.isfinite().all(1)
        if wrong.any():
            k = int(wrong.nonzero()[0])
            if not normalise(inputs[k : k + 1]).isfinite().all():
                raise FedfillError(f"data: input {k} holds a NaN or an infinity; allowed: finite numbers")
            raise FedfillError(
                f"model: its probabilities are no numbers for {int(wrong.sum()):,} of {len(wrong):,} inputs, so its weights are damaged; "
                "allowed: finite weights, such as of the run exported again"
            )
        return probabilities

    def extra_repr(self) -> str:
        """Shown in the module's printed form."""
        whose = "" if self.client is None else f", of client {self.client}"
        return f"takes {self.inputs.words}, {len(self.class_names)} classes{whose}"
