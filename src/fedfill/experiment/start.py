"""Starting from a finished run: its final weights are another run's first ones."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedfill import __version__, tree
from fedfill.algorithms import lookup
from fedfill.errors import FedfillError, checked, path_of
from fedfill.experiment.settings import DATA, INCIDENTAL, PYTHON, Experiment
from fedfill.models.networks import ModelSettings, applicable
from fedfill.models.pretrained import HEAD
from fedfill.models.views import NORMALISATION, normalisation, part
from fedfill.runs.directory import RunDirectory
from fedfill.tree import Weights

BESIDE = ("decoder", "projection", "personal", "encoder.logvar")
"""What some algorithms have in the built-in networks and others have not."""


@dataclass(frozen=True)
class Start:
    """What a finished run leaves to another one.

    Attributes:
        path: Its folder, as it was given.
        document: Its ``experiment.toml``.
        weights: Its final global weights.
        sha256: Of these, as in its ``summary.json``.
    """

    path: str
    document: Mapping[str, Any]
    weights: Weights
    sha256: str

    def network(self, given: Mapping[str, Any]) -> tuple[str, ModelSettings]:
        """Name and settings of the run's network, with what was asked for over these; a module from Python has no name."""
        name = str(self.document.get("model"))
        if name.split(":")[0] == PYTHON:
            raise FedfillError(
                f"model: found auto with start_from={self.path}, whose network came from Python ({name}); allowed: the same module again"
            )
        settings = network_settings(name, self.document, self.weights)
        return name, checked(ModelSettings, {**settings, **given}, "model setting")

    def put(self, model: nn.Module, needs: Collection[str], algorithm: str) -> str:
        """Put the weights into a network.

        The head stays as drawn where it has another shape. Decoder, projection and log-variances may be missing on either side,
        and of a module of one's own also whole parts that the run lacks; everything else has to fit.

        Args:
            model: Changed in place.
            needs: Of the algorithm.
            algorithm: Its name.

        Returns:
            Sentences on what was taken.

        Raises:
            FedfillError: Where it doesn't fit; the network is then as it was.
        """
        own: Weights = model.state_dict()
        head = {name for name in (*own, *self.weights) if name.startswith(HEAD)}
        fits = all(
            name in own and name in self.weights and _kind(own[name]) == _kind(self.weights[name]) for name in head
        )
        taken: Weights = {}
        drawn: list[str] = []
        for name, tensor in own.items():
            new = self.weights.get(name)
            if name in head and not fits:
                continue
            if new is not None and _kind(new) == _kind(tensor):
                taken[name] = new
            elif new is not None:
                raise self._misfit(f"'{name}' there is {_kind(new)} and here {_kind(tensor)}")
            elif _beside(name) or not part(self.weights, name.split(".")[0]):
                drawn.append(_beside(name) or name.split(".")[0])
            else:
                raise self._misfit(f"it has no '{name}'")
        left = [name for name in self.weights if name not in own and name not in head]
        if strange := [name for name in left if not _beside(name)]:
            raise self._misfit(f"its '{strange[0]}' has no place here")
        if not taken:
            raise self._misfit("no tensor is in both")
        if NORMALISATION in needs and not normalisation(model):
            raise FedfillError(
                f"start_from: {algorithm} needs normalisation layers, and the network of {self.path} has none; allowed: a run whose "
                "network has them, such as one with model.width=wide or --model cnn2bn"
            )
        model.load_state_dict(taken, strict=False)
        return " ".join(self._sentences(head, fits, dict.fromkeys(drawn), dict.fromkeys(map(_beside, left))))

    def note_on_division(self, experiment: Experiment) -> str | None:
        """A sentence where clients' own test and validation samples may be among those that the run was trained on."""
        words = (DATA - INCIDENTAL) | {"seed"}
        if self.document.get("data") != experiment.data or all(
            self.document.get(name) == getattr(experiment, name) for name in words
        ):
            return None
        everyones = self.document.get("test_fraction") != experiment.test_fraction
        return (
            f"The data of {self.path} were divided otherwise: it may have been trained on samples that are in {'the test set and in ' if everyones else ''}"
            "clients' own test and validation splits here."
        )

    def _sentences(self, head: Collection[str], fits: bool, drawn: Collection[str], left: Collection[str]) -> list[str]:
        said = (
            ""
            if not head
            else ", its head among them"
            if fits
            else ", but not its head, whose shape is another and which begins as drawn"
        )
        who = f"{self.document.get('algorithm')}, rounds {self.document.get('rounds')}, weights_sha256 {self.sha256}"
        found = [f"The network begins with the final weights of {self.path} ({who}){said}."]
        if drawn:
            found.append(f"Not in that run, and drawn as usual: {', '.join(drawn)}.")
        if left:
            found.append(f"Not in this network, and left out: {', '.join(left)}.")
        if (version := self.document.get("version")) != __version__:
            found.append(f"That run was made by fedfill {version}, whose network may have computed otherwise.")
        found.append("What it released of the same records comes on top of this run's account of privacy.")
        return found

    def _misfit(self, what: str) -> FedfillError:
        return FedfillError(
            f"start_from: {self.path} doesn't fit this network: {what}; allowed: a run of the same network "
            f"(its own is {self.document.get('model')}, which model auto takes) on samples of the same shape"
        )


