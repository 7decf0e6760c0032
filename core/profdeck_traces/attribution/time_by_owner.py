"""Sums of device time or self CPU time by operator, shape, module, stage and line of code."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.attribution.dtypes import torch_dtype
from profdeck_traces.attribution.event_work import EventWork
from profdeck_traces.attribution.model import AttributedTime, AttributedTimes
from profdeck_traces.attribution.rows import Attribution, values_at
from profdeck_traces.base.text import plural
from profdeck_traces.reading.intervals import Int

NO_LAUNCH, OUTSIDE_STAGES = "not attributed: no launch recorded", "outside stages"
_MAX_ROWS = 500
_MAX_NAMED = 4 * _MAX_ROWS  # larger than _MAX_ROWS, because shapes that differ only in JSON layout are merged
_NS_PER_US = 1000
_NONE = "none"
_WITHOUT_SPACE = dict.fromkeys(map(ord, " \t\n\r"))

_Key = tuple[str, str, str | None, str | None]
"""Kind, name, shapes and data types of an owner."""


class _Column(NamedTuple):
    """Owners of one kind for the selected events."""

    codes: Int
    """Code of each event's owner, or -1 if it has none."""
    size: int
    """Number of codes."""
    key: Callable[[int], _Key]
    """Returns the key for a code."""


def time_by_owner(  # noqa: PLR0913, PLR0917 - one parameter per kind of input
    names: Attribution, basis: str, rows: Int, time_ns: Int, stages: tuple[Int, Sequence[str]], work: EventWork
) -> AttributedTimes:
    """Sum the time of device events or operators by owner.

    Args:
        names: The owners of all events in the trace.
        basis: ``device`` or ``host``.
        rows: Rows of the device events, or of the operators if there are none. Events from other files have row -1.
        time_ns: Durations of the device events, or self times of the operators.
        stages: The stage of each event in `rows`, as an index or -1, and the names of the stages.
        work: Work of each event in `rows`.
    """
    tables = _Tables(names, rows, time_ns, work)
    return AttributedTimes(
        basis=basis,
        total_us=int(time_ns.sum()) / _NS_PER_US,
        has_stacks=names.has_frames or bool((names.frame >= 0).any()),
        has_shapes=bool(len(names.events.args["Input Dims"])),
        operators=tables.by_operator(),
        shapes=tables.by_shape(),
        modules=tables.by_module(),
        stages=tables.by_stage(*stages),
        lines=tables.by_line(),
    )


