"""A schema as text of a TOML file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from typing import Any

from pydantic import BaseModel


def text_of(site: str | None, target: BaseModel, columns: Mapping[str, BaseModel]) -> str:
    """The text of a schema's file: what is not as it is by default.

    Args:
        site: The column that says where a row comes from; None: none does.
        target: What is to be told of a row.
        columns: What is learned from, by name.

    Returns:
        TOML.
    """
    lines = [f"site = {_toml(site)}", ""] if site is not None else []
    tables = {"target": target, **{f"columns.{_key(name)}": column for name, column in columns.items()}}
    for head, part in tables.items():
        own = part.model_dump(exclude_defaults=True)
        lines += [f"[{head}]", *(f"{name} = {_toml(value)}" for name, value in own.items()), ""]
    return "\n".join(lines)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else _toml(name)


def _toml(value: Any) -> str:
    """A value in TOML; of strings JSON's form, which TOML reads."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, date):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False)
