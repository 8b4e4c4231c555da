"""Composition: local objectives and aggregations as values that other algorithms take.

`Composable` is the base of the algorithms that train one global model in rounds: its local objective and its aggregation may
be another algorithm's, so that ``feddpms`` runs with ``local=fedprox:mu=0.01`` and ``aggregation=fednova``. A method against
drift is a subclass of FedAvg that overrides a few of `Composable`'s methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from fedfill.algorithms._heads import Headed
from fedfill.algorithms._messages import Broadcast, Contribution, Start, Update
from fedfill.algorithms._values import Method
from fedfill.data.samples import Samples
from fedfill.errors import ContractError, FedfillError
from fedfill.models.views import weights_of
from fedfill.protocol.client import BoundHandler, Client
from fedfill.protocol.server import Server
from fedfill.training.fit import Loss, Penalty
from fedfill.tree import Tree, Weights


class Composable(Headed):
    """An algorithm of one global model, whose local objective and aggregation are values.

    A local objective overrides `objective` or `penalty`, and where it keeps or sends something `client_state`, `down`, `up` and
    `absorb`; an aggregation overrides `combine` and `pack`. All of them work for whichever algorithm takes them.
    """

    local: Method = None
    """Local objective of another algorithm with its settings, such as fedprox:mu=0.01; none: this one's own."""
    aggregation: Method = None
    """Aggregation of another algorithm with its settings, such as qffl:q=1; none: this one's own."""

    @classmethod
    def axes(cls) -> list[str]:
        """Which of a local objective and an aggregation it has of its own. With both it only makes sense as a whole."""
        local = cls.objective is not Composable.objective or cls.penalty is not Composable.penalty
        aggregation = cls.combine is not Composable.combine
        return [axis for axis, own in (("local", local), ("aggregation", aggregation)) if own]

    @classmethod
    def own_settings(cls) -> list[str]:
        """Settings that go with it where another algorithm takes it."""
        return [name for name in cls.model_fields if name not in Composable.model_fields and name != "weighting"]

    @property
    def by(self) -> str | None:
        """The field of a reply by which its weights count in the mean; None: all count the same."""
        return "samples"

    private: ClassVar[bool] = False
    """Whether nothing but what `combine` returns may be made public of the clients' models."""

    scales: ClassVar[bool] = False
    """Whether `combine` needs the number that each client's `pack` returns."""

    exchanges: ClassVar[bool] = False
    """Whether clients learn of each other's data by more than the models that the server sends."""

    @property
    def aggregates(self) -> bool:
        """Whether it has an aggregation of its own, other than the weighted mean."""
        return type(self).combine is not Composable.combine

    @property
    def sends_model(self) -> bool:
        """Whether a server that looks into clients' models must be sent them beside what the aggregation wants."""
        return self.aggregation_of.aggregates and not self.aggregation_of.private

    @property
    def objective_of(self) -> Composable:
        """Whose local objective it is."""
        return self.local or self

    @property
    def aggregation_of(self) -> Composable:
        """Whose aggregation it is."""
        return self.aggregation or self

    def needs(self) -> tuple[str, ...]:
        """Parts that the algorithm, or its local objective, needs in the model."""
        return tuple(dict.fromkeys([*self.parts, *(self.local.needs() if self.local else ())]))

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Refuse what doesn't compose, and let an aggregation know what becomes of buffers."""
        for axis in self.axes():
            if getattr(self, axis) is not None:
                raise FedfillError(
                    f"{axis}: found {getattr(self, axis).name} with {self.name}, which has its own; allowed: none"
                )
        for method in filter(None, (self, self.local, self.aggregation)):
            method.check_compatible(self)
        self._check_states(weights_of(model))
        if self.head is not None and self.aggregation_of.private:
            raise FedfillError(
                f"head: found {self.head.name} with {self.aggregation_of.name}, whose guarantee for a whole client sums over its "
                "records would void; allowed: none"
            )
        resolved = super().resolved(rounds=rounds, model=model, inputs=inputs)
        if self.aggregation is None:
            return resolved
        return resolved.model_copy(
            update={"aggregation": self.aggregation.model_copy(update={"buffers": self.buffers})}
        )

    def _check_states(self, initial: Weights) -> None:
        """Refuse two parts of a composition that keep something under the same name: one would silently win."""
        if self.local is None and self.aggregation is None:
            return
        parts = [self.model_copy(update={"local": None, "aggregation": None}), self.local, self.aggregation]
        owners: dict[tuple[str, str], str] = {}
        for part in filter(None, parts):
            for side, state in (("server", part.server_state(initial)), ("client", part.client_state())):
                for key in state.keys() - ({"weights"} if side == "server" else set()):
                    other = owners.setdefault((side, key), part.name)
                    if other != part.name:
                        raise ContractError(f"{other} and {part.name} both keep '{key}' in {side}.state; rename one")

    def check_compatible(self, whole: Composable) -> None:
        """Refuse to be the local objective or the aggregation of an algorithm with settings that make no sense with it.

        Args:
            whole: This algorithm itself, or one that composes with it.

        Raises:
            FedfillError: Where it makes no sense.
        """

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The global model, and what local objective and aggregation keep at the server."""
        state = super().server_state(initial)
        for method in filter(None, (self.local, self.aggregation)):
            state = {**method.server_state(initial), **state}  # the global model is this algorithm's
        return state

    def client_state(self) -> dict[str, Tree]:
        """What local objective and aggregation keep at a client."""
        state = super().client_state()
        for method in filter(None, (self.local, self.aggregation)):
            state |= method.client_state()
        return state

    # The local objective

    def down(self, server: Server) -> Weights | None:
        """What the server sends beside the model, by the names of parameters."""
        return None

    def objective(self, start: Start, loss: Loss) -> Loss:
        """The objective of one local training.

        Args:
            start: What it starts from.
            loss: The algorithm's own loss.

        Returns:
            What is minimised.
        """
        return loss

    def penalty(self, start: Start) -> Penalty | None:
        """What the objective has of the parameters alone.

        Args:
            start: What one local training starts from.

        Returns:
            A square and a linear term; None: neither.
        """
        return None

    def up(self, start: Start, trained: Weights, steps: int) -> Weights | None:
        """What the client sends beside the model, of the shape of what `down` sends; here its state is written.

        Args:
            start: What the training started from.
            trained: The shared tensors after it.
            steps: Mini-batches done.

        Returns:
            Tensors of which the server needs the mean over the cohort.
        """
        return None

    def absorb(self, server: Server, mean: Weights, replies: int) -> None:
        """What the server does with the mean of what clients sent beside the model.

        Args:
            server: Whose state it goes into.
            mean: Over the replies, all of equal weight.
            replies: How many there were.
        """

    # The aggregation

    def pack(self, start: Start, trained: Weights, steps: int) -> tuple[Weights, float | None]:
        """What a client sends for the server's mean.

        Args:
            start: What the training started from.
            trained: The shared tensors after it.
            steps: Mini-batches done.

        Returns:
            Tensors of the names and shapes of the shared ones, and a number of this client.
        """
        return trained, None

    def combine(self, server: Server, weights: Weights, mean: Weights, replies: Sequence[Any]) -> Weights:
        """The new global tensors.

        Args:
            server: What the algorithm sees.
            weights: The global tensors before the round.
            mean: Of what the clients packed.
            replies: With their ``samples`` and ``scale``.

        Returns:
            Tensors of the same names.
        """
        return mean

    def sample(self, server: Server, t: int) -> list[int]:
        """Which clients take part in a round, in ascending order."""
        return server.select(t)

    # What an algorithm calls

    def cohort(self, server: Server, t: int) -> list[int]:
        """The cohort of round `t`, as the aggregation draws it."""
        return self.aggregation_of.sample(server, t)

    def contribute(
        self,
        client: Client,
        message: Broadcast,
        loss: Loss,
        *,
        data: Samples | None = None,
        beside: Weights | None = None,
        fixed: Weights | None = None,
        samples_per_epoch: int | None = None,
    ) -> Contribution:
        """Local training with the local objective, and what it brings for the aggregation.

        Args:
            client: Who trains.
            message: As received, or with other tensors to start from.
            loss: The algorithm's own loss.
            data: Training samples; None: the client's own.
            beside: Tensors that are trained along and have no part in the aggregation.
            fixed: Tensors that stay as they are and have none either.
            samples_per_epoch: Uniform draws without replacement per epoch; None: every sample.

        Returns:
            What to send, and the trained tensors.
        """
        own = client.data if data is None else data
        weights = message.weights
        start = Start(client, own, weights, message.control, self.training(client.round), self.draws_beside)
        objective = self.objective_of.objective(start, loss)
        fitted = client.fit(
            {**weights, **(beside or {})},
            objective,
            start.training,
            data=start.data,
            samples_per_epoch=samples_per_epoch,
            penalty=self.objective_of.penalty(start),
            fixed=fixed,
        )
        trained = {name: fitted.weights[name] for name in weights}
        control = self.objective_of.up(start, trained, fitted.steps)
        packed, scale = self.aggregation_of.pack(start, trained, fitted.steps)
        update = Update(packed, len(start.data), scale=scale, control=control)
        return Contribution(update, trained, {name: fitted.weights[name] for name in beside or {}}, fitted.loss)

    def gather(
        self,
        server: Server,
        cohort: Sequence[int],
        handler: BoundHandler,
        messages: Broadcast | Mapping[int, Broadcast],
        *,
        beside: Mapping[str, Weights] | None = None,
        individually: bool = False,
    ) -> tuple[dict[int, Any], dict[str, Weights]]:
        """Let a cohort train, and aggregate.

        Args:
            server: What the algorithm sees.
            cohort: Clients to call.
            handler: Replies with an `Update`.
            messages: As in ``server.call``, all with the same weights; ``control`` is filled in here.
            beside: Further fields whose mean by samples is wanted, as in ``server.average``.
            individually: Whether every client's own tensors must reach the server.

        Returns:
            The good replies, with None in these fields unless they had to come individually, and by field what was combined; ``weights`` are the new global tensors.
        """
        if isinstance(messages, Broadcast):
            weights, each = messages.weights, dict.fromkeys(cohort, messages)
        else:
            each = dict(messages)
            weights = next((message.weights for message in each.values()), server.state.weights)
        control = self.objective_of.down(server)
        if control is not None:
            with_control = {id(message): replace(message, control=control) for message in each.values()}
            each = {i: with_control[id(message)] for i, message in each.items()}
        fields = {"weights": weights, **(beside or {}), **({} if control is None else {"control": control})}
        by = {
            **dict.fromkeys(beside or {}, "samples"),
            **({"weights": self.aggregation_of.by} if self.aggregation_of.by else {}),
        }
        numbers = ("scale",) if self.aggregation_of.scales else ()
        replies: dict[int, Any] = {}
        means: dict[str, Weights] = {}
        if cohort:
            replies, means = server.average(
                cohort, handler, each, of=fields, by=by, numbers=numbers, whole=individually
            )
        if not replies and self.aggregation_of.private:  # coins drew nobody, or only clients whose replies were lost
            return {}, {"weights": self.aggregation_of.combine(server, weights, weights, [])}
        if "weights" in means:
            means["weights"] = self.aggregation_of.combine(server, weights, means["weights"], list(replies.values()))
        if "control" in means:
            self.objective_of.absorb(server, means["control"], len(replies))
        return replies, means
