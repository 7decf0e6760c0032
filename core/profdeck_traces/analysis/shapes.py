"""Operators by the shapes of their inputs, and what the matrix products among them compute."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from profdeck_traces.analysis.detail_model import ShapeCalls
from profdeck_traces.attribution.time_by_owner import shapes_text
from profdeck_traces.reading.columns import OPERATOR
from profdeck_traces.reading.trace import Trace

_MOST = 500
_NS_PER_US = 1000
# Which inputs are the matrices: torch.utils.flop_counter counts the same operators so.
_PRODUCTS = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::_addmm_activation": (1, 2),
    "aten::_scaled_mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
}


@attrs.frozen
class OperatorShapes:
    """Calls and times of operators by name and input shapes. Empty if shapes were not recorded (``record_shapes``).

    The arg ``Input Dims`` of an operator (torch/csrc/profiler/collection.cpp) is a list with the sizes of each input.
    The entry for an input that is not a tensor is ``[]``, and the entry for a list of tensors is a list of such lists.
    """

    rows: list[tuple[str, str, int, int, int]]
    """Name, shapes as JSON, number of calls, and total and longest time in nanoseconds, sorted by total time."""

    @classmethod
    def of(cls, trace: Trace) -> OperatorShapes:
        """Sum up the operators for which the trace contains shapes."""
        is_operator = trace.tables.names_of_categories(frozenset({OPERATOR}))
        operators = trace.events[np.flatnonzero(is_operator[trace.events.name])]
        dims = trace.arg("Input Dims", operators.row)
        operators, dims = operators[dims >= 0], dims[dims >= 0]
        texts = trace.texts("Input Dims")
        keys, which = np.unique(operators.name * np.int64(len(texts) + 1) + dims, return_inverse=True)
        duration = operators.duration_ns
        count = np.bincount(which, minlength=len(keys))
        total = np.bincount(which, weights=duration, minlength=len(keys)).astype(np.int64)
        longest = np.zeros(len(keys), dtype=np.int64)
        np.maximum.at(longest, which, duration)
        sums: dict[tuple[str, str], tuple[int, int, int]] = {}
        for key, *values in zip(keys.tolist(), count.tolist(), total.tolist(), longest.tolist(), strict=True):
            name, code = divmod(key, len(texts) + 1)
            shapes = shapes_text(texts[code])
            before = sums.get((trace.tables.names[name], shapes), (0, 0, 0))
            sums[trace.tables.names[name], shapes] = (
                before[0] + values[0],
                before[1] + values[1],
                max(before[2], values[2]),
            )
        rows = [(*key, *values) for key, values in sums.items()]
        return cls(sorted(rows, key=lambda row: (-row[3], row[0], row[1])))

    def calls(self) -> tuple[ShapeCalls, ...]:
        """Return the operators with the longest total time."""
        return tuple(
            ShapeCalls(
                name=name,
                shapes=shapes,
                count=count,
                total_us=total_ns / _NS_PER_US,
                max_us=max_ns / _NS_PER_US,
                flops=None if (of_one := flops_of(name, shapes)) is None else of_one * count,
            )
            for name, shapes, count, total_ns, max_ns in self.rows[:_MOST]
        )

    def product_flops(self) -> int | None:
        """Return the number of floating-point operations in matrix products, or ``None`` if no shapes were recorded."""
        if not self.rows:
            return None
        return sum((flops_of(name, shapes) or 0) * count for name, shapes, count, *_ in self.rows)


def flops_of(name: str, shapes: str) -> int | None:
    """Return the floating-point operations of one matrix product; ``None``: it is no such, or its shapes do not fit.

    A product of matrices of m x k and k x n is 2 m k n, of a batch of b as often, as torch.utils.flop_counter counts.
    """
    places = _PRODUCTS.get(name)
    if places is None:
        return None
    try:
        inputs = json.loads(shapes)
        left, right = (_sizes(inputs[place]) for place in places)
    except (ValueError, TypeError, IndexError, KeyError):
        return None
    if not 2 <= len(left) == len(right) <= 3 or left[-1] != right[-2] or left[:-2] != right[:-2]:  # noqa: PLR2004
        return None
    flops = 2 * left[-2] * left[-1] * right[-1]
    return flops * left[0] if len(left) > 2 else flops  # noqa: PLR2004 - there is a batch


def _sizes(value: Any) -> Sequence[int]:
    if not isinstance(value, list) or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError
    return value
