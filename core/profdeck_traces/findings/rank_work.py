"""Amount of device work on one rank, relative to other ranks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from profdeck_traces.analysis.classes import COMMUNICATION, MEMORY_COPY, MEMORY_SET
from profdeck_traces.analysis.device_speed import WITH_GRIDS, WITHOUT_GRIDS, common_factor
from profdeck_traces.analysis.model import KernelSummary, OperatorSummary
from profdeck_traces.findings.rank_view import RankView


class WorkRatio(NamedTuple):
    """A rank's work relative to the median of the other ranks."""

    ratio: float
    text: str
    """Description for a finding, such as "it computes 1.30 times as many FLOPs"."""


def work_ratio(slow: RankView, others: Sequence[RankView]) -> WorkRatio | None:
    """Return a rank's work relative to other ranks, or ``None`` if it is unknown.

    The work is the number of FLOPs. If shapes were not recorded, it is the time that the rank's kernels would take at
    the speed of the other ranks, given the number of calls and their grids.
    """
    flops = slow.rank.product_flops
    of_others = [view.rank.product_flops for view in others if view.rank.product_flops]
    if flops and len(of_others) == len(others):
        ratio = flops / statistics.median(of_others)
        return WorkRatio(ratio, f"it computes {ratio:.2f} times as many FLOPs")
    of_kernels = _kernel_work_ratio(slow, others)
    if of_kernels is None:
        return None
    return WorkRatio(of_kernels, f"it has {of_kernels:.2f} times as much work, by the calls and grids of kernels")


_MORE_OPERATORS = 1.1
_SHORT_US, _LONG_US = 10.0, 50.0
"""Limits of the mean self time. Below the first, an operator's duration does not depend on its input sizes. Above the
second, it does."""


def operator_work_ratio(slow: RankView, others: Sequence[RankView]) -> WorkRatio | None:
    """Return how much more operator work a rank does on the host, or ``None`` if a slow CPU could be the reason.

    More calls mean more work. If long operators take longer than on the other ranks but short ones don't, the inputs
    are larger. A slow CPU would slow down all operators.
    """
    usual = [{of.name: of for of in view.rank.operators if of.count} for view in others]
    calls_us = usual_us = 0.0
    times_us = {True: [0.0, 0.0], False: [0.0, 0.0]}
    for operator in slow.rank.operators:
        same = [of_rank[operator.name] for of_rank in usual if operator.name in of_rank]
        own_us = _self_us(operator)
        if not same or not operator.count:
            calls_us += own_us
            continue
        mean_us = statistics.median(_self_us(of) / of.count for of in same)
        count = statistics.median([of.count for of in same])
        calls_us += operator.count * mean_us
        usual_us += count * mean_us
        if not _SHORT_US < mean_us < _LONG_US:
            times = times_us[mean_us >= _LONG_US]
            times[0] += own_us
            times[1] += operator.count * mean_us
    ratio = calls_us / usual_us if usual_us else 0.0
    if ratio >= _MORE_OPERATORS:
        return WorkRatio(ratio, f"it runs {ratio:.2f} times as many operators, weighted by their time on other ranks")
    long, short = (times_us[is_long][0] / (times_us[is_long][1] or 1.0) for is_long in (True, False))
    if ratio and long >= _MORE_OPERATORS and short and short - 1 < (long - 1) / 2:
        return WorkRatio(
            long, f"its long operators take {long:.2f} times as long, but not its short ones, as with larger inputs"
        )
    return None


def _self_us(operator: OperatorSummary) -> float:
    """Return the self time of all calls, based on the median step because a delayed thread hardly affects it."""
    steps = operator.per_step
    return operator.self_us or 0.0 if steps is None else steps.median_us * steps.steps


def _kernel_work_ratio(slow: RankView, others: Sequence[RankView]) -> float | None:
    usual = [{of.name: of for of in _kernels(view)} for view in others]
    usual_us = expected_us = 0.0
    speeds: list[tuple[float, float]] = []
    has_blocks = True
    for kernel in _kernels(slow):
        same = [of_rank[kernel.name] for of_rank in usual if kernel.name in of_rank]
        if not same:
            expected_us += kernel.total_us
            continue
        mean_us = statistics.median(of.mean_us for of in same)
        count = statistics.median([of.count for of in same])
        blocks = statistics.median(of.mean_blocks or 0.0 for of in same)
        has_blocks &= bool(kernel.mean_blocks and blocks)
        size = kernel.mean_blocks / blocks if kernel.mean_blocks and blocks else 1.0
        usual_us += count * mean_us
        expected_us += kernel.count * mean_us * size
        speeds.append((kernel.mean_us / (mean_us * size), kernel.total_us))
    similarity = WITH_GRIDS if has_blocks else WITHOUT_GRIDS
    factor = common_factor([speed for speed, _ in speeds], [time_us for _, time_us in speeds], similarity)
    return None if factor is None or not usual_us else expected_us / usual_us


def _kernels(view: RankView) -> list[KernelSummary]:
    return [of for of in view.rank.kernels if of.category not in {COMMUNICATION, MEMORY_COPY, MEMORY_SET}]
