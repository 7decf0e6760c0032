"""Steps of a trace: global steps and the iterations of engines, and what each of them took of the device and the host.

Global steps are ``ProfilerStep#N``, which torch.profiler marks. What engines call their iterations, their plugins tell
by entry points of the group ``profdeck.trace_names``: each a regular expression for the whole name, with any of these
groups:

- ``prefill``, ``decode``, ``mixed``: which of them matched is the stage; or else
- ``stage``: the engine's own word for it;
- ``requests``, ``prefill_requests``, ``decode_requests``, ``prefill_tokens``, ``decode_tokens``: what the batch holds.
  Without a stage, the requests tell it.

Tokens are those that the model was given; with speculation that is more than it put out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck.base.entry_points import installed, load
from profdeck.base.errors import PluginError, describe
from profdeck.traces.analysis.model import IterationStatistics, PerStep, StepSummary
from profdeck.traces.reading.columns import ANNOTATION, DEVICE_ANNOTATION, OPERATOR, Columns
from profdeck.traces.reading.identifiers import Id
from profdeck.traces.reading.intervals import Int

logger = logging.getLogger("profdeck")

TRACE_NAMES = "profdeck.trace_names"
GLOBAL_STEP, ITERATION = "global_step", "iteration"

_GLOBAL_STEP = re.compile(r"ProfilerStep#(\d{1,18})")
_PREFILL, _DECODE, _MIXED = "prefill", "decode", "mixed"
_MAX_DIGITS = 18  # of a number of 64 bits

# So many steps of a kind and stage are looked at name by name: memory is bounded by this times the names in use, and
# a median of 256 values is within a tenth of their spread of the true one.
_SAMPLED_STEPS = 256
_SEED = 0
# How many sums of one step and name are made at once.
_BLOCK_SUMS = 1 << 20
_CODES = 1 << 32
_NS_PER_US = 1000
_NS_PER_S = 1_000_000_000


@attrs.frozen
class StepName:
    """What the name of a step says."""

    kind: str
    """``global_step`` or ``iteration``."""
    step: int | None = None
    stage: str | None = None
    requests: int | None = None
    prefill_tokens: int | None = None
    decode_tokens: int | None = None

    @property
    def tokens(self) -> int | None:
        """All tokens of the batch; ``None`` where the name does not state them."""
        if self.stage == _PREFILL:
            return self.prefill_tokens
        if self.stage == _DECODE:
            return self.decode_tokens
        if self.prefill_tokens is None or self.decode_tokens is None:
            return None
        return self.prefill_tokens + self.decode_tokens


class StepNames:
    """Reads names of steps.

    Args:
        patterns: Regular expressions for the names of iterations, as in the module's docstring.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]

    @classmethod
    def load(cls) -> StepNames:
        """Take the patterns of all installed plugins; one that is broken is left out with a warning."""
        patterns = []
        for name in installed(TRACE_NAMES):
            try:
                patterns.append(re.compile(load(TRACE_NAMES, name)).pattern)
            except (PluginError, re.error, TypeError) as error:
                logger.warning("Iterations of '%s' are not recognised in traces: %s", name, describe(error))
        return cls(patterns)

    def parse(self, name: str) -> StepName | None:
        """Return what a name says, ``None`` if it is not that of a step."""
        if found := _GLOBAL_STEP.fullmatch(name):
            return StepName(GLOBAL_STEP, int(found[1]))
        for pattern in self._patterns:
            if found := pattern.fullmatch(name):
                return _iteration(found.groupdict())
        return None


def _iteration(groups: dict[str, str | None]) -> StepName:
    number = {
        group: int(text) for group, text in groups.items() if text and text.isdecimal() and len(text) <= _MAX_DIGITS
    }
    prefill, decode = number.get("prefill_requests"), number.get("decode_requests")
    stage = next((stage for stage in (_PREFILL, _DECODE, _MIXED) if groups.get(stage)), None)
    if stage is None and (word := groups.get("stage")):
        stage = word.lower()
    if stage is None and prefill is not None and decode is not None:
        stage = {(True, True): _MIXED, (True, False): _PREFILL, (False, True): _DECODE}.get((prefill > 0, decode > 0))
    both = None if prefill is None or decode is None else prefill + decode
    return StepName(
        ITERATION,
        stage=stage,
        requests=number.get("requests", both),
        prefill_tokens=number.get("prefill_tokens"),
        decode_tokens=number.get("decode_tokens"),
    )


