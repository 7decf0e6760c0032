"""Device and host times of each step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.detail_model import PerStep
from profdeck_traces.analysis.device_steps import step_kind
from profdeck_traces.analysis.model import IterationStatistics, StepSummary
from profdeck_traces.analysis.step_names import ITERATION
from profdeck_traces.analysis.steps import StepWindows, TraceSteps
from profdeck_traces.reading.columns import Columns
from profdeck_traces.reading.intervals import Int

_NS_PER_US = 1000
_NS_PER_S = 1_000_000_000


class Sums(NamedTuple):
    """Time of each name in each step, as parallel arrays of steps, name codes and times in nanoseconds."""

    step: Int
    code: Int
    time_ns: Int


class StepTimes:
    """Total time of each name in each step of a trace.

    For each kind of step, an event belongs to the step in which it starts, on the host or on the device. The variation
    of a name's time is computed over comparable steps: the steps of the kind and stage in which the name took the most
    time. Global steps are used only if the name took no time in iterations. There must be at least two such steps, and
    the name must take time in at least half of them. Cold steps are excluded if there are other steps of the same kind
    and stage.
    """

    def __init__(
        self,
        steps: TraceSteps,
        device: Columns,
        operators: tuple[Columns, Int],
        annotations: Columns,
        unrecorded: NDArray[np.bool_],
    ) -> None:
        """Assign the events to steps.

        Args:
            steps: Steps of the trace.
            device: Kernels, copies and fills.
            operators: Operators, and the self time of each one in nanoseconds.
            annotations: Host annotations.
            unrecorded: For each step, whether its device work is missing from the trace.
        """
        self._unrecorded = unrecorded
        self._steps = steps
        groups: dict[tuple[str, str | None], int] = {}
        of_mark = [groups.setdefault((mark.kind, mark.stage), len(groups)) for mark in steps.marks]
        self._groups = list(groups)
        self._group = _without_excluded(np.array(of_mark, dtype=np.int64)[steps.name], steps.excluded, len(groups))
        self._has_device = len(device) > 0
        self.kernels = self._sums(steps.device, device, device.duration_ns)
        """Times of kernels, copies and fills."""
        self.operators = self._sums(steps.host, *operators)
        """Self times of operators."""
        self.annotations = self._sums(steps.host, annotations, annotations.duration_ns)

    def _sums(self, windows: dict[str, StepWindows], events: Columns, time_ns: Int) -> Sums:
        names = max(1, len(events.tables.names))
        keys, times = [], []
        for of_kind in windows.values():
            step = of_kind.of(events.start_ns)
            inside = step >= 0
            keys.append(step[inside] * names + events.name[inside])
            times.append(time_ns[inside])
        key, which = np.unique(np.concatenate(keys), return_inverse=True)
        # A 64-bit float represents any whole number of nanoseconds up to 104 days exactly.
        sums = np.bincount(which, weights=np.concatenate(times), minlength=len(key)).astype(np.int64)
        return Sums(*np.divmod(key, names), sums)

    def classes(self, class_of_name: Int) -> dict[int, PerStep]:
        """Return the variation in time of each kernel class, by class number.

        Args:
            class_of_name: For each event name, the number of its class.
        """
        step, code, time_ns = self.kernels
        classes = int(class_of_name.max(initial=0)) + 1
        key, which = np.unique(step * classes + class_of_name[code], return_inverse=True)
        sums = np.bincount(which, weights=time_ns, minlength=len(key)).astype(np.int64)
        return self.per_step(Sums(*np.divmod(key, classes), sums))

    def cold_ns(self, sums: Sums) -> dict[int, int]:
        """Return each name code's time in the excluded steps of the kind given by `step_kind`, in nanoseconds."""
        steps = self._steps
        if not steps.excluded.any():
            return {}
        kinds = np.array([mark.kind == step_kind(steps) for mark in steps.marks], dtype=bool)
        used = (steps.excluded & kinds[steps.name])[sums.step]
        times = np.bincount(sums.code[used], weights=sums.time_ns[used])
        return {code: int(times[code]) for code in np.flatnonzero(times).tolist()}

    def summaries(self, origin_ns: int) -> tuple[StepSummary, ...]:
        """Return the steps, with times relative to an origin."""
        steps = self._steps
        device_ns: list[int | None] = [None] * len(steps)
        if self._has_device:
            step, _, time_ns = self.kernels
            device_ns = np.bincount(step, weights=time_ns, minlength=len(steps)).astype(np.int64).tolist()
            for row in np.flatnonzero(self._unrecorded).tolist():
                device_ns[row] = None
        rows = zip(
            steps.name.tolist(),
            steps.pids,
            steps.start_ns.tolist(),
            steps.end_ns.tolist(),
            device_ns,
            steps.cold.tolist(),
            strict=True,
        )
        return tuple(
            StepSummary(
                kind=steps.marks[name].kind,
                name=steps.names[name],
                step=steps.marks[name].step,
                stage=steps.marks[name].stage,
                pid=pid,
                start_us=(start - origin_ns) / _NS_PER_US,
                duration_us=(end - start) / _NS_PER_US,
                requests=steps.marks[name].requests,
                prefill_tokens=steps.marks[name].prefill_tokens,
                decode_tokens=steps.marks[name].decode_tokens,
                prefill_requests=steps.marks[name].prefill_requests,
                decode_requests=steps.marks[name].decode_requests,
                details=steps.marks[name].details,
                device_us=None if device is None else device / _NS_PER_US,
                cold=cold,
            )
            for name, pid, start, end, device, cold in rows
        )

    def statistics(self) -> tuple[IterationStatistics, ...]:
        """Return the times of the steps of each kind and stage: global steps first, then what took longest."""
        durations_ns = self._steps.end_ns - self._steps.start_ns
        statistics = []
        for group, (kind, stage) in enumerate(self._groups):
            of_group = np.flatnonzero(self._group == group)
            times_us = durations_ns[of_group] / _NS_PER_US
            p50, p90, p99 = np.percentile(times_us, [50, 90, 99]).tolist()
            statistics.append(
                IterationStatistics(
                    kind=kind,
                    stage=stage,
                    count=len(of_group),
                    mean_us=float(times_us.mean()),
                    p50_us=p50,
                    p90_us=p90,
                    p99_us=p99,
                    max_us=float(times_us.max()),
                    tokens_per_s=self._tokens_per_s(of_group),
                    tokens_per_wall_s=self._tokens_per_wall_s(of_group) if kind == ITERATION else None,
                )
            )
        statistics.sort(key=lambda group: (group.kind == ITERATION, -group.mean_us * group.count))
        return tuple(statistics)

    def _tokens_per_s(self, of_group: Int) -> float | None:
        """Return the tokens over the time of steps of one stage; ``None`` if one of them does not state its tokens.

        The host launches the work of an iteration in less time than the device takes for it, so that the time is the
        device's where there is one, and unknown where the steps have no place on it.
        """
        of_mark = [mark.tokens for mark in self._steps.marks]
        tokens = [of_mark[name] for name in self._steps.name[of_group].tolist()]
        duration_ns = self._steps.end_ns - self._steps.start_ns
        if self._has_device:
            windows = self._steps.device[ITERATION]
            duration_ns = np.full(len(self._steps), -1)
            if windows.end_ns is not None:
                duration_ns[windows.step] = windows.end_ns - windows.start_ns
        times = duration_ns[of_group]
        if None in tokens or (times < 0).any() or not times.any():
            return None
        return float(sum(filter(None, tokens)) * _NS_PER_S / int(times.sum()))

    def _tokens_per_wall_s(self, of_group: Int) -> float | None:
        """Return the tokens over the time until the next iteration of its thread begins, or the last one ends."""
        steps = self._steps
        tokens = [steps.marks[name].tokens for name in steps.name[of_group].tolist()]
        if None in tokens:
            return None
        iterations = steps.host[ITERATION].step
        until = steps.end_ns.copy()
        for track in np.unique(steps.track[iterations]):
            of_track = iterations[steps.track[iterations] == track]
            until[of_track[:-1]] = steps.start_ns[of_track[1:]]
        wall_ns = int((until - steps.start_ns)[of_group].sum())
        return sum(filter(None, tokens)) * _NS_PER_S / wall_ns if wall_ns else None

    def per_step(self, sums: Sums) -> dict[int, PerStep]:
        """Return the variation of each name code's time over comparable steps; see `StepTimes`."""
        count = len(self._groups)
        group_sizes = np.bincount(self._group[self._group >= 0], minlength=count)
        group = self._group[sums.step] if len(sums.step) else sums.step
        used = (group >= 0) & (sums.time_ns > 0)
        used[used] = group_sizes[group[used]] > 1
        group, code, time_ns = group[used], sums.code[used], sums.time_ns[used]
        if not len(code):
            return {}
        is_iteration = np.array([kind == ITERATION for kind, _ in self._groups], dtype=bool)
        pairs, pair = np.unique(code * count + group, return_inverse=True)
        pair_code, pair_group = np.divmod(pairs, count)
        total = np.bincount(pair, weights=time_ns, minlength=len(pairs))
        order = np.lexsort((total, is_iteration[pair_group], pair_code))
        best = order[np.diff(pair_code[order], append=-1) != 0]
        is_best = np.zeros(len(pairs), dtype=bool)
        is_best[best] = True
        used = is_best[pair]
        steps = group_sizes[pair_group[best]]
        _, row = np.unique(pair[used], return_inverse=True)
        median, mad = median_and_deviation(row, time_ns[used], steps)
        return {
            int(pair_code[one]): PerStep(
                kind=self._groups[pair_group[one]][0],
                stage=self._groups[pair_group[one]][1],
                steps=int(steps[place]),
                measured=int(steps[place]),
                median_us=float(median[place]) / _NS_PER_US,
                mad_us=float(mad[place]) / _NS_PER_US,
            )
            for place, one in enumerate(best.tolist())
            if median[place]
        }


