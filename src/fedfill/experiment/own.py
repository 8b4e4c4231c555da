"""Parts of one's own in an experiment: which words stand for them, where they come from, and networks made of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from fedfill import own_parts
from fedfill.data.federation import Federation
from fedfill.data.names import PARTITIONS
from fedfill.data.samples import normalise
from fedfill.errors import FedfillError
from fedfill.experiment.settings import PYTHON, Experiment
from fedfill.models.names import NAMES as NETWORKS
from fedfill.streams import derive

Network = str | nn.Module | Callable[..., nn.Module]
"""A name or a reference, a network with its weights, or a class or function that makes one."""


def word_of(thing: Any) -> str:
    """What stands in ``experiment.toml`` for a name, a reference or a part from Python."""
    if own_parts.is_reference(thing):
        return f"{PYTHON}:{thing.rpartition(':')[2]}"
    if isinstance(thing, str):
        return thing
    return f"{PYTHON}:{getattr(thing, '__name__', type(thing).__name__)}"


def origins(parts: Mapping[str, Any]) -> dict[str, str]:
    """Where parts of one's own come from, as far as that is known: references with the file's whole path.

    Args:
        parts: By setting: words, references with or without settings of their own, or what came from Python.

    Returns:
        By setting, only of parts that come from a file.
    """
    found = {}
    for what, given in parts.items():
        if own_parts.is_reference(given):
            bare = what in ("model", "partition")  # these take no settings: none may be lost
            found[what] = own_parts.absolute(given if bare else own_parts.split(given)[0], what)
        elif not isinstance(given, str) and (origin := own_parts.origin_of(given)):
            found[what] = origin
    return found


def network_of(experiment: Experiment) -> Callable[..., nn.Module] | None:
    """What makes the network, where it is one of one's own from a file or an installed package; None: a built-in one."""
    if (word := experiment.own.get("model")) is not None:
        return _maker(own_parts.load(word, "model"), word)
    if experiment.model not in NETWORKS and (entry := own_parts.entry_points("models").get(experiment.model)):
        return _maker(own_parts.load_entry(entry, "model"), experiment.model)
    return None


def _maker(thing: Any, word: str) -> Callable[..., nn.Module]:
    """Refuse a network that a file made already: its weights would be others each time the file is executed."""
    if isinstance(thing, nn.Module) or not callable(thing):
        raise FedfillError(
            f"model: found {word}, a {type(thing).__name__}; allowed: a class or a function that makes a torch.nn.Module"
        )
    made: Callable[..., nn.Module] = thing
    return made


def partition_of(experiment: Experiment) -> Any:
    """The partition, where it is one of one's own from a file or an installed package; else the experiment's words."""
    if (word := experiment.own.get("partition", experiment.partition)) and own_parts.is_reference(word):
        return own_parts.load(word, "partition")
    name = experiment.partition
    known = [usage.partition(":")[0] for usage in PARTITIONS]
    if name.partition(":")[0] not in known and (entry := own_parts.entry_points("partitions").get(name)):
        return own_parts.load_entry(entry, "partition")
    return name


def made(make: Callable[..., nn.Module], federation: Federation, seed: int) -> nn.Module:
    """A network of one's own, its weights drawn from the experiment's seed.

    Args:
        make: A class or a function. Its parameters `shape` and `classes` are given where it has them.
        federation: What the network is for.
        seed: The experiment's.

    Returns:
        The network.

    Raises:
        FedfillError: Where it needs something else, fails, or makes no network.
    """
    name = getattr(make, "__name__", type(make).__name__)
    given = {"shape": federation.shape, "classes": federation.classes}
    try:
        parameters = dict(inspect.signature(make).parameters)
    except (TypeError, ValueError):  # what is written in C has none
        parameters = {}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        parameters |= dict.fromkeys(given, inspect.Parameter("_", inspect.Parameter.KEYWORD_ONLY))
    needed = [
        key
        for key, parameter in parameters.items()
        if key not in given
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise FedfillError(
            f"model: {name} needs '{needed[0]}'; allowed: the parameters shape and classes, and others that have a default"
        )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "initial weights"))
            network = make(**{key: value for key, value in given.items() if key in parameters})
            _fill_in(network, federation)
    except (Exception, SystemExit) as error:  # whatever a user's code may raise
        code = getattr(getattr(make, "__init__", None) if isinstance(make, type) else make, "__code__", None)
        where = own_parts.told(error, code.co_filename) if code else own_parts.words_of(error)
        raise FedfillError(
            f"model: {name} can't be made of shape={federation.shape} and classes={federation.classes}: {where}"
        ) from error
    if not isinstance(network, nn.Module):
        raise FedfillError(
            f"model: {name} makes {type(network).__name__}; allowed: a class or a function that makes a torch.nn.Module"
        )
    return network


def _fill_in(network: Any, federation: Federation) -> None:
    """Draw the weights of lazy layers now; what goes wrong shows again, and is reported, where the network is tried."""
    if isinstance(network, nn.Module) and any(isinstance(p, UninitializedParameter) for p in network.parameters()):
        sample = federation.test if len(federation.test) else federation.sample
        with suppress(Exception), torch.no_grad():
            network.eval()(normalise(sample.inputs[:1]))
        network.train()