@attrs.frozen(eq=False)
class _Windows:
    """Intervals of time that belong to steps, by start."""

    step: Int
    start_ns: Int
    end_ns: Int | None
    """``None``: each lasts until the next one starts."""

    def of(self, time_ns: Int) -> Int:
        """Return the step at each of these times, -1 where there is none."""
        if not len(self.step):
            return np.full(len(time_ns), -1, dtype=np.int64)
        last = np.searchsorted(self.start_ns, time_ns, side="right") - 1
        outside = last < 0
        if self.end_ns is not None:
            outside |= time_ns > self.end_ns[last]
        return np.where(outside, -1, self.step[last])


@attrs.frozen(eq=False)
class TraceSteps:
    """The steps of one trace, by their start on the host."""

    names: tuple[str, ...]
    marks: tuple[StepName, ...]
    """What each of ``names`` says."""
    name: Int
    """Of each step: index into ``names``."""
    pids: tuple[Id, ...]
    start_ns: Int
    end_ns: Int
    host: dict[str, _Windows]
    """Of each kind of step: where its steps are on the host."""
    device: dict[str, _Windows]
    """Where they are on the device."""

    def __len__(self) -> int:
        return len(self.name)


def find_steps(columns: Columns, names: StepNames) -> TraceSteps:
    """Find the steps of a trace.

    A mark inside another one of the same kind, on the same thread, is the same step: what drives an engine may mark
    the iterations that the engine marks itself.

    Kineto shows next to the kernels where those lie that were launched in an annotation; it counts a kernel to the
    innermost annotation of the launching thread only (``GenericTraceActivity`` and ``GpuUserEventMap`` in
    pytorch/kineto), on each stream. The place of a step on the device thus reaches from the first to the last kernel
    of all annotations that began in it, itself included. Those of one name are told apart by their order: only where
    they are as many on a stream as on the host. If that leaves a step of a kind without a place, the steps of that
    kind begin on the device when they begin on the host, which counts kernels that were still queued then to the
    next step. Of Ascend's kernels a table tells the step, so that the same is known of its marks.

    Args:
        columns: All annotations of the trace, of host and devices, and the operators that are named like steps, which
            is how Ascend marks them. Other events do no harm.
        names: The names to look for.
    """
    marks = {
        code: mark
        for code in np.flatnonzero(columns.tables.names_of_categories(frozenset({ANNOTATION, OPERATOR}))).tolist()
        if (mark := names.parse(columns.names[code]))
    }
    is_global = np.full(len(columns.names), -1, dtype=np.int8)
    is_global[list(marks)] = [mark.kind == GLOBAL_STEP for mark in marks.values()]
    found = columns[np.flatnonzero(is_global[columns.name] >= 0)]
    found = found[np.lexsort((-found.end_ns, found.start_ns))]
    found = found[_outermost(found.track * 2 + is_global[found.name], found.end_ns)]
    used, name = np.unique(found.name, return_inverse=True)
    of_kind = {GLOBAL_STEP: is_global[found.name] == 1, ITERATION: is_global[found.name] == 0}
    host = {
        kind: _Windows(np.flatnonzero(mask), found.start_ns[mask], found.end_ns[mask]) for kind, mask in of_kind.items()
    }
    on_host = columns.tables.names_of_categories(frozenset({ANNOTATION}))
    twins = {ITERATION: _Twins.of(columns, on_host)}
    # Those of marks that are operators are around all kernels of a global step, and say nothing of iterations.
    named = {columns.names[code] for code in np.flatnonzero(on_host).tolist()}
    for code, mark in marks.items():
        on_host[code] |= mark.kind == GLOBAL_STEP and columns.names[code] not in named
    twins[GLOBAL_STEP] = _Twins.of(columns, on_host)
    return TraceSteps(
        names=tuple(columns.names[code] for code in used.tolist()),
        marks=_with_decoded_tokens(tuple(marks[code] for code in used.tolist())),
        name=name,
        pids=tuple(columns.tracks[track][0] for track in found.track.tolist()),
        start_ns=found.start_ns,
        end_ns=found.end_ns,
        host=host,
        device={kind: _on_device(kind, windows, twins[kind]) for kind, windows in host.items()},
    )


