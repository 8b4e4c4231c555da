"""Preparation: from words, arrays and modules to everything that a run needs, checked before anything is written."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from torch import Tensor, nn

from fedfill.algorithms import Algorithm, as_algorithm, find, known_algorithms
from fedfill.data.division import federate
from fedfill.data.federation import Federation
from fedfill.data.names import is_place
from fedfill.data.partitions import is_function
from fedfill.data.schema import read_schema
from fedfill.data.synthetic import with_extra
from fedfill.engines.allocator import keep_freed_memory
from fedfill.errors import FedfillError, checked, did_you_mean
from fedfill.experiment.before import came_before
from fedfill.experiment.digest import digest
from fedfill.experiment.engine import require_engine
from fedfill.experiment.own import Network, made, network_of, origins, partition_of, word_of
from fedfill.experiment.settings import PYTHON, TABLES, Experiment, in_words, refuse_settings
from fedfill.experiment.start import read_start
from fedfill.experiment.target import require_target
from fedfill.experiment.trial import copied, require_fit, with_lone_samples_noted
from fedfill.models.layers import with_streams
from fedfill.models.networks import ModelSettings, build, choose, described, record_of
from fedfill.models.pretrained import load
from fedfill.models.views import require_parts, weights_of
from fedfill.own_parts import load as load_own
from fedfill.streams import derive
from fedfill.tree import Weights


@dataclass(frozen=True)
class Prepared:
    """Everything that a run needs, checked, before anything is written.

    Attributes:
        experiment: With its settings resolved.
        algorithm: With its settings resolved.
        federation: The clients' data.
        model: The network with its initial weights.
        initial: These weights.
    """

    experiment: Experiment
    algorithm: Algorithm
    federation: Federation
    model: nn.Module
    initial: Weights

    @functools.cached_property
    def told(self) -> tuple[str, ...]:
        """Sentences on what is known of records beside what the run sends, for an account of privacy."""
        found = [*self.federation.told, *came_before(self.experiment.model_dump())]
        if self.experiment.test_fraction == 0 and self.algorithm.trains:
            found.append(
                "Figures on the test set are of samples that were trained on (test_fraction 0). They have no noise and are not in the account."
            )
        return tuple(found)

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the experiment: see `fedfill.experiment.digest`."""
        return digest(
            self.experiment.model_dump(), type(self.algorithm), self.model, self.federation.fingerprint, self.initial
        )


