"""Preparation: from words, arrays and modules to everything that a run needs, checked before anything is written."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from fedfill.algorithms import Algorithm, find
from fedfill.data.division import federate
from fedfill.data.federation import Federation
from fedfill.data.samples import normalise
from fedfill.engines import require
from fedfill.engines.allocator import keep_freed_memory
from fedfill.engines.host import refuses_one_sample
from fedfill.errors import FedfillError, checked, first_line
from fedfill.loop import Prepared
from fedfill.models.layers import draws_from, with_streams
from fedfill.models.networks import ModelSettings, build
from fedfill.models.pretrained import load
from fedfill.models.views import require_parts, weights_of
from fedfill.settings import Experiment, split_settings
from fedfill.streams import derive, torch_stream

PYTHON = "python"
"""Stands in ``experiment.toml`` for what came from Python, where the name of its type may follow: ``python:Net``."""


def prepare(
    experiment: Experiment, *, data: Any = None, partition: Any = None, model: nn.Module | None = None,
    algorithm: type[Algorithm] | None = None, federation: Federation | None = None,
) -> Prepared:  # fmt: skip
    """Load the data, divide it, build the network and check that everything fits together.

    Args:
        experiment: What to run.
        data: Data from Python in place of the experiment's name.
        partition: A partitioner object in place of the experiment's words.
        model: A module in place of the experiment's name.
        algorithm: A class in place of the experiment's name.
        federation: The data, divided; None: as the experiment says.

    Returns:
        All parts, nothing written.

    Raises:
        FedfillError: Where a setting is not allowed or the parts don't fit.
    """
    kind = algorithm or find(experiment.algorithm)
    for what, word, given in (
        ("data", experiment.data, data),
        ("partition", experiment.partition, partition),
        ("model", experiment.model, model),
    ):
        if given is None and word.split(":")[0] == PYTHON and (federation is None or what == "model"):
            raise FedfillError(
                f"{what}: this experiment's {what} came from Python; give the same again to fedfill.resume or fedfill.run there"
            )
    require(experiment.engine)
    for name, others in (("ray_address", ("ray",)), ("gpus_per_worker", ("ray",)), ("workers", ("local", "ray"))):
        if getattr(experiment, name) and experiment.engine not in others:
            raise FedfillError(
                f"{name}: found {getattr(experiment, name)} with engine={experiment.engine}; allowed with {' and '.join(others)}"
            )
    if kind.pooled and experiment.engine == "flower":
        raise FedfillError(
            f"engine: found flower with algorithm={kind.name}, which is no federation of hosts; allowed: local and ray"
        )
    own, models = dict(experiment.settings), dict(experiment.model_settings)
    presets = dict(kind.presets.get(experiment.data, {}))
    optional = type(None) in get_args(kind.model_fields["local_steps"].annotation)
    if "local_epochs" in own and optional:
        # who asks for epochs gets them, and not the mini-batches that an algorithm has by default
        presets["local_steps"] = None
    settings = checked(kind, {**presets, **own})
    model_settings = checked(ModelSettings, models, "model setting")
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
    if kind.pooled:
        federation = federation.pooled()
    if kind.personal and experiment.engine == "flower":
        federation = _at_their_hosts(federation, experiment)
    if model is None:
        network: nn.Module = build(
            experiment.model,
            federation.shape,
            federation.classes,
            model_settings,
            needs=settings.needs(),
            seed=derive(experiment.seed, "initial weights"),
        )
        if model_settings.weights is not None:
            note = load(network, model_settings.weights)
            federation = replace(federation, notes=(*federation.notes, note))
    else:
        if not isinstance(model, nn.Module):
            raise FedfillError(
                f"model: found {model!r}; allowed: a name of 'fedfill list models' or an instance of torch.nn.Module"
            )
        network = with_streams(_copied(model))
        if models:
            raise FedfillError(
                f"model setting: found {', '.join(models)}; these go with the built-in networks, and the model is a module of your own"
            )
        if any(len(client.train) for client in federation.clients):
            _require_fit(network, federation, settings.batch_size)
    require_parts(network, settings.needs(), kind.name)
    sample = (federation.test if len(federation.test) else federation.sample).inputs[:1]
    settings = settings.resolved(rounds=experiment.rounds, model=network, inputs=sample)
    spare = (1 if kind.pooled else cohort) - experiment.min_replies
    federation = _with_lone_samples_noted(network, federation, settings, sample, spare)
    final = experiment.model_copy(
        update={
            "clients": len(federation.clients),
            "settings": settings.model_dump(),
            "model_settings": {} if model is not None else model_settings.model_dump(),
        }
    )
    return Prepared(final, settings, federation, network, weights_of(network))


def divide(experiment: Experiment, *, data: Any = None, partition: Any = None) -> Federation:
    """Load the data of an experiment, and divide it among its clients.

    Args:
        experiment: Which data, and how.
        data: Data from Python in place of the experiment's name.
        partition: A partitioner object in place of the experiment's words.

    Returns:
        The federation.

    Raises:
        FedfillError: Where the data can't be read or divided like this.
    """
    keep_freed_memory()  # before those who read the data begin threads
    return federate(
        experiment.data if data is None else data,
        data_dir=experiment.data_dir or None,
        fraction=experiment.data_fraction,
        partition=experiment.partition if partition is None else partition,
        clients=experiment.clients,
        seed=experiment.seed,
        client_test=experiment.client_test,
        labelled_per_client=experiment.labelled_per_client,
        client_validation=experiment.client_validation,
        image_size=experiment.image_size,
        domain_fractions=experiment.domain_fractions,
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


def _copied(model: nn.Module) -> nn.Module:
    """A user's own network once more, so that theirs stays as it is."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # whatever a foreign module may raise
        raise FedfillError(
            f"model: {type(model).__name__} can't be copied ({first_line(error)}); where it has "
            "torch.nn.utils.weight_norm, use torch.nn.utils.parametrizations.weight_norm"
        ) from error


