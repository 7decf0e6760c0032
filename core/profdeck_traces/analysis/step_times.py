"""What each step took of the devices and the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.detail_model import PerStep
from profdeck_traces.analysis.device_steps import step_kind
from profdeck_traces.analysis.model import IterationStatistics, StepSummary
from profdeck_traces.analysis.step_names import ITERATION
from profdeck_traces.analysis.steps import TraceSteps
from profdeck_traces.reading.intervals import Int

# So many steps of a kind and stage are looked at name by name: memory is bounded by this times the names in use, and
# a median of 256 values is within a tenth of their spread of the true one.
_SAMPLED_STEPS = 256
_SEED = 0
# Number of sums per step and name that are computed at once.
_BLOCK_SUMS = 1 << 20
_CODES = 1 << 32
_NS_PER_US = 1000
_NS_PER_S = 1_000_000_000


class StepTimes:
    """Sums up times in the steps of a trace.

    An event belongs to the step of each kind in which it starts, on the host or on the device. The variation of a
    name's time is computed over comparable steps: those of the kind and stage in which the name took the most time.
    Global steps are used only if the name took no time in iterations. There must be at least two such steps, and the
    name must take time in at least half of them. If there are more than 256, a random sample of 256 steps is used. Cold
    steps are excluded if there are other steps of the same kind and stage.
    """

    def __init__(self, steps: TraceSteps) -> None:
        self._steps = steps
        groups: dict[tuple[str, str | None], int] = {}
        of_mark = [groups.setdefault((mark.kind, mark.stage), len(groups)) for mark in steps.marks]
        self._groups = list(groups)
        self._group = _without_excluded(np.array(of_mark, dtype=np.int64)[steps.name], steps.excluded, len(groups))
        self._device_ns = np.zeros(len(steps), dtype=np.int64)
        self._has_device = False
        sampled = _sampled(self._group, len(groups))
        self._group_of_row = self._group[sampled]
        row = np.full(len(steps) + 1, -1, dtype=np.int64)  # the last one is for step -1
        row[sampled] = np.arange(len(sampled))
        self._kernels = _Sums(row)
        self._operators = _Sums(row)
        self._annotations = _Sums(row)
        kind = step_kind(steps)
        self._cold_kernels = _ColdTimes(steps, kind)
        self._cold_operators = _ColdTimes(steps, kind)
        self._cold_annotations = _ColdTimes(steps, kind)

    def add_device(self, start_ns: Int, name: NDArray[np.integer], time_ns: Int) -> None:
        """Add kernels, copies and fills, or the portions of them in a time slice.

        Args:
            start_ns: When each of them started, which for a part is before its slice.
            name: A small number for each name, such as the codes of columns.
            time_ns: How long it, or the part, ran.
        """
        self._has_device |= len(start_ns) > 0
        for kind, windows in self._steps.device.items():
            step = windows.of(start_ns)
            self._cold_kernels.add(kind, step, name, time_ns)
            # A float of 64 bits holds 104 days of nanoseconds.
            sums = np.bincount(step + 1, weights=time_ns, minlength=len(self._steps) + 1)
            self._device_ns += sums[1:].astype(np.int64)
            self._kernels.add(step, name, time_ns)

    def add_operators(self, start_ns: Int, name: NDArray[np.integer], self_ns: Int) -> None:
        """Add operators, or portions of them, with their self time; arguments as in `add_device`."""
        for kind, windows in self._steps.host.items():
            step = windows.of(start_ns)
            self._cold_operators.add(kind, step, name, self_ns)
            self._operators.add(step, name, self_ns)

    def add_annotations(self, start_ns: Int, name: NDArray[np.integer], time_ns: Int) -> None:
        """Add annotations, or portions of them, with their total time; arguments as in `add_device`."""
        for kind, windows in self._steps.host.items():
            step = windows.of(start_ns)
            self._cold_annotations.add(kind, step, name, time_ns)
            self._annotations.add(step, name, time_ns)

    def kernels(self) -> dict[int, PerStep]:
        """Return the variation in time of each kernel, copy and fill, by name code."""
        return self._per_step(*self._kernels.totals())

    def classes(self, class_of_name: Int) -> dict[int, PerStep]:
        """Return the same for classes of them.

        Args:
            class_of_name: A number for the class of each name.
        """
        row, name, time_ns = self._kernels.totals()
        return self._per_step(row, class_of_name[name], time_ns)

    def operators(self) -> dict[int, PerStep]:
        """Return how the self time of each operator varies."""
        return self._per_step(*self._operators.totals())

    def annotations(self) -> dict[int, PerStep]:
        """Return the variation in time of each annotation, by name code."""
        return self._per_step(*self._annotations.totals())

    def cold_kernels(self) -> dict[int, int]:
        """Return the time of each kernel, copy and fill in excluded steps, in nanoseconds, by name code."""
        return self._cold_kernels.by_name

    def cold_operators(self) -> dict[int, int]:
        """Return the self time of each operator in excluded steps, in nanoseconds, by name code."""
        return self._cold_operators.by_name

    def cold_annotations(self) -> dict[int, int]:
        """Return the time of each annotation in excluded steps, in nanoseconds, by name code."""
        return self._cold_annotations.by_name

    def summaries(self, origin_ns: int) -> tuple[StepSummary, ...]:
        """Return the steps, with times relative to an origin."""
        steps = self._steps
        device_ns = self._device_ns.tolist() if self._has_device else [None] * len(steps)
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

    def _per_step(self, row: Int, code: Int, time_ns: Int) -> dict[int, PerStep]:
        """Return how the time of each code varies over the steps of one group; one entry for a row and code or more."""
        group_of_row = self._group_of_row
        group_sizes = np.bincount(self._group[self._group >= 0], minlength=len(self._groups))
        in_iterations = np.array([kind == ITERATION for kind, _ in self._groups], dtype=bool)
        pairs, pair = np.unique(code * len(self._groups) + group_of_row[row], return_inverse=True)
        pair_code, pair_group = np.divmod(pairs, max(1, len(self._groups)))
        total = np.bincount(pair, weights=time_ns, minlength=len(pairs))
        order = np.lexsort((total, in_iterations[pair_group], pair_code))
        best = order[np.diff(pair_code[order], append=-1) != 0]
        chosen = np.zeros(len(pairs), dtype=bool)
        chosen[best] = True
        results: dict[int, PerStep] = {}
        for group in np.unique(pair_group[best]).tolist():
            used = np.flatnonzero(chosen[pair] & (pair_group[pair] == group))
            rows = np.flatnonzero(group_of_row == group)
            kind, stage = self._groups[group]
            column = np.searchsorted(rows, row[used])
            for codes, sums in _matrices(code[used], column, time_ns[used], len(rows)):
                median = np.median(sums, axis=1)
                mad = np.median(np.abs(sums - median[:, np.newaxis]), axis=1)
                for one in np.flatnonzero(median).tolist():
                    results[int(codes[one])] = PerStep(
                        kind=kind,
                        stage=stage,
                        steps=int(group_sizes[group]),
                        measured=len(rows),
                        median_us=float(median[one]) / _NS_PER_US,
                        mad_us=float(mad[one]) / _NS_PER_US,
                    )
        return results


def _without_excluded(group: Int, excluded: NDArray[np.bool_], groups: int) -> Int:
    """Return the group of each step, or -1 for an excluded step of a group that has other steps."""
    has_others = np.bincount(group[~excluded], minlength=groups) > 0
    return np.where(excluded & has_others[group], -1, group)


class _ColdTimes:
    """Sums times by name code in the excluded steps. Only the step kind that divides the trace counts."""

    def __init__(self, steps: TraceSteps, kind: str | None) -> None:
        self.by_name: dict[int, int] = {}
        self._kind = kind
        self._excluded = np.append(steps.excluded, False)  # the last element is for step -1
        self._is_empty = not steps.excluded.any()

    def add(self, kind: str, step: Int, name: NDArray[np.integer], time_ns: Int) -> None:
        if self._is_empty or kind != self._kind:
            return
        used = self._excluded[step]
        sums = np.bincount(name[used], weights=time_ns[used])
        for code in np.flatnonzero(sums).tolist():
            self.by_name[code] = self.by_name.get(code, 0) + int(sums[code])


def _sampled(group: Int, groups: int) -> Int:
    """Return, in the order of time, the steps of each group of two or more that are looked at name by name."""
    random = np.random.default_rng(_SEED)
    chosen = [np.empty(0, dtype=np.int64)]
    for one in range(groups):
        of_group = np.flatnonzero(group == one)
        if len(of_group) > _SAMPLED_STEPS:
            # At random: every so-manieth step may be the one that does more than the others.
            of_group = random.choice(of_group, _SAMPLED_STEPS, replace=False)
        if len(of_group) > 1:
            chosen.append(of_group)
    return np.sort(np.concatenate(chosen))


class _Sums:
    """Times by row and code, of which few come together, and those mostly in the same slice of a trace."""

    def __init__(self, row: Int) -> None:
        self._row = row  # of each step, -1 for those that are not looked at
        self._parts: list[tuple[Int, Int]] = []

    def add(self, step: Int, code: NDArray[np.integer], time_ns: Int) -> None:
        """Add times; step -1 is none."""
        row = self._row[step]
        used = row >= 0
        if not used.any():
            return
        row, code, time_ns = row[used], code[used], time_ns[used]
        codes = np.flatnonzero(np.bincount(code))
        local = np.zeros(int(codes[-1]) + 1, dtype=np.int64)
        local[codes] = np.arange(len(codes))
        rows = max(1, _BLOCK_SUMS // len(codes))
        for first in range(int(row.min()), int(row.max()) + 1, rows):
            block = (row >= first) & (row < first + rows)
            cell = (row[block] - first) * len(codes) + local[code[block]]
            sums = np.bincount(cell, weights=time_ns[block])
            cells = np.flatnonzero(sums)
            key = (cells // len(codes) + first) * _CODES + codes[cells % len(codes)]
            self._parts.append((key, sums[cells].astype(np.int64)))

    def totals(self) -> tuple[Int, Int, Int]:
        """Return rows, codes and times; a row and code may come more than once."""
        none = np.empty(0, dtype=np.int64)
        keys = np.concatenate([none, *(key for key, _ in self._parts)])
        times = np.concatenate([none, *(time_ns for _, time_ns in self._parts)])
        row, code = np.divmod(keys, _CODES)
        return row, code, times


def _matrices(code: Int, column: Int, time_ns: Int, columns: int) -> Iterator[tuple[Int, NDArray[Any]]]:
    """Yield codes and the sums of their times, a row for each code, so many codes at a time."""
    codes, row = np.unique(code, return_inverse=True)
    rows = max(1, _BLOCK_SUMS // columns)
    for first in range(0, len(codes), rows):
        some = codes[first : first + rows]
        block = (row >= first) & (row < first + rows)
        cell = (row[block] - first) * columns + column[block]
        sums = np.bincount(cell, weights=time_ns[block], minlength=len(some) * columns)
        yield some, sums.reshape(len(some), columns)
