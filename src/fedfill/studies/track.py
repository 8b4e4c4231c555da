"""Trackers: a run's figures, round by round, for TensorBoard, MLflow or Weights & Biases; each an extra.

All of it is one `on_round` callback, as anybody's own would be: it is called with the record of each round (a line of
``rounds.jsonl``) and the number of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fedfill.errors import FedfillError, did_you_mean
from fedfill.experiment.loop import OnRound


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a round: what is one number, and the privacy account's epsilon where there is one."""
    found = {
        name: float(v) for name, v in record.items() if isinstance(v, int | float) and name not in ("round", "step")
    }
    epsilon = record.get("privacy", {}).get("total_epsilon")
    return found if epsilon is None else {**found, "epsilon": float(epsilon)}


def tensorboard(label: str, folder: Path) -> OnRound:
    """Event files for ``tensorboard --logdir``, in `folder`."""
    writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder / label))

    def on_round(record: dict[str, Any], rounds: int) -> None:
        if "round" in record:
            for name, value in numbers(record).items():
                writer.add_scalar(name, value, record["round"])
            writer.flush()

    return on_round


def mlflow(label: str, folder: Path) -> OnRound:
    """A run of MLflow, where its own settings (MLFLOW_TRACKING_URI) say; `folder` stays empty."""
    package = import_module("mlflow")
    client, begun = package.MlflowClient(), list[str]()

    def on_round(record: dict[str, Any], rounds: int) -> None:
        if "round" in record:
            if not begun:  # a run that is only read has no rounds, and no run is ever the process's active one
                place = package.set_experiment("fedfill").experiment_id
                begun.append(client.create_run(place, run_name=label).info.run_id)
            for name, value in numbers(record).items():
                client.log_metric(begun[0], name, value, step=record["round"])
            if record["round"] == rounds:
                client.set_terminated(begun[0])

    return on_round


def wandb(label: str, folder: Path) -> OnRound:
    """A run of Weights & Biases, where its own settings (WANDB_MODE, WANDB_PROJECT) say."""
    folder.mkdir(parents=True, exist_ok=True)
    run = import_module("wandb").init(name=label, dir=str(folder), reinit="finish_previous")

    def on_round(record: dict[str, Any], rounds: int) -> None:
        if "round" in record:
            run.log(numbers(record), step=record["round"])
            if record["round"] == rounds:
                run.finish()

    return on_round


TRACKERS: dict[str, Callable[[str, Path], OnRound]] = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}
"""By the names that ``--track`` takes; the packages are extras of the same names."""


def track(tracker: str, label: str, folder: str | Path = "runs/tracked") -> OnRound:
    """What to call after each round, so that a tracker shows it.

    Args:
        tracker: ``tensorboard``, ``mlflow`` or ``wandb``.
        label: What the run is called there.
        folder: Where its files go, in a folder of the tracker's name.

    Returns:
        For ``on_round`` of `fedfill.run`.

    Raises:
        FedfillError: Where the tracker is unknown, or its package is not installed.
    """
    if tracker not in TRACKERS:
        raise FedfillError(f"track: found '{tracker}'; {did_you_mean(tracker, TRACKERS)}")
    try:
        import_module(tracker)
    except ImportError as error:
        raise FedfillError(
            f"track: {tracker} needs a package that is not installed ({error}); allowed after pip install 'fedfill[{tracker}]'"
        ) from error
    name = label.replace(":", "-").replace(",", "-").replace(" ", "-").replace("/", "-")
    return TRACKERS[tracker](name, Path(folder) / tracker)
