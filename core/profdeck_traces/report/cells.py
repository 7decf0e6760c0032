"""Tables of a page: headings and cells, and how numbers, times and names are written in them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from profdeck_traces.analysis.short_names import full_name, short_kernel

_NAME_LENGTH = 110


@attrs.frozen
class Column:
    """A heading."""

    name: str
    number: bool = True


@attrs.frozen
class Cell:
    """What a table shows; numbers are sorted as such."""

    text: str
    title: str = ""
    kind: str = ""


def filled(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> tuple[list[Column], list[list[Cell]]]:
    """Return columns and rows without the columns in which all rows are empty."""
    used = [place for place in range(len(columns)) if any(row[place].text for row in rows)]
    return [columns[place] for place in used], [[row[place] for place in used] for row in rows]


def number(value: float | None, digits: int = 3) -> Cell:
    """Return a number with so many digits; an empty cell for none."""
    return Cell("", kind="n") if value is None else Cell(f"{value:,.{digits}f}", kind="n")


def ms(time_us: float | None) -> Cell:
    """Return microseconds as milliseconds."""
    return number(None if time_us is None else time_us / 1000)


def percent(share: float | None) -> Cell:
    """Return a share."""
    return Cell("", kind="n") if share is None else Cell(f"{share:.1%}", kind="n")


def name(name: str, *, kernel: bool = False) -> Cell:
    """Return a name that fits a table; the whole one is its title."""
    short = short_kernel(name, _NAME_LENGTH) if kernel else name
    return Cell(short, title=full_name(name)[:300] if short != name else "", kind="name copy")
