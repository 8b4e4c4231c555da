"""What a terminal shows: tables of results, measures and partitions, and the sentences below them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from fedfill.runs.shown import headline_of, percent, size

if TYPE_CHECKING:
    from fedfill.data.federation import Federation
    from fedfill.experiment.summary import Result
    from fedfill.studies.measure import Measures
    from fedfill.studies.synthesise import Synthesised

MOST_ROWS = 40
READABLE = 100
RISKS = {
    "nearest": "nearer than the median",
    "membership_auc": "membership, AUC",
    "membership_tpr": "membership, found at .01 false",
    "singling_out": "singling out",
    "attribute": "a cell is told, all columns",
}
"""Figures of a table's rows, and words for people."""
LEARNT = {
    "auc": ("AUC", ".4f"),
    "accuracy": ("accuracy", ".4f"),
    "brier": ("Brier score", ".4f"),
    "rmse": ("RMSE", "#.4g"),
    "r2": ("R²", ".4f"),
}
"""Figures of models that are trained on a table's rows, words for people, and how they are written."""

# names of classes, data sets and the like may look like markup
out = Console(highlight=False, markup=False, emoji=False)


def print_result(result: Result) -> None:
    """The figures of a finished run, its privacy account, and where it lies."""
    summary = result.summary
    table = Table(
        show_header=False,
        title=f"{summary['algorithm']} on {summary['dataset']}, {summary['partition']}, {summary['clients']} clients, seed {summary['seed']}",
        title_justify="left",
    )
    score = headline_of(summary)[0]
    if summary["accuracy"] is not None:
        table.add_row(f"{score}, last round ({summary['rounds']})", _share(summary["accuracy"]))
    if (
        summary["rounds"] > 1 and summary["accuracy"] is not None
    ):  # of one round it would be the same figure, and nothing was chosen
        best = f"{_share(summary['best_accuracy'])} in round {summary['best_round']}"
        table.add_row(f"best {score} (chosen on the test set)", best)
    if "selected_round" in summary:
        table.add_row(
            f"{score}, round chosen by validation",
            f"{_share(summary['selected_accuracy'])} in round {summary['selected_round']}",
        )
        if summary.get("selected_mean_client_accuracy") is not None:
            table.add_row("mean over clients, that round", _share(summary["selected_mean_client_accuracy"]))
    if summary["worst_client_accuracy"] is not None:
        table.add_row("mean over clients, last round", _share(summary["mean_client_accuracy"]))
        table.add_row("worst client, own test split", _share(summary["worst_client_accuracy"]))
        table.add_row("variance over clients, in percent²", f"{summary['client_variance']:.1f}")
    # here: what prints a slip imports no numpy
    from fedfill.statistics import survival
    from fedfill.training import probabilities, regression

    for name, called in {**probabilities.FIGURES, **regression.FIGURES, **survival.FIGURES}.items():
        if summary.get(name) is not None and called != score:  # which stands above
            table.add_row(called, _share(summary[name]))
    if len(summary["accuracy_by_class"]) > 1:
        table.add_row("variance over classes, in percent²", f"{summary['class_variance']:.1f}")
    table.add_row("sent up / down", f"{size(summary['bytes_up'])} / {size(summary['bytes_down'])}")
    table.add_row("samples trained on", f"{summary['train_samples']:,}")
    table.add_row("seconds (of it in local training)", f"{summary['seconds']:.1f} ({summary['seconds_in_fit']:.1f})")
    table.add_row("SHA-256 of the weights", f"{summary['weights_sha256'][:16]}...")
    out.print(table)
    for found in summary.get("tables", ()):
        out.print()
        paragraph(found["title"])
        shown = _table(*found["header"])
        for row in found["rows"][:MOST_ROWS]:
            shown.add_row(*row)
        out.print(shown)
        if len(found["rows"]) > MOST_ROWS:
            paragraph(f"... and {len(found['rows']) - MOST_ROWS} more rows, all of them in summary.json.")
    if result.was_finished:
        paragraph("This run was finished before: it was read from its folder, and nothing was run again.")
    elif result.resumed_after:
        paragraph(f"Rounds 1 to {result.resumed_after} had been done before; the run went on from there.")
    for note in summary["notes"]:
        paragraph(note)
    print_verdicts([verdict["sentence"] for verdict in summary.get("verdicts", ())])
    out.print("\n[bold]Privacy[/bold]", markup=True)
    paragraph(summary["privacy"]["statement"])
    tell(f"\nRun directory: {result.directory}")


