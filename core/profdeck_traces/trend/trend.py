"""Builds series from the metrics of captures, and detects changes in them.

The significance level is divided among all series by Holm's weighted step-down procedure (Scandinavian Journal of
Statistics 6, 1979). It bounds the probability of any false alarm, even for dependent series such as the parts of one
step. Metrics get half of the weight, so that a large number of parts does not hide a change in the step. The other half
is divided equally between parts (stages and owners) of all ranks together and parts of single ranks.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from profdeck_traces.analysis.rank_sum_test import LEVEL as PART_LEVEL, rank_test
from profdeck_traces.trend.change_points import (
    LEVEL,
    MIN_CHANGE,
    MIN_VALUES,
    ChangePoint,
    change_points,
    smallest_p_value,
)
from profdeck_traces.trend.model import Trend, TrendChange, TrendPart, TrendPoint, TrendSeries
from profdeck_traces.trend.points import RankPoint
from profdeck_traces.trend.rank_numbers import BUSY, EXPOSED, STEPS, TOKENS, RankNumbers

STALL = "stall"
_LAST = (BUSY, EXPOSED, STALL)
_HALF = 0.5
_LEAST_EXPLAINED = 0.25
"""Minimum change in a part for it to be reported, as a fraction of the change in the series."""

_WEIGHTS = (0.5, 0.25, 0.25)
"""Weights of metrics, of parts, and of parts of single ranks in the correction for multiple tests."""
_LEAST_PART = 0.01
"""Minimum size of a tested part, and minimum change in it, as fractions of the step."""
_Selector = Callable[[RankNumbers], Mapping[str, float]]
"""Function that returns the times of all parts of one kind."""
_PARTS: dict[str, _Selector] = {"stage": lambda numbers: numbers.stages, "owner": lambda numbers: numbers.owners}
"""Kinds of parts that are tested as series."""

_Capture = list[RankPoint]
"""The ranks of one role, replica and stage in one capture."""


@attrs.frozen
class _Line:
    """Input of one series."""

    role: str
    replica: int | None
    stage: str | None
    what: str
    captures: Sequence[_Capture]
    """Captures in chronological order."""
    kind: str = "metric"
    rank: int | None = None
    least: float = 0.0
    """Minimum change to report, in the unit of the series."""

    @property
    def family(self) -> int:
        """Index into `_WEIGHTS`."""
        return 0 if self.kind == "metric" else 1 if self.rank is None else 2

    def value_of(self, rank: RankPoint) -> float | None:
        """Return a rank's value, or ``None`` if it has none."""
        if self.kind == "metric":
            return _value(rank, self.what)
        return _PARTS[self.kind](rank.numbers).get(self.what, 0.0) if self.rank in {None, rank.rank} else None

    def points(self) -> list[TrendPoint]:
        """Return one point for each capture."""
        combine: Callable[[list[float]], float] = max if self.what == STALL else statistics.fmean
        points = []
        for ranks in self.captures:
            values = [value for rank in ranks if (value := self.value_of(rank)) is not None]
            points.append(
                TrendPoint(
                    run=ranks[0].run,
                    capture=ranks[0].capture,
                    first_step=ranks[0].first_step,
                    started_ns=min(rank.started_ns for rank in ranks),
                    value=combine(values),
                    ranks=len(values),
                )
            )
        return points


def trend_of(points: Sequence[RankPoint], *, left_out: int = 0, min_change: float = MIN_CHANGE) -> Trend:
    """Return the series of all roles and replicas, and their changes.

    Args:
        points: Metrics of each rank in each capture.
        left_out: Number of traces without usable values.
        min_change: Smallest change to report, as a fraction of the previous level.
    """
    kept = _without_cold(points)
    lines = [(line, line.points()) for line in _lines(kept)]
    levels = _levels(lines, min_change)
    series = [_series(line, points, level, min_change) for (line, points), level in zip(lines, levels, strict=True)]
    return Trend(
        series=tuple(one for one in series if one.kind == "metric" or one.changes),
        tested=len(series),
        left_out=left_out,
        cold_left_out=len(points) - len(kept),
        cold_excluded=sum(point.numbers.excludes_cold for point in kept),
    )


def _levels(lines: Sequence[tuple[_Line, Sequence[TrendPoint]]], min_change: float) -> list[float]:
    """Compute the significance level of each series with Holm's procedure."""
    sizes = Counter(line.family for line, _ in lines)
    weights = [_WEIGHTS[line.family] / sizes[line.family] for line, _ in lines]
    p_values = [smallest_p_value([point.value for point in points], min_change=min_change) for _, points in lines]
    levels = [0.0] * len(lines)
    remaining, level = sum(weights), LEVEL
    is_rejected = True
    for index in sorted(range(len(lines)), key=lambda index: p_values[index] / weights[index]):
        level = LEVEL / remaining if is_rejected else level
        levels[index] = level * weights[index]
        is_rejected = is_rejected and p_values[index] < levels[index]
        remaining -= weights[index]
    return levels