def prepare(
    experiment: Experiment, *, data: Any = None, partition: Any = None, model: Network | None = None,
    algorithm: type[Algorithm] | None = None, federation: Federation | None = None, needs: Mapping[str, str] | None = None,
) -> Prepared:  # fmt: skip
    """Load the data, divide it, build the network and check that everything fits together.

    Args:
        experiment: What to run.
        data: Data from Python in place of the experiment's name.
        partition: A partitioner object, a function or lists of indices in place of the experiment's words.
        model: A module, or what makes one, in place of the experiment's name.
        algorithm: A class in place of the experiment's name.
        federation: The data, divided; None: as the experiment says.
        needs: What ``auto`` looks for in a network beside this algorithm's needs, and which algorithm, that shall use the
            same, needs it.

    Returns:
        All parts, nothing written.

    Raises:
        FedfillError: Where a setting is not allowed or the parts don't fit.
    """
    kind = algorithm or _kind_of(experiment)
    for what, word, given in (
        ("data", experiment.data, data),
        ("partition", experiment.partition, partition),
        ("model", experiment.model, model),
    ):
        absent = given is None and what not in experiment.own
        if absent and word.split(":")[0] == PYTHON and (federation is None or what == "model"):
            raise FedfillError(
                f"{what}: this experiment's {what} came from Python; call fedfill there and give the same again ({what}=...)"
            )
    if model is None:
        model = network_of(experiment)
    require_engine(experiment, kind, party=federation is not None)
    settings, model_settings = _checked_settings(kind, experiment)
    if experiment.start_from is not None and model_settings.weights is not None:
        raise FedfillError(
            f"start_from: found {experiment.start_from}, and model.weights={model_settings.weights}; allowed: one of the two"
        )
    start = None if experiment.start_from is None else read_start(experiment.start_from)
    if federation is None:
        federation = divide(experiment, data=data, partition=partition)
    cohort = max(1, round(experiment.participation * len(federation.clients)))
    if experiment.min_replies > cohort:
        raise FedfillError(
            f"min_replies: found {experiment.min_replies}; allowed: at most the clients in a round, which are {cohort}"
        )
    at_hand = any(len(client.train) for client in federation.clients)
    if kind.unlabelled and at_hand and not any(len(client.unlabelled) for client in federation.clients):
        raise FedfillError(
            f"labelled_per_client: found no client with samples without labels, which {kind.name} needs; allowed: fewer labels than a client has samples"
        )
    if kind.tabular and (federation.columns is None or federation.columns.schema is None):
        raise FedfillError(
            f"schema_file: found none with {kind.name}, which counts the cells of a table; allowed: a table and its schema"
        )
    require_target(settings, federation)
    settings.check_schema(federation.schema)
    clients, honest = len(federation.clients), getattr(settings, "honest", None)
    if honest is not None and honest > clients:
        raise FedfillError(f"honest: found {honest} with {clients} clients; allowed: 1 to {clients}")
    if kind.pooled:
        federation = federation.pooled()
    if experiment.extra is not None:
        federation = with_extra(federation, experiment.extra, experiment.data_dir, experiment.test_fraction)
    if kind.personal and experiment.engine == "flower":
        federation = _at_their_hosts(federation, experiment)
    if experiment.preset is not None and not kind.paper:
        note = f"preset: {kind.name} has no training of its own paper here, and keeps that of all algorithms."
        federation = replace(federation, notes=(*federation.notes, note))
    name, wanted = experiment.model, {**(needs or {}), **dict.fromkeys(settings.needs(), kind.name)}
    if model is None:
        if name == "auto" and start is not None:
            name, model_settings = start.network(experiment.model_settings)
        elif name == "auto" and kind.network:
            name = kind.network
        elif name == "auto":
            name, model_settings = choose(federation.shape, model_settings, wanted)
        if name == kind.network and start is None:
            samples = sum(len(client.train) for client in federation.clients)
            own = settings.network_settings(federation.shape, samples, len(federation.clients))
            given = model_settings.model_fields_set
            model_settings = model_settings.model_copy(update={k: v for k, v in own.items() if k not in given})
        network: nn.Module = build(
            name,
            federation.shape,
            federation.classes,
            model_settings,
            needs=settings.needs(),
            seed=derive(experiment.seed, "initial weights"),
        )
        notes = [described(name, federation.shape, model_settings, wanted)]
        if model_settings.weights is not None:
            notes.append(load(network, model_settings.weights))
        federation = replace(federation, notes=(*federation.notes, *notes))
    else:
        if not isinstance(model, nn.Module) and not callable(model):
            raise FedfillError(
                f"model: found {model!r}; allowed: a name of 'fedfill list models', FILE.py:NAME, a torch.nn.Module, or what makes one"
            )
        network = copied(model) if isinstance(model, nn.Module) else made(model, federation, experiment.seed)
        network = with_streams(network)
        if models := experiment.model_settings:
            raise FedfillError(
                f"model setting: found {', '.join(models)}; these go with the built-in networks, and the model is a module of your own"
            )
        if any(len(client.train) for client in federation.clients):
            require_fit(network, federation, settings.batch_size)
    if start is not None:
        notes = [start.put(network, settings.needs(), kind.name)]
        divided = start.note_on_division(experiment.model_copy(update={"clients": len(federation.clients)}))
        notes += [divided] if divided else []
        federation = replace(federation, notes=(*federation.notes, *notes))
    require_parts(network, settings.needs(), kind.name)
    if not kind.network and not any(parameter.requires_grad for parameter in network.parameters()):
        raise FedfillError(
            f"model: {kind.name} trains a network, and nothing in this one is to be trained; allowed: another last_layer or network"
        )
    sample = sample_of(federation)
    rounds = 1 if kind.single_round else experiment.rounds
    if rounds != experiment.rounds:
        note = f"rounds: {kind.name} takes one round, and no more are run."
        federation = replace(federation, notes=(*federation.notes, note))
    idle = [
        name
        for name, info in Algorithm.model_fields.items()
        if kind.network and getattr(settings, name) != info.default
    ]
    lowered = experiment.precision != "float32"
    idle += ["precision"] if kind.network and lowered else []
    if idle:
        note = f"{', '.join(idle)}: {kind.name} trains no network, and does not read {'this' if len(idle) == 1 else 'these'}."
        federation = replace(federation, notes=(*federation.notes, note))
    if kind.own_loops and lowered:
        note = f"precision: {kind.name} trains {kind.own_loops} in float32 all the same."
        federation = replace(federation, notes=(*federation.notes, note))
    settings = settings.resolved(rounds=rounds, model=network, inputs=sample)
    spare = (1 if kind.pooled else cohort) - experiment.min_replies
    federation = with_lone_samples_noted(network, federation, settings, sample, spare)
    final = experiment.model_copy(
        update={
            "clients": len(federation.clients),
            "rounds": rounds,
            "model": name,
            "settings": settings.model_dump(),
            "model_settings": {} if model is not None else record_of(name, model_settings),
            "preset": None,
        }
    )
    return Prepared(final, settings, federation, network, weights_of(network))


