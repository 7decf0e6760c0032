"""Operators by the shapes of their inputs, and what the matrix products among them compute."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from profdeck_traces.analysis.detail_model import ShapeCalls
from profdeck_traces.reading.shape_fields import StatedShapes

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


def shape_calls(stated: StatedShapes) -> tuple[ShapeCalls, ...]:
    """Return the operators by shape, longest first."""
    found = sorted(stated.times.items(), key=lambda item: (-item[1][1], item[0]))
    return tuple(
        ShapeCalls(
            name=name,
            shapes=shapes,
            count=count,
            total_us=total_ns / _NS_PER_US,
            max_us=max_ns / _NS_PER_US,
            flops=None if (of_one := flops_of(name, shapes)) is None else of_one * count,
        )
        for (name, shapes), (count, total_ns, max_ns) in found[:_MOST]
    )


def product_flops(stated: StatedShapes) -> int | None:
    """Return the floating-point operations of all matrix products; ``None`` where no shapes were recorded."""
    if not stated.times or stated.left_out:
        return None
    return sum((flops_of(*key) or 0) * sums[0] for key, sums in stated.times.items())


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
