"""Table headings and cells of a page, with number formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import attrs

from profdeck_traces.analysis.short_names import full_name, short_kernel

_NAME_LENGTH = 110
_Item = TypeVar("_Item")


@attrs.frozen
class Column:
    """Heading of a column."""

    name: str
    number: bool = True


@attrs.frozen
class Cell:
    """Text of a table cell. The page sorts cells of kind ``n`` by number."""

    text: str
    title: str = ""
    kind: str = ""


Grid = dict[str, Callable[[_Item], Cell]]
"""Columns of a table. Maps each heading to the function that formats an item's cell in that column."""


def table(items: Iterable[_Item], grid: Grid[_Item]) -> tuple[list[Column], list[list[Cell]]]:
    """Return the columns and rows of a table with one row per item.

    A column is numeric if its first cell is numeric.
    """
    rows = [[cell(item) for cell in grid.values()] for item in items]
    numbers = [cell.kind == "n" for cell in rows[0]] if rows else [True] * len(grid)
    return list(map(Column, grid, numbers)), rows


def filled(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> tuple[list[Column], list[list[Cell]]]:
    """Remove the columns without any text."""
    used = [index for index in range(len(columns)) if any(row[index].text for row in rows)]
    return [columns[index] for index in used], [[row[index] for index in used] for row in rows]


def number(value: float | None, digits: int = 3) -> Cell:
    """Format a number with `digits` decimals; empty for ``None``."""
    return Cell("", kind="n") if value is None else Cell(f"{value:,.{digits}f}", kind="n")


def ms(time_us: float | None) -> Cell:
    """Format microseconds as milliseconds."""
    return number(None if time_us is None else time_us / 1000)


def count(value: int | None) -> Cell:
    """Format an integer; empty for ``None``."""
    return number(value, 0)


def percent(share: float | None) -> Cell:
    """Format a fraction as a percentage."""
    return Cell("", kind="n") if share is None else Cell(f"{share:.1%}", kind="n")


def name(name: str, *, kernel: bool = False) -> Cell:
    """Shorten a name to fit a table. The tooltip contains the full name."""
    short = short_kernel(name, _NAME_LENGTH) if kernel else name
    return Cell(short, title=full_name(name)[:300] if short != name else "", kind="name copy")
