"""Typed tables, convertible to Arrow, pandas and polars."""

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
    """A table with typed columns. The values of each row are in the order of `columns`."""

    name: str
    columns: Mapping[str, ColumnType]
    rows: Callable[[], Iterator[tuple[Any, ...]]] = attrs.field(repr=False)
    """Function that yields the rows."""

    def to_arrow(self) -> pa.Table:
        """Convert to an Arrow table.

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
        clean: dict[ColumnType, Callable[[Any], Any]] = {ColumnType.TEXT: _clean, ColumnType.INTEGER: _in_64_bits}
        rows = list(self.rows())
        values = zip(*rows, strict=True) if rows else itertools.repeat((), len(self.columns))
        return pa.table(
            {
                name: pa.array(map(clean[kind], column) if kind in clean else column, types[kind])
                for (name, kind), column in zip(self.columns.items(), values, strict=True)
            }
        )

    def to_pandas(self) -> pd.DataFrame:
        """Convert to a pandas DataFrame. pandas must be installed."""
        frame: pd.DataFrame = self.to_arrow().to_pandas()
        return frame

    def to_polars(self) -> pl.DataFrame:
        """Convert to a polars DataFrame. polars must be installed."""
        import polars as pl

        return pl.DataFrame(self.to_arrow())

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Export through the Arrow C stream interface, for DuckDB and polars for example."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def _repr_html_(self) -> str:
        """Return the first rows as HTML, for notebooks."""
        rows = list(itertools.islice(self.rows(), _SHOWN_ROWS + 1))
        more = f"<p>The first {_SHOWN_ROWS} rows of <code>{self.name}</code>.</p>" if len(rows) > _SHOWN_ROWS else ""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        body = "".join(
            f"<tr>{''.join(f'<td>{_format(value)}</td>' for value in row)}</tr>" for row in rows[:_SHOWN_ROWS]
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def arrow() -> Any:
    """Import pyarrow.

    Raises:
        ProfdeckError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise ProfdeckError(
            "Arrow tables require pyarrow, which is not installed. Run: pip install 'profdeck[tables]'."
        ) from None
    return pa


def _clean(value: str | None) -> str | None:
    """Replace unpaired surrogates: a corrupt trace can contain them, but UTF-8 cannot encode them."""
    return None if value is None else value.encode("utf-8", "replace").decode()


def _in_64_bits(value: int | None) -> int | None:
    """Return an integer that Arrow can store. A damaged manifest can contain larger ones."""
    return value if value is not None and -(2**63) <= value < 2**63 else None


def _format(value: object) -> str:
    return "" if value is None else html.escape(f"{value:,.3f}" if isinstance(value, float) else str(value))
