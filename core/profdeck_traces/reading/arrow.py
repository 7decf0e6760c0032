"""The events of a trace as Arrow, in batches of bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from profdeck_traces.reading.columns import Tables
from profdeck_traces.reading.time_slices import Slice

if TYPE_CHECKING:
    import pyarrow as pa


def batches_of(tables: Tables, slices: Callable[[], Iterator[Slice]]) -> pa.RecordBatchReader:
    """Return the complete events of a trace in the order of time, a batch for each slice of time.

    Columns: ``name``, ``category``, ``pid`` and ``tid``, as dictionaries of texts; ``start_ns`` and ``end_ns``.

    Raises:
        ImportError: pyarrow is not installed.
    """
    import pyarrow as pa

    pids, tids = ([str(track[part]) for track in tables.tracks] for part in (0, 1))
    text = pa.dictionary(pa.int32(), pa.string())
    times = {"start_ns": pa.int64(), "end_ns": pa.int64()}
    schema = pa.schema([*((name, text) for name in ("name", "category", "pid", "tid")), *times.items()])
    texts = [_Texts(pa, values) for values in (tables.names, tables.categories, pids, tids)]

    def batches() -> Iterator[pa.RecordBatch]:
        for piece in slices():
            columns = piece.whole(piece.first)
            codes = (columns.name, columns.category, columns.track, columns.track)
            arrays = [of_texts.array(of_events) for of_texts, of_events in zip(texts, codes, strict=True)]
            yield pa.RecordBatch.from_arrays(
                [*arrays, pa.array(columns.start_ns), pa.array(columns.end_ns)], schema=schema
            )

    return pa.RecordBatchReader.from_batches(schema, batches())


class _Texts:
    """Texts by code, as a dictionary, which must have each once; two codes may have one, of names that were cut."""

    def __init__(self, pa: Any, values: list[str]) -> None:
        self._pa = pa
        unique = {value: number for number, value in enumerate(dict.fromkeys(values))}
        self._codes = np.array([unique[value] for value in values], np.int32)
        self._texts = pa.array([value.encode("utf-8", "replace").decode() for value in unique], pa.string())

    def array(self, codes: Any) -> Any:
        return self._pa.DictionaryArray.from_arrays(self._pa.array(self._codes[codes]), self._texts)
