"""Derives table columns from attrs classes."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import attrs


class ColumnType(StrEnum):
    """Type of the values in a column. Values can be missing."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    TRUTH = "truth"


_COLUMN_TYPES: dict[type, ColumnType] = {
    str: ColumnType.TEXT,
    int: ColumnType.INTEGER,
    float: ColumnType.NUMBER,
    bool: ColumnType.TRUTH,
}


def columns_of(model: type, prefix: str = "") -> dict[str, ColumnType]:
    """Return the columns for the scalar fields of a class and of its nested classes.

    Columns of a nested class such as ``per_step`` have its field name as prefix. Fields with several types, such as
    thread IDs, become text. Lists are omitted, because they have their own tables.
    """
    columns: dict[str, ColumnType] = {}
    for name, types_ in _fields(model):
        if len(types_) == 1 and attrs.has(types_[0]):
            columns |= columns_of(types_[0], f"{prefix}{name}_")
        elif set(types_) <= _COLUMN_TYPES.keys():
            columns[prefix + name] = _COLUMN_TYPES[types_[0]] if len(types_) == 1 else ColumnType.TEXT
    return columns


def values_of(item: Any, model: type) -> Iterator[Any]:
    """Yield the values of the columns of `columns_of`. Values of a missing nested object are ``None``."""
    for name, types_ in _fields(model):
        value = None if item is None else getattr(item, name)
        if len(types_) == 1 and attrs.has(types_[0]):
            yield from values_of(value, types_[0])
        elif set(types_) <= _COLUMN_TYPES.keys():
            yield value if value is None or len(types_) == 1 else str(value)


def _fields(model: type) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield each field with its types, except ``None``."""
    attrs.resolve_types(model)
    for field in attrs.fields(model):
        kind = field.type
        alternatives = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        yield field.name, tuple(type_ for type_ in alternatives if type_ is not types.NoneType)
