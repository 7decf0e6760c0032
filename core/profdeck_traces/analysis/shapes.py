"""Operators grouped by input shapes and data types, and the FLOPs of counted operators."""

from __future__ import annotations

import numpy as np

from profdeck_traces.analysis.detail_model import ShapeCalls
from profdeck_traces.attribution.event_work import CountedCalls
from profdeck_traces.attribution.time_by_owner import dtypes_text, shapes_text
from profdeck_traces.reading.columns import OPERATOR
from profdeck_traces.reading.trace import Trace

_MOST = 500
_NS_PER_US = 1000

_Key = tuple[str, str, str | None]
"""Name, shapes as JSON, and data types."""


def operator_shapes(trace: Trace, calls: CountedCalls | None) -> tuple[tuple[ShapeCalls, ...], int | None]:
    """Sum operator calls by name, input shapes and data types.

    The arg ``Input Dims`` of an operator (torch/csrc/profiler/collection.cpp) is a list with the sizes of each input.
    The entry for an input that is not a tensor is ``[]``, and the entry for a list of tensors is a list of such lists.

    Args:
        trace: The trace.
        calls: Operator calls with known FLOPs, or ``None`` for a kernel table.

    Returns:
        The operators with the longest total time, in descending order, and the total FLOPs of all counted operators.
        If shapes were not recorded (``record_shapes``), an empty tuple and ``None``.
    """
    is_operator = trace.tables.names_of_categories(frozenset({OPERATOR}))
    operators = trace.events[np.flatnonzero(is_operator[trace.events.name])]
    dims = trace.arg("Input Dims", operators.row)
    operators, dims = operators[dims >= 0], dims[dims >= 0]
    types = trace.arg("Input type", operators.row)
    all_dims, all_types = trace.texts("Input Dims"), trace.texts("Input type")
    inputs, of_inputs = np.unique(dims * (len(all_types) + 1) + types + 1, return_inverse=True)
    keys, which = np.unique(operators.name * np.int64(len(inputs) + 1) + of_inputs, return_inverse=True)
    duration = operators.duration_ns
    longest = np.zeros(len(keys), dtype=np.int64)
    np.maximum.at(longest, which, duration)
    flops = np.zeros(0 if trace.raw is None else trace.raw.complete)
    if calls is not None:
        flops[calls.row] = calls.flops()
    columns = [np.bincount(which, weights=values, minlength=len(keys)) for values in (duration, flops[operators.row])]
    count = np.bincount(which, minlength=len(keys))
    sums: dict[_Key, tuple[int, int, int, int]] = {}
    for key, *values, most in zip(keys.tolist(), count.tolist(), *columns, longest.tolist(), strict=True):
        name, of_input = divmod(key, len(inputs) + 1)
        of_dims, of_types = divmod(int(inputs[of_input]), len(all_types) + 1)
        dtypes = dtypes_text(all_types[of_types - 1]) if of_types else None
        owner = trace.tables.names[name], shapes_text(all_dims[of_dims]), dtypes
        calls_before, *before, most_before = sums.get(owner, (0, 0, 0, 0))
        total, of_flops = (int(one) + other for one, other in zip(values[1:], before, strict=True))
        sums[owner] = values[0] + calls_before, total, of_flops, max(most, most_before)
    if not sums:
        return (), None
    rows = sorted(sums.items(), key=lambda row: (-row[1][1], *(part or "" for part in row[0])))
    shapes = tuple(
        ShapeCalls(
            name=name,
            shapes=shapes,
            count=number,
            total_us=total_ns / _NS_PER_US,
            max_us=max_ns / _NS_PER_US,
            flops=of_flops or None,
            dtypes=dtypes,
        )
        for (name, shapes, dtypes), (number, total_ns, of_flops, max_ns) in rows[:_MOST]
    )
    return shapes, int(flops[operators.row].sum())
