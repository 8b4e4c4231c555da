"""Composition: local objectives and aggregations as values that other algorithms take.

`Composable` is the base of the algorithms that train one global model in rounds: its local objective and its aggregation may
be another algorithm's, so that ``feddpms`` runs with ``local=fedprox:mu=0.01`` and ``aggregation=fednova``. A method against
drift is a subclass of FedAvg that overrides a few of `Composable`'s methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, PlainSerializer, ValidationInfo
from torch import Tensor, nn

from fedfill.algorithms._base import Algorithm, find, known_algorithms, parse_variant
from fedfill.algorithms._messages import Broadcast, Contribution, Start, Update
from fedfill.data.samples import Samples
from fedfill.errors import ContractError, FedfillError, checked, did_you_mean
from fedfill.models.views import weights_of
from fedfill.protocol.client import BoundHandler, Client
from fedfill.protocol.server import Server
from fedfill.training.fit import Loss
from fedfill.tree import Tree, Weights


def _method(given: Any, info: ValidationInfo) -> Any:
    """An algorithm whose local objective, or aggregation, another one takes; from ``"fedprox:mu=0.01"`` or an instance."""
    axis = str(info.field_name)
    if given is None or str(given).lower() == "none":
        return None
    if isinstance(given, Algorithm):
        kind = type(given)
        _check_axis(kind, axis)
        inherited = [name for name in given.model_fields_set if name not in _own_settings(kind)]
        if inherited:
            raise FedfillError(
                f"{axis}: {kind.name} takes no '{min(inherited)}' here, which the algorithm that takes it has; leave it out"
            )
        return given
    # ";" between settings where a "," would end the setting itself, as in a comparison's fedavg:local=moon:mu=1;temperature=0.2
    name, settings = parse_variant(str(given).replace(";", ","))
    able = [kind.name for kind in known_algorithms().values() if kind.name and _own_axes(kind) == [axis]]
    if name not in known_algorithms():
        raise FedfillError(f"{axis}: found '{name}'; {did_you_mean(name, [*able, 'none'])}")
    kind = find(name)
    _check_axis(kind, axis)
    own = _own_settings(kind)
    for key in settings:
        if key not in own:
            raise FedfillError(
                f"{axis}: {name} takes no '{key}' here; {did_you_mean(key, own) if own else 'it has no settings'}"
            )
    return checked(kind, settings)


def _check_axis(kind: type[Algorithm], axis: str) -> None:
    """Refuse an algorithm that has nothing of its own on an axis, or that is a whole of both."""
    axes = _own_axes(kind)
    if axes == [axis]:
        return
    able = ", ".join(other.name for other in known_algorithms().values() if other.name and _own_axes(other) == [axis])
    why = "has none of its own"
    if len(axes) == 2:
        why = "has a local objective and a server's step that make sense together alone"
    elif axes:
        why = f"is one for {axes[0]}={kind.name}"
    raise FedfillError(f"{axis}: found {kind.name}, which {why}; allowed: {able}, none")


def _own_settings(kind: type[Algorithm]) -> list[str]:
    return [name for name in kind.model_fields if name not in Composable.model_fields and name != "weighting"]


def _own_axes(kind: type[Algorithm]) -> list[str]:
    """Which axes an algorithm has an answer of its own to. With both it only makes sense as a whole."""
    if not issubclass(kind, Composable):
        return []
    local, aggregation = kind.objective is not Composable.objective, kind.combine is not Composable.combine
    return [axis for axis, own in (("local", local), ("aggregation", aggregation)) if own]


def _text(method: Algorithm | None) -> str | None:
    if method is None:
        return None
    settings = ",".join(f"{name}={getattr(method, name)}" for name in _own_settings(type(method)))
    return f"{method.name}:{settings}" if settings else method.name


Method = Annotated[Any, BeforeValidator(_method), PlainSerializer(_text)]


class Composable(Algorithm):
    """An algorithm of one global model, whose local objective and aggregation are values.

    A local objective overrides `objective`, and where it keeps or sends something `client_state`, `down`, `up` and
    `absorb`; an aggregation overrides `combine` and `pack`. All of them work for whichever algorithm takes them.
    """

    local: Method = None
    """Local objective of another algorithm with its settings, such as fedprox:mu=0.01; none: this one's own."""
    aggregation: Method = None
    """Aggregation of another algorithm with its settings, such as qffl:q=1; none: this one's own."""

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
        for axis in _own_axes(type(self)):
            if getattr(self, axis) is not None:
                raise FedfillError(
                    f"{axis}: found {getattr(self, axis).name} with {self.name}, which has its own; allowed: none"
                )
        for method in filter(None, (self, self.local, self.aggregation)):
            method.check_compatible(self)
        self._check_states(weights_of(model))
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
        samples_per_epoch: int | None = None,
    ) -> Contribution:
        """Local training with the local objective, and what it brings for the aggregation.

        Args:
            client: Who trains.
            message: As received, or with other tensors to start from.
            loss: The algorithm's own loss.
            data: Training samples; None: the client's own.
            beside: Tensors that are trained along and have no part in the aggregation.
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
        if not cohort:
            combined = self.aggregation_of.combine(server, weights, weights, [])
            return {}, {"weights": combined}
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
        replies, means = server.average(cohort, handler, each, of=fields, by=by, numbers=numbers, whole=individually)
        if "weights" in means:
            means["weights"] = self.aggregation_of.combine(server, weights, means["weights"], list(replies.values()))
        if "control" in means:
            self.objective_of.absorb(server, means["control"], len(replies))
        return replies, means
