"""Layout of tables, paragraphs and bars within the width of the terminal."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence

import attrs
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from profdeck_traces.analysis.short_names import cut_apart, cut_middle
from profdeck_traces.base.text import plural, printable

PIPED_WIDTH = 120
UNLIMITED = 1_000_000
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_GAP = 2


def width_of(console: Console, *, full_names: bool) -> int:
    """Return the line width: that of the terminal, at most `PIPED_WIDTH` in a pipe or file, or `UNLIMITED`.

    Args:
        console: The console for stdout.
        full_names: If True, the width is `UNLIMITED`.
    """
    if full_names:
        return UNLIMITED
    return min(console.width, PIPED_WIDTH) if not sys.stdout.isatty() else console.width


def aligned(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    left: Sequence[str] = (),
    cut: Callable[[str, int], str] = cut_middle,
) -> list[Text]:
    """Format a table without borders and trailing spaces. Empty columns are omitted.

    Args:
        header: The headings.
        rows: The cells. The last cell of each row is shortened to the remaining width.
        width: Width of the table in terminal columns.
        left: Headings of left-aligned columns. The last column is always left-aligned.
        cut: Shortens the last cell of a row to a width, if possible.
    """
    header = [printable(cell) for cell in header]
    cells = [[printable(cell) for cell in row] for row in rows]
    used = [column for column in range(len(header)) if any(row[column] for row in cells)]
    last = len(header) - 1
    sizes = [max([cell_len(header[column]), *(cell_len(row[column]) for row in cells)]) for column in range(last)]
    room = max(8, width - sum(sizes[column] + _GAP for column in used if column != last))

    names = cut_apart([cut(row[last], UNLIMITED) for row in cells], room)

    def line(row: Sequence[str], name: str) -> str:
        parts = []
        for column in used:
            if column == last:
                parts.append(name)
                continue
            pad = " " * (sizes[column] - cell_len(row[column]))
            parts.append(row[column] + pad if header[column] in left else pad + row[column])
        return (" " * _GAP).join(parts).rstrip()

    if not rows:
        return []
    heading = Text(line(header, cut_middle(header[last], room)), style="bold")
    return [heading, *(Text(line(row, name)) for row, name in zip(cells, names, strict=True))]


def wrapped(text: str, width: int, *, indent: str = "", first: str | None = None, style: str = "") -> list[Text]:
    """Wrap a paragraph to `width` without breaking words.

    Args:
        text: The paragraph.
        width: Maximum length of a line.
        indent: Prefix of all lines but the first.
        first: Prefix of the first line. Default: `indent`.
        style: Style of all lines.
    """
    lines = textwrap.wrap(
        printable(text),
        min(width, 10_000),
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [Text(line, style=style) for line in lines]


def bar(share: float, width: int) -> str:
    """Draw a horizontal bar.

    Args:
        share: Length as a fraction of `width`, limited to the range from 0 to 1.
        width: Maximum length in terminal columns.
    """
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, partial = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[partial] if partial else "")


def side_by_side(left: Sequence[Text], right: Sequence[Text], width: int) -> list[Text]:
    """Place two blocks of lines side by side, or one below the other if they do not fit in `width`."""
    size = max((line.cell_len for line in left), default=0) + 2 * _GAP
    if not left or not right or size + max(line.cell_len for line in right) > width:
        return [*left, *right]
    lines = []
    for row in range(max(len(left), len(right))):
        line = left[row].copy() if row < len(left) else Text()
        if row < len(right):
            line.append(" " * (size - line.cell_len))
            line.append_text(right[row])
        lines.append(line)
    return lines


@attrs.define(eq=False)
class ScreenTable:
    """A table whose number of rows can be adjusted to the screen."""

    render: Callable[[int], list[Text]]
    """Function that formats the table, given the maximum number of rows."""
    priority: int
    """Order in which tables are allocated screen space, lowest first. Tables with priority 0 are always shown."""
    rows: int
    """Number of rows to show. Initially the maximum."""
    fewest: int
    """Minimum number of rows. If this many do not fit, the table is hidden."""

    @property
    def lines(self) -> list[Text]:
        """The formatted table."""
        return self.render(self.rows)


def fitted(tables: Sequence[ScreenTable], room: int, option: str) -> tuple[list[ScreenTable], list[str]]:
    """Return the tables that fit in `room` lines, and a note if some do not fit.

    A blank line before each table is included in the count.

    Args:
        tables: The tables in display order.
        room: Number of lines.
        option: Command-line option that shows all tables.
    """
    shown = _fitted(tables, room)
    if len(shown) == len(tables):
        return shown, []
    shown = _fitted(tables, room - 2)
    hidden = plural(len(tables) - len(shown), "more table")
    return shown, [f"{hidden} in a taller terminal, in a pipe, or with {option}."]


def _fitted(tables: Sequence[ScreenTable], room: int) -> list[ScreenTable]:
    """Return the tables that fit in `room` lines, each with as many rows as possible.

    Tables first get their minimum number of rows, in order of priority. They then take turns growing by one row.
    """
    shown = []
    for index, table in sorted(enumerate(tables), key=lambda item: item[1].priority):
        small = attrs.evolve(table, rows=min(table.fewest, table.rows))
        size = len(small.lines) + 1
        if size <= room or table.priority == 0:
            shown.append((index, small, table.rows))
            room -= size
    growing = [(table, most) for _, table, most in shown]
    while growing:
        growing = [(table, most) for table, most in growing if table.rows < most]
        for table, most in tuple(growing):
            added = len(table.render(table.rows + 1)) - len(table.lines)
            if added > room:
                growing.remove((table, most))
                continue
            table.rows += 1
            room -= added
    return [table for _, table, _ in sorted(shown, key=lambda item: item[0])]


def show(console: Console, lines: Sequence[Text]) -> None:
    """Print lines without wrapping. Control characters are escaped."""
    for line in lines:
        line.rstrip()
        shown = printable(line.plain)
        console.print(line if shown == line.plain else Text(shown), soft_wrap=True, markup=False)
