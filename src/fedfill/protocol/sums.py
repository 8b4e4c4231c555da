"""Sums: what a statistic of each record comes to over all clients, noised once, in one exchange.

A handler says what is summed, and over which features; noise, ledger, bytes and what becomes of a lost reply follow here::

    @client_handler
    def sums(self, client, message):
        return contribute(client, statistic, features, self.noise(statistic), message.clients)

    def round(self, server, t):
        collected = collect(server, self.sums, message, statistic, self.noise(statistic))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedfill.errors import FedfillError
from fedfill.privacy import sums as privacy
from fedfill.privacy.keyed import KeyedStream
from fedfill.protocol.client import BoundHandler, Client
from fedfill.protocol.messages import HEAVIEST, Message
from fedfill.protocol.server import Server
from fedfill.statistics.noise import Noise
from fedfill.statistics.sums import Block, Statistic, as_joined, as_sent, summed
from fedfill.tree import Weights

SCALED = "the inputs were scaled by public numbers, and not by the mean and deviation of the records themselves"
STANDARDISED = "the schema's mean and deviation are public, or what they were found with is added"


@dataclass(frozen=True)
class Sums(Message):
    """Client to server: sums over its records, and nothing beside them.

    Attributes:
        sums: By block; symmetric matrices as upper triangles. Whole numbers where no noise is on them, else float32; with
            ``secure`` whole numbers of 64 bits in steps of a grid, noise and all.
    """

    sums: Weights


@dataclass(frozen=True)
class Collected:
    """What came of one exchange.

    Attributes:
        sums: By block, over all clients that answered, float64 on the CPU; symmetric matrices whole.
        stds: By block: standard deviation of the noise on a coordinate, off the diagonal of a symmetric matrix by the root
            of 2 less; 0 without noise.
        replies: How many clients are in it.
    """

    sums: Weights
    stds: Mapping[str, float]
    replies: int


def contribute(
    client: Client,
    statistic: Statistic,
    records: Iterable[tuple[Tensor, Tensor]],
    noise: Noise | None,
    clients: int,
    purpose: str = "sums",
) -> Sums:
    """A client's sums, with the noise that is its own to add, declared as what they release.

    Args:
        client: Whose records they are.
        statistic: What is summed.
        records: Chunks of features and labels.
        noise: On this exchange; None: none.
        clients: How many were asked.
        purpose: Names the stream of the noise; another one for each exchange of a round.

    Returns:
        The reply.

    Raises:
        FedfillError: With ``secure``, where this client's reply is not hidden, or its sums are no whole numbers that fit.
    """
    whole = noise is not None and noise.trust == "secure"
    if noise is not None and whole:
        if not client.hidden:
            raise FedfillError(
                "trust: found secure, and here the server would get this client's own sums; allowed: an engine and a call that hide them"
            )
        if client.registered is not None and clients != client.registered:
            # with fewer of them each share would be larger, but fewer would have to keep theirs
            raise FedfillError(
                f"clients: the server says {clients}, and this host has the keys of {client.registered}; nothing is sent"
            )
        if client.together is not None and client.together < noise.needed(clients):
            raise FedfillError(
                f"honest: {client.together} of {clients} clients are in this sum, and allowed are {noise.needed(clients)} or more, whose "
                "shares make the whole noise; nothing is sent"
            )
        statistic = noise.on_grid(statistic, clients)
    sums = as_sent(statistic, {name: x.cpu() for name, x in summed(statistic, records).items()})
    factor = noise.factor(clients) if noise is not None else 0.0
    if noise is not None and factor:
        stream = client.noise(purpose)
        if whole:
            sums = {
                name: _noisy(statistic.blocks[name], x, factor * noise.stds[name], stream) for name, x in sums.items()
            }
        else:
            real = as_joined(statistic, sums)
            # a float32 is made of what carries the noise already, so its rounding tells nothing
            sums = {
                name: privacy.add_noise(x, factor * noise.stds[name], statistic.blocks[name].symmetric, stream).float()
                for name, x in real.items()
            }
    bounds, stds = statistic.bounds(), noise.stds if noise is not None else {}
    trust = "none" if noise is None else noise.trust
    honest = noise.needed(clients) if noise is not None else 1
    # images are bytes, and each stands for itself; numbers of tables may have been scaled by what all records hold
    schema = client.schema
    public = client.data.inputs.dtype == torch.uint8 or (schema is not None and not schema.standardised)
    scaled = () if public else (SCALED if schema is None else STANDARDISED,)
    release = privacy.released(statistic.words, bounds, stds, trust, clients, honest, client.hidden, scaled)
    client.release("sums", release)
    return Sums(sums)


def _noisy(block: Block, x: Tensor, std: float, stream: KeyedStream) -> Tensor:
    """Whole numbers in steps of the block's grid, with a share of the noise: exact, whatever joins them."""
    steps = 2.0 ** (block.bits or 0)
    found = privacy.add_whole_noise(x.to(torch.int64), std * steps, block.symmetric, stream)
    if found.numel() and int(found.abs().max()) > HEAVIEST:
        raise FedfillError(
            f"target_epsilon: found so little noise that these sums take more than 53 bits (in steps of {1 / steps:g}); allowed with "
            "trust=secure: a smaller target_epsilon"
        )
    return found


