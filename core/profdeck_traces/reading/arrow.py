"""Export of trace events as Arrow record batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from profdeck_traces.reading.columns import Columns

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_EVENTS = 1 << 16


def record_batches(events: Columns) -> pa.RecordBatchReader:
    """Return events as record batches of up to 65,536 rows.

    The columns ``name``, ``category``, ``pid`` and ``tid`` are dictionary-encoded strings; ``start_ns`` and ``end_ns``
    are integers.

    Raises:
        ImportError: pyarrow is not installed.
    """
    import pyarrow as pa

    tables = events.tables
    pids, tids = ([str(track[part]) for track in tables.tracks] for part in (0, 1))
    text = pa.dictionary(pa.int32(), pa.string())
    times = {"start_ns": pa.int64(), "end_ns": pa.int64()}
    schema = pa.schema([*((name, text) for name in ("name", "category", "pid", "tid")), *times.items()])
    texts = [_Texts(pa, values) for values in (tables.names, tables.categories, pids, tids)]
    category = tables.category_of_names()

    def batches() -> Iterator[pa.RecordBatch]:
        for first in range(0, len(events), _BATCH_EVENTS):
            batch = events[first : first + _BATCH_EVENTS]
            codes = (batch.name, category[batch.name], batch.track, batch.track)
            arrays = [of_texts.array(of_events) for of_texts, of_events in zip(texts, codes, strict=True)]
            yield pa.RecordBatch.from_arrays([*arrays, pa.array(batch.start_ns), pa.array(batch.end_ns)], schema=schema)

    return pa.RecordBatchReader.from_batches(schema, batches())


class _Texts:
    """Strings by code, as an Arrow dictionary without duplicates. A name repeats if it occurs in several categories."""

    def __init__(self, pa: Any, values: list[str]) -> None:
        self._pa = pa
        unique = {value: number for number, value in enumerate(dict.fromkeys(values))}
        self._codes = np.array([unique[value] for value in values], np.int32)
        self._texts = pa.array([value.encode("utf-8", "replace").decode() for value in unique], pa.string())

    def array(self, codes: Any) -> Any:
        return self._pa.DictionaryArray.from_arrays(self._pa.array(self._codes[codes]), self._texts)