class _Tables:
    """Computes the tables of one trace."""

    def __init__(self, names: Attribution, rows: Int, time_ns: Int, work: EventWork) -> None:
        self._events, self._names, self._rows, self._time_ns = names.events, names, rows, time_ns
        bound_ns = np.where(work.is_compute_bound, work.roofline_ns, 0.0)
        self._values = [time_ns, work.flops, work.size_bytes, work.time_ns, work.roofline_ns, bound_ns]
        """Columns that `_sums` adds up after the event count."""

    def by_operator(self) -> tuple[AttributedTime, ...]:
        return self._sums([self._operator, self._call])

    def by_shape(self) -> tuple[AttributedTime, ...]:
        return self._sums([self._operator_shapes, self._call])

    def by_module(self) -> tuple[AttributedTime, ...]:
        return self._sums([self._module, self._annotation, self._operator, self._call])

    def by_line(self) -> tuple[AttributedTime, ...]:
        frame = self._named("line", self._names.frame)
        return self._sums([frame, self._module, self._annotation, self._operator, self._call])

    def by_stage(self, stage: Int, stage_names: Sequence[str]) -> tuple[AttributedTime, ...]:
        of_stages = _Column(stage, len(stage_names), lambda code: ("stage", stage_names[code], None, None))
        has_host = self._at(self._names.host) >= 0
        outside = _Column(np.where(has_host, 0, -1), 1, lambda _: (_NONE, OUTSIDE_STAGES, None, None))
        return self._sums([of_stages, outside])

    @functools.cached_property
    def _operator(self) -> _Column:
        return self._named("operator", self._names.operator)

    @functools.cached_property
    def _annotation(self) -> _Column:
        return self._named("annotation", self._names.annotation)

    @functools.cached_property
    def _call(self) -> _Column:
        return self._named("runtime call", self._names.launch)

    @functools.cached_property
    def _module(self) -> _Column:
        codes, paths = self._names.module_paths
        return _Column(self._at(codes), len(paths), lambda code: ("module", paths[code], None, None))

    @functools.cached_property
    def _operator_shapes(self) -> _Column:
        events = self._events
        owner = self._at(self._names.operator)
        has_owner = owner >= 0
        owner = owner[has_owner]
        dims, types = events.texts["Input Dims"], events.texts["Input type"]
        inputs, input_codes = np.unique(
            (events.arg("Input Dims", owner) + 1) * (len(types) + 1) + events.arg("Input type", owner) + 1,
            return_inverse=True,
        )
        values, codes = np.unique(events.name[owner] * np.int64(len(inputs)) + input_codes, return_inverse=True)

        def key(code: int) -> _Key:
            name, of_input = divmod(int(values[code]), len(inputs))
            of_dims, of_types = divmod(int(inputs[of_input]), len(types) + 1)
            shapes = shapes_text(dims[of_dims - 1]) if of_dims else None
            return "operator", events.names[name], shapes, dtypes_text(types[of_types - 1]) if of_types else None

        column = np.full(len(self._rows), -1)
        column[has_owner] = codes
        return _Column(column, len(values), key)

    def _at(self, values: NDArray[np.int32]) -> Int:
        return values_at(values, self._rows).astype(np.int64)

    def _named(self, kind: str, owners: NDArray[np.int32]) -> _Column:
        """Return a column that identifies owners by name."""
        owner = self._at(owners)
        codes = np.full(len(owner), -1)
        used, codes[owner >= 0] = np.unique(self._events.name[owner[owner >= 0]], return_inverse=True)
        return _Column(codes, len(used), lambda code: (kind, self._events.names[used[code]], None, None))

    def _sums(self, columns: Sequence[_Column]) -> tuple[AttributedTime, ...]:
        """Sum the time by owner. An event's owner comes from the first column that has an owner for the event."""
        unknown = _Column(np.zeros(len(self._rows), np.int64), 1, lambda _: (_NONE, NO_LAUNCH, None, None))
        columns = [*columns, unknown]
        first = np.cumsum([0, *(column.size for column in columns)])
        code = np.full(len(self._rows), -1)
        for offset, column in zip(first.tolist(), columns, strict=False):
            applies = (code < 0) & (column.codes >= 0)
            code[applies] = offset + column.codes[applies]
        counts = np.bincount(code, minlength=first[-1])
        # A 64-bit float represents integers exactly up to 2**53, or 104 days in nanoseconds.
        weighted = (np.bincount(code, weights=values, minlength=first[-1]) for values in self._values)
        totals = np.stack([counts, *weighted], axis=1)
        used = np.flatnonzero(counts)
        used = used[np.argsort(-totals[used, 1], kind="stable")]
        sums: dict[_Key, NDArray[np.float64]] = {}
        for owner in used[:_MAX_NAMED].tolist():
            index = int(np.searchsorted(first, owner, side="right")) - 1
            # The same shapes can occur in different JSON layouts.
            key = columns[index].key(owner - int(first[index]))
            sums[key] = sums[key] + totals[owner] if key in sums else totals[owner]
        rest = used[_MAX_NAMED:]
        return self._rows_of(sums, len(rest), totals[rest].sum(axis=0))

    def _rows_of(
        self, sums: dict[_Key, NDArray[np.float64]], others: int, of_others: NDArray[np.float64]
    ) -> tuple[AttributedTime, ...]:
        """Return the largest rows, and a row for the remaining owners.

        Args:
            sums: Event count and sums of `_values` for each owner.
            others: Number of owners that are not in `sums`.
            of_others: Event count and sums of these owners.
        """
        total_ns = int(self._time_ns.sum())
        order = sorted(sums, key=lambda key: (-sums[key][1], *(part or "" for part in key)))
        shown = {key: sums[key] for key in order[:_MAX_ROWS]}
        smaller = [*(sums[key] for key in order[_MAX_ROWS:]), of_others]
        others += len(smaller) - 1
        if others:
            shown[_NONE, plural(others, "smaller row"), None, None] = np.sum(smaller, axis=0)
        return tuple(_row(key, values.tolist(), total_ns) for key, values in shown.items())


def _row(key: _Key, values: Sequence[float], total_ns: int) -> AttributedTime:
    count, time_ns, flops, size_bytes, work_ns, roofline_ns, compute_bound_ns = values
    is_limited = work_ns > 0 and roofline_ns > 0  # False for NaN
    return AttributedTime(
        name=key[1],
        kind=key[0],
        shapes=key[2],
        dtypes=key[3],
        count=int(count),
        time_us=int(time_ns) / _NS_PER_US,
        share=int(time_ns) / total_ns if total_ns else 0.0,
        flops=round(flops) or None,
        size_bytes=None if math.isnan(size_bytes) else round(size_bytes) or None,
        work_us=work_ns / _NS_PER_US if work_ns else None,
        peak_share=roofline_ns / work_ns if is_limited else None,
        bound=("compute" if compute_bound_ns * 2 > roofline_ns else "memory") if is_limited else None,
    )


def shapes_text(dims: str) -> str:
    """Normalize the whitespace in the JSON text of shapes, as in ``[[2, 3], []]``."""
    return dims.translate(_WITHOUT_SPACE).replace(",", ", ")


def dtypes_text(types: str) -> str | None:
    """Return the distinct data types of the input tensors, in order of first appearance."""
    try:
        names = json.loads(types)
    except (ValueError, RecursionError):
        return None
    if not isinstance(names, list):
        return None
    distinct = dict.fromkeys(torch_dtype(name) for name in names if isinstance(name, str))
    return ", ".join(filter(None, distinct)) or None
