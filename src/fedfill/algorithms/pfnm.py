"""PFNM: Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019; widths do not grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Broadcast, Composable
from fedfill.errors import FedfillError
from fedfill.models.matching import class_shares, match, matched_mean
from fedfill.models.units import Layer, layers_in_order, reordered, require_units
from fedfill.privacy.releases import unbounded
from fedfill.protocol.client import BoundHandler, Client, client_handler
from fedfill.protocol.messages import HEAVIEST, Message
from fedfill.protocol.server import Server
from fedfill.tree import Weights


@dataclass(frozen=True)
class OwnUnits(Message):
    """Client to server: trained layers, with units in the client's order.

    Attributes:
        weights: Of one layer or of all.
        counts: Records of each class; None: the server has them.
    """

    declared: ClassVar = {
        "weights": unbounded("model update, sent as it is"),
        "counts": unbounded("number of records of each class, exact"),
    }

    weights: Weights
    counts: list[int] | None


class PFNM(Composable):
    """The average of networks whose hidden units are matched first, all layers at once.

    Use it when clients' networks began apart (own_start); from a common start units stay in place and fedavg does as well.
    """

    name = "pfnm"

    own_start: bool = False
    """Whether a client's training in the first round starts from weights that it draws itself, as the papers' do, or from common ones."""
    prior_variance: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Variance of the global numbers about 0, in those of a client's about the global ones (sigma_0^2 / sigma^2): it draws all means nearer to 0; none: there is no prior."""
    sweeps: int = Field(default=5, ge=0, le=1000)
    """How often each client is matched again with the others, at the most."""

    def check_compatible(self, whole: Composable) -> None:
        """Refuse another average, and what speaks of units by their places in an older model."""
        if self.aggregation is not None:
            raise FedfillError(
                f"aggregation: found {self.aggregation.name} with {self.name}, which averages matched units; allowed: none"
            )
        local = self.local
        if local is not None and (type(local).up is not Composable.up or type(local).down is not Composable.down):
            raise FedfillError(
                f"local: found {local.name} with {self.name}, whose units change places from round to round, so that nothing "
                "can be kept for each; allowed: fedprox, fedlc, fedrs, fedntd, feddecorr, fedsam, perfedavg, none"
            )

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Make sure that the network's layers stand in a row."""
        require_units(model, inputs, self.name)
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    @property
    def prior(self) -> float:
        """Precision of the global numbers, in those of a client's."""
        return 0.0 if self.prior_variance is None else 1 / self.prior_variance

    def round(self, server: Server, t: int) -> None:
        """Let a cohort train, match the units of their networks, and average."""
        weights: Weights = server.state.weights
        replies = self.ask(server, self.cohort(server, t), self.train, Broadcast(weights), weights)
        if replies:
            layers = layers_in_order(server.model(weights), server.sample.inputs)
            server.state.weights = self.matched(server, layers, replies)

    @client_handler
    def train(self, client: Client, message: Broadcast) -> OwnUnits:
        """Local epochs from the global model, or from a start of the client's own."""
        done = self.contribute(client, replace(message, weights=self.start(client, message.weights)), self.loss)
        return OwnUnits(done.trained, client.data.counts(client.classes))

    def start(self, client: Client, weights: Weights) -> Weights:
        """What a client trains from. Its own draw is each tensor's numbers in another order, so that their law is the same."""
        if not self.own_start or client.round:
            return weights
        stream = client.stream("own start")

        def shuffled(w: Tensor) -> Tensor:
            return w.flatten()[torch.randperm(w.numel(), generator=stream, device=stream.device)].view_as(w)

        return {name: shuffled(w) for name, w in weights.items()}

    def ask(
        self, server: Server, cohort: Sequence[int], handler: BoundHandler, messages: Message | Mapping[int, Message], like: Weights
    ) -> dict[int, OwnUnits]:  # fmt: skip
        """Collect trained layers of the names and shapes of `like`; who has no record to train on has no say."""
        replies, _ = server.average(cohort, handler, messages, of={"weights": like}, by=None, whole=True)
        found: dict[int, OwnUnits] = {}
        for i, reply in replies.items():
            if reply.counts is None or not sound(reply.counts, server.classes):
                server.lose(i, handler.__name__, "its counts are not numbers of records by class")
            elif any(reply.counts):
                found[i] = reply
        if not found:
            server.warn("No client has a record to train on in this round, and the model stays as it is.")
        return found

    def matched(self, server: Server, layers: list[Layer], replies: Mapping[int, OwnUnits]) -> Weights:
        """Match the hidden layers from the last to the first, by what the next layer makes of each unit, and average.

        The first is matched by what its units make of the inputs, too (section 3.2).

        Args:
            server: What the algorithm sees.
            layers: Of the network, in order.
            replies: Whole networks.

        Returns:
            The matched network.
        """
        own = [in_full(reply.weights) for reply in replies.values()]
        counted = self.precisions(replies, layers[-1])
        moved: dict[str, float] = {}
        for n in reversed(range(len(layers) - 1)):
            layer, after = layers[n], layers[n + 1]
            towards = counted if n + 2 == len(layers) else torch.ones(len(own), after.outputs).double()
            units, precisions = [], []
            for weights, precision in zip(own, towards, strict=True):
                outgoing = after.outgoing(weights)  # [L, outputs r]
                others = [layer.biases(weights), *([layer.incoming(weights)] if n == 0 else [])]
                units.append(torch.cat([outgoing, *others], 1))
                each = precision.repeat_interleave(outgoing.shape[1] // after.outputs)
                precisions.append(torch.cat([each, each.new_ones(units[-1].shape[1] - len(each))]))
            places = match(units, precisions, self.prior, self.sweeps)
            own = [reordered(weights, layers, n, place.argsort()) for weights, place in zip(own, places, strict=True)]
            moved[layer.path] = share_moved(places)
        server.note(moved=dict(reversed(moved.items())))
        found = [self.mean(layer, own) for layer in layers[:-1]]
        return alike(
            {k: x for part in [*found, self.mean(layers[-1], own, counted)] for k, x in part.items()},
            server.state.weights,
        )

    def precisions(self, replies: Mapping[int, OwnUnits], last: Layer) -> Tensor:
        """How much each client knows of each output of the last layer: its share of the class's records, ``[J, outputs]``."""
        counts = torch.zeros(len(replies), last.outputs, dtype=torch.int64)
        for row, reply in zip(counts, replies.values(), strict=True):
            row[: len(reply.counts or [])] = torch.tensor(reply.counts)
        return class_shares(counts)

    def mean(self, layer: Layer, own: Sequence[Weights], precisions: Tensor | None = None) -> Weights:
        """A layer whose units are in the same order at all clients, averaged.

        Args:
            layer: Which.
            own: Each client's tensors.
            precisions: By client and unit, ``[J, outputs]``; None: all count the same.

        Returns:
            Its tensors, in float64.
        """
        known = torch.ones(len(own), layer.outputs).double() if precisions is None else precisions
        return {
            name: matched_mean(
                [weights[name] for weights in own], [row.view(-1, *[1] * (x.dim() - 1)) for row in known], self.prior
            )
            for name, x in layer.of(own[0]).items()
        }


def in_full(weights: Weights) -> Weights:
    """The same in float64 on the CPU, where units are matched."""
    return {name: w.double().cpu() for name, w in weights.items()}


def alike(weights: Weights, like: Weights) -> Weights:
    """The same in the types and places of `like`, in its order."""
    return {name: weights[name].to(x) for name, x in like.items() if name in weights}


def share_moved(places: Sequence[Tensor]) -> float:
    """Of all clients' units, the share that is another global one than its number says."""
    moved = [float((place != torch.arange(len(place))).double().mean()) for place in places]
    return sum(moved) / len(moved)


def sound(counts: Sequence[int], classes: int) -> bool:
    """Whether these can be numbers of records by class."""
    return len(counts) == classes and all(0 <= k <= HEAVIEST for k in counts)
