"""Finished runs as their folders hold them, for whoever looks at what they made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedfill.algorithms import Algorithm, find, known_algorithms
from fedfill.data.samples import Samples
from fedfill.errors import FedfillError
from fedfill.experiment.before import came_before
from fedfill.experiment.loop import recorded, synthetic_images
from fedfill.experiment.prepare import Prepared
from fedfill.experiment.settings import PYTHON
from fedfill.experiment.summary import Result
from fedfill.runs.directory import RunDirectory
from fedfill.studies.run import reopen

MOST = 100_000
"""Samples of each class that may be asked for."""


def require_global(place: RunDirectory, setting: str) -> None:
    """Refuse, before data are read, what has no global model or can't be prepared from its folder alone."""
    if (place.path / "deployment.toml").exists():
        raise FedfillError(
            f"{setting}: {place.path} is a deployment's, whose data stay on their hosts; allowed: runs of 'fedfill run' and of rehearsals"
        )
    document = place.read_experiment(setting)
    for what in ("data", "partition", "model"):
        if str(document.get(what)).split(":")[0] == PYTHON and what not in document.get("own", {}):
            raise FedfillError(
                f"{setting}: the {what} of {place.path} came from Python; allowed: runs whose data, partition and model have names"
            )
    if _kind_of(document).personal:
        raise FedfillError(
            f"{setting}: {place.path} is a run of {document['algorithm']}, whose clients have models of their own; "
            "allowed: runs with a global model"
        )
    if place.summary() is None:
        raise FedfillError(
            f"{setting}: {place.path} holds {len(place.rounds())} of {document.get('rounds')} rounds; 'fedfill resume {place.path}' finishes it"
        )


def _kind_of(document: Mapping[str, Any]) -> type[Algorithm]:
    return find(str(document.get("own", {}).get("algorithm", document.get("algorithm"))))


def require_maker(place: RunDirectory, setting: str) -> None:
    """Refuse, before data are read, a run whose algorithm makes no synthetic samples."""
    require_global(place, setting)
    kind = _kind_of(place.read_experiment(setting))
    if kind.synthetic is Algorithm.synthetic:
        makers = [name for name, one in known_algorithms().items() if one.synthetic is not Algorithm.synthetic]
        raise FedfillError(
            f"{setting}: {place.path} is a run of {kind.name}, whose server makes no inputs such as clients hold (features, and what "
            f"clients make for themselves, are none); allowed: runs of {', '.join(makers)}"
        )


def account_of(document: Mapping[str, Any], summary: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The account of privacy of what a run made, with what came before it.

    Args:
        document: Its ``experiment.toml``.
        summary: Its ``summary.json``.
        what: What the run made, such as "this model".

    Returns:
        ``statement``, ``epsilon`` and ``epsilon_added`` (None: no guarantee) and ``delta``.
    """
    account, before = summary["privacy"], came_before(document)
    above = [sentence for sentence in before if sentence not in account["statement"]]
    if before:
        above.append(f"In total: no guarantee is known for {what}.")
    return {
        # what came before was made of records too, perhaps of these: the run's own figures are none for the result
        "epsilon": None if before else account["total_epsilon"],
        "epsilon_added": None if before else account.get("total_epsilon_added"),
        "delta": account.get("delta"),
        "statement": " ".join([account["statement"], *above]),
    }


def finished(
    place: RunDirectory, setting: str, data_dir: str | Path | None, device: str | None
) -> tuple[Prepared, Result]:
    """A finished run, prepared again, and what it found.

    Args:
        place: Its folder.
        setting: What an error's sentence begins with.
        data_dir: Another folder with the same data.
        device: Another device than the run's.

    Returns:
        Its parts and its result.
    """
    prepared = reopen(place, setting=setting, data_dir=data_dir, device=device)
    return prepared, recorded(prepared.digest, prepared.experiment.rounds, place, place.summary() or {})


def require_count(per_class: object) -> None:
    """Refuse what is no number of samples of each class, from 1 to `MOST`."""
    if type(per_class) is not int or not 1 <= per_class <= MOST:
        raise FedfillError(f"per_class: found {per_class!r}; allowed: a whole number from 1 to {MOST}")


def made_by(
    run: Prepared, place: RunDirectory, setting: str, device: torch.device, per_class: int | None = None
) -> Samples:
    """The synthetic samples of a finished run.

    Args:
        run: Prepared again.
        place: Its folder.
        setting: What an error's sentence begins with.
        device: Where they are made.
        per_class: So many of each class; None: those of the run's picture.

    Returns:
        At least one; -1 where one has no label, and none of these with `per_class`.

    Raises:
        FedfillError: Where there are none, or they are not of the kind that the clients hold, such as features of it.
    """
    samples = synthetic_images(run, place, device, per_class)
    if samples is not None and per_class is not None:
        samples = samples.labelled
    if samples is None or not len(samples):
        name = run.experiment.algorithm
        hint = (
            "" if per_class is not None else ", or --per-class with a number, where the algorithm makes some on demand"
        )
        raise FedfillError(
            f"{setting}: the run of {name} in {place.path} has ended without synthetic images; allowed: runs that made some{hint}"
        )
    found, wanted = samples.inputs, run.federation.test.inputs
    if found.shape[1:] != wanted.shape[1:] or found.dtype != wanted.dtype:
        raise FedfillError(
            f"{setting}: the run of {run.experiment.algorithm} in {place.path} makes {found.dtype} of shape {list(found.shape[1:])}, such "
            f"as features; allowed: runs that make what their clients hold, {wanted.dtype} of shape {list(wanted.shape[1:])}"
        )
    return samples


def noisy(summary: Mapping[str, Any]) -> bool:
    """Whether anything of a run has noise that hides a record from somebody, total or no total: its seed is no one else's business."""
    figures = ("epsilon", "epsilon_added", "conditional_epsilon", "conditional_epsilon_added")
    return any((entry.get(name) or 0) > 0 for entry in summary["privacy"]["entries"] for name in figures)


def tells(summary: Mapping[str, Any]) -> str:
    """What the model of a run tells of a row; see `fedfill.runs.curves.Findings`."""
    findings = summary.get("findings") or {}
    # the other word is that of runs before version 0.2.0 was out
    return str(findings.get("model_tells", "ranks" if findings.get("ranks_only") else "all"))
