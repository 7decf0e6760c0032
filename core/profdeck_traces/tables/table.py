"""A table: columns with types, and rows; as Arrow, and through that for pandas, polars and DuckDB."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.tables.fields import ColumnType

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

_SHOWN_ROWS = 20


@attrs.frozen
class Table:
    """Rows of values, each in the order of the columns."""

    name: str
    columns: Mapping[str, ColumnType]
    rows: Callable[[], Iterator[tuple[Any, ...]]] = attrs.field(repr=False)
    """Yields the rows."""

    def to_arrow(self) -> pa.Table:
        """Return it as a table of Arrow.

        Raises:
            ProfdeckError: pyarrow is not installed.
        """
        pa = arrow()
        types = {
            ColumnType.TEXT: pa.string(),
            ColumnType.INTEGER: pa.int64(),
            ColumnType.NUMBER: pa.float64(),
            ColumnType.TRUTH: pa.bool_(),
        }
        rows = list(self.rows())
        values = zip(*rows, strict=True) if rows else itertools.repeat((), len(self.columns))
        return pa.table(
            {
                name: pa.array(map(_clean, column) if kind is ColumnType.TEXT else column, types[kind])
                for (name, kind), column in zip(self.columns.items(), values, strict=True)
            }
        )

    def to_pandas(self) -> pd.DataFrame:
        """Return it as a data frame of pandas, which must be installed."""
        frame: pd.DataFrame = self.to_arrow().to_pandas()
        return frame

    def to_polars(self) -> pl.DataFrame:
        """Return it as a data frame of polars, which must be installed."""
        import polars as pl

        return pl.DataFrame(self.to_arrow())

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Hand it to what speaks Arrow's C stream interface, such as DuckDB and polars."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def _repr_html_(self) -> str:
        """Show the first rows in a notebook."""
        rows = list(itertools.islice(self.rows(), _SHOWN_ROWS + 1))
        more = f"<p>The first {_SHOWN_ROWS} rows of <code>{self.name}</code>.</p>" if len(rows) > _SHOWN_ROWS else ""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        body = "".join(
            f"<tr>{''.join(f'<td>{_shown(value)}</td>' for value in row)}</tr>" for row in rows[:_SHOWN_ROWS]
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def arrow() -> Any:
    """Return the module pyarrow.

    Raises:
        ProfdeckError: It is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise ProfdeckError(
            "Tables of Arrow need pyarrow, which is not installed. Run: pip install 'profdeck[tables]'."
        ) from None
    return pa


def _clean(value: str | None) -> str | None:
    """Return text without halves of surrogate pairs, which a damaged trace may have and UTF-8 has not."""
    return None if value is None else value.encode("utf-8", "replace").decode()


def _shown(value: object) -> str:
    return "" if value is None else html.escape(f"{value:,.3f}" if isinstance(value, float) else str(value))