def network_settings(name: str, document: Mapping[str, Any], weights: Weights) -> dict[str, Any]:
    """The settings with which a finished run's network is built again, whatever algorithm it was made for.

    Args:
        name: Of the network.
        document: The run's ``experiment.toml``.
        weights: Its final weights.

    Returns:
        By name, as the record has them, with what the run had from elsewhere: the seed of a map of features, and the size of
        a projection head.
    """
    settings = applicable(name, document.get("model_settings", {}))
    settings.pop("weights", None)  # where it began is long behind it
    if name == "features":
        settings.setdefault("features_seed", document.get("seed"))  # its head stands on the map of that seed
    last = [tensor for key, tensor in weights.items() if key.startswith("projection.") and tensor.dim() == 2]
    if last and settings.get("projection", "none") == "none":
        settings["projection"] = len(last[-1])  # the head stands on it
    return settings


def read_start(path: str) -> Start:
    """What a finished run leaves, read and checked.

    Args:
        path: Its folder.

    Returns:
        Its weights and its record.

    Raises:
        FedfillError: Where there is no run, or none that has come to its end with one global model.
    """
    directory = RunDirectory(path_of("start_from", path, "the folder of a finished run"))
    document = directory.read_experiment("start_from")
    summary, checkpoint = directory.summary(), directory.read_checkpoint("start_from")
    if summary is None or checkpoint is None:
        done = 0 if checkpoint is None else checkpoint.get("rounds")
        raise FedfillError(
            f"start_from: {path} is not finished ({done} of {document.get('rounds')} rounds); allowed: a finished run, "
            f"and 'fedfill resume {path}' goes on with this one"
        )
    weights: Any = checkpoint.get("weights")
    if not _is_weights(weights) or summary.get("weights_sha256") != tree.sha256(weights):
        raise FedfillError(
            f"start_from: summary.json and checkpoint in {path} don't belong together; remove summary.json and resume that run"
        )
    if is_personal(str(document.get("algorithm")), checkpoint):
        raise FedfillError(
            f"start_from: {path} is a run of {document.get('algorithm')}, which ends with a model for each client and no single "
            "one to go on from; allowed: a run that ends with one global model"
        )
    if not tree.is_finite(weights):
        raise FedfillError(f"start_from: the weights of {path} hold a NaN or an infinity; allowed: finite numbers")
    return Start(path, document, weights, str(summary["weights_sha256"]))


def _is_weights(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(tensor, Tensor) for tensor in found.values())


def is_personal(algorithm: str, checkpoint: Mapping[str, Any]) -> bool:
    """Whether the checkpoint's weights are those of all clients; of an algorithm that isn't known here their names tell."""
    kind = lookup(algorithm)
    if kind is not None:
        return kind.personal
    weights, server = checkpoint["weights"], checkpoint.get("server", {})
    return all(re.match(r"\d+\.", name) for name in weights) and weights.keys() != server.get("weights", {}).keys()


def _beside(name: str) -> str:
    """Which of the parts that an algorithm may lack a tensor belongs to; "" for none."""
    return next((one for one in BESIDE if name.startswith(f"{one}.")), "")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
