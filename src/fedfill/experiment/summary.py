"""The figures to quote of a run, and the finished run itself."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedfill import __version__, tree
from fedfill.data.names import is_place
from fedfill.data.schema import Schema
from fedfill.engines.local import processors
from fedfill.experiment.prepare import Prepared
from fedfill.experiment.verdicts import balanced_accuracy, of_run
from fedfill.protocol.server import Server
from fedfill.runs.shown import html_table
from fedfill.training.evaluation import FAIRNESS
from fedfill.tree import Weights

if TYPE_CHECKING:
    import pandas

OF_TRAINED_HEAD = ("accuracy_of_trained_head", "mean_client_accuracy_of_trained_head")
"""Figures of the last round before a new last layer was fitted, where one was."""


def accuracy_by_round(records: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Accuracy on the test set of the rounds that were evaluated."""
    return {record["round"]: record["accuracy"] for record in records if "accuracy" in record}


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        directory: Where it lies.
        summary: The figures to quote, as in ``summary.json``.
        rounds: One record for each round; those without an evaluation have no figure of one.
        weights: The final global weights; of an algorithm with personal models all of these, as ``<client>.<name>``, where
            they don't stay with their hosts.
        resumed_after: Rounds that had been done before this call: all of them where the run was finished and only read.
    """

    directory: Path
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    weights: Weights
    resumed_after: int = 0

    @property
    def curve(self) -> dict[int, float]:
        """Accuracy on the test set by round, of the rounds that were evaluated."""
        return accuracy_by_round(self.rounds)

    @property
    def was_finished(self) -> bool:
        """Whether every round had been done before, so that nothing was trained."""
        return self.resumed_after == len(self.rounds)

    @property
    def title(self) -> str:
        """What was run, in a line."""
        found = self.summary
        return f"{found['algorithm']} on {found['dataset']}, {found['partition']}, {found['clients']} clients, seed {found['seed']}"

    def to_frame(self) -> pandas.DataFrame:
        """The rounds as a table: a column for each figure that is one number or word, and nothing where a round has none."""
        import pandas  # here: it takes half a second

        plain = [{k: v for k, v in record.items() if not isinstance(v, list | dict)} for record in self.rounds]
        return pandas.DataFrame(plain).set_index("round")

    def by_client(self) -> pandas.DataFrame:
        """The clients after the last round: name, samples of the own test split (None: nobody knows), accuracy on it (NaN: it is empty)."""
        import pandas

        accuracies = self.summary["accuracy_by_client"]
        names = self.summary.get("client_names") or [f"client {i}" for i in range(len(accuracies))]
        sizes = self.summary.get("own_test_samples") or [None] * len(accuracies)
        columns = {"client": names, "own_test_samples": sizes, "accuracy": accuracies}
        return pandas.DataFrame(columns).astype({"accuracy": float}).set_index("client")

    def __repr__(self) -> str:
        score = self.summary["accuracy"]
        scored = "" if score is None else f" accuracy {score:.4f}"
        return f"<Result: {self.title}:{scored} after {len(self.rounds)} round{'s' if len(self.rounds) != 1 else ''}, in {self.directory}>"

    def _repr_html_(self) -> str:
        names = (
            "accuracy",
            "mean_client_accuracy",
            "worst_client_accuracy",
            "loss",
            "bytes_up",
            "bytes_down",
            "seconds",
        )
        rows = [(name, self.summary[name]) for name in names if self.summary.get(name) is not None]
        cells = [(name, f"{value:.4f}" if isinstance(value, float) else f"{value:,}") for name, value in rows]
        return html_table(
            f"{self.title}, {len(self.rounds)} rounds", ("figure", "last round"), [*cells, ("folder", self.directory)]
        )


def selected(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The round that the validation splits choose: of the highest mean over clients, the first of several; none without one."""
    judged = [r for r in records if any(share is not None for share in r.get("validation_by_client", []))]
    if not judged:
        return {}
    means = [statistics.fmean(share for share in r["validation_by_client"] if share is not None) for r in judged]
    best = judged[means.index(max(means))]
    figures = ("accuracy", "accuracy_by_client", "mean_client_accuracy")
    return {
        "selected_round": best["round"],
        "selected_validation": max(means),
        **{f"selected_{name}": best[name] for name in figures},
    }


