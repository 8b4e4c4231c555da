"""More rounds for a run that has had its own: the run is made one that was started with more, where that is the same thing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import tomli_w

from fedfill.algorithms import Algorithm
from fedfill.errors import FedfillError
from fedfill.experiment.prepare import Prepared, sample_of
from fedfill.runs.directory import RunDirectory


def lengthen(prepared: Prepared, directory: RunDirectory, rounds: int) -> Prepared:
    """Give a run more rounds.

    The summary goes first, then the checkpoint gets the new digest beside the old one, then ``experiment.toml`` is replaced. So
    a kill in between leaves a run without a summary that goes on as the old one or as the new one.

    Args:
        prepared: The run as it was.
        directory: Its folder.
        rounds: At least those that it has.

    Returns:
        The run as if it had been started with so many.

    Raises:
        FedfillError: Where it would have begun otherwise; nothing is written then.
    """
    before = prepared.experiment.rounds
    if rounds < before:
        raise FedfillError(f"rounds: found {rounds} for {directory.path}; allowed: at least the {before} that it has")
    if rounds == before:  # also after a kill behind the last of the three writes
        return prepared
    if prepared.algorithm.single_round:
        raise FedfillError(
            f"rounds: found {rounds} for {directory.path}, and {prepared.algorithm.name} takes one round; allowed: 1"
        )
    if prepared.experiment.engine == "flower":
        raise FedfillError(
            f"rounds: found {rounds} for {directory.path}, whose hosts keep what they have for {before} rounds; allowed: those, or a new run"
        )
    longer = _with_rounds(prepared, rounds)
    directory.lock()
    try:
        document = directory.read_experiment("rounds")
        if document["digest"] != prepared.digest:
            raise FedfillError(f"rounds: another process has changed {directory.path}; allowed: one at a time")
        checkpoint = directory.read_checkpoint("rounds")
        if checkpoint is not None:
            if prepared.digest not in (checkpoint.get("digest"), checkpoint.get("was")):
                raise FedfillError(
                    f"rounds: the checkpoint in {directory.path} is another experiment's; start again in a new folder"
                )
            _require_blind(checkpoint, directory, rounds, prepared.algorithm.name)
        directory.remove_summary()
        if checkpoint is not None:
            directory.write_checkpoint({**checkpoint, "digest": longer.digest, "was": prepared.digest})
        directory.write(
            "experiment.toml", tomli_w.dumps({**document, "digest": longer.digest, "rounds": rounds}).encode()
        )
    finally:
        directory.close()
    return longer


def _with_rounds(prepared: Prepared, rounds: int) -> Prepared:
    """The same run with another number of rounds, where its settings would be the same."""
    settings, before = prepared.algorithm, prepared.experiment.rounds
    inputs = sample_of(prepared.federation)
    resolved = settings.resolved(rounds=rounds, model=prepared.model, inputs=inputs)
    _require_equal(settings, resolved, rounds)
    for name in type(settings).model_fields:
        if getattr(settings, name) is None or type(settings).model_fields[name].default is not None:
            continue
        # it may have been left open, and then the number of rounds may have decided
        left_open = settings.model_copy(update={name: None})
        try:
            found = [left_open.resolved(rounds=t, model=prepared.model, inputs=inputs) for t in (before, rounds)]
        except FedfillError:  # it has to be given, so it was
            continue
        if getattr(found[0], name) == getattr(settings, name):
            _require_equal(settings, found[1], rounds)
    return replace(prepared, experiment=prepared.experiment.model_copy(update={"rounds": rounds}), algorithm=resolved)


def _require_equal(settings: Algorithm, longer: Algorithm, rounds: int) -> None:
    mine, other = settings.model_dump(), longer.model_dump()
    for name, value in mine.items():
        if other[name] != value:
            raise FedfillError(
                f"rounds: found {rounds}, with which {name} would be {other[name]} from the start, and this run began with "
                f"{value}; allowed: a new run, with {name}={value} if that is meant"
            )


def _require_blind(checkpoint: Mapping[str, Any], directory: RunDirectory, rounds: int, algorithm: str) -> None:
    """Refuse where the algorithm asked how many rounds there would be, and did by the answer what can't be undone."""
    asked = checkpoint.get("asked_rounds")
    if asked is False:
        return
    why = (
        f"{algorithm} in {directory.path} went by the number of rounds from the first one"
        if asked
        else f"the checkpoint in {directory.path} is of a release that doesn't say whether {algorithm} went by the number of rounds"
    )
    raise FedfillError(f"rounds: found {rounds}, but {why}; allowed: a new run")
