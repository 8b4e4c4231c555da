"""How far the method that `fedfill study` recommends is from the best of an exhaustive comparison, on eight settings.

    python experiments/study/run.py --data-dir DATA

The rules of a study were fixed before this was first run, and nothing in them was changed by it. Each setting: the study, and
every other method of the list with the same clients, validation splits, seeds and rounds. Regret is in points of what the
study's goal judges by, on test samples, means over seeds. The figures go to ``results.json``, one line for each setting, and
into the README.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from pathlib import Path
from typing import Any

import fedfill
from fedfill import __version__
from fedfill.experiment.summary import Result
from fedfill.runs.directory import write_atomically
from fedfill.studies.compare import compare
from fedfill.studies.recommend import candidates
from fedfill.studies.study import Study

HERE = Path(__file__).parent
BEGIN, END = "<!-- figures: written by run.py -->", "<!-- end of figures -->"
BUDGET = {"rounds": 20, "local_epochs": 2, "batch_size": 32}
DOMAINS = "mnist_m=0.1375,svhn=0.2"
SETTINGS: dict[str, dict[str, Any]] = {
    "MNIST, Dirichlet .1": {"data": "mnist", "data_fraction": 0.05, "partition": "dirichlet:0.1"},
    "MNIST, sizes differ": {"data": "mnist", "data_fraction": 0.05, "partition": "quantity:0.3"},
    "Fashion-MNIST, Dirichlet .5": {"data": "fashion_mnist", "data_fraction": 0.05, "partition": "dirichlet:0.5"},
    "Fashion-MNIST, two classes each": {"data": "fashion_mnist", "data_fraction": 0.05, "partition": "classes:2"},
    "CIFAR-10, alike": {"data": "cifar10", "data_fraction": 0.15, "partition": "iid"},
    "USPS, Dirichlet .1, 20 clients": {"data": "usps", "data_fraction": 0.4, "partition": "dirichlet:0.1", "clients": 20},
    "digits of four domains": {
        "data": "digits-domains", "data_fraction": 0.01, "partition": "domain", "domain_fractions": DOMAINS,
        "image_size": 16,  # each of 32 pixels would take four times as long
    },
    "table of tumours, Dirichlet .5": {"data": "tumours", "partition": "dirichlet:0.5", "clients": 4},
}  # fmt: skip
GLOBAL = (
    "fed3r", "fedcgs", "fedavg", "fedavg:head=ccvr", "fedavg:head=fed3r", "fedprox:mu=0.01", "scaffold", "scaffold:head=ccvr",
    "fednova", "feddyn",
)  # fmt: skip
"""The exhaustive list where one model serves everyone."""

OWN = (*GLOBAL, "pfed3r", "fedbn", "fedbn:head=pfed3r", "pfedavg", "local")
"""... and where each client may have its own."""

IMAGES = ("fed3r:features=patches(300, cells=4) > project(2048)",)


def table_of_tumours(folder: Path) -> None:
    """scikit-learn's bundled table of 569 tumours, 30 numbers each, as a CSV."""
    from sklearn.datasets import load_breast_cancer

    place = folder / "tumours"
    place.mkdir(parents=True, exist_ok=True)
    bunch = load_breast_cancer()
    with (place / "train.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*bunch.feature_names, "label"])
        writer.writerows([*row, bunch.target_names[label]] for row, label in zip(bunch.data, bunch.target, strict=True))


def judged(result: Result, goal: str) -> float:
    """What the goal judges by, on test samples."""
    return float(result.summary["accuracy" if goal == "everyone" else "mean_client_accuracy"])


def exhaustive(found: Study, place: Path, options: dict[str, Any], images: bool) -> dict[str, float]:
    """The mean over seeds of every method of the list; those of the study's last stage are read from it."""
    known = {
        one.label: [value for value in (one.accuracy if found.goal == "everyone" else one.own) if value is not None]
        for one in found.finalists
    }
    labels = [*(GLOBAL if found.goal == "everyone" else OWN), *(IMAGES if images else ())]
    missing = [label for label in labels if label not in known]
    share = found.final.first["validation_samples"] and options["client_validation"]
    others = compare(
        missing, seeds=found.plan.seeds, out=place, rounds=found.plan.rounds, evaluate_every=found.plan.rounds,
        **{**options, "client_validation": share},
    )  # fmt: skip
    for one in candidates(others, found.goal):
        known.setdefault(
            one.label, [v for v in (one.accuracy if found.goal == "everyone" else one.own) if v is not None]
        )
    return {label: statistics.fmean(values) for label, values in known.items() if len(values) == len(found.plan.seeds)}


def run(name: str, data_dir: Path, out: Path) -> dict[str, Any]:
    """One setting: the study, the rest of the list, and the regrets."""
    from fedfill.studies.rules import validation_share

    folder = out / "".join(letter if letter.isalnum() else "-" for letter in name)
    setting = SETTINGS[name]
    place = out / "tables" if setting["data"] == "tumours" else data_dir
    if setting["data"] == "tumours":
        table_of_tumours(place)
    options = {
        **setting,
        **{k: v for k, v in BUDGET.items() if k != "rounds"},
        "data_dir": str(place),
        "seeds": [0, 1, 2],
    }
    found = fedfill.study(out=folder / "study", rounds=BUDGET["rounds"], **options)
    assert found.recommendation is not None
    options.pop("seeds")
    options["client_validation"] = validation_share(found.seen.samples)
    images = setting["data"] != "tumours"
    scores = exhaustive(found, folder / "others", options, images)
    best = max(scores, key=lambda label: scores[label])
    tree = "fedbn" if found.seen.feature_shift else "fedavg"
    own = scores[found.recommendation.label]
    return {
        "setting": name, "version": __version__, "goal": found.goal, "recommended": found.recommendation.label,
        "sure": found.recommendation.sure, "scores": scores, "best": best, "regret": 100 * (scores[best] - own),
        "regret_of_fedavg": 100 * (scores[best] - scores["fedavg"]), "regret_of_tree": 100 * (scores[best] - scores[tree]),
    }  # fmt: skip


def table(results: list[dict[str, Any]]) -> str:
    """The figures for the page."""
    lines = [
        "| setting | judged on | recommended | sure | its figure | best of all | its figure | regret | always FedAvg | decision tree |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        own, best = (f"{100 * one['scores'][one[key]]:.2f}" for key in ("recommended", "best"))
        regrets = " | ".join(f"{one[key]:.2f}" for key in ("regret", "regret_of_fedavg", "regret_of_tree"))
        names = [f"`{one[key]}`" for key in ("recommended", "best")]
        lines.append(
            f"| {one['setting']} | {one['goal']} | {names[0]} | {one['sure']} | {own} | {names[1]} | {best} | {regrets} |"
        )
    for what in (statistics.median, max):
        cells = " | ".join(
            f"{what(one[key] for one in results):.2f}" for key in ("regret", "regret_of_fedavg", "regret_of_tree")
        )
        lines.append(f"| **{'median' if what is statistics.median else 'worst'}** | | | | | | | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is asked for, and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/regret"))
    parser.add_argument("--only", action="append", choices=list(SETTINGS))
    given = parser.parse_args()
    kept = HERE / "results.json"
    lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    results = {one["setting"]: one for one in lines}
    for name in given.only or SETTINGS:
        results[name] = run(name, given.data_dir, given.out)
        ordered = [results[one] for one in SETTINGS if one in results]
        write_atomically(kept, "".join(json.dumps(one) + "\n" for one in ordered).encode())
        page = HERE / "README.md"
        if page.exists():
            before, _, rest = page.read_text().partition(BEGIN)
            write_atomically(page, f"{before}{BEGIN}\n{table(ordered)}\n{END}{rest.partition(END)[2]}".encode())
        print(table(ordered), flush=True)


if __name__ == "__main__":
    main()
