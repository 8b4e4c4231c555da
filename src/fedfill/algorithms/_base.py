"""What every algorithm has: settings, a name, and the few methods that the loop calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from fedfill.algorithms._registry import register
from fedfill.data.samples import Batch, Samples
from fedfill.data.schema import Schema
from fedfill.errors import FedfillError
from fedfill.protocol.server import Server
from fedfill.runs.curves import Findings
from fedfill.training.augmentation import Augmentation, require
from fedfill.training.fit import Buffers, Context, LocalTraining
from fedfill.training.losses import of_labels
from fedfill.training.optimizers import OptimizerName
from fedfill.tree import Tree, Weights


class Algorithm(BaseModel):
    """Base of the algorithms. The fields are the settings; an instance is frozen and holds nothing else.

    A subclass with a `name` is found by that name everywhere. It implements `round`, keeps what outlives a round in
    ``server.state`` and ``client.state``, and marks its client programs with ``@client_handler``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    name: ClassVar[str] = ""
    parts: ClassVar[tuple[str, ...]] = ()
    """Named parts that the algorithm needs in the model; built-in networks make a ``"decoder"``, a ``"projection"`` and a ``"personal"`` head on request."""
    personal: ClassVar[bool] = False
    """Whether clients are evaluated with models of their own: those of `personal_weights`."""
    pooled: ClassVar[bool] = False
    """Whether all training data lie in one place, with client 0; the own test splits stay with their clients."""
    draws_beside: ClassVar[bool] = False
    """Whether it trains on samples that it draws beside its mini-batches, which `augmentation` would leave as they are."""
    single_round: ClassVar[bool] = False
    """Whether one round is all it takes; more are not run."""
    trains: ClassVar[bool] = True
    """Whether its model tells one record from another in the end; else it has no scores, and nobody compares it."""
    network: ClassVar[str] = ""
    """The built-in network that ``auto`` stands for, in a comparison too; "": the one that suits inputs and needs."""
    unlabelled: ClassVar[bool] = False
    """Whether there is nothing to do without samples that have no label."""
    tabular: ClassVar[bool] = False
    """Whether the data have to be a table with a schema."""
    packages: ClassVar[tuple[str, ...]] = ()
    """What the server's program imports beside fedfill's own packages: those of the extra that has the algorithm's name."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings by data set that stand in for the defaults, where the paper has others for each data set."""
    paper: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """What ``preset=paper`` sets: the paper's own training budget, and its network's settings as ``model.NAME``; under ``""``
    for all data, under a data set's name for that one."""
    unfair: ClassVar[str] = ""
    """What the algorithm must have otherwise than the others in its training, and what would make a comparison fair."""
    numbers: ClassVar[bool] = False
    """Whether it learns a number, too, and not classes alone. A subclass says it anew: what it adds may need classes."""
    own_loops: ClassVar[str] = ""
    """What it trains in loops of its own, beside ``fit``; `precision` leaves that in float32."""

    local_epochs: int = Field(default=5, ge=1, le=1_000_000)
    """Passes of a client over its data in a round (E); given alone, in place of an algorithm's `local_steps`."""
    local_steps: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Mini-batches in a round, in place of epochs."""
    batch_size: int = Field(default=64, ge=1)
    """Samples in a mini-batch (B)."""
    optimizer: OptimizerName = "adam"
    """Of the local training, fresh in each round."""
    learning_rate: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """Step size of the local training."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Of the optimizer sgd."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """L2 penalty of the local training."""
    lr_decay: float = Field(default=0.5, gt=0, le=1)
    """Factor of the learning rate every `lr_decay_every` rounds; 1 keeps it constant."""
    lr_decay_every: int = Field(default=10, ge=1)
    """Rounds between two decays of the learning rate."""
    buffers: Buffers = "average"
    """Running statistics of normalisation layers: learnt and averaged like parameters (average), or left as the initial model has them and normalised with (frozen)."""
    # left out where it is none, so that digests of runs without it stay as they were
    augmentation: Augmentation | None = Field(default=None, exclude_if=lambda value: value is None)
    """How the images of each mini-batch are changed before it is trained on: moved (shift), moved and half of them mirrored (shift_flip), parts of them at another scale (crop), these in other colours too (crop_colour); none: not at all."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Register the algorithm by its name."""
        super().__pydantic_init_subclass__(**options)
        cls.numbers = cls.__dict__.get("numbers", False)
        if "name" in cls.__dict__:
            register(cls)

    @classmethod
    def axes(cls) -> list[str]:
        """The settings of other algorithms for which this one is a value: none, or one; with two it is a whole of both."""
        return []

    @classmethod
    def own_settings(cls) -> list[str]:
        """Settings that go with it where another algorithm takes it as a value."""
        return [name for name in cls.model_fields if name not in Algorithm.model_fields]

    def needs(self) -> tuple[str, ...]:
        """Named parts that the algorithm needs in the model, with these settings."""
        return self.parts

    def network_settings(self, shape: tuple[int, ...], samples: int, clients: int) -> Mapping[str, Any]:
        """Settings of its `network` that suit it, where none were given.

        Args:
            shape: Of one input.
            samples: Training samples of all clients.
            clients: How many there are.

        Returns:
            By name, of `fedfill.models.networks.ModelSettings`.
        """
        return {}

    def training(self, t: int) -> LocalTraining:
        """Budget and optimizer of the local training in round `t`, the decay of the learning rate applied."""
        return LocalTraining(
            epochs=self.local_epochs,
            steps=self.local_steps,
            batch_size=self.batch_size,
            optimizer=self.optimizer,
            learning_rate=self.learning_rate * self.lr_decay ** (t // self.lr_decay_every),
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            buffers=self.buffers,
            augmentation=self.augmentation,
        )

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        """The local objective on one mini-batch, a scalar."""
        return of_labels(model, batch)

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """The settings with every one that depends on the others filled in.

        Args:
            rounds: Rounds of the whole run.
            model: The network of the run.
            inputs: The inputs of one sample as they are stored, ``[1, ...]``.

        Returns:
            Settings that are enough to run again.

        Raises:
            FedfillError: Where settings, network and data don't fit together.
        """
        if self.augmentation is not None:
            if self.draws_beside:
                raise FedfillError(
                    f"augmentation: found {self.augmentation} with {self.name}, which draws further samples beside its mini-batches; allowed: none"
                )
            require(inputs, self.augmentation)
        if self.momentum and self.optimizer != "sgd":
            found = f"{self.momentum} with optimizer={self.optimizer}"
            raise FedfillError(f"momentum: found {found}; allowed: 0, or optimizer=sgd")
        return self

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """First values of ``server.state``.

        Args:
            initial: The experiment's initial weights of the whole model.

        Returns:
            Values by name; ``weights`` is the global model.
        """
        return {"weights": initial}

    def client_state(self) -> dict[str, Tree]:
        """First values of every ``client.state``."""
        return {}

    def pretraining_steps(self) -> int:
        """Steps of `pretrain` before the first round; a run that is killed goes on behind the last one that was finished."""
        return 0

    def pretrain(self, server: Server, step: int) -> None:
        """One step of what comes before the first round, and leaves the global model as it is.

        Args:
            server: What the algorithm sees.
            step: From 0.
        """
        raise NotImplementedError

    def round(self, server: Server, t: int) -> None:
        """One round of the algorithm: select, call, combine.

        Args:
            server: What the algorithm sees.
            t: The round, from 0.
        """
        raise NotImplementedError

    def check_schema(self, schema: Schema | None) -> None:
        """Refuse data that the algorithm can't learn from, before anything is written.

        Args:
            schema: What was agreed on about the table; None: nothing was, or the data are none.

        Raises:
            FedfillError: In a sentence that begins with the setting.
        """

    def findings(self, server: Server) -> Findings | None:
        """What a finished run has found beside a model: figures for its summary, and survival curves; None where it is nothing."""
        return None

    def conclude(self, server: Server, t: int) -> None:
        """What follows a round, whatever the algorithm: a head that is fitted anew, say."""

    def global_weights(self, server: Server) -> Weights:
        """The weights after a round, of the whole model."""
        weights: Weights = server.state.weights
        return weights

    def trained_weights(self, server: Server) -> Weights | None:
        """The weights before `conclude`, where they are judged beside the result; None: there are no others."""
        return None

    def result_weights(self, server: Server) -> Weights:
        """The weights to evaluate and to keep after a round: those of `global_weights`, or with what `conclude` fitted."""
        return self.global_weights(server)

    def personal_weights(self, state: Mapping[str, Tree], weights: Weights) -> Weights:
        """The weights of a client's own model, where the algorithm is `personal`.

        Args:
            state: What the client keeps, by name.
            weights: What `global_weights` gives.

        Returns:
            Weights of the whole model.
        """
        return weights

    def synthetic(self, server: Server, per_class: int | None = None) -> Samples | None:
        """Synthetic samples of a finished run, which need no client's data but what was sent.

        Args:
            server: After the last round; streams are that round's.
            per_class: So many of each class: exactly where the algorithm can make them, at most where it has a fixed set;
                None: those that the run's picture shows.

        Returns:
            Inputs as they are stored, with labels; -1 where None was asked for and a sample has none. None where there are none.
        """
        return None