def _require_fit(model: nn.Module, federation: Federation, batch_size: int) -> None:
    """Try a user's own network on a sample and on a mini-batch, so that a misfit shows before anything is written."""
    name = type(model).__name__
    try:
        with torch.inference_mode():
            found = list(model.eval()(normalise(federation.test.inputs[:1])).shape)  # a lazy layer gets its shape here
        trained = [client.train for client in federation.clients if len(client.train)]
        smallest = min(trained, key=len)[: max(batch_size, 2)]
        # two of one: whether batch norm ever meets a lone sample is for the algorithm and its data to say
        inputs = torch.cat([smallest.inputs, smallest.inputs]) if len(smallest) == 1 else smallest.inputs
        draws = torch.get_rng_state()
        trial = copy.deepcopy(model).train()
        with draws_from(trial, torch_stream(0, "trial")):
            scores = trial(normalise(inputs))
        drew = not torch.equal(draws, torch.get_rng_state())
        if scores.requires_grad:
            scores.sum().backward()
    except Exception as error:  # whatever a foreign module may raise
        raise FedfillError(
            f"model: {name} can't be evaluated on one sample of shape {list(federation.shape)} and trained on the mini-batch of the "
            f"smallest client ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error
    if found != [1, federation.classes]:
        raise FedfillError(
            f"model: {name} makes scores of shape {found} for one sample; allowed: [1, {federation.classes}], one for each class"
        )
    if not scores.requires_grad:
        raise FedfillError(
            f"model: {name} has nothing to train; allowed: at least one parameter that requires a gradient"
        )
    if drew:
        raise FedfillError(
            f"model: {name} draws from torch's global generator in training, so that results would depend on the number of workers; "
            "allowed: layers such as torch.nn.Dropout, which get a stream of their own"
        )
    hidden = {buffer for buffer, _ in model.named_buffers()} - model.state_dict().keys()
    if hidden:
        raise FedfillError(
            f"model: {name} keeps '{min(hidden)}' as a buffer outside its state dict, where one client would find what another left; "
            "allowed: persistent buffers"
        )


def _with_lone_samples_noted(
    network: nn.Module, federation: Federation, settings: Algorithm, sample: torch.Tensor, spare: int
) -> Federation:
    """Look out for clients that train on one sample at a time, which a network with batch norm of single values can't do.

    Where a round may lose more than `spare` of them, that is refused; where it can go on without them, a note counts them.
    """
    sizes = {i: len(client.train) for i, client in enumerate(federation.clients) if len(client.train)}
    lone = [i for i, size in sizes.items() if min(size, settings.batch_size) == 1]
    if not lone or settings.buffers == "frozen" or settings.unlabelled:
        return federation
    trial = copy.deepcopy(network).train()
    try:
        with torch.no_grad(), draws_from(trial, torch_stream(0, "trial")):
            trial(normalise(sample))
        return federation
    except Exception as error:  # whatever a foreign module may raise
        if not refuses_one_sample(error):
            raise FedfillError(
                f"model: {type(network).__name__} can't be trained on one sample ({first_line(error)}), and client "
                f"{federation.client_names[lone[0]]} has mini-batches of one; allowed: two samples or more for each"
            ) from error
    some = ", ".join(federation.client_names[i] for i in lone[:3]) + (", ..." if len(lone) > 3 else "")
    found = (
        "batch_size=1"
        if settings.batch_size == 1
        else f"clients with one training sample: {len(lone)} of {len(sizes)} ({some})"
    )
    helps = "buffers=frozen, or a network without batch norm of single values, such as --model cnn2 for images"
    if len(lone) > spare and not any(len(client.unlabelled) for client in federation.clients):
        raise FedfillError(
            f"model: the batch norm of this network can't be trained on one sample; found {found}; allowed: two "
            f"samples or more for each client and mini-batch (data_fraction, labelled_per_client and the partition decide on them), {helps}"
        )
    note = (
        f"On one labelled sample at a time the batch norm of this network can't be trained: {found}. Where a client has "
        f"nothing else to train on, its reply is lost; what helps: {helps}."
    )
    return replace(federation, notes=(*federation.notes, note))


def default_directory(prepared: Prepared) -> Path:
    """``runs/<name>`` with a name that tells the experiment and never clashes with another's."""
    experiment = prepared.experiment
    words = [experiment.algorithm, experiment.data, experiment.partition, f"seed{experiment.seed}", prepared.digest[:8]]
    return Path("runs") / "-".join(re.sub(r"[^\w.+-]", "", word) for word in words)


def arrange(
    algorithm: str | type[Algorithm], *, data: Any, partition: Any, model: str | nn.Module,
    federation: Federation | None = None, **options: Any,
) -> Prepared:  # fmt: skip
    """The parts of an experiment from the words of `run`, checked, nothing written.

    Args:
        algorithm: As in `run`.
        data: As in `run`.
        partition: As in `run`.
        model: As in `run`.
        federation: The data, divided, in place of what `data` and `partition` say.
        **options: As in `run`.

    Returns:
        All parts.

    Raises:
        FedfillError: Where anything that was given is not allowed.
    """
    kind = _algorithm(algorithm)
    for what, given in (("data", data), ("partition", partition), ("model", model)):
        if given is None:
            raise FedfillError(f"{what}: found None; leave it out for the default")
    options = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    fields = {
        k: v for k, v in options.items() if k in Experiment.model_fields and k not in ("settings", "model_settings")
    }
    own, models = split_settings(kind, {k: v for k, v in options.items() if k not in fields})
    if isinstance(data, list) or not isinstance(partition, str):
        fields.setdefault("clients", None)  # the list or the partitioner says how many
    experiment = checked(
        Experiment,
        {
            "algorithm": kind.name,
            "data": data if isinstance(data, str) else PYTHON,
            "partition": "given" if isinstance(data, list) else _named(partition),
            "model": _named(model),
            **fields,
            "settings": own,
            "model_settings": models,
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
    )


def _algorithm(algorithm: Any) -> type[Algorithm]:
    if isinstance(algorithm, str):
        return find(algorithm)
    if not isinstance(algorithm, type) or not issubclass(algorithm, Algorithm):
        raise FedfillError(
            f"algorithm: found {algorithm!r}; allowed: a name of 'fedfill list algorithms' or a subclass of Algorithm"
        )
    if "name" not in algorithm.__dict__:
        raise FedfillError(f'algorithm: {algorithm.__qualname__} has no name of its own; give it one: name = "..."')
    return algorithm


def _named(thing: Any) -> str:
    return thing if isinstance(thing, str) else f"{PYTHON}:{type(thing).__name__}"