def target_of(schema: Schema | None) -> dict[str, str]:
    """What a record or a summary says of what is learnt: nothing where it is classes."""
    return {} if schema is None or schema.target.kind == "classes" else {"target": schema.target.kind}


def _machine(device: str) -> str:
    """What it ran on, in a few words."""
    kind = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{processors()} processors"
    return f"{platform.machine()}, {kind}, torch {torch.__version__}"


def _when(record: dict[str, Any]) -> str:
    return f"round {record['round']}" if "round" in record else f"preparation, step {record['step']}"


def summarise(
    prepared: Prepared,
    server: Server,
    preparation: list[dict[str, Any]],
    records: list[dict[str, Any]],
    seconds: float,
    workers: int,
    device: str,
    weights: Weights,
    measured: Mapping[str, Any],
) -> dict[str, Any]:
    """The figures to quote.

    Args:
        prepared: What was run.
        server: After the last round.
        preparation: Records of the steps before the first round.
        records: Of all rounds.
        seconds: In these steps and in rounds, evaluation included.
        workers: Threads over clients.
        device: Where it ran.
        weights: Those of the result.
        measured: What `fedfill.experiment.quality` found of it.

    Returns:
        The document of ``summary.json``.
    """
    experiment, last = prepared.experiment, records[-1]
    judged = [record for record in records if "accuracy" in record]  # of rounds with an evaluation
    best = max(judged, key=lambda record: (record["accuracy"], -record["round"]), default=None)
    own, held = ([len(getattr(c, part)) for c in prepared.federation.clients] for part in ("test", "validation"))
    target = target_of(prepared.federation.schema)
    figures = {
        "algorithm": experiment.algorithm,
        "dataset": Path(experiment.data).name if is_place(experiment.data) else experiment.data,
        "partition": experiment.partition,
        "clients": experiment.clients,
        "rounds": experiment.rounds,
        "seed": experiment.seed,
        "engine": experiment.engine,
        **({} if experiment.test_fraction is None else {"test_fraction": experiment.test_fraction}),
        "personal": prepared.algorithm.personal,
        "version": __version__,
        **target,
        "accuracy": last.get("accuracy"),
        "loss": last.get("loss"),
        "best_accuracy": best and best["accuracy"],
        "best_round": best and best["round"],
        **selected(records),
        **{name: last[name] for name in OF_TRAINED_HEAD if name in last},
        "accuracy_by_class": (by_class := last.get("accuracy_by_class", [])),
        "balanced_accuracy": balanced_accuracy(by_class) if not target else None,
        **measured,
        "largest_class": last.get("largest_class"),
        "accuracy_by_client": last.get("accuracy_by_client", [None] * len(own)),
        "client_names": prepared.federation.called,
        # a party of a deployment knows nobody's
        "own_test_samples": own if any(own) else None,
        **({"validation_samples": held} if any(held) else {}),
        **{name: last.get(name) for name in FAIRNESS},
        "bytes_up": server.costs.bytes_up,
        "bytes_down": server.costs.bytes_down,
        "bytes_by_handler": {name: {"down": down, "up": up} for name, (down, up) in server.costs.legs.items()},
        "train_samples": server.costs.train_samples,
        "seconds": round(seconds, 3),
        "seconds_in_fit": round(server.costs.fit_seconds, 3),
        "workers": workers,
        "device": device,
        "machine": _machine(device),
        "weights_sha256": tree.sha256(weights),
        **({"preparation": preparation} if preparation else {}),
        "lost_replies": sum(len(record["lost"]) for record in (*preparation, *records)),
        "warnings": [f"{_when(record)}: {text}" for record in (*preparation, *records) for text in record["warnings"]],
        "notes": list(prepared.federation.notes),
        "privacy": server.ledger.account(experiment.delta, prepared.told),
    }
    return {**figures, "verdicts": [asdict(verdict) for verdict in of_run(figures, records)]}
