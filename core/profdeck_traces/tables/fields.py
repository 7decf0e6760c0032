"""Columns of tables from the classes of the model, so that what is added to those is in the tables as well."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import attrs


class ColumnType(StrEnum):
    """What the values of a column are; any may be missing."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    TRUTH = "truth"


_OF: dict[type, ColumnType] = {
    str: ColumnType.TEXT,
    int: ColumnType.INTEGER,
    float: ColumnType.NUMBER,
    bool: ColumnType.TRUTH,
}


def columns_of(model: type, prefix: str = "") -> dict[str, ColumnType]:
    """Return the columns of what the class says by itself: its scalars, and those of a single part of it.

    Ids of processes, threads and streams may be numbers or words; they are text. What has many parts is a table of
    its own. The scalars of a part such as ``per_step`` have its name in front.
    """
    found: dict[str, ColumnType] = {}
    for name, kinds in _fields(model):
        if len(kinds) == 1 and attrs.has(kinds[0]):
            found |= columns_of(kinds[0], f"{prefix}{name}_")
        elif set(kinds) <= _OF.keys():
            found[prefix + name] = _OF[kinds[0]] if len(kinds) == 1 else ColumnType.TEXT
    return found


def values_of(item: Any, model: type) -> Iterator[Any]:
    """Yield the values of these columns; ``None`` for all of a part that is not there."""
    for name, kinds in _fields(model):
        value = None if item is None else getattr(item, name)
        if len(kinds) == 1 and attrs.has(kinds[0]):
            yield from values_of(value, kinds[0])
        elif set(kinds) <= _OF.keys():
            yield value if value is None or len(kinds) == 1 else str(value)


def _fields(model: type) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the fields with the types that they can have, beside ``None``."""
    attrs.resolve_types(model)
    for field in attrs.fields(model):
        kind = field.type
        alternatives = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        yield field.name, tuple(one for one in alternatives if one is not types.NoneType)