def _outermost(lane: NDArray[np.integer], end_ns: Int) -> NDArray[np.bool_]:
    """Return which intervals lie in no earlier one of their lane; they are sorted by start, the longest first."""
    outermost = np.ones(len(lane), dtype=bool)
    for one in np.unique(lane):
        events = np.flatnonzero(lane == one)
        reach = np.maximum.accumulate(end_ns[events])
        outermost[events[1:]] = end_ns[events[1:]] > reach[:-1]
    return outermost


def _with_decoded_tokens(marks: tuple[StepName, ...]) -> tuple[StepName, ...]:
    """Let decode iterations that state their requests only have one token each, unless the engine drafts tokens."""
    if any(word in (mark.stage or "") for mark in marks for word in ("draft", "verify")):
        return marks
    return tuple(
        attrs.evolve(mark, decode_tokens=mark.requests)
        if mark.stage == _DECODE and mark.decode_tokens is None
        else mark
        for mark in marks
    )


@attrs.frozen(eq=False)
class _Twins:
    """The marks of the host whose name is on a device too, and where their kernels are."""

    host_ns: Int
    """When they begin on the host."""
    start_ns: Int
    end_ns: Int
    """Of their kernels; before the start for those whose kernels could not be told from others."""

    @classmethod
    def of(cls, columns: Columns, on_host: NDArray[np.bool_]) -> _Twins:
        """Find them.

        Args:
            columns: Those of host and devices.
            on_host: Which names are marks of the host.
        """
        on_device = columns[columns.of_categories(frozenset({DEVICE_ANNOTATION}))]
        ids = {columns.names[code]: number for number, code in enumerate(np.unique(on_device.name).tolist())}
        of_code = np.array([ids.get(name, -1) for name in columns.names], dtype=np.int64)
        host = columns[on_host[columns.name]]
        host = host[of_code[host.name] >= 0]
        host_order, host_counts = _by_name_and_time(of_code[host.name], host.start_ns, len(ids))
        start = np.full(len(host), np.iinfo(np.int64).max)
        end = np.full(len(host), np.iinfo(np.int64).min)
        for track in np.unique(on_device.track):
            stream = on_device[on_device.track == track]
            order, counts = _by_name_and_time(of_code[stream.name], stream.start_ns, len(ids))
            paired = counts == host_counts
            order = order[paired[of_code[stream.name[order]]]]
            to = host_order[(paired & (counts > 0))[of_code[host.name[host_order]]]]
            start[to] = np.minimum(start[to], stream.start_ns[order])
            end[to] = np.maximum(end[to], stream.end_ns[order])
        return cls(host.start_ns, start, end)


def _by_name_and_time(name: Int, start_ns: Int, names: int) -> tuple[Int, Int]:
    """Return the order by name, then time, and how many there are of each name."""
    return np.lexsort((start_ns, name)), np.bincount(name, minlength=names)


def _on_device(kind: str, host: _Windows, twins: _Twins) -> _Windows:
    if not len(host.step):
        return host
    local = attrs.evolve(host, step=np.arange(len(host.step)))
    step = local.of(twins.host_ns)
    known = (step >= 0) & (twins.end_ns >= twins.start_ns)
    start = np.full(len(host.step), np.iinfo(np.int64).max)
    end = np.full(len(host.step), np.iinfo(np.int64).min)
    np.minimum.at(start, step[known], twins.start_ns[known])
    np.maximum.at(end, step[known], twins.end_ns[known])
    placed = end >= start
    if not placed.any() or not placed[step[step >= 0]].all():
        return attrs.evolve(host, end_ns=None)
    order = np.flatnonzero(placed)
    order = order[np.argsort(start[order], kind="stable")]
    # Global steps leave nothing between them, but kernels that were launched outside of all annotations.
    return _Windows(host.step[order], start[order], None if kind == GLOBAL_STEP else end[order])


