"""A trained model in use: load it, and let it predict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fedfill.engines.local import choose_device
from fedfill.studies.model import Model, Predictions
from fedfill.studies.saved import Run, saved_at


def load(directory: Run, client: str | int | None = None, *, model: nn.Module | None = None) -> Model:
    """A trained model with its classes and its preprocessing.

    Example::

        model = fedfill.load("first")
        model.predict("seven.png").classes

    Args:
        directory: A folder of `fedfill.export`, the directory of a finished run, or what `fedfill.run` returned.
        client: Whose model, where clients have models of their own: an int is a number, a text a name (or, where nobody has
            that name, a number).
        model: The module, where the run's network came from Python; it stays as it is.

    Returns:
        A ``torch.nn.Module`` in evaluation mode, on the CPU.

    Raises:
        FedfillError: Where there is no such model, or it is damaged.
    """
    return saved_at(directory).model(client, model)


def predict(
    directory: Run, paths: Any, client: str | int | None = None, *,
    model: nn.Module | None = None, device: str = "auto", seen: Callable[[int], None] | None = None,
) -> Predictions:  # fmt: skip
    """What a trained model says of new images or of the rows of new tables.

    Example::

        found = fedfill.predict("first", ["seven.png", "photos/"])
        found.classes, found.probabilities, found.top(3), found.to_csv()

    Args:
        directory: As for `load`.
        paths: One or several: images, folders of images at any depth, Parquet files with images; of a table CSV and Parquet
            files. Or what `Model.predict` takes beside paths: arrays, Pillow images, a DataFrame.
        client: As for `load`.
        model: As for `load`.
        device: ``cpu``, ``cuda``, ``cuda:N``, or ``auto`` for a GPU when there is one.
        seen: Of paths, told now and then how many inputs are done.

    Returns:
        A class and a probability for each, in their order; in a folder by the names of the files.

    Raises:
        FedfillError: Where there is no such model, or it takes no such files.
    """
    loaded = load(directory, client, model=model).to(choose_device(device))
    given = list(paths) if isinstance(paths, Iterator) else paths
    return (
        loaded.predict_files([], seen) if isinstance(given, list | tuple) and not given else loaded.predict(given, seen)
    )
