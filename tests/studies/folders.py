"""Folders of runs and comparisons, written by hand: what a report reads, in any size, without any training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from PIL import Image

from fedfill import __version__
from fedfill.studies.comparison import Comparison, Row, read_figures, record
from fedfill.training.evaluation import FAIRNESS

STATEMENT = "No guarantee covers Update.weights. In total: no differential-privacy guarantee."


def run_folder(
    folder: Path,
    *,
    algorithm: str = "fedavg",
    seed: int = 0,
    curve: Sequence[float] = (0.2, 0.5, 0.8),
    rounds: int | None = None,
    by_client: Sequence[float | None] = (0.9, 0.4, 0.8, 0.7),
    by_class: Sequence[float | None] = (0.9, 0.7, 0.8),
    counts: Sequence[Sequence[int]] | None = ((10, 0, 3), (0, 7, 0), (5, 5, 5), (1, 0, 0)),
    class_names: Sequence[str] = ("cat", "dog", "fish"),
    bytes_each: int = 1_000_000,
    picture: bool = False,
    epsilon: float | None = None,
    experiment: Mapping[str, Any] | None = None,
    summary: Mapping[str, Any] | None = None,
) -> Path:
    """A run's folder; with more `rounds` than the curve has the run is not finished."""
    folder.mkdir(parents=True)
    asked = rounds or len(curve)
    known = [share for share in by_client if share is not None]
    fairness = {name: sum(known) / len(known) for name in FAIRNESS} | {
        "worst_client_accuracy": min(known), "client_variance": 1.0, "class_variance": 2.0,
    }  # fmt: skip
    held = {
        "digest": "0123456789abcdef", "version": __version__, "algorithm": algorithm, "data": "digits", "data_fraction": 1.0,
        "partition": "dirichlet:0.5", "clients": len(by_client), "client_test": 0.1, "participation": 1.0, "rounds": asked, "seed": seed,
        "model": "cnn2", "engine": "local", "device": "auto", "delta": 1e-5, "settings": {"local_epochs": 5, "learning_rate": 0.001},
        "model_settings": {"width": "paper", "latent": "none"}, **(experiment or {}),
    }  # fmt: skip
    (folder / "experiment.toml").write_text(tomli_w.dumps(held))
    records = [
        {
            "round": t, "accuracy": share, "loss": 1.0 / t, "accuracy_by_class": list(by_class),
            "accuracy_by_client": [None if own is None else own * t / len(curve) for own in by_client],
            "most_predicted": 0.5, "largest_class": 0.4, **fairness,
            "privacy": {"total_epsilon": None if epsilon is None else epsilon * t / len(curve), "total_epsilon_added": None, "entries": {}},
            "bytes_up": bytes_each, "bytes_down": bytes_each, "train_samples": 10, "seconds": 1.0, "lost": [], "warnings": [],
        }
        for t, share in enumerate(curve, 1)
    ]  # fmt: skip
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "partition.json").write_text(json.dumps({"class_names": list(class_names), "clients": counts}))
    if picture:
        (folder / "samples").mkdir()
        Image.effect_noise((90, 90), 80).resize((900, 900), Image.Resampling.NEAREST).save(
            folder / "samples" / f"round-{asked:04d}.png"
        )
    if asked == len(curve):
        last = records[-1]
        entry = {
            "released": "Update.weights", "mechanism": "model update, sent as it is", "epsilon": epsilon, "conditional_epsilon": None,
            "epsilon_added": None, "conditional_epsilon_added": None, "delta": 1e-5, "clients": 4, "times": asked, "conditions": [],
        }  # fmt: skip
        document = {
            **{name: held[name] for name in ("algorithm", "partition", "clients", "rounds", "seed", "engine", "version")},
            "dataset": held["data"], "personal": False,
            **{name: last[name] for name in ("accuracy", "loss", "accuracy_by_class", "largest_class", *FAIRNESS)},
            "accuracy_by_client": list(by_client), "balanced_accuracy": 0.8, "own_test_samples": None,
            "best_accuracy": max(curve), "best_round": curve.index(max(curve)) + 1,
            "bytes_up": bytes_each * asked, "bytes_down": bytes_each * asked,
            "bytes_by_handler": {"train": {"up": bytes_each * asked, "down": bytes_each * asked}},
            "train_samples": 10 * asked, "seconds": float(asked), "seconds_in_fit": 1.0, "workers": 1, "device": "cpu", "machine": "a machine",
            "weights_sha256": "ab" * 32, "lost_replies": 0, "warnings": [], "notes": ["Network: cnn2."],
            "privacy": {"entries": [entry], "total_epsilon": epsilon, "total_epsilon_added": None, "delta": 1e-5, "statement": STATEMENT},
            **(summary or {}),
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(document))
    return folder


def comparison_folder(
    folder: Path, finals: Mapping[str, Sequence[float | None]], *, notes: Sequence[str] = (), **run: Any
) -> Path:
    """A comparison's folder: by label the accuracy of each seed, None where training diverged."""
    rows = []
    for label, shares in finals.items():
        folders = [
            None
            if share is None
            else run_folder(
                folder / f"{label.replace(':', '-')}-seed{seed}", algorithm=label.partition(":")[0], seed=seed,
                curve=(share / 2, share), **run,
            )
            for seed, share in enumerate(shares)
        ]  # fmt: skip
        rows.append(Row(label, tuple(None if one is None else read_figures(one) for one in folders)))
    seeds = tuple(range(len(next(iter(finals.values())))))
    (folder / "comparison.json").write_bytes(record(Comparison(tuple(rows), seeds, folder, rows[0], tuple(notes))))
    return folder