def _kind_of(experiment: Experiment) -> type[Algorithm]:
    """The algorithm of an experiment. What its settings take as values of their own is made known first."""
    loaded = {what: load_own(word, what) for what, word in experiment.own.items() if what not in ("model", "partition")}
    if "algorithm" not in loaded:
        return find(experiment.algorithm)
    kind = as_algorithm(loaded["algorithm"], experiment.own["algorithm"])
    if kind.name != experiment.algorithm:
        raise FedfillError(
            f"algorithm: {experiment.own['algorithm']} is called '{kind.name}'; allowed: '{experiment.algorithm}', as in the experiment"
        )
    return kind


def sample_of(federation: Federation) -> Tensor:
    """The inputs of one sample as they are stored, ``[1, ...]``: of the test set, or of nothing."""
    return (federation.test if len(federation.test) else federation.sample).inputs[:1]


def _checked_settings(kind: type[Algorithm], experiment: Experiment) -> tuple[Algorithm, ModelSettings]:
    """What was given, over the paper's own where that is asked for, over what the algorithm has for the data set."""
    presets = dict(kind.presets.get(experiment.data, {}))
    if experiment.preset is not None:
        presets |= {**kind.paper.get("", {}), **kind.paper.get(experiment.data, {})}
    if "local_epochs" in experiment.settings:
        # who asks for epochs gets them, and not the mini-batches of the paper or of the algorithm
        presets.pop("local_steps", None)
        if kind.model_fields["local_steps"].default is not None and type(None) in get_args(
            kind.model_fields["local_steps"].annotation
        ):
            presets["local_steps"] = None
    if experiment.settings.get("optimizer", "sgd") != "sgd":
        presets.pop("momentum", None)  # which no other optimizer has
    own, models = split_settings(kind, presets)
    if experiment.model not in ("auto", "cnn2", "cnn4"):
        models = {}  # a paper's word on its own network
    settings = checked(kind, {**own, **experiment.settings})
    return settings, checked(ModelSettings, {**models, **experiment.model_settings}, "model setting")


def divide(experiment: Experiment, *, data: Any = None, partition: Any = None) -> Federation:
    """Load the data of an experiment, and divide it among its clients."""
    keep_freed_memory()  # before those who read the data begin threads
    return federate(
        experiment.data if data is None else data,
        data_dir=experiment.data_dir or None,
        fraction=experiment.data_fraction,
        partition=partition_of(experiment) if partition is None else partition,
        clients=experiment.clients,
        seed=experiment.seed,
        test_fraction=experiment.test_fraction,
        client_test=experiment.client_test,
        labelled_per_client=experiment.labelled_per_client,
        client_validation=experiment.client_validation,
        image_size=experiment.image_size,
        domain_fractions=experiment.domain_fractions,
        schema=None if experiment.schema_file is None else read_schema(experiment.schema_file),
    )


