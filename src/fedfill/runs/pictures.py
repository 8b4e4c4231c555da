"""Pictures of data: who holds which classes, and what the samples look like. Charts are written as PNG and, beside it, as SVG.

Drawn on matplotlib's figures without pyplot, so that nothing global is touched and no display is needed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, MaxNLocator

from fedfill.data.samples import Samples
from fedfill.errors import FedfillError

INK = "#333333"
DPI = 150
_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 3)), (0, (8, 2, 1, 2, 1, 2)), (0, (12, 3)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")


def heat_map(
    counts: Sequence[Sequence[int]], class_names: Sequence[str], path: Path | str, client_names: Sequence[str] = ()
) -> None:
    """A picture of the class distribution: one row per client, one column per class, darker for more samples.

    The counts stand in the cells, and each client's total to the right, where there is room for them.

    Args:
        counts: ``[clients][classes]`` numbers of samples.
        class_names: The classes' names.
        path: The PNG file to write; replaced in one step where it exists.
        client_names: What to call the clients; empty: by their numbers.

    Raises:
        FedfillError: Where there is no client, or the counts and names don't fit together.
    """
    table = np.asarray(counts)
    if table.ndim != 2 or not len(table) or table.shape[1] != len(class_names):
        raise FedfillError(f"heat map: counts of shape {list(table.shape)} don't fit {len(class_names)} class names")
    clients, classes = table.shape
    numbers = clients <= 40 and classes <= 20
    digits = len(f"{table.max():,}")
    # in inches: cells are as wide as their numbers; without numbers the whole is squeezed into one readable page
    width = classes * max(0.5, 0.1 * digits + 0.2) if numbers else min(14.0, max(5.0, 0.2 * classes))
    height = 0.34 * clients if numbers else min(9.0, max(3.0, 0.2 * clients))
    names = [_short(name) for name in class_names]
    slanted = max(map(len, names)) * 0.085 > width / classes
    figure, axes = _page(width, height)
    # a square root keeps a handful of samples apart from none beside a client that holds thousands
    norm = PowerNorm(0.5, vmin=0, vmax=max(1, int(table.max())))
    image = axes.imshow(table, cmap="Blues", norm=norm, aspect="auto", interpolation="nearest")
    axes.set_title(
        f"{_many(int(table.sum()), 'training sample')}: {_many(clients, 'client')}, {_many(classes, 'class')}",
        loc="left",
        color=INK,
        fontsize=11,
        pad=22 if numbers else 10,
    )
    axes.set_ylabel("client", color=INK)
    axes.set_xlabel("class", color=INK)
    every = _step(classes, room=int(width / 0.22)) if slanted else 1
    axes.set_xticks(
        range(0, classes, every),
        names[::every],
        rotation=45 if slanted else 0,
        ha="right" if slanted else "center",
        rotation_mode="anchor",
        fontsize=8,
    )
    shown = range(0, clients, _step(clients, room=max(1, int(height / 0.2))))
    axes.set_yticks(shown, [client_names[c] if client_names else f"{c:,}" for c in shown], fontsize=8)
    if numbers:
        for (row, column), count in np.ndenumerate(table):
            colour = "white" if norm(count) > 0.65 else INK if count else "#aaaaaa"
            axes.text(column, row, f"{count:,}", ha="center", va="center", fontsize=8, color=colour)
        # white lines between the cells keep the rows apart
        axes.set_xticks(np.arange(classes + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(clients + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="minor", length=0)
        # points to the right of the cells, wide enough for the largest total
        aside = 12 + 5.5 * len(f"{table.sum(axis=1).max():,}")
        style: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "fontsize": 8, "color": INK}
        for row, total in enumerate(table.sum(axis=1)):
            axes.annotate(f"{total:,}", (1, row), (aside, 0), xycoords=("axes fraction", "data"), va="center", **style)
        axes.annotate("total", (1, 1), (aside, 5), xycoords="axes fraction", va="bottom", **style)
    else:
        bar = figure.colorbar(image, cax=axes.inset_axes((1 + 0.2 / width, 0, 0.15 / width, 1)))
        bar.set_label("samples", color=INK)
        bar.outline.set_visible(False)
        bar.ax.tick_params(colors=INK, labelsize=8)
    _save(figure, Path(path), "png")  # a report has it as SVG


def image_grid(
    samples: Samples,
    class_names: Sequence[str],
    path: Path | str,
    per_class: int = 10,
    below: torch.Tensor | None = None,
) -> None:
    """A picture of samples: one row per class with its name, the first examples of the class side by side.

    Args:
        samples: Grey or colour uint8 images ``[n, 1 or 3, h, w]``.
        class_names: The classes' names; a class without samples has an empty row.
        path: The PNG file to write; replaced in one step where it exists.
        per_class: The most examples of one class.
        below: For each the nearest of other images, of its shape, which stands under it; None: none.

    Raises:
        FedfillError: Where the samples aren't such images or there are none.
    """
    inputs = samples.inputs.cpu()
    if inputs.dtype != torch.uint8 or inputs.ndim != 4 or inputs.shape[1] not in (1, 3) or not len(samples):
        raise FedfillError(
            f"image grid: found {len(samples)} inputs of shape {list(inputs.shape[1:])} and type {inputs.dtype}, "
            "but uint8 images [1 or 3, h, w] are needed"
        )
    labels = samples.labels.cpu().numpy()
    side, width = inputs.shape[2:]
    gap = max(1, round(side / 14))
    if below is not None:  # each becomes one taller image, with a line between the two
        line = inputs.new_full((*inputs.shape[:2], gap, width), 255)
        inputs = torch.cat([inputs, line, below.cpu()], 2)
    images = inputs.permute(0, 2, 3, 1).numpy()  # [n, h, w, c]
    rows = [images[np.flatnonzero(labels == index)[:per_class]] for index in range(len(class_names))]
    height = images.shape[1]
    columns = max(map(len, rows))
    apart = gap if below is None else 3 * gap  # of rows
    canvas = np.full((len(rows) * (height + apart) - apart, columns * (width + gap) - gap, 3), 255, np.uint8)
    for row, examples in enumerate(rows):
        for column, example in enumerate(examples):
            top, left = row * (height + apart), column * (width + gap)
            canvas[top : top + height, left : left + width] = example  # grey spreads over the three channels
    cell = (0.5 if len(rows) <= 30 else 0.3) * (1 if below is None else 2)  # inches
    names = [_short(name) for name in class_names]
    figure, axes = _page(columns * cell * width / height, len(rows) * cell)
    axes.imshow(canvas, aspect="auto", interpolation="nearest")
    axes.set_yticks(
        [row * (height + apart) + (height - 1) / 2 for row in range(len(rows))],
        names,
        fontsize=9 if len(rows) <= 30 else 7,
    )
    axes.set_xticks([])
    kind = "grey" if images.shape[3] == 1 else "colour"
    beside = "" if below is None else ", and below each its nearest"
    title = f"{width}x{side} {kind}, {_many(len(rows), 'class')}{beside}"
    axes.set_title(title, loc="left", color=INK, fontsize=11, pad=10)
    _save(figure, Path(path), "png")  # pixels: drawn lines would not make it sharper


def accuracy_curves(
    curves: Mapping[str, Sequence[Mapping[int, float]]],
    path: Path | str,
    title: str = "",
    formats: Sequence[str] = ("png", "svg"),
) -> None:
    """A picture of the accuracy per round: a line for the mean over seeds, a band from the lowest to the highest seed.

    Args:
        curves: By label, for each seed the accuracies by round, as shares; of a label's seeds the same rounds.
        path: The PNG file to write, with an SVG file beside it; replaced in one step where they exist.
        title: Data set and partition, such as a comparison's title; empty: nothing is said of them.
        formats: Such as ``"pdf"``; what is no PNG lies beside it.

    Raises:
        FedfillError: Where there is nothing to draw.
    """
    if not curves or not all(len(seeds) and len(seeds[0]) for seeds in curves.values()):
        raise FedfillError("accuracy curves: there is no round to draw")
    figure, axes = _page(7.0, 4.2)
    for k, (label, seeds) in enumerate(curves.items()):
        rounds = list(seeds[0])
        values = 100 * np.array([[seed[t] for t in rounds] for seed in seeds])  # [seeds, rounds]
        # dashes show a curve below another one, and markers at places of their own a curve of the same rounds
        every = max(1, -(-len(rounds) // 6))
        axes.plot(
            rounds,
            values.mean(0),
            color=_colour(k),
            label=label,
            linewidth=1.6,
            linestyle=_DASHES[k % len(_DASHES)],
            marker=_MARKERS[k % len(_MARKERS)],
            markersize=4.5,
            markevery=(k * max(1, every // 3) % every, every),
        )
        if len(values) > 1:
            axes.fill_between(rounds, values.min(0), values.max(0), color=_colour(k), alpha=0.18, linewidth=0)
    few, many = (pick(len(seeds) for seeds in curves.values()) for pick in (min, max))
    count = f"{few} to {many}" if few < many else str(many)
    axes.set_title(
        _under(title) + "accuracy per round" + (f": mean and range of {count} seeds" if many > 1 else ", one seed"),
        loc="left",
        color=INK,
        fontsize=11,
    )
    _chart(axes, "round", "accuracy on the test set, percent")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    _save(figure, Path(path), *formats)


def accuracy_bars(
    finals: Mapping[str, tuple[Sequence[float], Sequence[float | None]]], path: Path | str, title: str = ""
) -> None:
    """A picture of final accuracies beside those of the worst clients: a bar for the mean, a dot for each seed.

    Args:
        finals: By label, for each seed the accuracy on the test set and the worst client's on its own test split.
        path: The PNG file to write, with an SVG file beside it; replaced in one step where they exist.
        title: Data set and partition, such as a comparison's title; empty: nothing is said of them.

    Raises:
        FedfillError: Where there is nothing to draw.
    """
    if not finals:
        raise FedfillError("accuracy bars: there is no run to draw")
    figure, axes = _page(7.0, 0.5 + 0.55 * len(finals))
    for kind, (name, shade) in enumerate((("test set", _colour(0)), ("worst client, own test split", _colour(1)))):
        for row, label in enumerate(finals):
            values = [100 * value for value in finals[label][kind] if value is not None]
            place = row + (kind - 0.5) * 0.36
            if values:
                axes.barh(place, float(np.mean(values)), 0.34, color=shade, alpha=0.85, label=name if not row else None)
                axes.plot(values, [place] * len(values), "o", color=INK, markersize=3)
    axes.set_yticks(range(len(finals)), list(finals), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_title(
        _under(title) + "after the last round: bars are means, dots are seeds", loc="left", color=INK, fontsize=11
    )
    _chart(axes, "accuracy, percent", "")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    _save(figure, Path(path))


def accuracy_against(
    series: Mapping[str, Sequence[tuple[float, Sequence[float]]]], cost: str, path: Path | str, title: str = ""
) -> None:
    """A picture of the accuracy against what it costs: a line for each series, with a bar from the lowest to the highest seed.

    Args:
        series: By label its points: the cost, above 0, and the accuracy of each seed, as a share.
        cost: What the horizontal, logarithmic axis shows, such as ``"epsilon"``.
        path: The PNG file to write, with an SVG file beside it; replaced in one step where they exist.
        title: What all points share; empty: nothing is said.

    Raises:
        FedfillError: Where there is nothing to draw.
    """
    if not any(series.values()):
        raise FedfillError("accuracy against a cost: there is no point to draw")
    figure, axes = _page(6.0, 4.2)
    for k, (label, points) in enumerate(series.items()):
        places = [x for x, _ in sorted(points)]
        values = [100 * np.array(seeds) for _, seeds in sorted(points)]
        means = np.array([seeds.mean() for seeds in values])
        ends = np.array([[m - v.min(), v.max() - m] for m, v in zip(means, values, strict=True)]).T  # [2, points]
        style = {"linestyle": _DASHES[k % len(_DASHES)], "marker": _MARKERS[k % len(_MARKERS)], "markersize": 4.5}
        axes.errorbar(
            places, means, np.maximum(ends, 0), color=_colour(k), label=label, linewidth=1.6, capsize=2, **style
        )
    axes.set_xscale("log", subs=[])  # no small ticks: they would be labelled too
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(
        _under(title) + f"accuracy against {cost}: mean and range of seeds", loc="left", color=INK, fontsize=11
    )
    _chart(axes, cost, "accuracy on the test set, percent")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    _save(figure, Path(path), "png", "svg")


def class_bars(
    bars: Mapping[str, Sequence[float | None]], class_names: Sequence[str], path: Path | str, title: str
) -> None:
    """A picture of accuracies by class, several beside each other.

    Args:
        bars: By label, for each class a share, or None where there is nothing to show.
        class_names: The classes' names.
        path: The PNG file to write, with an SVG file beside it; replaced in one step where they exist.
        title: Of the picture.

    Raises:
        FedfillError: Where there is nothing to draw, or the bars and names don't fit together.
    """
    classes = len(class_names)
    if not classes or not bars or any(len(values) != classes for values in bars.values()):
        raise FedfillError(
            f"class bars: bars of {[len(values) for values in bars.values()]} classes don't fit {classes} class names"
        )
    names = [_short(name) for name in class_names]
    width = min(14.0, max(5.0, 0.6 * classes))
    figure, axes = _page(width, 3.4)
    each = 0.8 / len(bars)
    for k, (label, values) in enumerate(bars.items()):
        shown = [(c, 100 * value) for c, value in enumerate(values) if value is not None]
        left = (k - (len(bars) - 1) / 2) * each
        axes.bar([c + left for c, _ in shown], [v for _, v in shown], 0.94 * each, color=_colour(k), label=label)
    slanted = max(map(len, names)) * 0.085 > width / classes
    every = _step(classes, room=int(width / 0.22)) if slanted else 1
    axes.set_xticks(
        range(0, classes, every),
        names[::every],
        rotation=45 if slanted else 0,
        ha="right" if slanted else "center",
        rotation_mode="anchor",
        fontsize=8,
    )
    axes.set_xlim(-0.6, classes - 0.4)
    axes.set_ylim(0, 100)
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    _chart(axes, "class", "accuracy, percent")
    axes.grid(visible=False, axis="x")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    _save(figure, Path(path))


def _under(title: str) -> str:
    """A title as a line of its own above what the picture shows."""
    return f"{title}\n" if title else ""


def _chart(axes: Axes, x: str, y: str) -> None:
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)


def _colour(k: int) -> str:
    """Colours that people who see few of them can tell apart (Okabe and Ito), again from the start after eight."""
    return ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")[k % 8]


def _page(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure whose axes are this many inches; labels lie outside and are included when it is saved."""
    figure = Figure(figsize=(width, height), dpi=DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.tick_params(length=0, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure, axes


def _many(count: int, noun: str) -> str:
    """For example ``1 class`` or ``1,797 samples``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def _short(name: str) -> str:
    """A name that leaves room for the picture."""
    return name if len(name) <= 18 else name[:17] + "…"


def _step(items: int, room: int) -> int:
    """Every how many items one is labelled, so that no more than `room` labels are drawn: 1, 2, 5, 10, 20, ..."""
    step = 1
    while items > step * room:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return step


def _save(figure: Figure, path: Path, *formats: str) -> None:
    """Write the picture beside its place and move it there, so that nobody ever sees half a picture; PNG and SVG if not told."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a dollar in a name begins no formula
    # once: told "tight", matplotlib lays each file out twice
    box = figure.get_tightbbox(FigureCanvasAgg(figure).get_renderer()).padded(0.15)  # type: ignore[no-untyped-call]
    for kind in formats or ("png", "svg"):
        place = path if kind == "png" else path.with_suffix(f".{kind}")
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{place.name}.", suffix=".tmp")
        # the same picture is the same file: no date, and names within that follow from what is drawn
        dated = {"svg": "Date", "pdf": "CreationDate"}
        same: dict[str, Any] = {"metadata": {dated[kind]: None}} if kind in dated else {}
        try:
            with os.fdopen(handle, "wb") as file, rc_context({"svg.hashsalt": "fedfill"}):
                figure.savefig(file, format=kind, bbox_inches=box, **same)
            # mkstemp's files are readable by their owner alone
            os.chmod(temporary, 0o644)
            os.replace(temporary, place)
        except BaseException:
            os.unlink(temporary)
            raise
