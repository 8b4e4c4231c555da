"""A finished run's model as a folder for others: weights by readable names, and a card with all that it takes to use them.

See `fedfill.studies.saved` for the files. Where they are asked for, ``model.pt2`` is a program of torch.export and
``model.onnx`` one of ONNX, with the preprocessing inside.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from fedfill.errors import A_RUN, FedfillError, path_of
from fedfill.runs.directory import RunDirectory, to_json, write_atomically, writing
from fedfill.studies.card import CARD
from fedfill.studies.saved import Run, Saved, of_run, saved_at, source_of_run

OWN = "model"
"""Where a run's export lies unless it is told otherwise, in the run's directory."""
FILES = {CARD, "clients", "model.safetensors", "model.pt2", "model.onnx"}


@dataclass(frozen=True)
class Exported:
    """What `export` wrote.

    Attributes:
        directory: The folder.
        card: The document of its ``model.json``.
        files: What lies in it, by their names there.
    """

    directory: Path
    card: dict[str, Any]
    files: tuple[str, ...]

    def __repr__(self) -> str:
        """Where it lies, and what is in it."""
        return f"<Exported: {', '.join(self.files)}, in {self.directory}>"


def export(
    run: Run, to: str | Path | None = None, *, pt2: bool = False, onnx: bool = False, model: nn.Module | None = None,
    data: Any = None, data_dir: str | Path | None = None,
) -> Exported:  # fmt: skip
    """Write a finished run's model for others to use.

    Example::

        exported = fedfill.export("runs/first", to="first")
        fedfill.load("first").predict("photos/")

    Args:
        run: The run directory, or what `fedfill.run` returned.
        to: The folder: new, empty, or with an earlier export of the same run; None: ``model`` in the run directory.
        pt2: Also write ``model.pt2``, which plain PyTorch runs without fedfill.
        onnx: Also write ``model.onnx``; it needs the extra ``onnx``.
        model: The module, where the run's network came from Python and `pt2` or `onnx` is asked for.
        data: The data, where they came from Python: `pt2` and `onnx` are checked on some of the test set.
        data_dir: Another folder with the same data.

    Returns:
        Where it lies, and its card. What was there of an earlier export is replaced.

    Raises:
        FedfillError: Where the folder holds no finished run, the other one something else, or a program doesn't give what the
            model gives.
    """
    place = RunDirectory(path_of("run", run, A_RUN))
    data_dir = None if data_dir is None else path_of("data_dir", data_dir)
    saved = of_run(place, data, data_dir)
    target = place.path / OWN if to is None else path_of("to", to)
    _check_target(target, saved, own=to is None)
    suffixes = [suffix for suffix, wanted in (("pt2", pt2), ("onnx", onnx)) if wanted]
    samples = _samples(saved, place, data, data_dir, suffixes[-1]) if suffixes else None
    card: dict[str, Any] = {**saved.card, "weights": [], "programs": []}
    with writing(target, setting="to"):
        target.mkdir(parents=True, exist_ok=True)
        for left in target.glob(".export-*"):  # by a process that was killed
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(dir=target, prefix=".export-") as name:
            made = Path(name)
            for entry in saved.card["weights"]:
                card["weights"].append(_written(saved, entry, made))
                for suffix in suffixes if samples is not None else ():
                    from fedfill.studies.programs import (
                        write_program,
                    )  # here: tracing imports a second's worth of torch

                    file = str(Path(entry["file"]).with_suffix(f".{suffix}"))
                    own = saved.model(entry.get("number"), model)
                    found = write_program(own, suffix, made / file, samples)  # type: ignore[arg-type]
                    card["programs"].append({"file": file, **found})
            write_atomically(made / CARD, to_json(card))
            for old in sorted(FILES, key=lambda name: name != CARD):  # the card first: without it nobody reads the rest
                path = target / old
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            for new in sorted(made.iterdir(), key=lambda path: path.name == CARD):
                new.replace(target / new.name)
    files = [entry["file"] for entry in (*card["weights"], *card["programs"])]
    return Exported(target, card, (CARD, *files))


def _written(saved: Saved, entry: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the weights of an entry; the entry with their digest."""
    # copies: of a module from Python two names may stand for one tensor, which safetensors refuses
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in saved.weights(entry).items()}
    data = safetensors.torch.save(weights, metadata={"format": "pt"})
    write_atomically(folder / entry["file"], data)
    return {**entry, "sha256": hashlib.sha256(data).hexdigest()}


def _check_target(target: Path, saved: Saved, own: bool) -> None:
    """Refuse a folder with anything else than an earlier export of the same run."""
    if not target.exists():
        return
    if not target.is_dir():
        raise FedfillError(
            f"to: {target} is a file; allowed: a folder that is new, empty or an earlier export of this run"
        )
    try:
        names = sorted(path.name for path in target.iterdir() if not path.name.startswith(".export-"))
    except OSError as error:
        raise FedfillError(f"to: can't read {target} ({error.strerror or error})") from error
    if strangers := [name for name in names if name not in FILES]:
        raise FedfillError(
            f"to: {target} holds something else ({strangers[0]}); allowed: a folder that is new, empty or an earlier export of this run"
        )
    if own or CARD not in names:
        return
    try:
        held = saved_at(target).card.get("run", {})
    except FedfillError as error:
        raise FedfillError(
            f"to: {target} holds a model that can't be read ({error}); choose another folder or remove it"
        ) from error
    if held != json.loads(to_json(saved.card["run"])):  # all of it: the digest of a run with noise is not in it
        raise FedfillError(
            f"to: {target} holds the model of another run ({held.get('algorithm')} on {held.get('data')}, {held.get('rounds')} rounds); "
            "choose another folder or remove it"
        )


def _samples(saved: Saved, place: RunDirectory, data: Any, data_dir: Any, setting: str) -> Tensor:
    """Real inputs on which a program is compared with the model: the first of the test set."""
    from fedfill.studies.programs import CHECKED, require

    require(setting)
    source = source_of_run(place, place.read_experiment(setting), data, data_dir, setting)
    inputs: Tensor = source.test.inputs[:CHECKED]
    wanted = saved.card["inputs"]
    if list(inputs.shape[1:]) != wanted["shape"] or str(inputs.dtype) != f"torch.{wanted['dtype']}":
        raise FedfillError(
            f"{setting}: the data have {inputs.dtype} inputs of shape {list(inputs.shape[1:])}; allowed: those of the run, {wanted['dtype']} of "
            f"shape {wanted['shape']}"
        )
    return inputs
