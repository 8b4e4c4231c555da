"""The sets of the benchmark ``natural``: real tables of many sites, and digits of four sources; the methods that run on each.

Settings are fixed for all sets of a kind, so that nothing is chosen by a test sample.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedfill.data import sources
from fedfill.data.dataset import Source
from fedfill.data.names import DATASETS
from fedfill.data.natural import NaturalTable, divide, known_tables, read
from fedfill.errors import FedfillError, did_you_mean
from fedfill.files import read_regular
from fedfill.runs.directory import write_atomically, writing

DIGITS = "digits-domains"
"""The set of images, which is the data set of this name."""
OF_A_DOMAIN = 500
"""Training images of each source of digits, or all where it has fewer."""
FEW_SITES = 4
"""Sets with more sites go without FRAug, which takes ten times as long there as FedAvg."""
OF_SUMS = ("fed3r", "pfed3r")
"""Methods for which ``auto`` is no network that is trained, but features from a seed."""
PRIVATE = "fed3r:target_epsilon={:g},trust=secure"
"""With an epsilon: the noise is in the sum once."""
PERSONAL = (
    "pfedavg", "ditto", "pfedme", "perfedavg", "fedper", "lgfedavg", "fedrep", "fedbabu", "fedrod", "fedproto", "partialfed",
    "ifca", "fesem", "cfl",
)  # fmt: skip
"""More methods with a model for each site, or for each cluster of sites. They are run where they are asked for by name."""


@dataclass(frozen=True)
class Model:
    """A model, and the methods that train it.

    Attributes:
        methods: Those of every benchmark.
        settings: Options of all their runs.
        named: Methods that are run where they are asked for by name.
        private: Those that stand in for all others with an epsilon, which is put in for ``{:g}``.
    """

    methods: tuple[str, ...]
    settings: Mapping[str, Any]
    named: tuple[str, ...] = ()
    private: tuple[str, ...] = ()


TABLES: dict[str, Model] = {
    "linear": Model(
        ("central", "local", "fedavg", "fedprox", "scaffold"),
        {
            "model": "features", "model.features": "clip", "rounds": 20, "local_epochs": 2, "batch_size": 64, "optimizer": "sgd",
            "learning_rate": 2.0,
        },
        # on the inputs themselves, which are few, as each more has noise of its own
        private=("central", "local", PRIVATE),
    ),
    "mlp": Model(
        (
            "central", "local", "fedavg", "fedprox", "scaffold:learning_rate=0.02", "fedbn", "fraug", "fedavg:head=fed3r",
            "fedbn:head=pfed3r", *OF_SUMS,
        ),
        {"model": "auto", "rounds": 10, "local_epochs": 2, "batch_size": 64, "learning_rate": 0.003},
        named=PERSONAL,
    ),
}  # fmt: skip
"""By model its methods on tables. ``features`` with ``clip`` are the inputs themselves, so the model is logistic regression; ``auto`` is
the network mlp. SCAFFOLD has plain SGD in both."""

IMAGES: dict[str, Model] = {
    "cnn2bn": Model(
        (
            "central", "local", "fedavg", "fedprox", "scaffold:learning_rate=0.05", "fedbn", "fraug", "fedavg:head=fed3r",
            "fedbn:head=pfed3r",
        ),
        {"model": "cnn2bn", "rounds": 20, "local_epochs": 2, "batch_size": 32},
        named=PERSONAL,
        private=("central", "local"),
    ),
    "features": Model(OF_SUMS, {"model": "auto", "rounds": 1}, private=(PRIVATE,)),
}  # fmt: skip
"""By model its methods on images. SCAFFOLD has plain SGD."""


@dataclass(frozen=True)
class BenchmarkSet:
    """Data of several sites that nobody divided.

    Attributes:
        name: In fedfill.
        title: What is told, and what the sites are.
        label: How the label was made.
        score: The figure that methods are judged by, over all test samples.
        within: The same within sites.
        sites: How many there are.
        models: By name what is trained on it, and by which methods.
        split: From the benchmark's folder and a seed the options that read this seed's samples; writes them where that needs files.
    """

    name: str
    title: str
    label: str
    score: str
    within: str
    sites: int
    models: Mapping[str, Model]
    split: Callable[[Path, int], Mapping[str, Any]]

    def labels(self, methods: Sequence[str] | None = None, epsilon: float | None = None) -> dict[str, tuple[str, ...]]:
        """By model the methods that run, with the settings of their own.

        Args:
            methods: Those that are asked for, as `method_of` calls them; None: those of every benchmark.
            epsilon: Of one record; None: nobody adds noise.

        Returns:
            Only models that have any.
        """
        found = {
            name: tuple(
                label
                for label in labels_of(model, epsilon, named=methods is not None)
                if not (self.sites > FEW_SITES and label == "fraug")
                and (methods is None or method_of(label) in methods)
            )
            for name, model in self.models.items()
        }
        return {name: labels for name, labels in found.items() if labels}


def labels_of(model: Model, epsilon: float | None, named: bool) -> tuple[str, ...]:
    """All methods of a model, with or without those that are asked for by name alone."""
    if epsilon is not None:
        return tuple(label.format(epsilon) for label in model.private)
    return model.methods + (model.named if named else ())


def method_of(label: str) -> str:
    """A method without the rate, or the noise, that it has of its own."""
    return label.partition(":learning_rate")[0].partition(":target_epsilon")[0]


def known_sets() -> tuple[str, ...]:
    """The names of all sets."""
    return (*known_tables(), DIGITS)


def methods_of(names: Iterable[str], epsilon: float | None) -> set[str]:
    """What can be asked for by name on these sets."""
    models = {kind: model for name in names for kind, model in (IMAGES if name == DIGITS else TABLES).items()}
    return {method_of(label) for model in models.values() for label in labels_of(model, epsilon, named=True)}


def chosen_names(names: Sequence[str] | None) -> list[str]:
    """The names of sets that are asked for, checked; None: all tables that are bundled."""
    if names is None:
        return [name for name, table in known_tables().items() if table.sha256 is not None]
    known = known_sets()
    for k, name in enumerate(names):
        if name not in known:
            raise FedfillError(f"sets: found '{name}'; {did_you_mean(str(name), known)}")
        if name in names[:k]:
            raise FedfillError(f"sets: found '{name}' twice; allowed: each once")
    if not names:
        raise FedfillError(f"sets: found none; allowed: {', '.join(known)}")
    return list(names)


def open_set(name: str, tables: Path | None, data_dir: str | Path | None) -> BenchmarkSet:
    """Read a set.

    Args:
        name: One of `known_sets`.
        tables: Folder with tables that are not bundled.
        data_dir: Folder with the data sets that `DIGITS` is joined of.

    Returns:
        The set.

    Raises:
        FedfillError: Where it can't be read.
    """
    if name == DIGITS:
        return _digits(sources.load(DIGITS, data_dir), data_dir)
    table = known_tables()[name]
    rows = read(table, tables)
    sites = len(set(rows.column(table.schema.site).to_pylist()))
    split = functools.partial(_split_table, table, rows)
    return BenchmarkSet(name, table.title, table.label, "auc", "auc_within_clients", sites, TABLES, split)


def _split_table(table: NaturalTable, rows: Any, folder: Path, seed: int) -> dict[str, Any]:
    """The split as files, as any command can read it."""
    import pyarrow.parquet as pq

    place = folder / "data" / f"{table.name}-seed{seed}"
    for name, part in zip(("train", "test"), divide(rows, table.schema, seed), strict=True):
        file, text = place / f"{name}.parquet", io.BytesIO()
        pq.write_table(part, text, compression="zstd")
        if not file.is_file() or read_regular(file) != text.getvalue():
            with writing(place):
                place.mkdir(parents=True, exist_ok=True)
            write_atomically(file, text.getvalue())
    return {"data": f"{place.resolve()}", "schema_file": str(table.schema_file), "client_test": 0.0}


def _digits(source: Source, data_dir: str | Path | None) -> BenchmarkSet:
    """Each source of digits as a site, with its own test set and a draw of `OF_A_DOMAIN` of its training images."""
    if (domains := source.domains) is None:  # a folder of that name goes before the four
        raise FedfillError(
            f"data_dir: the folder '{DIGITS}' tells no domains of its images; allowed: a column 'domain', or no such folder"
        )
    sizes = np.bincount(domains.train, minlength=len(domains.names))
    shares = (f"{name}={min(1.0, OF_A_DOMAIN / size):.8g}" for name, size in zip(domains.names, sizes, strict=True))
    options = {"data": DIGITS, "data_dir": data_dir, "domain_fractions": ",".join(shares)}
    return BenchmarkSet(
        DIGITS, f"{DATASETS[DIGITS]}; the sites are the four sources", "which digit it is, as each source has it",
        "accuracy", "mean_client_accuracy", len(domains.names), IMAGES, lambda folder, seed: options,
    )  # fmt: skip
