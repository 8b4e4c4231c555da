"""Reproductions: the tables of papers, run row by row, and kept beside the papers' figures.

Figures that were made with other settings, other data or by another version stay in ``results.json`` and are not shown.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from fedfill import __version__
from fedfill.algorithms import Algorithm, find
from fedfill.errors import A_FUNCTION, DivergedError, FedfillError, did_you_mean, expect, path_of, shown
from fedfill.experiment.prepare import Prepared, arrange
from fedfill.experiment.settings import INCIDENTAL, whole_numbers
from fedfill.experiment.summary import accuracy_by_round
from fedfill.runs.directory import RunDirectory, writing
from fedfill.studies.measure import measure
from fedfill.studies.run import OnRun, follower, launch
from fedfill.studies.table import KEPT, Entry, Reproduction, find_table, frame, read_entries, read_table, write


def reproduce(
    table: str | Path,
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    out: str | Path = "runs/reproduce",
    on_run: OnRun | None = None,
    **options: Any,
) -> Reproduction:
    """Run a paper's table, or some of its rows, and write the figures into its README.

    Example::

        fedfill.reproduce("sums-digits", seeds=[0])

    Args:
        table: A folder with ``table.toml``, or the name of one below ``experiments``.
        only: Names of rows; none: all of them.
        seeds: Which seeds; None: those of the table.
        out: Folder of the runs; finished ones are read and not run again, those of other tables neither, others go on where they
            stopped. A row whose training diverges is shown as such, and the others are run.
        on_run: Called before each run with its row and seed; returns what to call after each of its rounds.
        **options: Where it runs: ``data_dir``, ``device``, ``workers``, ``ray_address`` and the like.

    Returns:
        The table with all figures at hand.

    Raises:
        FedfillError: Where there is no such table or row, the table is not sound, or an option changes the experiment.
    """
    folder = find_table(path_of("table", table, "a folder with a table.toml, or a name"))
    out = path_of("out", out)
    expect("on_run", on_run, Callable | None, A_FUNCTION)
    content = read_table(folder)
    names = [row.name for row in content.rows]
    if isinstance(only, str) or not isinstance(only, Iterable):
        raise FedfillError(f"only: found {shown(only)}; allowed: a list of rows")
    for name in only:
        if name not in names:
            raise FedfillError(f"only: found '{name}'; {did_you_mean(name, names)}")
    for name in options.keys() - INCIDENTAL:
        raise FedfillError(f"reproduce: '{name}' would change the experiment; allowed: {', '.join(sorted(INCIDENTAL))}")
    chosen = whole_numbers(content.seeds if seeds is None else seeds)
    if not chosen:
        raise FedfillError("seeds: found none; allowed: one or more whole numbers of at least 0")

    def arranged(name: str, seed: int) -> Prepared:
        row = next(row for row in content.rows if row.name == name)
        words = {"data": "digits", "partition": "dirichlet:0.5", "model": "auto", **content.options, **row.options}
        return arrange(row.algorithm, **{**words, **options, "seed": seed})

    @functools.cache
    def digest_of(name: str, seed: int) -> str:
        # of the parts no more than this is kept: each row has data and a model of its own, which would all lie in memory
        return arranged(name, seed).digest

    makers = [row.name for row in content.rows if find(row.algorithm).synthetic is not Algorithm.synthetic]
    if "synthetic_accuracy" not in content.figures:
        makers = []
    elif not makers:
        raise FedfillError("figures: found 'synthetic_accuracy' in a table whose rows make no synthetic samples")

    # everything is checked before anything runs
    frame(folder, content)
    for row in content.rows:
        for seed in chosen:
            digest_of(row.name, seed)

    def table_of(entries: Sequence[Entry]) -> Reproduction:
        """Figures of the present settings, and others."""
        shown = [e for e in entries if e.row in names and e.digest == digest_of(e.row, e.seed)]
        return Reproduction(folder, content, tuple(shown), tuple(e for e in entries if e not in shown))

    found = table_of(read_entries(folder))
    for seed in chosen:
        for row in content.rows:
            if only and row.name not in only:
                continue
            digest = digest_of(row.name, seed)
            place = out / folder.name / f"{_slug(row.name)}-seed{seed}-{digest[:8]}"
            if not place.exists():  # tables and rows share finished runs
                done = out.glob(f"*/*-seed{seed}-{digest[:8]}/summary.json")
                place = min((path.parent for path in done), default=place)
            try:
                result = launch(arranged(row.name, seed), place, follower(on_run, row.name, seed))
                figures = {name: result.summary.get(name) for name in KEPT} | {"curve": result.curve}
                account = result.summary["privacy"]
                figures |= {"epsilon": account["total_epsilon"], "epsilon_added": account.get("total_epsilon_added")}
                figures["part_epsilon_added"] = _of_part(account)
                figures["client_epsilon"] = result.rounds[-1].get("client_epsilon")
                if row.name in makers:
                    figures["synthetic_accuracy"] = _of_synthetic(place, content.per_class, options)
            except DivergedError as error:
                reached = accuracy_by_round(RunDirectory(place).rounds())
                figures = dict.fromkeys(KEPT) | {"curve": reached, "diverged": str(error), "version": __version__}
            new = Entry(row.name, seed, digest, figures)
            with writing(folder / ".lock"), FileLock(folder / ".lock"):
                # read again: another process may have added figures meanwhile
                others = [
                    e for e in read_entries(folder) if (e.row, e.seed, e.digest) != (new.row, new.seed, new.digest)
                ]
                found = table_of([*others, new])
                write(found)
    return found


def _of_synthetic(place: Path, per_class: int | None, options: Mapping[str, Any]) -> float | None:
    """Accuracy on real test data of a classifier that saw a run's synthetic samples alone; None where none has a label."""
    where = {name: options[name] for name in ("data_dir", "device") if name in options}
    trained = measure(place, per_class=per_class, **where).document["trained_on"]
    return None if trained is None else trained["synthetic"]["accuracy"]["value"]


def _of_part(account: Mapping[str, Any]) -> float | None:
    """Epsilon, for a record added or removed, of the one release that has a guarantee beside others without; None of other accounts."""
    found = [entry["epsilon_added"] for entry in account["entries"] if entry.get("epsilon_added")]
    return found[0] if account["total_epsilon"] is None and len(found) == 1 else None


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
