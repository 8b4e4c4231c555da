"""Federated moments: mean and deviation of a table's numbers over all clients, for a schema that scales by them.

See ``docs/algorithms/moments.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from fedfill.algorithms import Algorithm
from fedfill.data.schema import Schema, agreed
from fedfill.data.schema_columns import Column
from fedfill.errors import FedfillError
from fedfill.privacy.sums import BlockBound
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Sums, collect, contribute
from fedfill.runs.curves import Findings
from fedfill.statistics.noise import NoisySums
from fedfill.statistics.sums import GRID, Block, Statistic
from fedfill.tree import Tree, Weights

LEAST = 1e-3
"""Of a deviation, in shares of half the way between the bounds."""
DIGITS = 6
"""That are told of a mean and of a deviation."""
NO_MODEL = (
    "moments trains nothing: the model and its figures are those of the network as drawn. What it found is in schema.toml: give it to the "
    "next run as schema_file."
)


@dataclass(frozen=True)
class AskMoments(Message):
    """Server to client: the request for sums.

    Attributes:
        clients: How many clients are asked.
    """

    clients: int


class Moments(NoisySums, Algorithm):
    """Mean and deviation of each column of numbers over all clients, in one round; its schema scales by them.

    Use it before training on a table whose numbers lie far from the middle of their bounds.
    """

    name = "moments"
    single_round = True
    tabular = True
    numbers = True

    def check_schema(self, schema: Schema | None) -> None:
        """Refuse a table without numbers."""
        if schema is not None and not numbers_of(schema):
            raise FedfillError(
                "schema_file: found no column of numbers, whose mean could be told; allowed with moments: one or more of the kinds integer "
                "and real"
            )

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Refuse words on noise that would not be heeded."""
        self.check_trust()
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The network as drawn, and the sums with the noise in them."""
        return {**super().server_state(initial), "sums": None, "std": 0.0}

    def round(self, server: Server, t: int) -> None:
        """One exchange."""
        statistic = moment_sums(len(numbers_of(agreed(server.schema))))
        noise = self.noise(statistic)
        collected = collect(server, self.sum, AskMoments(server.clients), statistic, noise)
        server.state.sums, server.state.std = dict(collected.sums), collected.stds["squares"]
        server.warn(NO_MODEL)

    @client_handler
    def sum(self, client: Client, message: AskMoments) -> Sums:
        """Sums over the client's rows."""
        schema = agreed(client.schema)
        statistic = moment_sums(len(numbers_of(schema)))

        def records() -> Iterator[tuple[Tensor, Tensor]]:
            yield by_bounds(schema, client.data.inputs, client.data.labels), client.data.labels.cpu()

        return contribute(client, statistic, records(), self.noise(statistic), message.clients)

    def findings(self, server: Server) -> Findings:
        """Mean and deviation of each column in its own unit, and the schema with them."""
        schema, sums = agreed(server.schema), server.state.sums
        told: dict[str, dict[str, Any]] = {}
        columns = dict(schema.columns)
        # of the sum of squares alone: where noise is as large as that, a smaller deviation would be the noise's
        for k, name in enumerate(numbers_of(schema)):
            n, total, squares = (float(sums[block][k]) for block in ("present", "total", "squares"))
            if n < 1:
                told[name] = {"mean": None, "why": "no row tells it"}
                continue
            mean = min(max(total / n, -1.0), 1.0)
            least = max(LEAST**2, 2 * float(server.state.std) / n)
            deviation = math.sqrt(min(max(squares / n - mean**2, least), 1.0))
            middle, half = middle_and_half(schema.columns[name])
            own = {"mean": rounded(middle + half * mean), "deviation": rounded(half * deviation)}
            low, high = columns[name].bounds
            own["mean"] = min(max(own["mean"], low), high)  # after rounding, too
            columns[name] = columns[name].model_copy(update=own)
            told[name] = {**own, "rows": n}
        figures: dict[str, Any] = {"columns": told}
        return Findings(figures, schema=replace(schema, columns=columns).toml())


def numbers_of(schema: Schema) -> list[str]:
    """Columns of numbers."""
    return [name for name, column in schema.columns.items() if column.is_number]


def middle_and_half(column: Column) -> tuple[float, float]:
    """The middle of a column's bounds, and half of the way between them."""
    low, high = column.bounds
    return (low + high) / 2, (high - low) / 2


def by_bounds(schema: Schema, inputs: Tensor, labels: Tensor) -> Tensor:
    """Numbers of -1..1 by their bounds, 0 where a cell is empty, and then 1 for each that is not: ``[n, 2 p]`` float64."""
    wanted = [k for k, column in enumerate(schema.columns.values()) if column.is_number]
    x = 2 * torch.from_numpy(schema.places_of(inputs, labels)[:, wanted]) - 1
    there = ~x.isnan()
    return torch.cat([torch.where(there, x, 0.0), there.double()], dim=1)


def moment_sums(p: int) -> Statistic:
    """The sums over rows of p numbers x of -1..1: of x, of x^2, and of 1, where a cell is not empty.

    A replaced row moves x by 2 at the most, x^2 by 1 and its presence by 1.

    Args:
        p: Columns.

    Returns:
        Blocks ``total``, ``squares`` and ``present``, ``[p]`` each.
    """
    length = math.sqrt(p)
    blocks = {
        "total": Block((p,), BlockBound(length, 2 * length, p), bits=GRID),
        "squares": Block((p,), BlockBound(length, length, p), bits=2 * GRID),
        "present": Block((p,), BlockBound(length, length, p), bits=0),
    }

    def add(sums: Weights, z: Tensor, labels: Tensor) -> None:
        x, there = z[:, :p], z[:, p:]
        sums["total"] += x.sum(0)
        sums["squares"] += x.square().sum(0)
        sums["present"] += there.sum(0)

    return Statistic(blocks, add, "sums of a table's numbers, of their squares, and how many there are")


def rounded(x: float) -> float:
    """To `DIGITS` digits."""
    return float(f"{x:.{DIGITS}g}")
