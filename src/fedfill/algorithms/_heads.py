"""Heads: the last linear layer of a frozen network, fitted by sums that do not depend on how records lie on clients.

`Head` is the base of the algorithms that do nothing else, in one round. Each of them is also a value of ``head=``, with which
an algorithm that trains one global model fits its last layer anew (`fedfill.algorithms._composition`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms._base import Algorithm
from fedfill.algorithms._features import Featured
from fedfill.algorithms._layers import Ask, Kept, Layer, bounded, changed, features, layer_of
from fedfill.algorithms._names import known_algorithms
from fedfill.algorithms._values import Method, able
from fedfill.errors import FedfillError
from fedfill.protocol.client import BoundHandler, Client, client_handler
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Collected, Sums, collect, contribute, sound_counts, warn_of_absent
from fedfill.statistics.gaussian_heads import QuadraticHead
from fedfill.statistics.heads import LinearHead
from fedfill.statistics.spectral_noise import drowned
from fedfill.statistics.sums import Statistic
from fedfill.tree import Tree, Weights


class Head(Featured):
    """An algorithm that fits the last layer of a frozen network, by sums over all clients' records."""

    single_round = True
    releases: int = Field(default=1, ge=1, exclude_if=lambda value: value == 1)
    """Among how many heads target_epsilon is divided; with head_every as many as there will be."""

    biased: ClassVar[bool] = False
    """Whether the head has a bias, which the layer must have then."""

    @classmethod
    def axes(cls) -> list[str]:
        """A head is a value for ``head`` alone."""
        return ["head"]

    @classmethod
    def own_settings(cls) -> list[str]:
        """Without those of a feature map: the network of another algorithm learns nothing before the first round."""
        return [name for name in super().own_settings() if name not in Featured.__annotations__]

    @property
    def last_layer(self) -> str:
        """Which kind of last layer it fits: of `ModelSettings.last_layer`."""
        return "linear"

    # What a head is

    def statistic(self, layer: Layer) -> Statistic:
        """What is summed over the records."""
        raise NotImplementedError

    def solve(self, server: Server, collected: Collected, layer: Layer, weights: Weights) -> LinearHead | QuadraticHead:
        """The head that follows from the sums.

        Args:
            server: For the record, and for streams.
            collected: Sums over all clients, and the noise on them.
            layer: Which is fitted.
            weights: Of the network, the layer's own of before among them.

        Returns:
            Weights and biases of a linear layer, or what a `Quadratic` has.
        """
        raise NotImplementedError

    def check_network(self, model: nn.Module, inputs: Tensor) -> None:
        """Refuse a network whose last layer can't be fitted with these settings.

        Args:
            model: The network of the run.
            inputs: Of one sample as they are stored, ``[1, ...]``.

        Raises:
            FedfillError: Where it has no last linear layer, or one without a bias or a bound that are needed.
        """
        layer = Layer.of(model, inputs, self.name)
        last = model.get_submodule(layer.path)
        kind = "linear" if isinstance(last, nn.Linear) else "diagonal" if last.whitening.dim() == 2 else "gaussian"  # type: ignore[operator]
        if kind != self.last_layer:
            raise FedfillError(
                f"model: {self.name} fits a {self.last_layer} last layer with these settings, and this network's is {kind}; allowed: "
                f"--model features with last_layer={self.last_layer}"
            )
        if self.biased and last.bias is None:
            raise FedfillError(f"model: {self.name} gives each class a bias, and the layer {layer.path} has none")
        bounded(self, layer)
        self.statistic(layer)  # refuses what does not fit into memory

    # What it does as an algorithm of its own

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Refuse networks whose last layer can't be fitted."""
        self.check_network(model, inputs)
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def round(self, server: Server, t: int) -> None:
        """Ask everybody for sums, and fit the head."""
        server.state.weights = self.fit_head(server, server.state.weights, self.sums)

    @client_handler
    def sums(self, client: Client, message: Ask) -> Sums:
        """Sums over the client's records."""
        return self.answer(client, {**client.initial, **message.weights}, message)

    # What an algorithm with this head calls

    def fit_head(self, server: Server, weights: Weights, handler: BoundHandler) -> Weights:
        """One exchange with all clients, and the network with the head that follows.

        Args:
            server: What the algorithm sees.
            weights: Of the network.
            handler: Answers with what `answer` returns.

        Returns:
            The weights, those of the last layer new.
        """
        layer, collected = self.ask(server, weights, handler)
        if collected.stds.get("counts") and not bool((sound_counts(collected) > 0).any()):
            return weights  # nothing stands out of the noise; the warning says so
        head = self.solve(server, collected, layer, {**server.initial, **weights})
        return {**weights, **layer.holding(head, weights)}

    def ask(self, server: Server, weights: Weights, handler: BoundHandler) -> tuple[Layer, Collected]:
        """The layer that is fitted, and the sums over all clients, with a warning of what is wrong with them."""
        layer = layer_of(server, weights, self.name)
        statistic = self.statistic(layer)
        noise = self.noise(statistic, self.left / self.releases)
        message = Ask(changed(server, weights), server.clients)
        collected = collect(server, handler, message, statistic, noise, purpose=f"{self.name} sums")
        self.warn_of(server, collected)
        return layer, collected

    def warn_of(self, server: Server, collected: Collected) -> None:
        """Say which classes nobody holds, and where the noise drowns the classes."""
        sums, stds = collected.sums, collected.stds
        if "counts" in sums:
            warn_of_absent(server, sound_counts(collected), stds["counts"], "it is never predicted")
        if stds.get("moments") and drowned(sums["moments"], stds["moments"]):
            server.warn(
                f"target_epsilon: with {self.target_epsilon:g} and trust={self.trust} the differences between classes do not stand out "
                "of the noise, and the head may be no better than a guess; what helps: a larger one, more records, or trust=secure or server"
            )

    def answer(self, client: Client, weights: Weights, message: Ask) -> Sums:
        """A client's sums over the features of a network, in its handler.

        Args:
            client: Whose records they are.
            weights: Of the whole network.
            message: As received.

        Returns:
            The reply.
        """
        layer = Layer.of(client.model(weights), client.blank, self.name)
        statistic = self.statistic(layer)
        return contribute(
            client,
            statistic,
            self.records(client, weights, layer),
            self.noise(statistic, self.left / self.releases),
            message.clients,
            purpose=f"{self.name} sums",
        )

    def records(self, client: Client, weights: Weights, layer: Layer) -> Iterator[tuple[Tensor, Tensor]]:
        """Those that are summed: chunks of features ``[b, d]`` and labels ``[b]``."""
        return features(client, weights, layer)