def print_measures(measures: Measures) -> None:
    """How good synthetic samples are: by class who recognises what, and below one line for each measure."""
    found = measures.document
    if "risks" in found:
        _print_table(measures)
        return
    oracle, balance, learnt = found["oracle"], found["balance"], found["trained_on"] or {}
    judge = "" if oracle is None else f", and the oracle {oracle['name']}"
    out.print(
        f"Synthetic samples of {found['algorithm']} on {found['dataset']}, seed {found['seed']}{judge}: accuracies in percent, on real "
        "test samples where not told otherwise",
        width=min(out.width, READABLE),
    )
    columns: dict[str, tuple[list[float | None], float | None]] = {}
    if oracle is not None:
        columns["oracle, synthetic"] = found["recognised_by_class"], (found["recognised"] or {}).get("value")
        columns["oracle"] = oracle["accuracy_by_class"], oracle["accuracy"]
    if found["accuracy"] is not None:
        columns[found["algorithm"]] = found["accuracy_by_class"], found["accuracy"]
    for what in ("synthetic", "real", "both"):
        if what in learnt:
            columns[f"trained on {what}"] = learnt[what]["accuracy_by_class"], learnt[what]["accuracy"]["value"]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("class", overflow="fold")
    for column in ("samples", *columns):
        table.add_column(column, justify="right")
    counts, shares = balance["counts"], [by_class for by_class, _ in columns.values()]
    for name, count, *row in list(zip(found["class_names"], counts, *shares, strict=True))[:MOST_ROWS]:
        table.add_row(name, f"{count:,}", *(percent(value, None) for value in row))
    table.add_row("all", f"{sum(counts):,}", *(percent(value, None) for _, value in columns.values()), style="bold")
    out.print(table)
    if len(counts) > MOST_ROWS:
        paragraph(f"... and {len(counts) - MOST_ROWS} more classes, all of them in the picture.")
    more = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    more.add_column("measure", overflow="fold")
    for column in ("value", "interval of 95 %", "real test samples"):
        more.add_column(column, justify="right")
    for cells in _rows_of(found):
        more.add_row(*cells)
    out.print(more)
    features = [
        found["data_free"]["features"],
        *([found["frechet"]["features"]] if found["frechet"] is not None else []),
    ]
    paragraph(f"Features: {'; '.join(features)}. An observer's figures: nothing may be chosen by them.")
    for note in found["notes"]:
        paragraph(note)
    tell(f"\nWritten: {measures.directory}/measures.json, measures.png")


def _print_table(measures: Measures) -> None:
    """How good a synthetic table is: what can be learned of it, how like it is, and what it gives away."""
    found = measures.document
    rows, work, risks = found["rows"], found["workload"], found["risks"]
    out.print(
        f"Synthetic table of {found['algorithm']} on {found['dataset']}, seed {found['seed']}: {rows['synthetic']:,} rows, beside "
        f"{rows['training']:,} training rows and {rows['test']:,} test rows that nobody trained on",
        width=min(out.width, READABLE),
    )
    learnt = {
        f"{what} rows, {name.replace('_', ' ')}": figures
        for what, models in (found["trained_on"] or {}).items()
        for name, figures in (models or {}).items()
        if name != "rows"
    }
    if learnt:
        keys = next(iter(learnt.values()))
        table = _table("trained on", *(LEARNT[key][0] for key in keys))
        for what, figures in learnt.items():
            values = ((figures[key], LEARNT[key][1]) for key in keys)
            table.add_row(what, *("-" if value is None else format(value, how) for value, how in values))
        out.print(table)
    like = _table("beside the training rows", "synthetic rows", "columns apart", "test rows")
    apart, test = (f"{work[key]:.4f}" for key in ("columns_apart", "test_rows"))
    like.add_row(f"workload error, {len(found['columns'])} columns", f"{work['error']:.4f}", apart, test)
    most = work["largest"]
    cells = (f"{most[key]:.4f}" for key in ("error", "columns_apart", "test_rows"))
    like.add_row(f"largest error: {' and '.join(most['columns'])}", *cells)
    v = work["cramers_v"]
    like.add_row("mean difference of Cramér's V", f"{v['difference']:.4f}", "", f"{v['test_rows']:.4f}")
    if (sites := found["sites"]) is not None:
        worst = sites["by_site"][sites["worst"]]
        like.add_row(f"workload error to the worst site: {sites['worst']}", f"{worst['error']:.4f}", "", "")
        like.add_row("that of all training rows to this site", f"{worst['training_rows']:.4f}", "", "")
    out.print(like)
    told = _table("risk", "training rows", "held-out rows", "difference", "interval of 95 %")
    for name, label in RISKS.items():
        told.add_row(
            f"{label}, {risks['predicates']:,} predicates" if name == "singling_out" else label, *_risk(risks[name])
        )
    worst_column = max(risks["attributes"], key=lambda name: risks["attributes"][name]["value"])
    told.add_row(f"a cell is told, column {worst_column}", *_risk(risks["attributes"][worst_column]))
    out.print(told)
    guarantee = found["privacy"].rsplit("In total: ", 1)[-1]
    paragraph(
        f"{risks['words']} Of this table: {guarantee.rstrip('.')}. An observer's figures: nothing may be chosen by them."
    )
    for note in found["notes"]:
        paragraph(note)
    tell(f"\nWritten: {measures.directory}/measures.json, measures.csv, measures.png")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for k, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="right" if k else "left")
    return table


def _risk(figure: dict[str, Any]) -> tuple[str, ...]:
    ours, theirs, value, low, high = (figure[key] for key in ("training", "held_out", "value", "low", "high"))
    return f"{ours:.4f}", f"{theirs:.4f}", f"{value:.4f}", f"{low:.4f} .. {high:.4f}"


