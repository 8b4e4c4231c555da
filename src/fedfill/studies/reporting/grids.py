"""What a grid's folder holds beside its comparisons: the table of all combinations."""

from __future__ import annotations

import csv
from pathlib import Path

from fedfill.errors import FedfillError
from fedfill.studies.comparison import RECORD
from fedfill.studies.grid import TABLE
from fedfill.studies.reporting.answer import Answer
from fedfill.studies.reporting.values import DAMAGE, Section, Table, many

_TAIL = ["algorithm", "figure", "mean", "deviation", "n"]


def read_grid_table(folder: Path) -> tuple[Answer, dict[Path, str]]:
    """A grid's folder.

    Args:
        folder: Where it lies.

    Returns:
        Its table, and the comparisons that are there, with what they are called.

    Raises:
        FedfillError: Where its table is damaged, or it has no comparison.
    """
    place = folder / TABLE
    try:
        with place.open(newline="") as file:
            header, *lines = csv.reader(file)
        if header[-len(_TAIL) :] != _TAIL:
            raise ValueError("another header")
        names = header[: -len(_TAIL)]
        cells: dict[tuple[str, ...], dict[str, tuple[float, str]]] = {}
        for *values, label, figure, mean, deviation, _ in lines:
            if figure == "accuracy" and not mean:
                cells.setdefault(tuple(values), {})[label] = (-1.0, "diverged")
            elif figure == "accuracy":
                words = f"{100 * float(mean):.1f}" + (f" ± {100 * float(deviation):.1f}" if deviation else "")
                cells.setdefault(tuple(values), {})[label] = (float(mean), words)
        if not cells or any(len(values) != len(names) for values in cells):
            raise ValueError("no figures, or others than the header's")
        stages = {path.parent: path.parent.name for path in sorted(folder.glob(f"*/{RECORD}"))}
    except OSError as error:
        raise FedfillError(f"report: can't read {place} ({error.strerror or error})") from error
    except (*DAMAGE, csv.Error) as error:
        raise FedfillError(f"report: {place} is damaged; run the same grid again") from error
    labels = list(dict.fromkeys(label for found in cells.values() for label in found))
    best = [max(found, key=lambda label: found[label][0]) for found in cells.values()]
    best = [label if found[label][0] >= 0 else "" for label, found in zip(best, cells.values(), strict=True)]
    rows = [
        (*values, *(found[label][1] if label in found else "–" for label in labels)) for values, found in cells.items()
    ]
    strong = (
        {(k, len(names) + labels.index(label)) for k, label in enumerate(best) if label} if len(labels) > 1 else set()
    )
    sentences = [f"A grid over {', '.join(names)}: {many(len(cells), 'comparison')}."]
    if len(labels) > 1:
        counts = ", ".join(f"{label} in {best.count(label)}" for label in labels if label in best)
        sentences.append(f"Highest on everyone's test set: {counts or 'none, as all diverged'}.")
    caption = "Accuracy on everyone's test set, in percent, mean ± standard deviation over seeds. Bold: highest"
    section = Section("grid", "All combinations", tables=[Table(caption, (*names, *labels), rows, frozenset(strong))])
    return Answer(tuple(sentences), (section,)), stages
