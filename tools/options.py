"""Write src/fedfill/options.py: what editors and type checkers know of the keywords of fedfill.run and the like."""

from __future__ import annotations

import re
import textwrap
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from fedfill.algorithms import Algorithm, known_algorithms
from fedfill.experiment.settings import INCIDENTAL, PLACES, TABLES, Experiment
from fedfill.models.networks import ModelSettings

TARGET = Path(__file__).parents[1] / "src" / "fedfill" / "options.py"
NAMED = {"algorithm", "data", "partition", "model"}
"""Parameters of their own."""
FILES = {"data_dir", "start_from", "extra", "schema_file", "weights"}
RESUMED = {"workers", "device", "data_dir"}
"""Parameters of `resume` of their own."""

HEAD = '''"""Keywords of `fedfill.run` and the like, for editors and type checkers; written by ``python tools/options.py``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from fedfill.algorithms import Algorithm

'''


def kinds(annotation: Any) -> list[str]:
    """The parts of a type as they are written."""
    if annotation is type(None):
        return ["None"]
    if annotation is Any:  # algorithms as values of other algorithms' settings
        return ["str", "Algorithm", "None"]
    origin = get_origin(annotation)
    if origin is Annotated:
        return kinds(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [part for one in get_args(annotation) for part in kinds(one)]
    if origin is Literal:
        return [f'Literal["{word}"]' for word in get_args(annotation)]
    return [annotation.__name__]


def entry(name: str, fields: Iterable[FieldInfo]) -> str:
    """One keyword, which several algorithms may have: its type, and what it means."""
    parts: dict[str, None] = {}
    meanings: dict[str, None] = {}
    for field in fields:
        parts |= dict.fromkeys(kinds(field.annotation))
        meanings[" ".join((field.description or "").split())] = None
    if name in FILES:
        parts = {"str": None, "Path": None, **parts}
    words = [part.removeprefix("Literal[").removesuffix("]") for part in parts if part.startswith("Literal")]
    plain = sorted((part for part in parts if not part.startswith("Literal")), key=lambda part: part == "None")
    if words:
        plain.insert(0, f"Literal[{', '.join(words)}]")
    # the first sentence of the first meaning: the rest is for 'fedfill list settings'
    sentence = re.split(r"(?<=[^.]\.) ", next(iter(meanings)))[0].rstrip(".")
    doc = textwrap.shorten(f"{sentence}.", 108, placeholder=" ...")
    return f'    {name}: {" | ".join(plain)}\n    """{doc}"""'


def table(name: str, base: str, doc: str, entries: Iterable[str]) -> str:
    """A TypedDict none of whose keys is needed."""
    return "\n".join([f"\nclass {name}({base}, total=False):", f'    """{doc}"""\n', *entries, ""])


def text() -> str:
    """The whole module."""
    fields = {name: field for name, field in Experiment.model_fields.items() if name not in NAMED | TABLES}
    settings: dict[str, list[FieldInfo]] = {}
    ours = [kind for kind in known_algorithms().values() if kind.__module__.split(".")[0] == "fedfill"]
    for kind in (Algorithm, *ours, ModelSettings):
        for name, field in kind.model_fields.items():
            settings.setdefault(name, []).append(field)
    shared = [entry(name, [field]) for name, field in fields.items() if name != "seed"]
    shared += [entry(name, owners) for name, owners in settings.items()]
    changes = [entry(name, [field]) for name, field in fields.items() if name in (INCIDENTAL | PLACES) - RESUMED]
    return HEAD + "\n".join(
        [
            table(
                "Shared",
                "TypedDict",
                "What all runs of a comparison may be given: fields of `Experiment`, and settings.",
                shared,
            ),
            table("Options", "Shared", "What one run may be given.", [entry("seed", [fields["seed"]])]),
            table("Changes", "TypedDict", "What may be changed at a resume.", changes),
        ]
    )


if __name__ == "__main__":
    TARGET.write_text(text())