def _rows_of(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """The measures: name, value, interval, and the same of real test samples."""
    free, balance, near, copies = (found[name] for name in ("data_free", "balance", "nearest", "exact_copies"))

    def row(name: str, estimate: dict[str, Any] | None, real: str = "") -> tuple[str, str, str, str]:
        if estimate is None:
            return name, "-", "-", real
        low, high = f"{estimate['low']:.4g}", f"{estimate['high']:.4g}"
        return f"{name}, n={estimate['n']:,}", f"{estimate['value']:.4g}", f"{low} .. {high}", real

    def value(estimate: dict[str, Any] | None) -> str:
        return "-" if estimate is None else f"{estimate['value']:.4g}"

    for what, estimate in (found["trained_on"] or {}).items():
        if isinstance(estimate, dict):
            yield row(f"accuracy, trained on {what}", estimate["accuracy"])
    yield row("Fréchet distance to test samples", free["frechet"], value(free["frechet_floor"]))
    yield row("precision", free["precision"], value(free["real_precision"]))
    yield row("recall", free["recall"], value(free["real_recall"]))
    yield row("nearer to a training sample than to a test sample (.5: no copying)", free["nearer_to_training"])
    yield "exact copies of training samples", f"{copies['count']:,}", "", ""
    yield "samples (of them labelled)", f"{found['samples']:,} ({balance['labelled']:.1%})", "", ""
    yield row("entropy of the labels (1: balanced)", balance["entropy"])
    yield row("distance to the nearest training sample: median", near["median"], f"{near['real_median']:.4g}")
    yield "nearest of all", f"{near['minimum']:.4g}", "", ""
    yield row(f"share within {near['real_percentile']:.4g}", near["share_below"], "0.01")
    if found["oracle"] is not None:
        yield row("recognised by the oracle", found["recognised"], f"{found['oracle']['accuracy']:.4g}")
    if (own := found["frechet"]) is not None:
        yield row(
            "Fréchet distance to training samples by the oracle's encoder", own["synthetic"], f"{own['test']:.4g}"
        )


def print_synthesised(made: Synthesised) -> None:
    """How many there are of each class, what guarantee they carry, and where they lie."""
    origin, counts = made.origin, made.samples.counts(len(made.origin.class_names))
    few = [
        f"{name} {count:,}" for name, count in zip(origin.class_names, counts, strict=True) if count < origin.per_class
    ]
    asked = f"{origin.per_class:,} of each class asked for" if origin.per_class else "in the table's own shares"
    paragraph(f"{sum(counts):,} synthetic samples ({origin.words}), {asked}.")
    if few:
        paragraph(f"Fewer of {', '.join(few[:MOST_ROWS])}{', ...' if len(few) > MOST_ROWS else ''}.")
    paragraph(f"Privacy: {origin.guarantee}.")
    if origin.seed is None:
        paragraph(
            "In a simulation the noise follows from the seed, which the file therefore doesn't tell. Before it is handed out, the run "
            "needs a seed that nobody can guess."
        )
    tell(f"\nWritten: {made.path}" + (f", {made.picture}" if made.picture is not None else ""))


def print_federation(federation: Federation, title: str) -> None:
    """Who holds what: a row for each client, as far as there is room."""
    from fedfill.data.federation import class_table

    header, rows = class_table(federation)
    names = federation.class_names
    # columns are as wide as their numbers, and a class's name may be broken; the other headings only between words
    widths = [max(len(str(row[k])) for row in rows) for k in range(len(header))]
    classes = slice(2, 2 + len(names))
    for k in (0, 1, *range(classes.stop, len(header))):
        widths[k] = max(widths[k], *map(len, header[k].split()))
    if sum(widths) + 2 * len(widths) + 1 > out.width:
        header[classes] = ["classes"]
        rows = [[*row[:2], sum(count > 0 for count in row[classes]), *row[classes.stop :]] for row in rows]
        title += f", {len(names)} classes"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in header:
        whole = column not in names and " " not in column
        table.add_column(column, justify="right", overflow="fold", no_wrap=whole)
    for row in rows[:MOST_ROWS]:
        table.add_row(row[0], *(str(value) if value else "·" for value in row[1:]))
    out.print(table)
    if len(rows) > MOST_ROWS:
        paragraph(f"... and {len(rows) - MOST_ROWS} more clients, all of them in the picture.")
    for note in federation.notes:
        paragraph(note)


def print_verdicts(sentences: Iterable[str]) -> None:
    """What to know before a figure is quoted."""
    sentences = list(sentences)
    if sentences:
        out.print("\n[bold]Verdicts[/bold]", markup=True)
    for sentence in sentences:
        paragraph(f"* {sentence}.")


def tell(text: str) -> None:
    """A line that others may copy, such as a path: never broken."""
    out.print(text, soft_wrap=True)


def paragraph(text: str) -> None:
    """Prose, broken between words at a width that reads well."""
    out.print(text, width=min(out.width, READABLE))


def _share(value: float) -> str:
    return f"{value:.4f}"
