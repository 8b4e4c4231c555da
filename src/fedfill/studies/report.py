"""Reports: one self-contained page on runs, comparisons, grids and studies, for people who don't run them."""

from __future__ import annotations

from pathlib import Path

import jinja2

from fedfill import __version__
from fedfill.errors import FedfillError, Kept, first_line, path_of
from fedfill.runs.directory import write_atomically
from fedfill.studies.reporting.charts import holdings, learning
from fedfill.studies.reporting.embedded import samples
from fedfill.studies.reporting.found import found
from fedfill.studies.reporting.parts import Part, Story, gather
from fedfill.studies.reporting.served import served
from fedfill.studies.reporting.totals import finals, traffic
from fedfill.studies.reporting.values import DAMAGE, ROOMS, Room, Section
from fedfill.studies.reporting.words import headline, privacy, results, settings, tiles, told, who_is_worst

LIMIT = 300_000
"""Bytes of a page at the most: what every mailbox takes."""


MARK, MARKED = b'<meta name="generator" content="fedfill ', 10_000
"""What every report has in its first bytes, and in how many of these."""


def report(*paths: str | Path | Kept, out: str | Path | None = None) -> Path:
    """Write a page on runs, comparisons, grids and studies: what came out, how sure it is, and how to run it again.

    The page is one file that asks for nothing else and needs no script. No data and no weights are read.

    Example::

        fedfill.report(fedfill.compare(["fedavg", "fed3r"]))

    Args:
        *paths: Folders of runs, finished or not, of comparisons, grids and studies, or what `fedfill.run`, `compare` and `study`
            returned. Several runs stand side by side.
        out: The HTML file; None: ``report.html`` in the folder, or in ``runs/`` where several are given.

    Returns:
        The file.

    Raises:
        FedfillError: Where a folder holds none of these or is damaged, or the file can't be written or would be too large.
    """
    if not paths:
        raise FedfillError("report: no folder is given; allowed: folders of runs, comparisons, grids and studies")
    folders = [path_of("paths", path, "folders, and what fedfill.run, compare and study return") for path in paths]
    place = (
        path_of("out", out, "a file that ends in .html")
        if out is not None
        else (folders[0] if len(folders) == 1 else Path("runs")) / "report.html"
    )
    if place.is_dir():
        raise FedfillError(f"out: {place} is a folder; allowed: a file, such as {place / 'report.html'}")
    _check_place(place)
    try:
        html = page(gather(folders))
    except DAMAGE as error:
        raise FedfillError(
            f"report: the files in {', '.join(map(str, folders))} don't fit together ({type(error).__name__}: {first_line(error)}), so one is "
            "damaged; put back what the run wrote, or run it again"
        ) from error
    write_atomically(place, html, "name another place with --out FILE")
    return place


def _check_place(place: Path) -> None:
    """Refuse a name that is no page's, and a file that is something else than an earlier report."""
    if place.suffix.lower() not in (".html", ".htm"):
        raise FedfillError(f"out: found {place}; allowed: a file whose name ends with .html")
    if not place.exists():
        return
    try:
        with place.open("rb") as file:
            ours = place.is_file() and (not (head := file.read(MARKED)) or MARK in head)
    except OSError as error:
        raise FedfillError(f"out: can't read {place} ({error.strerror or error}); name another place") from error
    if not ours:
        raise FedfillError(f"out: {place} is there and is no report of fedfill; remove it, or name another place")


def page(story: Story) -> bytes:
    """The page, with as many of the details as it has room for.

    Args:
        story: What it tells.

    Returns:
        HTML of `LIMIT` bytes at the most.

    Raises:
        FedfillError: Where even without details it is larger.
    """
    size = 0
    for room in ROOMS:
        html = _render(story, room).encode()
        size = len(html)
        if size <= LIMIT:
            return html
    raise FedfillError(f"report: found {size / 1000:.0f} kB; allowed: {LIMIT / 1000:.0f} kB, so give fewer folders")


def _render(story: Story, room: Room) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedfill.studies.reporting", "page"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["told"] = told
    parts = []
    for k, part in enumerate(story.parts):
        title, verdicts = headline(part)
        charts = finals(part, where(part)) if len(part.lines) > 1 else []
        parts.append(
            {
                "key": f"part{k + 1}", "part": part, "headline": title, "verdicts": verdicts, "tiles": tiles(part), "results": results(part),
                "charts": charts, "sections": _sections(part, room), "under": _under(part),
            }
        )  # fmt: skip
    title, under = _title(story)
    return environment.get_template("report.html.j2").render(
        parts=parts, answers=story.answers, headline=title, under=under, title=f"fedfill report: {story.parts[0].title}" if story.parts else "fedfill report",
        version=__version__, cut=room is not ROOMS[0], limit=LIMIT // 1000,
    )  # fmt: skip


def _title(story: Story) -> tuple[str, list[str]]:
    """The headline of the page, and what stands under it."""
    if len(story.answers) == 1:
        words = story.answers[0].sentences
        return words[0], list(words[1:2])  # how sure; a section has them all
    if len(story.parts) == 1:
        return headline(story.parts[0])[0], _under(story.parts[0])
    return f"{len(story.answers) + len(story.parts)} subjects in one report", [
        *(answer.sentences[0] for answer in story.answers),
        *(headline(part)[0] for part in story.parts),
    ]


def _under(part: Part) -> list[str]:
    return [words for words in (who_is_worst(part), part.title) if words]


def where(part: Part) -> str:
    """Data set, partition and size in a few words, for every chart."""
    trial = next(iter(part.trials), None)
    if trial is None:
        return part.title
    held = trial.experiment
    clients = held.get("clients")
    seeds = (
        f"{len(part.seeds)} seeds"
        if len(part.seeds) > 1
        else f"seed {held.get('seed')}"
        if part.seeds
        else "several seeds"
    )
    data = Path(str(held.get("data"))).name
    return f"{data}, {held.get('partition')}, {clients} client{'s' if clients != 1 else ''}, {seeds}"


def _sections(part: Part, room: Room) -> list[Section]:
    about = where(part)
    made = [
        found(part, about, room),
        holdings(part, about, room),
        learning(part, about, room),
        served(part, about, room),
        traffic(part, about, room),
    ]
    made += [
        privacy(part, about, room) if any(line.known for line in part.lines) else None,
        samples(part, room),
        settings(part, room),
    ]
    return [section for section in made if section is not None]
