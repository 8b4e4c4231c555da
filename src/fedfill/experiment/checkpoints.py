"""Checkpoints of a run: what is written after each round, and how a run goes on from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from fedfill import tree
from fedfill.errors import FedfillError
from fedfill.experiment.prepare import Prepared
from fedfill.privacy.ledger import Ledger
from fedfill.protocol.client import State
from fedfill.protocol.engine import Engine
from fedfill.protocol.server import Costs, Server
from fedfill.runs.directory import RunDirectory
from fedfill.tree import Weights


class Observed(Server):
    """Notices whether an algorithm asks for the number of rounds, by which it may have done what more rounds would change."""

    asked: bool | None = False
    """None: the checkpoint doesn't say."""

    @property
    def rounds(self) -> int:
        """Number of rounds of the whole run."""
        self.asked = True
        return self._rounds

    @rounds.setter
    def rounds(self, number: int) -> None:
        self._rounds = number


def keep(
    prepared: Prepared, directory: RunDirectory, server: Observed, engine: Engine, *, rounds: int, weights: Weights,
    seconds: float = 0.0, preparation: Sequence[dict[str, Any]] = (),
) -> None:  # fmt: skip
    """Write where a run stands.

    Args:
        prepared: The run.
        directory: Its folder.
        server: After the last finished round, or step before the first.
        engine: Likewise.
        rounds: Finished ones.
        weights: What is evaluated.
        seconds: Of all rounds and steps so far.
        preparation: Records of the steps before the first round.
    """
    directory.write_checkpoint(
        {
            "digest": prepared.digest,
            "rounds": rounds,
            "asked_rounds": server.asked,
            "seconds": seconds,
            "preparation": list(preparation),
            "weights": weights,
            "server": server.state.tree(),
            "clients": engine.states(),
            "origin": engine.origin,
            "ledger": server.ledger.state(),
            "costs": asdict(server.costs),
        }
    )


def keep_account(
    prepared: Prepared, directory: RunDirectory, server: Observed, fresh: Observed, engine: Engine
) -> None:
    """Write what was released and spent by a round that failed into the checkpoint before it, of which all else stays.

    Args:
        prepared: The run.
        directory: Its folder.
        server: As it is in the middle of that round.
        fresh: As one is before the first round, where there is no checkpoint yet.
        engine: Likewise.
    """
    checkpoint = directory.read_checkpoint()
    if checkpoint is None:
        fresh.ledger, fresh.costs = server.ledger, server.costs
        keep(prepared, directory, fresh, engine, rounds=0, weights=fresh.initial)
    else:
        directory.write_checkpoint({**checkpoint, "ledger": server.ledger.state(), "costs": asdict(server.costs)})


def read(digest: str, directory: RunDirectory) -> dict[str, Any] | None:
    """The checkpoint of an experiment.

    Args:
        digest: The experiment's.
        directory: Its folder.

    Returns:
        The checkpoint; None where there is none yet.

    Raises:
        FedfillError: Where it is another experiment's.
    """
    checkpoint = directory.read_checkpoint()
    # one of before the run was given more rounds, too
    if checkpoint is not None and digest not in (checkpoint.get("digest"), checkpoint.get("was")):
        raise FedfillError(
            f"resume: the checkpoint in {directory.path} is another experiment's; start again in a new folder"
        )
    return checkpoint


def restore(
    prepared: Prepared, directory: RunDirectory, server: Observed, engine: Engine, device: torch.device
) -> tuple[int, float, list[dict[str, Any]]]:
    """Bring server and engine to where a run stands.

    Args:
        prepared: The run.
        directory: Its folder.
        server: As it is before the first round.
        engine: Likewise.
        device: Where the server computes.

    Returns:
        Finished rounds, seconds so far, and records of the steps before the first round.

    Raises:
        FedfillError: Where the algorithm keeps something that the checkpoint lacks.
    """
    checkpoint = read(prepared.digest, directory)
    if checkpoint is None:
        return 0, 0.0, []
    _require(checkpoint["server"], server.state.tree(), "the server", prepared, directory)
    for i, state in checkpoint["clients"].items():
        _require(state, prepared.algorithm.client_state(), f"client {i}", prepared, directory)
    server.state = State(tree.to(checkpoint["server"], device))
    server.asked = checkpoint.get("asked_rounds")
    engine.origin = checkpoint.get("origin", "")
    engine.restore(checkpoint["clients"])
    server.ledger = Ledger.restore(checkpoint["ledger"])
    server.costs = Costs(**checkpoint["costs"])
    return int(checkpoint["rounds"]), float(checkpoint["seconds"]), list(checkpoint.get("preparation", []))


def _require(
    kept: Mapping[str, Any], first: Mapping[str, Any], who: str, prepared: Prepared, directory: RunDirectory
) -> None:
    """Refuse a state without what the algorithm would have put there first: between two releases the version tells nothing."""
    if missing := sorted(first.keys() - kept.keys()):
        raise FedfillError(
            f"resume: the checkpoint in {directory.path} was written by another state of fedfill: what {who} keeps in it has no "
            f"'{missing[0]}', which {prepared.algorithm.name} needs; start again in a new folder, or go on with the fedfill that wrote it"
        )
