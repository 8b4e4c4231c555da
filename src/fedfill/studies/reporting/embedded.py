"""Pictures in a report: those of synthetic samples that runs left, made small."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from PIL import Image

from fedfill.errors import FedfillError
from fedfill.studies.reporting.parts import Part
from fedfill.studies.reporting.values import Picture, Room, Section, many


def samples(part: Part, room: Room) -> Section | None:
    """The pictures of synthetic samples that the runs left."""
    found = [
        (line, trial) for line in part.lines if (trial := next((t for t in line.known if t.picture is not None), None))
    ]
    if not found:
        return None
    pictures = []
    for line, trial in found[: room.pictures]:
        assert trial.picture is not None
        title = f"{line.label}, seed {trial.experiment.get('seed')}, round {int(trial.picture.stem.rpartition('-')[2])}"
        if (picture := embedded(trial.picture, title, room.picture)) is not None:
            pictures.append(picture)
    lead = "Samples that the methods made, one row for each class."
    if left := len(found) - len(pictures):
        where = ", ".join(str(trial.picture) for _, trial in found if trial.picture is not None)
        lead += f" {many(left, 'picture')} would make this page too large; they lie in the runs' folders: {where}."
    return Section("samples", "Synthetic samples", lead, pictures=pictures)


def embedded(path: Path, title: str, most: int) -> Picture | None:
    """A picture in a few kilobytes.

    Args:
        path: A PNG file.
        title: What it shows.
        most: Bytes it may have.

    Returns:
        None where it can't be made so small.

    Raises:
        FedfillError: Where the file is no picture.
    """
    try:
        with Image.open(path, formats=["PNG"]) as image:
            whole = image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise FedfillError(f"report: {path} is no picture ({error}); remove it") from error
    for width, colours in ((720, 64), (560, 32), (420, 16)):
        small = whole.copy()
        small.thumbnail((width, 4 * width), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        small.quantize(colours).save(buffer, "PNG", optimize=True)
        if buffer.tell() <= most:
            return Picture(title, f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}", *small.size)
    return None
