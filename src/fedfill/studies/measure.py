"""Measures of synthetic samples: of a run's, or of a file's, with another run's model as a judge where one is given.

Tables with a schema have figures of their own (`fedfill.studies.assess_table`). The judge, or oracle, is a classifier that was trained on the same data, most often by ``central``. All of it is an observer's: it looks
at the clients' real data side by side, which no party of a federation could.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedfill import __version__, tree
from fedfill.data import sources, synthetic
from fedfill.data.dataset import Source
from fedfill.data.federation import Federation
from fedfill.data.samples import Samples
from fedfill.data.schema import Schema
from fedfill.engines.local import choose_device
from fedfill.engines.runner import make_resident
from fedfill.errors import A_RUN, FedfillError, Kept, path_of
from fedfill.experiment.prepare import Prepared, divide
from fedfill.runs.directory import RunDirectory, to_json, write_atomically, writing
from fedfill.studies.assess import Real, assess, judged, one_thread, trained_on
from fedfill.studies.assess_table import assess_table, require_rows, write_table
from fedfill.studies.finished import account_of, finished, made_by, require_count, require_global, require_maker


@dataclass(frozen=True)
class Measures:
    """What `measure` found.

    Attributes:
        directory: Where ``measures.json`` and ``measures.png`` lie.
        document: The figures, as in ``measures.json``.
    """

    directory: Path
    document: dict[str, Any]

    def __repr__(self) -> str:
        """Whose they are, and where they lie."""
        return f"<Measures: {len(self.document)} figures of synthetic samples, in {self.directory}>"


@dataclass(frozen=True)
class _Subject:
    """What is measured, and beside what.

    Attributes:
        path: The run directory, or the file.
        folder: Where the figures go unless told otherwise.
        about: Its own figures and words, for the document.
        samples: The synthetic samples, on the device that is asked for.
        real: The real data.
        seed: Of all draws: the run's, or 0 for a file that doesn't tell it.
        rounds: Records of the run, and its clients' data; None for a file.
        schema: Of a table; None where the samples are none, or nothing was agreed on about it.
        sites: By name the training rows of each site of such a table.
    """

    path: Path
    folder: Path
    about: dict[str, Any]
    samples: Samples
    real: Real
    seed: int
    rounds: tuple[list[dict[str, Any]], Federation] | None
    schema: Schema | None = None
    sites: Mapping[str, Samples] = field(default_factory=dict)


def measure(
    subject: str | Path | Kept, *, oracle: str | Path | Kept | None = None, per_class: int | None = None, ceiling: bool = False,
    data_dir: str | Path | None = None, device: str | None = None, out: str | Path | None = None,
) -> Measures:  # fmt: skip
    """How good synthetic samples are: those in a finished run's checkpoint, or those of a file of `synthesise`.

    Example::

        fedfill.measure("made.safetensors").document

    Args:
        subject: The run directory, what `fedfill.run` returned, or the file; of a table with a schema a ``.parquet`` file.
        oracle: Another run directory, on the same data; its final global model judges the samples. None: nobody does, and all
            other figures are the same. Not of a table.
        per_class: Of a run, so many of each class, from 1 to 100,000; None: those that its picture shows. Not of a table.
        ceiling: Whether the classifier that is trained on the samples is trained on real ones as well, for comparison; of a table
            it always is.
        data_dir: Another folder with the same data.
        device: Another device than the run's; of a file, other than ``auto``.
        out: Folder of ``measures.json`` and ``measures.png``, of a table also ``measures.csv``; None: ``samples`` in the run directory, or ``NAME.measures`` beside the
            file.

    Returns:
        The figures.

    Raises:
        FedfillError: Where there is no finished run and no file that can be measured or can judge, or the two don't fit together.
    """
    path = path_of("subject", subject, "a run directory, what fedfill.run returned, or a file of fedfill.synthesise")
    if per_class is not None:
        require_count(per_class)
    judges = None if oracle is None else RunDirectory(path_of("oracle", oracle, A_RUN))
    if synthetic.is_file(path.name) and not path.is_dir():
        if per_class is not None:
            raise FedfillError(
                f"per_class: found {per_class} with the file {path}, whose samples are made; allowed: none"
            )
        if judges is not None:
            require_global(judges, "oracle")
        found = _file(path, data_dir, choose_device(device or "auto"))
    elif path.suffix.lower() == synthetic.TABLE and not path.is_dir():
        _refuse_choices(path, per_class, judges)
        found = _table_file(path, data_dir)
    else:
        found = _run(path, judges, per_class, data_dir, device)
    folder = found.folder if out is None else path_of("out", out)
    if found.schema is not None:
        return _measured_table(found, found.schema, folder)
    document = {
        "version": __version__,
        **found.about,
        "class_names": list(found.real.class_names),
        "oracle": None,
        "recognised": None,
        "recognised_by_class": None,
        "frechet": None,
        "notes": [],
    }
    with one_thread():
        if judges is not None:
            document |= _judged(found, judges, data_dir, device)
        document |= assess(found.samples, found.real, found.seed)
        document["trained_on"] = trained_on(found.samples, found.real, ceiling)
    document["pseudo_labels"] = None if found.rounds is None else pseudo_labels(*found.rounds)
    if document["trained_on"] is None:
        document["notes"] = [*document["notes"], "No classifier was trained: fewer than two samples have a label."]
    _write(document, folder)
    return Measures(folder, document)


def _run(
    path: Path, judges: RunDirectory | None, per_class: int | None, data_dir: str | Path | None, device: str | None
) -> _Subject:
    place = RunDirectory(path)
    require_maker(place, "measure")
    if judges is not None:
        require_global(judges, "oracle")
    run, result = finished(place, "measure", data_dir, device)
    synthetic.require_test(path, run.experiment.test_fraction, "measure")
    # the clients' own data: what --extra put beside them is not real
    federation = run.federation if run.experiment.extra is None else divide(run.experiment)
    real, schema = Real.of(federation), federation.schema
    if schema is not None:
        _refuse_choices(path, per_class, judges)
        require_rows(real, "measure", path)
    samples = made_by(run, place, "measure", choose_device(run.experiment.device), per_class)
    summary = result.summary
    about = {
        "algorithm": run.experiment.algorithm,
        "dataset": run.experiment.data,
        "seed": run.experiment.seed,
        "rounds": run.experiment.rounds,
        "weights_sha256": summary["weights_sha256"],
        "accuracy": summary["accuracy"],
        "accuracy_by_class": summary["accuracy_by_class"],
        "privacy": summary["privacy"]["statement"],
    }
    if schema is not None:
        account = account_of(run.experiment.model_dump(), summary, "this table")
        about |= {key: account[key] for key in ("epsilon", "epsilon_added", "delta")} | {
            "privacy": account["statement"]
        }
    clients = zip(federation.called, federation.clients, strict=True)
    return _Subject(
        place.path, place.path / "samples", about, samples, real, run.experiment.seed, (result.rounds, run.federation),
        schema, {name: client.train for name, client in clients if len(client.train)},
    )  # fmt: skip


def _file(path: Path, data_dir: str | Path | None, device: torch.device) -> _Subject:
    held = synthetic.read(path, "measure")
    synthetic.require_test(path, held.origin.test_fraction, "measure")

    def load(name: str, size: int | None, test_fraction: float | None) -> Source:
        return sources.load(name, data_dir, size, test_fraction=test_fraction)

    try:
        real = synthetic.real_of(held, path, load, "measure")
    except FedfillError as error:
        if held.samples.inputs.dim() != 2:
            raise
        raise FedfillError(f"{error}; of a table with a schema: a file that ends in {synthetic.TABLE}") from error
    about = {**held.origin.document(), "dataset": held.origin.data, "accuracy": None, "accuracy_by_class": None}
    del about["class_names"], about["data"]
    samples = held.samples.to(device)
    return _Subject(path, path.with_suffix(".measures"), about, samples, Real.of(real), held.origin.seed or 0, None)


def _table_file(path: Path, data_dir: str | Path | None) -> _Subject:
    """A table that was written by a schema, and the real one that it stands for."""
    held, schema = synthetic.read_table(path, "measure")
    synthetic.require_test(path, held.origin.test_fraction, "measure")
    if held.origin.per_class:
        raise FedfillError(
            f"measure: {path} has {held.origin.per_class:,} rows asked for of each class, which are not the classes' own shares; "
            "allowed: a table made without --per-class"
        )

    def load(name: str, size: int | None, test_fraction: float | None) -> Source:
        return sources.load(name, data_dir, size, schema, test_fraction)

    source = synthetic.real_of(held, path, load, "measure")
    real, domains = Real.of(source), source.domains
    require_rows(real, "measure", path)
    sites = {}
    if domains is not None:
        sites = {name: source.train[torch.from_numpy(domains.train == k)] for k, name in enumerate(domains.names)}
    about = {**held.origin.document(), "dataset": held.origin.data}
    del about["class_names"], about["data"], about["per_class"], about["image_size"]
    return _Subject(
        path, path.with_suffix(".measures"), about, held.samples, real, held.origin.seed or 0, None, schema, sites
    )


def _refuse_choices(path: Path, per_class: int | None, judges: RunDirectory | None) -> None:
    """What goes with images alone."""
    if per_class is not None:
        raise FedfillError(
            f"per_class: found {per_class} with {path}, a table, whose classes have their own shares; allowed: none"
        )
    if judges is not None:
        raise FedfillError(
            f"oracle: found {judges.path} with {path}, a table, beside which classifiers are trained; allowed: none"
        )


def _measured_table(found: _Subject, schema: Schema, folder: Path) -> Measures:
    with one_thread():
        assessed = assess_table(found.samples.to("cpu"), found.real, schema, found.sites, found.seed)
    document = {"version": __version__, **found.about, "class_names": list(found.real.class_names), **assessed.figures}
    write_table(document, assessed, schema, folder)
    return Measures(folder, document)


def _judged(found: _Subject, judges: RunDirectory, data_dir: str | Path | None, device: str | None) -> dict[str, Any]:
    """What the oracle says, and who it is."""
    judge, by = finished(judges, "oracle", data_dir, device)
    _require_same_data(found, judge, judges.path)
    sha256 = by.summary["weights_sha256"]
    if found.about.get("weights_sha256") == sha256:
        raise FedfillError(
            f"oracle: {judges.path} holds the model of {found.path} itself, which would judge its own images; allowed: another "
            "run on the same data, such as one of central"
        )
    where = found.samples.labels.device
    model = make_resident(judge.model, where).load(tree.to(by.weights, where)).eval()
    name = f"{judge.experiment.algorithm} on {judge.experiment.data}"
    who = {
        "directory": str(judges.path),
        "name": name,
        "model": judge.experiment.model,
        "weights_sha256": sha256,
        "accuracy": by.summary["accuracy"],
        "accuracy_by_class": by.summary["accuracy_by_class"],
    }
    return {"oracle": who, **judged(found.samples, found.real, model, name, found.seed)}


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


def _require_same_data(found: _Subject, judge: Prepared, judges: Path) -> None:
    """The oracle has to know the run's classes and inputs, and must not have been trained on what the run is tested on."""
    ours, theirs, dataset = found.real.test, judge.federation.test, found.about["dataset"]
    if ours.inputs.shape[1:] != theirs.inputs.shape[1:] or ours.inputs.dtype != theirs.inputs.dtype:
        other, allowed = (f"inputs {list(f.inputs.shape[1:])} of {f.inputs.dtype}" for f in (theirs, ours))
        raise FedfillError(f"oracle: {judges} was trained on {other}; allowed: {allowed}, as in {found.path}")
    same = found.real.class_names == judge.federation.class_names and all(
        torch.equal(one, other) for one, other in ((ours.inputs, theirs.inputs), (ours.labels, theirs.labels))
    )
    if not same:
        raise FedfillError(
            f"oracle: {judges} was trained on {judge.experiment.data}, with other classes or another test set; "
            f"allowed: a run on {dataset}, as in {found.path}"
        )


def _write(document: dict[str, Any], folder: Path) -> None:
    from fedfill.runs.pictures import class_bars  # here: matplotlib costs every start a third of a second

    algorithm, oracle, learnt = document["algorithm"], document["oracle"], document["trained_on"] or {}
    bars = {f"{algorithm}'s model, real test images": document["accuracy_by_class"]} if document["accuracy"] else {}
    for what in ("synthetic", "real", "both"):
        if what in learnt:
            bars[f"trained on {what}, real test images"] = learnt[what]["accuracy_by_class"]
    if oracle is not None:
        bars["oracle, synthetic images"] = document["recognised_by_class"]
    title = f"{algorithm} on {document['dataset']}" + ("" if oracle is None else f"; oracle: {oracle['name']}")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if bars:
            class_bars(bars, document["class_names"], folder / "measures.png", title)
    write_atomically(folder / "measures.json", to_json(document))
