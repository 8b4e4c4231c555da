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


Begun = tuple[Callable[[dict[str, float], int], None], Callable[[], None]]
"""What writes the figures of a round, and what ends the run."""


def tensorboard(label: str, folder: Path) -> Begun:
    """Event files for ``tensorboard --logdir``, in `folder`."""
    writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder / label))

    def write(figures: dict[str, float], number: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, number)
        writer.flush()

    return write, writer.close


def mlflow(label: str, folder: Path) -> Begun:
    """A run of MLflow, where its own settings (MLFLOW_TRACKING_URI) say; `folder` stays empty."""
    package = import_module("mlflow")
    client = package.MlflowClient()  # no run is ever the process's active one
    place = package.set_experiment("fedfill").experiment_id
    run = client.create_run(place, run_name=label).info.run_id

    def write(figures: dict[str, float], number: int) -> None:
        for name, value in figures.items():
            client.log_metric(run, name, value, step=number)

    return write, lambda: client.set_terminated(run)


def wandb(label: str, folder: Path) -> Begun:
    """A run of Weights & Biases, where its own settings (WANDB_MODE, WANDB_PROJECT) say."""
    folder.mkdir(parents=True, exist_ok=True)
    run = import_module("wandb").init(name=label, dir=str(folder), reinit="finish_previous")
    return lambda figures, number: run.log(figures, step=number), run.finish


TRACKERS: dict[str, Callable[[str, Path], Begun]] = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}
"""By the names that ``--track`` takes; the packages are extras of the same names."""


def require(tracker: str) -> None:
    """Refuse a tracker that is unknown, or whose package is not installed."""
    if tracker not in TRACKERS:
        raise FedfillError(f"track: found '{tracker}'; {did_you_mean(tracker, TRACKERS)}")
    try:
        import_module(tracker)
    except ImportError as error:
        raise FedfillError(
            f"track: {tracker} needs a package that is not installed ({error}); allowed after pip install 'fedfill[{tracker}]'"
        ) from error


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
    require(tracker)
    name = label.replace(":", "-").replace(",", "-").replace(" ", "-").replace("/", "-")
    begun: list[Begun] = []

    def on_round(record: dict[str, Any], rounds: int) -> None:
        if "round" not in record:
            return
        if not begun:  # a run that is only read has no rounds, and leaves no trace
            begun.append(TRACKERS[tracker](name, Path(folder) / tracker))
        write, end = begun[0]
        write(numbers(record), record["round"])
        if record["round"] == rounds:
            end()

    return on_round