def collect(
    server: Server,
    handler: BoundHandler,
    message: Message,
    statistic: Statistic,
    noise: Noise | None,
    purpose: str = "sums",
) -> Collected:
    """The sums over all clients that can be reached.

    Args:
        server: What the algorithm sees.
        handler: Answers with `contribute`.
        message: To every client.
        statistic: As the handler has it.
        noise: Likewise.
        purpose: Likewise.

    Returns:
        Sums that are exactly those of the clients that answered; the others are in the record.

    Raises:
        FedfillError: Where too few are left for the noise of ``secure``.
    """
    if noise is None and any(block.bound.kind == "gram" for block in statistic.blocks.values()):
        server.warn(privacy.GIVES_AWAY)
    everyone = range(server.clients)
    clients, least = server.clients, 0
    if noise is not None and noise.trust == "secure":
        statistic, least = noise.on_grid(statistic, clients), noise.needed(clients)
    template = statistic.template()
    if noise is not None and noise.trust == "site":
        template = {name: x.to(torch.float64) for name, x in template.items()}
    exact = noise is None or noise.trust == "server"  # noise takes counts below 0 too
    counts = [name for name, block in statistic.blocks.items() if exact and block.bound.kind == "counts"]
    replies, sums = server.sum(everyone, handler, message, of={"sums": template}, least=least, counts=counts)
    m = len(replies)
    if noise is not None and m < noise.needed(clients):
        raise FedfillError(
            f"honest: {m} of {clients} clients answered, and with trust=secure the sum may be opened from {noise.needed(clients)} "
            "on, whose shares of the noise make the whole of it; nothing was opened, and 'fedfill resume' asks again"
        )
    joined = {name: x.cpu() for name, x in as_joined(statistic, sums["sums"]).items()}  # solved in float64, once
    stds = dict.fromkeys(joined, 0.0)
    if noise is not None:
        stds = {name: std * noise.in_the_sum(m, clients) for name, std in noise.stds.items()}
        if noise.trust == "server":
            stream = server.noise(purpose, joined)
            joined = {
                name: privacy.add_noise(x, stds[name], statistic.blocks[name].symmetric, stream)
                for name, x in joined.items()
            }
    whole = {name: privacy.unpack(x) if statistic.blocks[name].symmetric else x for name, x in joined.items()}
    _note(server, replies)
    return Collected(whole, stds, m)


def sound_counts(collected: Collected) -> Tensor:
    """Records of each class, ``[C]``: under noise a class that can't be told from none counts as one that nobody holds."""
    counts, std = collected.sums["counts"], collected.stds["counts"]
    return torch.where(counts > 3 * std, counts.clamp(min=max(1.0, 3 * std)), 0.0) if std else counts


def warn_of_absent(server: Server, counts: Tensor, std: float, so: str) -> None:
    """Name the classes that nobody holds.

    Args:
        server: Who warns.
        counts: Of each class, ``[C]``.
        std: Of the noise in them.
        so: What follows, such as "it is never predicted".
    """
    if absent := (counts <= 0).nonzero().flatten().tolist():
        noisy = " in numbers that stand out of the noise" if std else ""
        more = ", ..." if len(absent) > 10 else ""
        server.warn(f"No client holds class {', '.join(map(str, absent[:10]))}{more}{noisy}, so that {so}.")


def _note(server: Server, replies: Mapping[int, object]) -> None:
    """Who is not in the sum is in the record, in words too: the answer is that of the others' records."""
    missing = [i for i in range(server.clients) if i not in replies]
    if missing:
        server.warn(
            f"The sums are those of {len(replies)} of {server.clients} clients; not in them: {', '.join(map(str, missing[:10]))}"
            f"{', ...' if len(missing) > 10 else ''}."
        )
