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
from fedfill.errors import FedfillError
from fedfill.privacy.sums import BlockBound
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Sums, collect, contribute
from fedfill.runs.curves import Findings, FoundTable
from fedfill.statistics.noise import NoisySums
from fedfill.statistics.sums import GRID, Block, Statistic
from fedfill.tree import Tree, Weights

LEAST = 1e-6
"""Of a deviation, in shares of half the way between the bounds."""
FLAT = 1e-7
"""A deviation below that is rounding: the column never changes, and is scaled by half the way between its bounds."""
SOUND = 3
"""A count stands out of its noise from so many standard deviations on."""
DIGITS = 6
"""That are told of a mean and of a deviation."""
NO_MODEL = (
    "moments trains nothing: the model is the network as drawn, and has no scores. What it found is in schema.toml: give it to the next "
    "run as schema_file."
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
    trains = False
    tabular = True
    numbers = True

    @property
    def exact(self) -> bool:
        """Whether sums have no noise."""
        return self.target_epsilon is None

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
        return {**super().server_state(initial), "sums": None, "stds": None}

    def round(self, server: Server, t: int) -> None:
        """One exchange."""
        statistic = moment_sums(len(numbers_of(agreed(server.schema))), self.exact)
        collected = collect(server, self.sum, AskMoments(server.clients), statistic, self.noise(statistic))
        server.state.sums, server.state.stds = dict(collected.sums), dict(collected.stds)
        server.warn(NO_MODEL)

    @client_handler
    def sum(self, client: Client, message: AskMoments) -> Sums:
        """Sums over the client's rows."""
        schema = agreed(client.schema)
        statistic = moment_sums(len(numbers_of(schema)), self.exact)

        def records() -> Iterator[tuple[Tensor, Tensor]]:
            yield by_bounds(schema, client.data.inputs, self.exact), client.data.labels.cpu()

        return contribute(client, statistic, records(), self.noise(statistic), message.clients)

    def findings(self, server: Server) -> Findings:
        """Mean and deviation of each column in its own unit, and the schema with them."""
        schema, sums, stds = agreed(server.schema), server.state.sums, server.state.stds
        told: dict[str, dict[str, Any]] = {}
        columns = dict(schema.columns)
        for k, name in enumerate(numbers_of(schema)):
            n, total, squares = (float(sums[block][k]) for block in ("present", "total", "squares"))
            if n < 1 or n <= SOUND * stds["present"]:
                told[name] = {
                    "mean": None,
                    "why": "no row tells it" if not stds["present"] else "its rows do not stand out of the noise",
                }
                continue
            mean, error = min(max(total / n, -1.0), 1.0), stds["total"] / n
            # where the noise is as large as that, a smaller deviation would be the noise's
            least = math.sqrt(2 * stds["squares"] / n)
            deviation = math.sqrt(min(max(squares / n - mean**2, 0.0), 1.0))
            deviation = max(deviation, least, LEAST) if least or deviation > FLAT else 1.0
            middle, half = schema.columns[name].middle_and_half
            own = {"mean": rounded(middle + half * mean), "deviation": rounded(half * deviation)}
            low, high = columns[name].bounds
            own["mean"] = min(max(own["mean"], low), high)  # after rounding, too
            columns[name] = columns[name].model_copy(update=own)
            told[name] = {**own, "rows": n, **({"std_of_noise_in_mean": half * error} if error else {})}
        figures: dict[str, Any] = {"columns": told}
        rows = tuple(
            (name, f"-, {one['why']}", "-")
            if one["mean"] is None
            else (name, f"{one['mean']:g}", f"{one['deviation']:g}")
            for name, one in told.items()
        )
        table = FoundTable("Columns of numbers, over all clients' rows", ("column", "mean", "deviation"), rows)
        text = f"{self.comment()}\n\n{replace(schema, columns=columns).toml()}"
        return Findings(figures, tells="nothing", schema=text, tables=(table,))

    def comment(self) -> str:
        """Where mean and deviation come from, as a comment for whoever gets the schema."""
        found = "# mean and deviation were found by a run of moments over all sites' rows, "
        if self.target_epsilon is None:
            return f"{found}from exact sums: they have no guarantee."
        return (
            f"{found}with target_epsilon = {self.target_epsilon:g},\n# target_delta = {self.target_delta:g} and trust = {self.trust}: to be "
            "added to what is promised of a model."
        )


def numbers_of(schema: Schema) -> list[str]:
    """Columns of numbers."""
    return [name for name, column in schema.columns.items() if column.is_number]


def by_bounds(schema: Schema, inputs: Tensor, exact: bool) -> Tensor:
    """Numbers x of -1..1 by their bounds.

    Args:
        schema: Of the inputs.
        inputs: ``[n, features]``, by its encoding.
        exact: Whether x is told beyond whole steps of 2^-12.

    Returns:
        ``[n, 3 p]`` float64: x in whole steps, 0 where a cell is empty; what is left of it, in steps, or 0; 1 where a cell is not empty.
    """
    encoding, found = schema.encoding(), []
    places, values = {name: k for k, name in enumerate(encoding.numbers)}, inputs.double().cpu()
    for name in numbers_of(schema):
        (middle, half), place = schema.columns[name].middle_and_half, places[name]
        own = values[:, place] * encoding.deviation[place] + encoding.mean[place]  # whatever the schema scales by
        # the next input says where it is empty
        there = (
            values[:, place + 1] < 0.5 if schema.columns[name].missing else torch.ones(len(values), dtype=torch.bool)
        )
        x = torch.where(there, ((own - middle) / half).clamp(-1, 1), 0.0)
        steps = (x * 2.0**GRID).round()  # to the nearest: -1 and 1 are steps, so that nothing gets longer
        left = x * 2.0**GRID - steps if exact else torch.zeros_like(x)
        found.append(torch.stack([steps * 2.0**-GRID, left, there.double()]))
    return torch.cat([*torch.stack(found, dim=1)]).T  # [3, p, n] as [n, 3 p]


def moment_sums(p: int, exact: bool) -> Statistic:
    """The sums over rows of p numbers x of -1..1: of x, of x^2, and of 1, where a cell is not empty.

    A replaced row moves x by 2 at the most, x^2 by 1 and its presence by 1; not all at once, so that what is booked for it is more than
    enough.

    Args:
        p: Columns.
        exact: Whether x has more digits than whole steps; then the sums are no whole numbers.

    Returns:
        Blocks ``total``, ``squares`` and ``present``, ``[p]`` each.
    """
    length = math.sqrt(p)
    once, twice = (None, None) if exact else (GRID, 2 * GRID)
    blocks = {
        "total": Block((p,), BlockBound(length, 2 * length, p), bits=once),
        "squares": Block((p,), BlockBound(length, length, p), bits=twice),
        "present": Block((p,), BlockBound(length, length, p), bits=0),
    }

    def add(sums: Weights, z: Tensor, labels: Tensor) -> None:
        x, there = z[:, :p] + z[:, p : 2 * p] * 2.0**-GRID, z[:, 2 * p :]
        sums["total"] += x.sum(0)
        sums["squares"] += x.square().sum(0)
        sums["present"] += there.sum(0)

    return Statistic(blocks, add, "sums of a table's numbers, of their squares, and how many there are")


def rounded(x: float) -> float:
    """To `DIGITS` digits."""
    return float(f"{x:.{DIGITS}g}")