def _at_their_hosts(federation: Federation, experiment: Experiment) -> Federation:
    """The same data, where personal models never leave their hosts: make sure that these have something to judge them by."""
    known = any(len(client.train) for client in federation.clients)  # a party of a deployment sees nobody's data
    if not experiment.client_test or (known and not any(len(client.test) for client in federation.clients)):
        raise FedfillError(
            f"client_test: found {experiment.client_test:g}, which leaves no client a test split of its own, and with engine=flower "
            f"the personal models of {experiment.algorithm} are evaluated on these alone; allowed: above 0 and up to 0.5, with samples enough"
        )
    note = (
        "Personal models stay with their hosts: accuracy and loss are those of all own test splits together, each by its owner's "
        "model, and weights_sha256 is that of the shared model."
    )
    return replace(federation, notes=(*federation.notes, note))


def default_directory(prepared: Prepared) -> Path:
    """``runs/<name>`` with a name that tells the experiment and never clashes with another's."""
    experiment = prepared.experiment
    words = [
        experiment.algorithm,
        Path(experiment.data).name,
        experiment.partition,
        f"seed{experiment.seed}",
        prepared.digest[:8],
    ]
    return Path("runs") / "-".join(re.sub(r"[^\w.+-]", "", word) for word in words)


def given_parts(data: Any, partition: Any, model: Any) -> Any:
    """Refuse what is None, which no default hides behind; the data, of a path its text."""
    for what, given in (("data", data), ("partition", partition), ("model", model)):
        if given is None:
            raise FedfillError(f"{what}: found None; leave it out for the default")
    return os.path.abspath(os.path.expanduser(data)) if isinstance(data, os.PathLike) else data


def arrange(
    algorithm: str | type[Algorithm], *, data: Any, partition: Any, model: Network,
    federation: Federation | None = None, needs: Mapping[str, str] | None = None, **options: Any,
) -> Prepared:  # fmt: skip
    """The parts of an experiment from the words of `fedfill.run`, or with `federation` in place of data and partition."""
    if isinstance(algorithm, str):
        refuse_settings(algorithm)
    kind = find(algorithm) if isinstance(algorithm, str) else as_algorithm(algorithm, repr(algorithm))
    data = given_parts(data, partition, model)
    options = in_words(options)
    fields = {k: v for k, v in options.items() if k in Experiment.model_fields.keys() - TABLES}
    own, models = split_settings(kind, {k: v for k, v in options.items() if k not in fields})
    if isinstance(data, list) or not (isinstance(partition, str) or is_function(partition)):
        fields.setdefault("clients", None)  # the lists or the partitioner say how many
    from_files = origins({"algorithm": kind, "partition": partition, "model": model, **own})
    experiment = checked(
        Experiment,
        {
            "algorithm": kind.name,
            "data": PYTHON
            if not isinstance(data, str)
            else os.path.abspath(os.path.expanduser(data))
            if is_place(data)
            else data,
            "partition": "given" if isinstance(data, list) else word_of(partition),
            "model": word_of(model),
            **fields,
            "settings": own,
            "model_settings": models,
            "own": from_files,
        },
        "option",
    )
    return prepare(
        experiment,
        data=None if isinstance(data, str) else data,
        partition=None if isinstance(partition, str) else partition,
        model=None if isinstance(model, str) else model,
        algorithm=kind,
        federation=federation,
        needs=needs,
    )


def split_settings(algorithm: type[Algorithm], values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Which settings are the algorithm's and which the model's."""
    own: dict[str, Any] = {}
    models: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith("model."):
            models[name.removeprefix("model.")] = value
        elif name in algorithm.model_fields:
            own[name] = value
        elif name in ModelSettings.model_fields:
            models[name] = value
        else:
            known = [*algorithm.model_fields, *ModelSettings.model_fields]
            if owners := [other for other, kind in known_algorithms().items() if name in kind.model_fields]:
                some = ", ".join(owners[:4]) + (" and others" if len(owners) > 4 else "")
                raise FedfillError(
                    f"setting: {algorithm.name} has no '{name}', which is a setting of {some}; "
                    f"'fedfill list settings {algorithm.name}' has its own"
                )
            raise FedfillError(f"setting: {algorithm.name} has no '{name}'; {did_you_mean(name, known)}")
    return own, models