def median_and_deviation(row: Int, value: Int, counts: Int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the median and the median absolute deviation of each row in a sparse matrix of non-negative values.

    Args:
        row: For each value, the index of its row. Every row has at least one value.
        value: The values.
        counts: Number of columns in each row. Columns without a value count as 0.
    """
    zeros = counts - np.bincount(row, minlength=len(counts))
    rows = np.arange(len(counts))
    row = np.append(row, rows)
    values: NDArray[np.float64] = np.append(value.astype(np.float64), np.zeros(len(counts)))
    weight = np.append(np.ones(len(row) - len(counts), dtype=np.int64), zeros)
    median = _weighted_median(row, values, weight, counts)
    return median, _weighted_median(row, np.abs(values - median[row]), weight, counts)


def _weighted_median(row: Int, value: NDArray[np.float64], weight: Int, counts: Int) -> NDArray[np.float64]:
    """Return the weighted median of each row. `counts` is the total weight of each row."""
    order = np.lexsort((value, row))
    upto = np.cumsum(weight[order])
    before = np.cumsum(counts) - counts
    middles = (before + (counts - 1) // 2, before + counts // 2)
    low, high = (value[order][np.searchsorted(upto, middle, side="right")] for middle in middles)
    return (low + high) / 2


def _without_excluded(group: Int, excluded: NDArray[np.bool_], groups: int) -> Int:
    """Return the group of each step, or -1 for an excluded step of a group that has other steps."""
    has_others = np.bincount(group[~excluded], minlength=groups) > 0
    return np.where(excluded & has_others[group], -1, group)