def _without_cold(points: Sequence[RankPoint]) -> list[RankPoint]:
    """Remove traces with only a cold step if the same role and stage has other traces."""
    warm = {_team(point) for point in points if not point.numbers.cold}
    return [point for point in points if not point.numbers.cold or _team(point) not in warm]


def _team(point: RankPoint) -> tuple[str, int, str]:
    return point.role, -1 if point.replica is None else point.replica, point.stage or ""


def _lines(points: Sequence[RankPoint]) -> Iterator[_Line]:
    starts: dict[str, int] = {}
    for point in points:
        starts[point.run] = min(point.started_ns, starts.get(point.run, point.started_ns))
    teams: defaultdict[tuple[str, int, str], defaultdict[tuple[str, str], _Capture]]
    teams = defaultdict(lambda: defaultdict(list))
    for point in points:
        teams[_team(point)][point.run, point.capture].append(point)
    for (role, replica, stage), captures in sorted(teams.items()):
        ordered = sorted(captures.values(), key=lambda ranks: _order(ranks[0], starts))
        for what in _names(ordered):
            with_value = [ranks for ranks in ordered if any(_value(rank, what) is not None for rank in ranks)]
            yield _Line(role, None if replica < 0 else replica, stage or None, what, with_value)
        yield from _part_lines(role, None if replica < 0 else replica, stage or None, ordered)


def _part_lines(role: str, replica: int | None, stage: str | None, captures: Sequence[_Capture]) -> Iterator[_Line]:
    """Yield the stages and owners that take at least 1 % of a step, for all ranks together and for each rank.

    The selection uses means over all captures. It does not depend on their order, so it does not bias the test.
    """
    ranks = sorted({rank.rank for capture in captures for rank in capture})
    for rank in (None, *ranks) if len(ranks) > 1 else (None,):
        points = [[point for point in capture if rank in {None, point.rank}] for capture in captures]
        points = [capture for capture in points if capture]
        steps = [value for capture in points for point in capture if (value := _step_us(point)) is not None]
        if len(points) < 2 * MIN_VALUES or not steps:
            continue
        least = _LEAST_PART * statistics.median(steps)
        for kind, select in _PARTS.items():
            totals: Counter[str] = Counter()
            for capture in points:
                for point in capture:
                    totals.update({name: time / len(capture) for name, time in select(point.numbers).items()})
            for name, total in sorted(totals.items()):
                if total / len(points) >= least:
                    yield _Line(role, replica, stage, name, points, kind, rank, least)


def _step_us(rank: RankPoint) -> float | None:
    """Return the step duration or, if there are no steps, the duration of the first kind of iteration."""
    values = rank.numbers.values
    steps = [name for name in values if name in STEPS.values()] or [name for name in values if "iteration" in name]
    return values[steps[0]] if steps else None


def _order(point: RankPoint, starts: Mapping[str, int]) -> tuple[object, ...]:
    return starts[point.run], point.run, point.first_step, point.started_ns


def _names(captures: Sequence[_Capture]) -> list[str]:
    """Return the metrics of the captures: step durations first, then rates, then the others."""
    names = dict.fromkeys(name for ranks in captures for rank in ranks for name in rank.numbers.values)
    if any(rank.stall_s is not None for ranks in captures for rank in ranks):
        names[STALL] = None

    def sort_key(name: str) -> tuple[object, ...]:
        return name in _LAST, name not in STEPS.values(), name.endswith(TOKENS), name

    return sorted(names, key=sort_key)


def _value(rank: RankPoint, what: str) -> float | None:
    if what == STALL:
        return None if rank.stall_s is None else rank.stall_s * 1e6
    return rank.numbers.values.get(what)


def _series(line: _Line, points: Sequence[TrendPoint], level: float, min_change: float) -> TrendSeries:
    what, captures = line.what, line.captures
    change_list = change_points([point.value for point in points], level=level, min_change=min_change)
    change_list = [change for change in change_list if abs(change.after - change.before) >= line.least]
    edges = [0, *(change.index for change in change_list), len(points)]
    more_is_worse = not (what == BUSY or what.endswith(TOKENS)) or line.kind != "metric"
    changes = [
        _change(change, captures[begin : change.index], captures[change.index : end], more_is_worse=more_is_worse)
        for begin, change, end in zip(edges, change_list, edges[2:], strict=False)
    ]
    changes = [
        attrs.evolve(change, parts=tuple(part for part in change.parts if _is_named(part, change, line)))
        for change in changes
    ]
    unit = "us" if line.kind != "metric" else "tokens/s" if what.endswith(TOKENS) else "share" if what == BUSY else "us"
    return TrendSeries(
        role=line.role,
        replica=line.replica,
        stage=line.stage,
        what=what if line.kind == "metric" else f"{line.kind} {what}",
        unit=unit,
        points=tuple(points),
        changes=tuple(changes),
        kind=line.kind,
        rank=line.rank,
    )


