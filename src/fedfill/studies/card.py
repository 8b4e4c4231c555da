"""The card of an exported model, ``model.json``: read as what a stranger wrote, so that nothing in it is taken on trust."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import Field, FiniteFloat, StringConstraints, ValidationError, model_validator

from fedfill import __version__
from fedfill.errors import FedfillError, first_line
from fedfill.files import read_regular
from fedfill.runs.records import Checked, first_fault

CARD, FORMAT = "model.json", 1
"""Name of the card, and the number of its form: a reader refuses a higher one."""

MOST_VALUES = 2**24
"""Values of one input at the most: a colour image of 2,300 by 2,300. A network for more would eat the memory."""


class _Number(Checked):
    name: str
    mean: FiniteFloat
    deviation: FiniteFloat


class _Words(Checked):
    name: str
    words: list[str]


class _Inputs(Checked):
    kind: Literal["images", "table", "numbers"]
    shape: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)
    dtype: Literal["uint8", "float32"]
    image_size: Annotated[int, Field(ge=1)] | None = None
    numbers: list[_Number] = Field(default_factory=list)
    words: list[_Words] = Field(default_factory=list)

    @model_validator(mode="after")
    def _not_too_large(self) -> _Inputs:
        size = 1
        for side in self.shape:
            size *= side
        if size > MOST_VALUES:
            raise ValueError(f"found {size:,} values, allowed: {MOST_VALUES:,}")
        return self


class _Network(Checked):
    name: Annotated[str, StringConstraints(min_length=1)]
    settings: dict[str, Any] = Field(default_factory=dict)
    drawn_sha256: str | None = None


class _Entry(Checked):
    file: str
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    number: Annotated[int, Field(ge=0)] | None = None
    client: str | None = None
    domain: str | None = None

    @model_validator(mode="after")
    def _file_of_its_client(self) -> _Entry:
        if (self.number is None) != (self.client is None):
            raise ValueError("a client has a number and a name")
        wanted = "model.safetensors" if self.number is None else f"clients/{self.number}.safetensors"
        if self.file != wanted:
            raise ValueError(f"the file is {self.file!r}, allowed: {wanted!r}")
        return self


class _Card(Checked):
    format: Annotated[int, Field(ge=1)]
    fedfill: str
    network: _Network
    class_names: list[str] = Field(min_length=1)
    inputs: _Inputs
    weights: list[_Entry] = Field(min_length=1)
    run: dict[str, Any]
    privacy: dict[str, Any]

    @model_validator(mode="after")
    def _each_once(self) -> _Card:
        if len(set(self.class_names)) < len(self.class_names):
            raise ValueError("two classes have the same name")
        numbers = [entry.number for entry in self.weights]
        if len(set(numbers)) < len(numbers) or (None in numbers and len(numbers) > 1):
            raise ValueError("two models are of the same client, or of none")
        return self


def read_card(folder: Path) -> dict[str, Any]:
    """The card in a folder, checked.

    Args:
        folder: With the card.

    Returns:
        The document.

    Raises:
        FedfillError: Where it can't be read, is damaged, or is of a newer fedfill.
    """
    where = folder / CARD
    try:
        document = json.loads(read_regular(where), parse_constant=_no_number)
        number = document["format"]
        if type(number) is int and number > FORMAT:
            raise FedfillError(
                f"model: {where} has form {number}, as fedfill {document.get('fedfill')} writes it, and this is fedfill {__version__}, "
                f"which reads up to {FORMAT}; allowed: a newer fedfill, or the run exported by this one"
            )
        _Card.model_validate(document)
    except OSError as error:
        raise FedfillError(f"model: {where} can't be read ({error.strerror or error})") from error
    except ValidationError as error:
        raise damaged(where, first_fault(error)) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise damaged(where, f"{type(error).__name__}: {first_line(error)}") from error
    return dict(document)


def damaged(where: Path, what: str) -> FedfillError:
    """The error of a card that says something that can't be."""
    return FedfillError(f"model: {where} is damaged ({what}); export the run again")


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")