class StepTimes:
    """Adds up what the steps of a trace took.

    An event belongs to the step of each kind in which it starts, on the host or on the device. How a time varies from
    step to step is looked at over steps that do the same: for each name, over those of the kind and stage in which it
    took the most time, and over global steps only where it took none in iterations. These must be two or more, and it
    must take time in at least half of them; of more than 256 of one kind and stage, that many are looked at, drawn at
    random.
    """

    def __init__(self, steps: TraceSteps) -> None:
        self._steps = steps
        groups: dict[tuple[str, str | None], int] = {}
        of_mark = [groups.setdefault((mark.kind, mark.stage), len(groups)) for mark in steps.marks]
        self._groups = list(groups)
        self._group = np.array(of_mark, dtype=np.int64)[steps.name]
        self._device_ns = np.zeros(len(steps), dtype=np.int64)
        self._has_device = False
        sampled = _sampled(self._group, len(groups))
        self._group_of_row = self._group[sampled]
        row = np.full(len(steps) + 1, -1, dtype=np.int64)  # the last one is for step -1
        row[sampled] = np.arange(len(sampled))
        self._kernels = _Sums(row)
        self._operators = _Sums(row)

    def add_device(self, start_ns: Int, name: NDArray[np.integer], time_ns: Int) -> None:
        """Take kernels, copies and fills, or the parts of them in a slice of time.

        Args:
            start_ns: When each of them started, which for a part is before its slice.
            name: A small number for each name, such as the codes of columns.
            time_ns: How long it, or the part, ran.
        """
        self._has_device |= len(start_ns) > 0
        for windows in self._steps.device.values():
            step = windows.of(start_ns)
            # A float of 64 bits holds 104 days of nanoseconds.
            sums = np.bincount(step + 1, weights=time_ns, minlength=len(self._steps) + 1)
            self._device_ns += sums[1:].astype(np.int64)
            self._kernels.add(step, name, time_ns)

    def add_host(self, start_ns: Int, name: NDArray[np.integer], self_ns: Int) -> None:
        """Take operators and annotations, or parts of them, with their self time; arguments as above."""
        for windows in self._steps.host.values():
            self._operators.add(windows.of(start_ns), name, self_ns)

    def kernels(self) -> dict[int, PerStep]:
        """Return how the time of each kernel, copy and fill varies, by name."""
        return self._per_step(*self._kernels.totals())

    def classes(self, class_of_name: Int) -> dict[int, PerStep]:
        """Return the same for classes of them.

        Args:
            class_of_name: A number for the class of each name.
        """
        row, name, time_ns = self._kernels.totals()
        return self._per_step(row, class_of_name[name], time_ns)

    def operators(self) -> dict[int, PerStep]:
        """Return how the self time of each operator and annotation varies."""
        return self._per_step(*self._operators.totals())

    def summaries(self, origin_ns: int) -> tuple[StepSummary, ...]:
        """Return the steps, with times counted from an origin."""
        steps = self._steps
        device_ns = self._device_ns.tolist() if self._has_device else [None] * len(steps)
        rows = zip(
            steps.name.tolist(), steps.pids, steps.start_ns.tolist(), steps.end_ns.tolist(), device_ns, strict=True
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
            )
            for name, pid, start, end, device in rows
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

    def _per_step(self, row: Int, code: Int, time_ns: Int) -> dict[int, PerStep]:
        """Return how the time of each code varies over the steps of one group; one entry for a row and code or more."""
        group_of_row = self._group_of_row
        group_sizes = np.bincount(self._group, minlength=len(self._groups))
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
