"""Columns of a table: how its rows become the inputs of a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedfill.data.cells import cell_numbers, cell_words
from fedfill.data.samples import Samples
from fedfill.errors import FedfillError

if TYPE_CHECKING:
    from fedfill.data.schema import Schema


@dataclass(frozen=True)
class Columns:
    """How the rows of a table become inputs: numbers first, then one input for each word of each column of words.

    Attributes:
        numbers: Names of the columns of numbers.
        words: By name of a column the words that it may hold.
        mean: What is taken from each number; empty before `fitted`.
        deviation: What each number is then divided by; likewise.
        schema: What sites agreed on before any data were read, by which rows are prepared first and numbers scaled; None: the
            training table says it all.
    """

    numbers: tuple[str, ...]
    words: Mapping[str, tuple[str, ...]]
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    schema: Schema | None = None

    @property
    def told(self) -> tuple[str, ...]:
        """What is known of the records by these columns, in a sentence for an account of privacy; none without columns."""
        if self.schema is not None and (names := self.schema.standardised):
            told = (
                f"The schema scales by a mean and a deviation ({', '.join(names)}). Where these came from records, what they were found "
                "with has to be added: schema.toml of a run of moments says it."
            )
            return (told,)
        if not (self.numbers or self.words) or self.schema is not None:
            return ()
        return (
            (
                "The means, deviations and words of the table's columns, by which inputs are scaled, come from its records without "
                "noise, and are not in the account."
            ),
        )

    def strata(self, labels: NDArray[np.int64]) -> NDArray[np.int64]:
        """What a stratified choice among rows with these labels keeps the shares of: their classes, if the schema says nothing else."""
        return labels if self.schema is None else self.schema.target.strata(labels)

    @property
    def size(self) -> int:
        """Inputs that a row becomes."""
        return len(self.numbers) + sum(map(len, self.words.values()))

    def values(self, table: Any, file: Path) -> Tensor:
        """The inputs of an Arrow table's rows in its own units, ``[n, size]`` float64; a word that nobody knows has none.

        Args:
            table: With all of these columns.
            file: Where it came from, for errors.

        Returns:
            One row each.

        Raises:
            FedfillError: Where a cell is empty, or no number where one is needed.
        """
        features = [cell_numbers(table, name, file)[:, None] for name in self.numbers]
        features += [cell_words(table, name, file)[:, None] == np.array(found) for name, found in self.words.items()]
        return torch.from_numpy(np.concatenate(features, axis=1, dtype=np.float64))

    def fitted(self, values: Tensor) -> Self:
        """The same columns, whose numbers get mean 0 and deviation 1 over these rows.

        Args:
            values: ``[n, size]``, all samples to train on, before they are divided: what clients will keep for their own tests
                and for validation is among them, and so is what a fraction of the data leaves out; the global test set is not.

        Returns:
            With mean and deviation. A number that never changes becomes 0. With a schema: as they are.
        """
        if self.schema is not None:
            return self
        column = values[:, : len(self.numbers)]
        mean = column.mean(dim=0)
        deviation = column.std(dim=0, correction=0) if self.numbers else mean  # torch warns of a deviation of nothing
        # of a constant rounding may leave a mean beside it, and a deviation above 0 by which to blow up the difference
        lowest = column.amin(dim=0)
        constant = lowest == column.amax(dim=0)
        mean = torch.where(constant, lowest, mean)
        deviation[constant | (deviation == 0)] = 1
        return replace(self, mean=tuple(mean.tolist()), deviation=tuple(deviation.tolist()))

    def scaled(self, values: Tensor) -> Tensor:
        """Inputs as a network takes them.

        Args:
            values: ``[n, size]`` float64.

        Returns:
            ``[n, size]`` float32; what stands for words stays 0 or 1.
        """
        k = len(self.numbers)
        mean, deviation = (values.new_tensor(numbers) for numbers in (self.mean, self.deviation))
        return torch.cat([(values[:, :k] - mean) / deviation, values[:, k:]], dim=1).to(torch.float32)

    def inputs(self, values: Tensor, where: str) -> Tensor:
        """`scaled`, refused where a number is so far from those that were trained on that float32 has no place for it.

        Args:
            values: ``[n, size]`` float64.
            where: They came from, for the beginning of an error's sentence.

        Returns:
            ``[n, size]`` float32, finite.

        Raises:
            FedfillError: With the first such number.
        """
        found = self.scaled(values)
        if not (finite := torch.isfinite(found)).all():
            row, column = (~finite).nonzero()[0].tolist()
            raise FedfillError(
                f"{where}: column '{self.numbers[column]}' holds {values[row, column]:.4g}, and the training table has a mean of "
                f"{self.mean[column]:.4g} and a deviation of {self.deviation[column]:.4g}; allowed: numbers like those that were trained on"
            )
        return found

    def samples(self, given: Samples, where: str) -> Samples:
        """The same samples with their `inputs` scaled; `where` they came from begins an error's sentence."""
        return Samples(self.inputs(given.inputs, where), given.labels)
