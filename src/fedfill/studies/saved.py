"""Trained models with their card, from a folder of `fedfill.export` or straight from a run directory.

``model.json`` is the card, ``model.safetensors`` the weights; of a run with personal models ``clients/NUMBER.safetensors`` is
each client's.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import nn

from fedfill import __version__, tree
from fedfill.data import sources
from fedfill.data.inputs import Inputs
from fedfill.data.objects import from_python
from fedfill.data.schema import read_schema
from fedfill.errors import FedfillError, Kept, checked, first_line, path_of
from fedfill.experiment.settings import PYTHON
from fedfill.experiment.start import BESIDE, is_personal, network_settings
from fedfill.experiment.trial import copied
from fedfill.files import read_regular
from fedfill.models.networks import ModelSettings, build
from fedfill.runs.directory import RunDirectory
from fedfill.runs.records import Summary, require
from fedfill.statistics.survival import FIGURES as OF_TIMES
from fedfill.studies.card import CARD, FORMAT, damaged, read_card
from fedfill.studies.finished import account_of, noisy, tells
from fedfill.studies.model import Model
from fedfill.training.regression import FIGURES as OF_NUMBERS
from fedfill.tree import Weights

Run = str | Path | Kept
"""A run directory, or what `fedfill.run` returned; where a model is read, also what `fedfill.export` wrote or returned."""


@dataclass(frozen=True)
class Saved:
    """Models with their card.

    Attributes:
        where: The folder.
        card: The document of ``model.json``.
        weights: Reads those of an entry of the card.
    """

    where: str
    card: dict[str, Any]
    weights: Callable[[Mapping[str, Any]], Weights]

    def model(self, client: str | int | None = None, module: nn.Module | None = None) -> Model:
        """The model, or one client's.

        Args:
            client: Its number or its name; None: the model of all.
            module: The module, where the network came from Python; it stays as it is.

        Returns:
            In evaluation mode.

        Raises:
            FedfillError: Where there is no such model, its file is damaged, or the module is missing or doesn't fit.
        """
        entry = _chosen(self.card["weights"], client, self.where)
        described = self.card["network"]
        name = described.get("class", described["name"])
        if module is None and described["name"] == PYTHON:
            raise FedfillError(
                f"model: the network of {self.where} came from Python ({name}); give the module again, in Python: "
                "fedfill.load(DIR, model=module)"
            )
        if module is not None and described["name"] != PYTHON:
            raise FedfillError(
                f"model: found {type(module).__name__}, and the network of {self.where} is a built-in one ({name}); allowed: none"
            )
        weights = self.weights(entry)
        network = copied(module) if module is not None else self._built()
        if (drawn := _drawn(network)) != described.get("drawn_sha256") and module is None:
            raise FedfillError(
                f"model: the features that are drawn here from features_seed {described.get('settings', {}).get('features_seed')} are not those "
                f"of {self.where} ({drawn} in place of {described.get('drawn_sha256')}); allowed: the fedfill and numpy that made it"
            )
        try:
            network.load_state_dict(weights)
        except RuntimeError as error:
            first = next((line.strip() for line in str(error).splitlines()[1:] if line.strip()), str(error))
            raise FedfillError(
                f"model: the weights of {self.where} are those of {name}, and don't fit {type(network).__name__}: {first}"
            ) from error
        return Model(network, Inputs.from_document(self.card["inputs"]), self.card, entry.get("client"))

    def _built(self) -> nn.Module:
        """The built-in network, or one sentence where the card describes none that can be."""
        try:
            return _built(self.card)
        except (FedfillError, ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
            raise FedfillError(
                f"model: {self.where} describes a network that can't be built ({first_line(error)}); export the run again"
            ) from error


def saved_at(place: Run) -> Saved:
    """The models in a folder, which is an export or a run directory.

    Args:
        place: The folder, or the result of `fedfill.run`.

    Returns:
        Models and card.

    Raises:
        FedfillError: Where it is neither, or what it holds is damaged, unfinished or of a newer fedfill.
    """
    path = path_of("directory", place, "a folder of fedfill.export, a run directory, or what fedfill.run returned")
    if (path / CARD).is_file():
        return _of_export(path)
    if (path / "experiment.toml").is_file():
        return of_run(RunDirectory(path), setting="model")
    what = "a file" if path.is_file() else "no model" if path.is_dir() else "nothing"
    raise FedfillError(
        f"model: found {what} at {path}; allowed: a folder of 'fedfill export', which has a {CARD}, or a run directory"
    )


def _of_export(path: Path) -> Saved:
    """What `fedfill.export` wrote."""
    card = read_card(path)
    try:
        Inputs.from_document(card["inputs"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise damaged(path / CARD, f"inputs: {first_line(error)}") from error

    def read(entry: Mapping[str, Any]) -> Weights:
        file = path / str(entry["file"])
        try:
            data = read_regular(file)
            if hashlib.sha256(data).hexdigest() == entry["sha256"]:
                return safetensors.torch.load(data)
            problem = "its SHA-256 is not the one in model.json"
        except OSError as error:
            problem = error.strerror or str(error)
        except SafetensorError as error:
            problem = str(error)
        raise FedfillError(f"model: {file} is damaged or another model's ({problem}); export the run again")

    return Saved(str(path), card, read)


def of_run(place: RunDirectory, data: Any = None, data_dir: str | Path | None = None, setting: str = "export") -> Saved:
    """The models of a finished run, straight from its folder.

    Args:
        place: Its folder.
        data: The data, where they came from Python and the run was made before runs recorded what their inputs are.
        data_dir: Where the data lie, for such runs.
        setting: What an error's sentence begins with.

    Returns:
        Models and card.

    Raises:
        FedfillError: Where it is not finished, or has no model.
    """
    document, summary = place.read_experiment(setting), place.summary()
    if lacking := [name for name in ("algorithm", "data", "model", "settings") if name not in document]:
        raise FedfillError(
            f"{setting}: {place.path / 'experiment.toml'} is damaged (it has no {lacking[0]}); run the experiment again"
        )
    # its weights alone are wanted, whatever the algorithm keeps beside them
    checkpoint = place.read_checkpoint(setting, unknown=True)
    if summary is None or checkpoint is None:
        raise FedfillError(
            f"{setting}: {place.path} holds {len(place.rounds())} of {document.get('rounds')} rounds; 'fedfill resume {place.path}' finishes it"
        )
    require(Summary, summary, place.path / "summary.json", setting, "remove it and resume the run")
    if tells(summary) == "nothing":
        raise FedfillError(
            f"{setting}: {place.path} is a run of {document['algorithm']}, which trains no model; allowed: runs that do"
        )
    weights: Weights = checkpoint.get("weights", {})
    if summary.get("weights_sha256") != tree.sha256(weights):
        raise FedfillError(
            f"{setting}: summary.json and checkpoint in {place.path} don't belong together; remove summary.json and resume the run"
        )
    division = _division(place, setting)
    inputs = _inputs(place, document, division, data, data_dir, setting)
    models = _by_client(place, document, checkpoint, setting)
    card: dict[str, Any] = {
        "format": FORMAT,
        "fedfill": __version__,
        "network": _network(document, next(iter(models.values()))),
        "class_names": list(division["class_names"]),
        "inputs": inputs.document(),
        "weights": [],
        "run": _run(document, summary),
        "privacy": _privacy(document, summary, inputs, None not in models),
    }
    if card["network"]["name"] != PYTHON:
        network = _built(card)
        card["network"]["drawn_sha256"] = _drawn(network)
        # what only some trainings need is no part of a model in use
        models = {i: _without(own, set(network.state_dict())) for i, own in models.items()}
    domains, accuracies = division.get("domains") or [], summary.get("accuracy_by_client") or []
    for i, own in models.items():
        entry: dict[str, Any] = {"file": "model.safetensors"}
        if i is not None:
            entry = {
                "client": " ".join([str(i), *domains[i : i + 1]]),
                "number": i,
                "domain": domains[i] if i < len(domains) else None,
                "file": f"clients/{i}.safetensors",
                "accuracy_on_own_test_split": accuracies[i] if i < len(accuracies) else None,
            }
        card["weights"].append({**entry, "parameters": sum(tensor.numel() for tensor in own.values())})
    return Saved(str(place.path), card, lambda entry: models[entry.get("number")])


def _division(place: RunDirectory, setting: str) -> dict[str, Any]:
    path = place.path / "partition.json"
    try:
        found = json.loads(read_regular(path))
        names = found["class_names"]
        if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise ValueError("classes without a name, or two of the same")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise FedfillError(
            f"{setting}: {path} is missing or damaged, and has the names of the classes; run the experiment again"
        ) from error
    return dict(found)


def _inputs(
    place: RunDirectory,
    document: Mapping[str, Any],
    division: Mapping[str, Any],
    data: Any,
    data_dir: Any,
    setting: str,
) -> Inputs:
    """What the network takes: as the run recorded it, or of a run from before there was a record as its data are."""
    if "inputs" in division:
        try:
            return Inputs.from_document(division["inputs"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FedfillError(
                f"{setting}: partition.json in {place.path} is damaged ({error}); run the experiment again"
            ) from error
    return Inputs.of(source_of_run(place, document, data, data_dir, setting), document.get("image_size"))


def source_of_run(place: RunDirectory, document: Mapping[str, Any], data: Any, data_dir: Any, setting: str) -> Any:
    """The data set of a run, read again, undivided.

    Args:
        place: The run's folder.
        document: Its ``experiment.toml``.
        data: Again what came from Python, where it did.
        data_dir: Another folder than the run's with the same data.
        setting: What an error's sentence begins with.

    Returns:
        The source.

    Raises:
        FedfillError: Where it can't be had.
    """
    name, share = str(document["data"]), document.get("test_fraction")
    if (place.path / "deployment.toml").exists():
        raise FedfillError(f"{setting}: {place.path} is a deployment's, whose data stay on their hosts; allowed: none")
    schema = None if document.get("schema_file") is None else read_schema(document["schema_file"])
    if data is None and name.split(":")[0] == PYTHON:
        raise FedfillError(
            f"{setting}: the data of {place.path} came from Python; give them again, in Python: fedfill.export(RUN, data=...)"
        )
    if data is None:
        return sources.load(name, data_dir or document.get("data_dir"), document.get("image_size"), schema, share)
    source = from_python(data, schema=schema, test_fraction=share)
    return next(one for one in source if len(one.test)) if isinstance(source, list) else source


def _by_client(
    place: RunDirectory, document: Mapping[str, Any], checkpoint: Mapping[str, Any], setting: str
) -> dict[int | None, Weights]:
    """The models that a run ended with: by client, or one of nobody's."""
    name, weights = str(document.get("algorithm")), checkpoint["weights"]
    if not is_personal(name, checkpoint):
        return {None: weights}
    if document.get("engine") == "flower" or not all(re.match(r"\d+\.", key) for key in weights):
        raise FedfillError(
            f"{setting}: {place.path} is a run of {name} on flower, whose clients' models stay with their hosts; allowed: runs with one global "
            "model, or on the engines local and ray"
        )
    models: dict[int | None, Weights] = {}
    for key, tensor in weights.items():
        client, _, own = key.partition(".")
        models.setdefault(int(client), {})[own] = tensor
    return models