def _is_named(part: TrendPart, change: TrendChange, line: _Line) -> bool:
    """Return whether to report a part. It must differ from the series and explain enough of a change in time."""
    if (part.kind, part.name) == (line.kind, line.what) and part.rank in {None, line.rank}:
        return False
    is_time = not (line.what == BUSY or line.what.endswith(TOKENS)) or line.kind != "metric"
    return not is_time or abs(part.delta_us) >= _LEAST_EXPLAINED * abs(change.after - change.before)


def _change(
    change: ChangePoint, before: Sequence[_Capture], after: Sequence[_Capture], *, more_is_worse: bool
) -> TrendChange:
    is_worse = (change.after > change.before) == more_is_worse
    busy = [sum(any(rank.is_machine_busy for rank in ranks) for ranks in side) for side in (before, after)]
    is_busy = busy[0] <= _HALF * len(before) and busy[1] > _HALF * len(after)
    return TrendChange(
        index=change.index,
        before=change.before,
        after=change.after,
        ratio=change.after / change.before - 1 if change.before else None,
        p_value=change.p_value,
        is_worse=is_worse,
        parts=tuple(_parts(before, after, sign=1.0 if is_worse else -1.0)),
        busy_before=busy[0],
        busy_after=busy[1],
        is_conclusive=not (is_worse and is_busy),
    )


def _parts(before: Sequence[_Capture], after: Sequence[_Capture], *, sign: float) -> Iterator[TrendPart]:
    """Yield the stage, owner, class and idle cause that changed most, each only if its change is significant."""
    kinds: dict[str, _Selector] = _PARTS | {
        "class": lambda numbers: numbers.classes,
        "idle": lambda numbers: numbers.idle,
    }
    stage = ""
    for kind, select in kinds.items():
        deltas = _deltas(before, after, select)
        # A stage or owner can be slow on a single rank. Device times are averaged because waiting ranks are busy too.
        score = max if kind in _PARTS else statistics.fmean
        scores = {name: score([sign * delta for delta in by_rank.values()]) for name, by_rank in deltas.items()}
        name = max(scores, key=lambda name: scores[name], default="")
        if not scores or scores[name] <= 0:
            continue
        by_rank = {rank: sign * delta for rank, delta in deltas[name].items()}
        slowest = max(by_rank, key=lambda rank: by_rank[rank])
        others = [delta for rank, delta in by_rank.items() if rank != slowest]
        is_single_rank = kind in _PARTS and bool(others) and statistics.median(others) < _HALF * by_rank[slowest]
        if kind == "owner" and name == stage:  # an annotation without inner events
            continue
        if _is_significant(before, after, select, name, slowest):
            stage = name if kind == "stage" else stage
            yield TrendPart(
                kind=kind, name=name, delta_us=sign * scores[name], rank=slowest if is_single_rank else None
            )


def _deltas(before: Sequence[_Capture], after: Sequence[_Capture], select: _Selector) -> dict[str, dict[int, float]]:
    """Return the increase of each part on each rank that recorded on both sides."""
    sides = [_by_rank(captures) for captures in (before, after)]
    names = dict.fromkeys(
        name for captures in (before, after) for ranks in captures for rank in ranks for name in select(rank.numbers)
    )
    deltas: dict[str, dict[int, float]] = {}
    for name in names:
        for rank in sorted(sides[0].keys() & sides[1].keys()):
            old, new = (
                statistics.median(select(point.numbers).get(name, 0.0) for point in side[rank]) for side in sides
            )
            deltas.setdefault(name, {})[rank] = new - old
    return deltas


def _by_rank(captures: Sequence[_Capture]) -> dict[int, list[RankPoint]]:
    by_rank: defaultdict[int, list[RankPoint]] = defaultdict(list)
    for ranks in captures:
        for rank in ranks:
            by_rank[rank.rank].append(rank)
    return by_rank


def _is_significant(
    before: Sequence[_Capture], after: Sequence[_Capture], select: _Selector, name: str, rank: int
) -> bool:
    old, new = (
        [select(point.numbers).get(name, 0.0) for point in _by_rank(captures).get(rank, ())]
        for captures in (before, after)
    )
    test = rank_test(old, new)
    return test is not None and test.p_value < PART_LEVEL
