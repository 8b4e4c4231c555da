"""Measures of a run's synthetic images, with another run's model as the judge.

The judge, or oracle, is a classifier that was trained on the same data, most often by ``central``. All of it is an observer's: it looks
at the clients' real data side by side, which no party of a federation could.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedfill import __version__, tree
from fedfill.data.federation import Federation
from fedfill.data.samples import Samples
from fedfill.engines.local import choose_device
from fedfill.engines.runner import make_resident
from fedfill.errors import FedfillError
from fedfill.experiment.prepare import Prepared
from fedfill.runs.directory import RunDirectory, to_json, write_atomically, writing
from fedfill.streams import torch_stream
from fedfill.studies.finished import finished, made_by, require_global, require_maker
from fedfill.synthesis.measures import class_balance, features, frechet_distance, nearness, recognised


@dataclass(frozen=True)
class Measures:
    """What `measure` found.

    Attributes:
        directory: Where ``measures.json`` and ``measures.png`` lie.
        document: The figures, as in ``measures.json``.
    """

    directory: Path
    document: dict[str, Any]


def measure(
    directory: str | Path,
    *,
    oracle: str | Path,
    data_dir: str | Path | None = None,
    device: str | None = None,
    out: str | Path | None = None,
) -> Measures:
    """How good the synthetic images in a finished run's checkpoint are.

    Args:
        directory: The run directory.
        oracle: Another run directory, on the same data; its final global model judges the images.
        data_dir: Another folder with the same data.
        device: Another device than the run's.
        out: Folder of ``measures.json`` and ``measures.png``; None: ``samples`` in the run directory.

    Returns:
        The figures.

    Raises:
        FedfillError: Where a folder holds no finished run that can be measured or can judge, or the two don't fit together.
    """
    place, judges = RunDirectory(Path(directory)), RunDirectory(Path(oracle))
    require_maker(place, "measure")
    require_global(judges, "oracle")
    run, result = finished(place, "measure", data_dir, device)
    judge, judged = finished(judges, "oracle", data_dir, device)
    _require_same_data(run, place.path, judge, judges.path)
    sha256 = result.summary["weights_sha256"]
    if sha256 == judged.summary["weights_sha256"]:
        raise FedfillError(
            f"oracle: {judges.path} holds the model of {place.path} itself, which would judge its own images; allowed: another "
            "run on the same data, such as one of central"
        )

    where = choose_device(run.experiment.device)
    samples = made_by(run, place, "measure", where)
    model = make_resident(judge.model, where).load(tree.to(judged.weights, where)).eval()
    name = f"{judge.experiment.algorithm} on {judge.experiment.data}"
    document = {
        "version": __version__,
        "algorithm": run.experiment.algorithm,
        "dataset": run.experiment.data,
        "seed": run.experiment.seed,
        "rounds": run.experiment.rounds,
        "weights_sha256": sha256,
        "accuracy": result.summary["accuracy"],
        "accuracy_by_class": result.summary["accuracy_by_class"],
        "oracle": {
            "directory": str(oracle),
            "name": name,
            "model": judge.experiment.model,
            "weights_sha256": judged.summary["weights_sha256"],
            "accuracy": judged.summary["accuracy"],
            "accuracy_by_class": judged.summary["accuracy_by_class"],
        },
        "class_names": list(run.federation.class_names),
        **assess(samples, run.federation, model, name, run.experiment.seed),
        "pseudo_labels": pseudo_labels(result.rounds, run.federation),
    }
    folder = place.path / "samples" if out is None else Path(out)
    _write(document, folder)
    return Measures(folder, document)


def assess(samples: Samples, federation: Federation, oracle: nn.Module, name: str, seed: int) -> dict[str, Any]:
    """The measures of synthetic images beside a federation's real data.

    Args:
        samples: Synthetic images, at least one; -1 where one has no label.
        federation: The real data.
        oracle: A classifier in evaluation mode, on the device of the images.
        name: Whose it is, for the record.
        seed: Of the draws of as many real images.

    Returns:
        By name, as in ``measures.json``.
    """
    where = samples.labels.device
    pooled = federation.pooled().clients[0]
    training = pooled.train
    by_class, overall = recognised(oracle, samples, federation.classes)
    notes: list[str] = []
    frechet = None
    # a distance grows as samples get fewer: all three sets are of one size
    n = min(len(samples), len(training), len(federation.test))
    if not isinstance(getattr(oracle, "encoder", None), nn.Module):
        notes.append(f"No Fréchet distance: the oracle's {type(oracle).__name__} has no part 'encoder'.")
    elif n < 2:
        notes.append("No Fréchet distance: it needs at least 2 synthetic and 2 real images.")
    else:
        made, real, test = (
            features(oracle, _draw(those, n, seed, what).to(where).inputs)
            for what, those in (("synthetic", samples), ("training", training), ("test", federation.test))
        )
        frechet = {
            "features": f"encoder of {name}, d={made.shape[1]}",
            "samples": n,
            "synthetic": frechet_distance(made, real),
            "test": frechet_distance(test, real),
        }
    seen = training + pooled.unlabelled  # a generator may have copied either
    near = nearness(samples.inputs, seen.inputs.to(where), federation.test.inputs.to(where))
    return {
        "samples": len(samples),
        "unlabelled": int((samples.labels < 0).sum()),
        "recognised": overall,
        "recognised_by_class": by_class,
        "balance": asdict(class_balance(samples.labels, federation.classes)),
        "frechet": frechet,
        "nearest": asdict(near),
        "notes": notes,
    }


def pseudo_labels(rounds: list[dict[str, Any]], federation: Federation) -> list[dict[str, Any]] | None:
    """How far the labels of synthetic images reached after each round, and how many can be right.

    An image that a client's generator made shows one of the classes that this client holds, if it shows any; a label of
    another class is wrong for certain. Where each client holds a single class, what can be right is right.

    Args:
        rounds: Records, with ``labelled_by_owner`` where the server labelled images.
        federation: The clients' data.

    Returns:
        By round, as in ``measures.json``: share with a label, and share of these labels that are of a class of the image's
        owner, None where there is no label (of images that came with labels, all are); None where the server holds no labels,
        or where clients hold samples without labels.
    """
    if not all("labelled_by_owner" in record for record in rounds):
        return None
    if any(len(client.unlabelled) for client in federation.clients):
        return None
    found = []
    for record in rounds:
        given = possible = 0
        for owner, counts in record["labelled_by_owner"].items():
            held = federation.counts[int(owner)]
            given += sum(counts)
            possible += sum(n for n, real in zip(counts, held, strict=True) if real)
        found.append(
            {
                "round": record["round"],
                "labelled": record["labelled"],
                "of_owners_classes": possible / given if given else None,
            }
        )
    return found


def _draw(samples: Samples, n: int, seed: int, what: str) -> Samples:
    if n == len(samples):
        return samples
    index = torch.randperm(len(samples), generator=torch_stream(seed, "measure", what))[:n]
    return samples[index.to(samples.labels.device)]


def _require_same_data(run: Prepared, place: Path, judge: Prepared, judges: Path) -> None:
    """The oracle has to know the run's classes and inputs, and must not have been trained on what the run is tested on."""
    ours, theirs = run.federation, judge.federation
    if ours.shape != theirs.shape or ours.test.inputs.dtype != theirs.test.inputs.dtype:
        found, allowed = (f"inputs {list(f.shape)} of {f.test.inputs.dtype}" for f in (theirs, ours))
        raise FedfillError(f"oracle: {judges} was trained on {found}; allowed: {allowed}, as in {place}")
    same = ours.class_names == theirs.class_names and all(
        torch.equal(one, other)
        for one, other in ((ours.test.inputs, theirs.test.inputs), (ours.test.labels, theirs.test.labels))
    )
    if not same:
        raise FedfillError(
            f"oracle: {judges} was trained on {judge.experiment.data}, with other classes or another test set; "
            f"allowed: a run on {run.experiment.data}, as in {place}"
        )


def _write(document: dict[str, Any], folder: Path) -> None:
    from fedfill.runs.pictures import class_bars  # here: matplotlib costs every start a third of a second

    algorithm = document["algorithm"]
    bars = {
        f"{algorithm}'s model on real test images": document["accuracy_by_class"],
        "oracle on synthetic images": document["recognised_by_class"],
    }
    title = f"{algorithm} on {document['dataset']}; oracle: {document['oracle']['name']}"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        class_bars(bars, document["class_names"], folder / "measures.png", title)
    write_atomically(folder / "measures.json", to_json(document))
