"""Device speed in each step, measured by comparing each kernel's duration with its duration in other steps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.device_steps import step_kind
from profdeck_traces.analysis.steps import TraceSteps
from profdeck_traces.reading.columns import Columns
from profdeck_traces.reading.intervals import Int
from profdeck_traces.reading.trace import Trace

_FEWEST_STEPS, _FAST = 4, 0.25
_MIN_COMPARED, _NOISE = 0.75, 0.05
"""``_MIN_COMPARED`` is the minimum share of a step's kernel time in kernels that run in most steps. ``_NOISE`` is the
deviation in duration that is always tolerated."""


class Similarity(NamedTuple):
    """Criteria for assuming that kernels process inputs of the same size even though their durations change."""

    tolerance: float
    """Maximum difference between a kernel's factor and the common factor, as a fraction of the common change. An
    additional difference of 0.05 is always tolerated."""
    min_share: float
    """Minimum share of the total kernel time that must be spent in kernels within the tolerance."""
    fewest_names: int
    """Minimum number of different kernels."""


WITH_GRIDS, WITHOUT_GRIDS = Similarity(0.5, 0.5, 1), Similarity(0.0, 0.95, 3)
"""Criteria for traces with and without recorded grids.

Kernels with equal grids can still differ in duration. For example, attention reads the entire KV cache.
"""


def block_counts(trace: Trace, kernels: Columns) -> Int:
    """Return the number of thread blocks of each kernel, or -1 if its ``grid`` was not recorded."""
    texts = trace.texts("grid")
    blocks = np.array([*map(_product, texts), -1], dtype=np.int64)
    return blocks[trace.arg("grid", kernels.row)]


def mean_blocks(kernels: Columns, blocks: Int) -> dict[int, float]:
    """Return the mean number of thread blocks for each kernel name, by name code. Omit names with unknown counts.

    Args:
        kernels: The kernels.
        blocks: Number of thread blocks of each kernel, or -1 if unknown.
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
    """Return the factor by which each step's kernels are slower than in the fastest quarter of the steps, by step.

    Only kernels with the same name and grid are compared. A step is omitted if less than 75 % of its kernel time can be
    compared, or if its kernels do not change by a similar factor; see `Similarity`.

    Args:
        steps: Steps of the trace.
        kernels: All kernels except communication kernels.
        blocks: Number of thread blocks of each kernel, or -1 if unknown.
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
    ratios = mean_ns / np.nanquantile(mean_ns, _FAST, axis=1, keepdims=True)
    totals_ns = np.bincount(step, weights=time_ns)
    similarity = WITH_GRIDS if (blocks >= 0).all() else WITHOUT_GRIDS
    factors = (_common_factor(ratios[:, at], sums_ns[:, at], totals_ns[at], similarity) for at in range(len(rows)))
    return {row: factor for row, factor in zip(rows.tolist(), factors, strict=True) if factor is not None}


def _common_factor(
    ratio: NDArray[np.float64], time_ns: NDArray[np.float64], total_ns: float, similarity: Similarity
) -> float | None:
    """Return the factor by which a step's kernels are slower, or ``None`` if they cannot be compared."""
    used = time_ns > 0
    if time_ns.sum() < _MIN_COMPARED * total_ns:
        return None
    return common_factor(ratio[used].tolist(), time_ns[used].tolist(), similarity)


def common_factor(ratios: Sequence[float], times: Sequence[float], similarity: Similarity) -> float | None:
    """Return the factor by which durations changed overall, or ``None`` if it differs too much between kernels.

    Args:
        ratios: Duration of each kernel, relative to its usual duration.
        times: Total duration of each kernel.
        similarity: Criteria that the changes must meet.
    """
    if not ratios:
        return None
    factor = sum(times) / sum(time / ratio for time, ratio in zip(times, ratios, strict=True))
    tolerance = _NOISE + similarity.tolerance * abs(factor - 1)
    alike = sum(time for time, ratio in zip(times, ratios, strict=True) if abs(ratio - factor) < tolerance)
    is_known = len(ratios) >= similarity.fewest_names and alike >= similarity.min_share * sum(times)
    return factor if is_known else None
