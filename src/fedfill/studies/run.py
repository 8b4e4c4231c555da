"""Experiments: run one, or go on with one that was stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack, overload

import torch

from fedfill import __version__
from fedfill.algorithms import Algorithm, as_algorithm
from fedfill.data.partitions import Partition
from fedfill.engines.local import choose_device
from fedfill.errors import A_FUNCTION, A_RUN, FedfillError, Kept, checked, expect, path_of
from fedfill.experiment.loop import OnRound, execute
from fedfill.experiment.more_rounds import lengthen
from fedfill.experiment.own import Network
from fedfill.experiment.prepare import Prepared, arrange, default_directory, prepare
from fedfill.experiment.settings import INCIDENTAL, PLACES, Experiment, in_words
from fedfill.experiment.summary import Result
from fedfill.options import Changes, Options
from fedfill.own_parts import absolute
from fedfill.runs.directory import RunDirectory
from fedfill.runs.progress import both, watched
from fedfill.training.precision import require_fast

OnRun = Callable[[str, int], OnRound | None]


@overload
def run(
    algorithm: type[Algorithm],
    *,
    data: Any = ...,
    partition: Partition = ...,
    model: Network = ...,
    out: str | Path | None = ...,
    on_round: OnRound | None = ...,
    quiet: bool = ...,
    **options: Any,  # the settings of a class of one's own are not known here
) -> Result: ...


@overload
def run(
    algorithm: str,
    *,
    data: Any = ...,
    partition: Partition = ...,
    model: Network = ...,
    out: str | Path | None = ...,
    on_round: OnRound | None = ...,
    quiet: bool = ...,
    **options: Unpack[Options],
) -> Result: ...


def run(
    algorithm: str | type[Algorithm],
    *,
    data: Any = "digits",
    partition: Partition = "dirichlet:0.5",
    model: Network = "auto",
    out: str | Path | None = None,
    on_round: OnRound | None = None,
    quiet: bool = False,
    **options: Any,
) -> Result:
    """Run one experiment.

    Example::

        result = fedfill.run("fedavg", data="digits", partition="dirichlet:0.5", clients=10, rounds=20)
        result.summary["accuracy"], result.curve, result.to_frame(), result.by_client()

    Args:
        algorithm: A name of ``fedfill list algorithms``, or an `Algorithm` class of your own, as a class or as ``"FILE.py:NAME"``.
        data: A name of ``fedfill list datasets``; the path of a folder or a table; or a DataFrame with a column ``label``; ``(inputs,
            labels)`` arrays, with ``(test inputs, test labels)``
            behind them where there are any; a ``datasets.Dataset`` or ``DatasetDict``; a list with one of these for each client, or a
            dict with one for each domain.
        partition: Words such as ``"dirichlet:0.5"`` or ``"domain"``; a list of indices for each client, or a dict of them by the clients'
            names; a function of labels, a
            number of clients and a ``numpy.random.Generator`` that makes such lists, also as ``"FILE.py:NAME"``; or a partitioner object of
            ``flwr_datasets``.
        model: A name of ``fedfill list models``; a ``torch.nn.Module`` that has the parts which the algorithm names; or a class or
            function that makes one, given ``shape`` and ``classes`` where it has such parameters, also as ``"FILE.py:NAME"``.
        out: The run directory; None: one below ``runs/`` with a name of its own.
        on_round: Called after each round with its record and the number of rounds.
        quiet: Show no progress. Without it one line moves on a terminal and in a notebook, and nothing is shown elsewhere.
        **options: Fields of `Experiment` (``clients``, ``rounds``, ``seed``, ``participation``, ``data_dir``, ``workers``, ...)
            and settings of the algorithm, its training and the model (``local_epochs``, ``alpha``, ``latent_activation``, ...).

    Returns:
        The finished run. The same experiment in the same folder is continued, or read where it was finished.

    Raises:
        FedfillError: Where anything that was given is not allowed.
    """
    path = None if out is None else path_of("out", out)
    expect("on_round", on_round, Callable | None, A_FUNCTION)
    if path is not None:
        RunDirectory(path).require_idle()
    with watched(quiet) as follow:
        followed = follow(str(getattr(algorithm, "name", algorithm)))
        prepared = arrange(algorithm, data=data, partition=partition, model=model, **options)
        return launch(prepared, path or default_directory(prepared), both(on_round, followed))


def launch(prepared: Prepared, path: Path, on_round: OnRound | None = None) -> Result:
    """Run an experiment on the engine that it names."""
    experiment = prepared.experiment
    # workers of a cluster see for themselves, and what is finished can be read anywhere
    if experiment.precision != "float32" and not experiment.ray_address and not (path / "summary.json").exists():
        require_fast(torch.device("cuda") if experiment.gpus_per_worker else choose_device(experiment.device))
    if prepared.experiment.engine == "flower":
        from fedfill.deployment.rehearsal import rehearse  # here and below: other runs have no use for it

        return rehearse(prepared, path, on_round)
    return execute(prepared, path, on_round)


def follower(on_run: OnRun | None, label: str, seed: int) -> OnRound | None:
    """What a caller's function returned for one run.

    Args:
        on_run: The caller's; None: there is none.
        label: Of the run.
        seed: Likewise.

    Returns:
        What to call after each round, or None.

    Raises:
        FedfillError: Where it returned something else.
    """
    found = (on_run(label, seed) if on_run is not None else None) or None
    expect("on_run, which returned", found, Callable | None, "a function, or None")
    return found


def resume(
    directory: str | Path | Kept,
    *,
    data: Any = None,
    partition: Partition | None = None,
    model: Network | None = None,
    algorithm: str | type[Algorithm] | None = None,
    rounds: int | None = None,
    on_round: OnRound | None = None,
    workers: int | None = None,
    device: str | None = None,
    data_dir: str | Path | None = None,
    quiet: bool = False,
    **options: Unpack[Changes],
) -> Result:
    """Continue a run that was stopped or killed, or give a finished one more rounds.

    It ends with the same bits as one that was not stopped, and that had so many rounds from the start.

    Example::

        fedfill.resume("runs/first", rounds=50)

    Args:
        directory: The run directory, or what `run` returned.
        data: Again what came from Python, where it did.
        partition: Likewise; or ``"FILE.py:NAME"`` where its file has moved.
        model: Likewise.
        algorithm: Likewise.
        rounds: More rounds than it has; None: those that it has.
        on_round: Called after each round.
        workers: Another number of threads than before.
        device: Another device than before.
        data_dir: Another folder with the same data.
        quiet: As in `run`.
        **options: Further options on how it runs and how long it waits for whom: ``min_replies``, ``reply_timeout``, ``ray_address``,
            ``gpus_per_worker``; and ``start_from`` and ``extra``, where what it began with has moved.

    Returns:
        The finished run.

    Raises:
        FedfillError: Where the folder holds no run, or the data or the model are not the same, or the run would have begun
            otherwise with more rounds.
    """
    folder = RunDirectory(path_of("directory", directory, A_RUN))
    expect("on_round", on_round, Callable | None, A_FUNCTION)
    changes: dict[str, Any] = {**options}
    if (folder.path / "deployment.toml").exists():
        given = {"data": data, "partition": partition, "model": model, "algorithm": algorithm, "workers": workers}
        given |= {"rounds": rounds, "device": device, "data_dir": data_dir, **changes}
        if any(value is not None for value in given.values()):
            raise FedfillError(
                "resume: a deployment goes on as its app says, and no option can change it; edit the app's experiment.toml"
            )
        from fedfill.deployment.rehearsal import resubmit

        with watched(quiet) as follow:
            return resubmit(folder.path, both(on_round, follow(folder.path.name)))
    changes |= {"workers": workers, "device": device, "data_dir": data_dir}
    folder.require_idle()
    with watched(quiet) as follow:
        followed = follow(folder.path.name)
        prepared = reopen(folder, data=data, partition=partition, model=model, algorithm=algorithm, **changes)
        if rounds is not None:
            asked = checked(Experiment, {"algorithm": "", "rounds": rounds}, "option").rounds
            prepared = lengthen(prepared, folder, asked)
        return launch(prepared, folder.path, both(on_round, followed))


def reopen(
    folder: RunDirectory,
    *,
    setting: str = "resume",
    data: Any = None,
    partition: Any = None,
    model: Network | None = None,
    algorithm: str | type[Algorithm] | None = None,
    **changes: Any,
) -> Prepared:
    """What a run was started with, prepared again.

    Args:
        folder: The run directory.
        setting: What an error's sentence begins with.
        data: Again what came from Python, where it did.
        partition: Likewise.
        model: Likewise.
        algorithm: Likewise.
        **changes: Options on how and where it runs, such as ``data_dir``; None: as before.

    Returns:
        All parts, with the digest of before.

    Raises:
        FedfillError: Where the folder holds no run, or the data or the model are not the same.
    """
    document = folder.read_experiment(setting)
    digest, version = document.pop("digest", ""), document.pop("version", "")
    if version != __version__:
        raise FedfillError(f"{setting}: {folder.path} was started with fedfill {version}, and this is {__version__}")
    allowed = INCIDENTAL | (PLACES & document.keys())
    unknown = changes.keys() - allowed
    if unknown:
        raise FedfillError(f"{setting}: '{min(unknown)}' can't be changed; allowed: {', '.join(sorted(allowed))}")
    document |= in_words({key: value for key, value in changes.items() if value is not None})
    parts = {"partition": partition, "model": model, "algorithm": algorithm}
    moved = {what: absolute(word, what) for what, word in parts.items() if isinstance(word, str)}
    if moved:
        document["own"] = {**document.get("own", {}), **moved}
    if algorithm is not None and "algorithm" not in moved:
        as_algorithm(algorithm, repr(algorithm))
    experiment = checked(Experiment, document, "option")
    prepared = prepare(experiment, data=data, **{what: part for what, part in parts.items() if what not in moved})
    if prepared.digest != digest:
        begun = " (nor may be the weights of start_from, where that run has changed)" if experiment.start_from else ""
        raise FedfillError(
            f"{setting}: data, model or settings are not the ones that {folder.path} was started with{begun}"
        )
    return prepared