def _network(document: Mapping[str, Any], weights: Weights) -> dict[str, Any]:
    """Name and settings with which the network is built again."""
    name, _, kind = str(document["model"]).partition(":")
    if name == PYTHON:
        return {"name": PYTHON, "class": kind}
    settings = {k: v for k, v in network_settings(name, document, weights).items() if v != "none" and k != "frozen"}
    return {"name": name, "settings": settings}


def _built(card: Mapping[str, Any]) -> nn.Module:
    """The built-in network of a card, as drawn."""
    described = card["network"]
    settings = checked(ModelSettings, described.get("settings", {}), "model setting")
    return build(
        described["name"], tuple(card["inputs"]["shape"]), len(card["class_names"]), settings, seed=0, loaded=True
    )


def _without(weights: Weights, wanted: set[str]) -> Weights:
    """The weights less those of decoders and the like, which a model in use has not."""
    return {
        name: tensor
        for name, tensor in weights.items()
        if name in wanted or not any(name.startswith(f"{part}.") for part in BESIDE)
    }


def _drawn(network: nn.Module) -> str | None:
    """SHA-256 of what a network draws from its seed and keeps out of its weights; None where that is nothing."""
    drawn = {
        f"{path}.{name}": tensor
        for path, module in network.named_modules()
        for name, tensor in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    }
    return tree.sha256(drawn) if drawn else None