class Headed(Algorithm):
    """An algorithm whose last layer may be fitted anew, after the last round or after every few."""

    shares_head: ClassVar[bool] = False
    """Whether the last layer of a `personal` algorithm's models is one for all."""

    # left out where they are as they come, so that digests of runs without a head stay as they were
    head: Method = Field(default=None, exclude_if=lambda value: value is None)
    """What fits the last layer anew from sums over all clients, with its settings, such as fed3r or ccvr; none: nothing."""
    head_every: int | None = Field(default=None, ge=1, exclude_if=lambda value: value is None)
    """Rounds from one new head to the next, the last round always; none: after the last round alone."""
    head_mode: Literal["beside", "replace"] = Field(default="beside", exclude_if=lambda value: value == "beside")
    """Whether a new head is evaluated and kept beside the trained one (beside), or training goes on from it (replace)."""

    def _check_head(self, model: nn.Module, inputs: Tensor) -> None:
        """Refuse a head where it can't be fitted, or would void what the algorithm promises."""
        if self.head is None:
            for name in ("head_every", "head_mode"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    raise FedfillError(
                        f"{name}: found {value} without a head; allowed with head={', '.join(able('head'))}"
                    )
            return
        if self.personal and not self.shares_head:
            raise FedfillError(
                f"head: found {self.head.name} with {self.name}, whose clients have last layers of their own; allowed: none"
            )
        if self.personal and self.head.target_epsilon is not None:
            raise FedfillError(
                f"target_epsilon: found {self.head.target_epsilon:g} with {self.name}, whose clients make features with layers that "
                "their other records have trained, so that no bound holds for one record; allowed: none"
            )
        if self.head.personal and not self.personal:
            sharing = [kind for kind in known_algorithms().values() if issubclass(kind, Headed) and kind.shares_head]
            raise FedfillError(
                f"head: found {self.head.name} with {self.name}, whose clients have no models of their own; "
                f"allowed with {', '.join(kind.name for kind in sharing)}"
            )
        if self.head.personal and self.head_every is not None:
            raise FedfillError(
                f"head_every: found {self.head_every} with head={self.head.name}, which is for the last round; allowed: none"
            )
        self.head.check_network(model, inputs)

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """What the algorithm keeps, and the last layer that was fitted."""
        return {**super().server_state(initial), **({} if self.head is None else {"head": None})}

    def client_state(self) -> dict[str, Tree]:
        """What the algorithm keeps at a client, and the client's own last layer where there is one."""
        return {**super().client_state(), **({} if self.head is None else self.head.client_state())}

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Refuse a head that can't be fitted to this network."""
        self._check_head(model, inputs)
        checked = super().resolved(rounds=rounds, model=model, inputs=inputs)
        if checked.head is None or checked.head.target_epsilon is None:
            return checked
        releases = -(-rounds // (self.head_every or rounds))
        return checked.model_copy(update={"head": checked.head.model_copy(update={"releases": releases})})

    def conclude(self, server: Server, t: int) -> None:
        """Fit the last layer anew where it is due, by sums over all clients."""
        if self.head is None:
            return
        server.state.head = None
        if (t + 1) % (self.head_every or server.rounds) and t + 1 != server.rounds:
            return
        weights = self.global_weights(server)
        fitted = self.head.fit_head(server, weights, self.head_sums)
        new = {name: x for name, x in fitted.items() if x is not weights[name]}
        if self.head_mode == "replace":
            server.state.weights = {**server.state.weights, **new}
        else:
            server.state.head = new
        if self.head.personal:
            server.call(range(server.clients), self.head_own, Ask(changed(server, fitted), server.clients))

    @client_handler
    def head_sums(self, client: Client, message: Ask) -> Sums:
        """Sums over the client's labelled records, by its own model where it has one."""
        reply: Sums = self.head.answer(client, self._model_of(client, message), message)
        return reply

    @client_handler
    def head_own(self, client: Client, message: Ask) -> Kept:
        """A last layer of the client's own, around the one that was fitted."""
        client.state.own_head = None
        reply: Kept = self.head.keep_own(client, self._model_of(client, message))
        return reply

    def _model_of(self, client: Client, message: Ask) -> Weights:
        weights = {**client.initial, **message.weights}
        return self.personal_weights(client.state.tree(), weights) if self.personal else weights

    def trained_weights(self, server: Server) -> Weights | None:
        """The global model as it was trained, where a last layer was fitted beside its own; not where clients have their own."""
        fitted = self.head is not None and server.state.head is not None and not self.head.personal
        return self.global_weights(server) if fitted else None

    def result_weights(self, server: Server) -> Weights:
        """The global model, with the last layer that was fitted."""
        weights = self.global_weights(server)
        new = server.state.head if self.head is not None else None
        return weights if new is None else {**weights, **new}
