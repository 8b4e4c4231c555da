"""What a study's folder holds beside its stages: the recommendation, what was seen, what decided, what was not tried."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedfill.errors import FedfillError
from fedfill.files import read_regular
from fedfill.studies.reporting.values import DAMAGE, Section, Table, amount, duration, sentence, spread
from fedfill.studies.stages import FINAL, REFERENCE, SCREEN
from fedfill.studies.study import RECORD

STAGES = {FINAL: "The last stage", REFERENCE: "For comparison", SCREEN: "The screening"}
"""Folders of a study's comparisons, the most telling first, and what they are called."""


@dataclass(frozen=True)
class Answer:
    """The answer of a study, or of a grid.

    Attributes:
        sentences: The recommendation; the first one to be read alone.
        sections: What was seen, what decided, how to train the method on everything, what was not tried; of a grid its table.
    """

    sentences: tuple[str, ...]
    sections: tuple[Section, ...]


def read_answer(folder: Path) -> tuple[Answer, dict[Path, str]]:
    """A study's folder.

    Args:
        folder: Where it lies.

    Returns:
        Its answer, and the stages that are there, with what they are called.

    Raises:
        FedfillError: Where its record is damaged.
    """
    place = folder / RECORD
    try:
        document = json.loads(read_regular(place))
        if (
            "look" not in document and "request" in document
        ):  # nothing but what was asked for: it was stopped in its screening
            document = {"look": {"sentences": []}, "goal": "", **document}
        found = document.get("recommendation")
        sentences = [_plain(text) for text in found["sentences"]] if found else []
        sections = [
            *(
                [Section("why", "Why, how sure, and at which cost", texts=[("", text) for text in sentences[1:]])]
                if sentences[1:]
                else []
            ),
            Section(
                "seen",
                "What the clients hold",
                texts=[("", _plain(text)) for text in document["look"]["sentences"]],
            ),
            *_decided(document.get("finalists", []), document["goal"]),
        ]
        if commands := document.get("commands"):
            sections.append(
                Section(
                    "use",
                    "How to use it",
                    code=[("Train it, with the validation samples too, and use it", "\n".join(map(str, commands)))],
                )
            )
        if missing := document.get("not_tried"):
            rows = [(str(name), str(why)) for name, why in missing.items()]
            sections.append(
                Section(
                    "missing", "What was not tried", folded=[Table("Methods, and why not", ("method", "why"), rows)]
                )
            )
    except OSError as error:
        raise FedfillError(f"report: can't read {place} ({error.strerror or error})") from error
    except DAMAGE as error:
        raise FedfillError(f"report: {place} is damaged; run the same study again") from error
    if not sentences:
        over = "finalists" in document
        sentences = ["No method came to its end." if over else "This study is not finished: the same command goes on."]
    stages = {folder / name: title for name, title in STAGES.items() if (folder / name / "comparison.json").exists()}
    return Answer(tuple(sentences), tuple(sections)), stages


def _plain(text: object) -> str:
    """A sentence that begins with a word of ours."""
    words = sentence(str(text))
    return words[:1].upper() + words[1:]


def _decided(finalists: Sequence[dict[str, object]], goal: str) -> list[Section]:
    if not finalists:
        return []

    def figures(values: object) -> list[float]:
        """None of a method of which a run diverged."""
        if not isinstance(values, list):
            raise TypeError(f"{values!r} in place of a list")
        return [] if None in values else [float(value) for value in values]

    rows = [
        (
            str(one["label"]),
            spread(figures(one["validation"])),
            spread(figures(one["accuracy"])),
            spread(figures(one["own"])),
            str(one["rounds"]),
            amount(float(str(one["bytes"]))),
            duration(float(str(one["seconds"]))),
        )
        for one in finalists
    ]
    means = [figures(one["validation"]) for one in finalists]
    best = max(range(len(means)), key=lambda k: sum(means[k]) / len(means[k]) if means[k] else -1.0)
    header = ("method", "clients' validation splits", "everyone's test set", "own splits", "rounds", "traffic", "time")
    where = "each client's own data" if goal == "own" else "samples like those of all clients"
    lead = f"The clients' validation splits decided, for a model that will be used on {where}. Nothing was chosen by a test set."
    table = Table(
        "Finalists; mean ± standard deviation over seeds. Bold: what decided", header, rows, frozenset({(best, 1)})
    )
    return [Section("decided", "What decided", lead, tables=[table])]