def _run(document: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """What the run was: nothing of where it lies."""
    told = ("algorithm", "partition", "clients", "rounds", "seed", "data_fraction", "settings")
    of_classes = ("accuracy", "accuracy_by_class", "mean_client_accuracy", "worst_client_accuracy")
    figures = {"number": tuple(OF_NUMBERS), "survival": tuple(OF_TIMES)}.get(str(summary.get("target")), of_classes)
    exact = document.get("test_fraction") == 0 and noisy(summary)  # figures of the very records that noise protects
    return {
        "data": Path(str(document["data"])).name,
        **{name: document.get(name) for name in told},
        **{name: summary.get(name) for name in ("weights_sha256", *(() if exact else figures))},
        **({"ranks_only": True} if tells(summary) == "ranks" else {}),
        "fedfill": document["version"],
        "digest": document["digest"],
        # who knows the seed can draw a simulation's noise again, and take it off; the digest tells whether a guess at the records is right
        **({"seed": None, "digest": None} if noisy(summary) else {}),
    }


def _privacy(document: Mapping[str, Any], summary: Mapping[str, Any], inputs: Inputs, personal: bool) -> dict[str, Any]:
    """The run's account, and what a model tells beside what the account speaks of."""
    account = account_of(document, summary, "this model")
    beside = [] if inputs.columns is None else [*inputs.columns.told]
    if personal:
        beside.append(
            "The account speaks of what left each client in training. A client's own model was trained on its records beyond that: "
            "to give it to others releases something of them without a guarantee."
        )
        account |= {"epsilon": None, "epsilon_added": None}
    return {**account, "not_in_the_account": beside}


def _chosen(entries: Sequence[Mapping[str, Any]], client: str | int | None, where: str) -> Mapping[str, Any]:
    """The entry of a client, by its number or its name."""
    if "client" not in entries[0]:
        if client is not None:
            raise FedfillError(f"client: found {client!r}, and {where} holds one model for all; allowed: none")
        return entries[0]
    some = ", ".join(str(entry["client"]) for entry in entries[:20])
    some += f" and {len(entries) - 20} more" if len(entries) > 20 else ""
    if client is None:
        raise FedfillError(f"client: {where} holds a model for each client; name one of {some}")
    # a client may be called by another one's number, so a number is never taken for a name
    number = isinstance(client, Integral) and not isinstance(client, bool)
    word = str(int(client) if number else client).strip()
    for field in ("number",) if number else ("domain", "client", "number"):
        found = [entry for entry in entries if str(entry[field]) == word]
        if len(found) == 1:
            return found[0]
        if found:
            raise FedfillError(
                f"client: found {client!r}, which is the name of {len(found)} clients; name one of "
                f"{', '.join(str(entry['client']) for entry in found)}"
            )
    raise FedfillError(f"client: found {client!r}; name one of {some}")
