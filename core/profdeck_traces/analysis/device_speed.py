"""Speed of the device in each step: how long its kernels take, relative to the same kernels in other steps."""

from __future__ import annotations

import json
import math

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.device_steps import step_kind
from profdeck_traces.analysis.steps import TraceSteps
from profdeck_traces.reading.columns import Columns
from profdeck_traces.reading.intervals import Int
from profdeck_traces.reading.trace import Trace

_FEWEST_STEPS = 4
_MIN_COMPARED, _MIN_ALIKE = 0.75, 0.95
"""Minimum share of a step's kernel time: in kernels that run in most steps, and in kernels with the same change."""
_ALIKE, _FEWEST_NAMES = 0.05, 3


def block_counts(trace: Trace, kernels: Columns) -> Int:
    """Return the number of thread blocks of each kernel, or -1 if its ``grid`` was not recorded."""
    texts = trace.texts("grid")
    blocks = np.array([*map(_product, texts), -1], dtype=np.int64)
    return blocks[trace.arg("grid", kernels.row)]


def mean_blocks(kernels: Columns, blocks: Int) -> dict[int, float]:
    """Return the mean number of thread blocks of the kernels with each name, by name code, if it is known.

    Args:
        kernels: The kernels.
        blocks: Number of thread blocks of each kernel, or -1.
    """
    names, name = np.unique(kernels.name, return_inverse=True)
    means = np.bincount(name, weights=blocks) / np.maximum(1, np.bincount(name))
    known = np.bincount(name, weights=blocks < 0) == 0
    return dict(zip(names[known].tolist(), means[known].tolist(), strict=True))


def _product(grid: str) -> int:
    try:
        value = math.prod(json.loads(grid))
    except (TypeError, ValueError):
        return -1
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else -1


def slowdowns(steps: TraceSteps, kernels: Columns, blocks: Int) -> dict[int, float]:
    """Return how much longer the kernels of each step take than in the median step, by step.

    Only kernels with the same name and grid are compared. Steps in which less than 75 % of the time can be compared are
    omitted. If the grids are unknown, different kernels with the same name can process inputs of different sizes. A
    step is then omitted unless at least 95 % of its time is in three or more kernels whose durations change by the same
    factor.

    Args:
        steps: Steps of the trace.
        kernels: All kernels except communication.
        blocks: Number of thread blocks of each kernel.
    """
    kind = step_kind(steps)
    if kind is None or not len(kernels):
        return {}
    step = steps.device[kind].of(kernels.start_ns)
    used = (step >= 0) & ~steps.excluded[step] & (kernels.duration_ns > 0)
    step, blocks, time_ns = step[used], blocks[used], kernels.duration_ns[used].astype(np.float64)
    rows, step = np.unique(step, return_inverse=True)
    if len(rows) < _FEWEST_STEPS:
        return {}
    _, size = np.unique(blocks, return_inverse=True)
    _, group = np.unique(kernels.name[used] * np.int64(size.max() + 1) + size, return_inverse=True)
    cells = np.unique(group * len(rows) + step)
    is_common = np.bincount(cells // len(rows)) > len(rows) / 2
    used = is_common[group]
    common, row = np.unique(group[used], return_inverse=True)
    sums_ns, counts = np.zeros((2, len(common), len(rows)))
    np.add.at(sums_ns, (row, step[used]), time_ns[used])
    np.add.at(counts, (row, step[used]), 1)
    mean_ns = np.divide(sums_ns, counts, out=np.full(counts.shape, np.nan), where=counts > 0)
    ratios = mean_ns / np.nanmedian(mean_ns, axis=1, keepdims=True)
    totals_ns = np.bincount(step, weights=time_ns)
    min_alike = 0.0 if (blocks >= 0).all() else _MIN_ALIKE
    factors = (_common_factor(ratios[:, at], sums_ns[:, at], totals_ns[at], min_alike) for at in range(len(rows)))
    return {row: factor for row, factor in zip(rows.tolist(), factors, strict=True) if factor is not None}


def _common_factor(
    ratio: NDArray[np.float64], time_ns: NDArray[np.float64], total_ns: float, min_alike: float
) -> float | None:
    """Return the factor by which the kernels of a step take longer, or ``None`` if they cannot be compared."""
    used = time_ns > 0
    compared_ns, ratio = time_ns[used], ratio[used]
    if compared_ns.sum() < _MIN_COMPARED * total_ns:
        return None
    factor = float(compared_ns.sum() / (compared_ns / ratio).sum())
    is_alike = np.abs(ratio / factor - 1) < _ALIKE
    is_known = min_alike == 0 or len(ratio) >= _FEWEST_NAMES
    return factor if is_known and compared_ns[is_alike].sum() >= min_alike * total_ns else None
