"""Sorts the metrics of captures into series, and detects their changes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from profdeck_traces.analysis.rank_sum_test import LEVEL as PART_LEVEL, rank_test
from profdeck_traces.trend.change_points import LEVEL, MIN_CHANGE, ChangePoint, change_points
from profdeck_traces.trend.model import Trend, TrendChange, TrendPart, TrendPoint, TrendSeries
from profdeck_traces.trend.points import RankPoint
from profdeck_traces.trend.rank_numbers import BUSY, EXPOSED, STEPS, TOKENS, RankNumbers

STALL = "stall"
_LAST = (BUSY, EXPOSED, STALL)
_HALF = 0.5

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


def trend_of(points: Sequence[RankPoint], *, left_out: int = 0, min_change: float = MIN_CHANGE) -> Trend:
    """Return the series of all roles and replicas, and their changes.

    Args:
        points: Metrics of each rank in each capture.
        left_out: Number of traces without usable values.
        min_change: Smallest change to report, as a fraction of the previous level.
    """
    kept = _without_cold(points)
    lines = list(_lines(kept))
    level = LEVEL / max(1, len(lines))  # shared by all series
    return Trend(
        series=tuple(_series(line, level, min_change) for line in lines),
        left_out=left_out,
        cold_left_out=len(points) - len(kept),
        cold_excluded=sum(point.numbers.excludes_cold for point in kept),
    )


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


def _series(line: _Line, level: float, min_change: float) -> TrendSeries:
    what, captures = line.what, line.captures
    combine: Callable[[list[float]], float] = max if what == STALL else statistics.fmean
    points = []
    for ranks in captures:
        values = [value for rank in ranks if (value := _value(rank, what)) is not None]
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
    change_list = change_points([point.value for point in points], level=level, min_change=min_change)
    edges = [0, *(change.index for change in change_list), len(points)]
    more_is_worse = not (what == BUSY or what.endswith(TOKENS))
    changes = [
        _change(change, captures[begin : change.index], captures[change.index : end], more_is_worse=more_is_worse)
        for begin, change, end in zip(edges, change_list, edges[2:], strict=False)
    ]
    unit = "tokens/s" if what.endswith(TOKENS) else "share" if what == BUSY else "us"
    return TrendSeries(
        role=line.role,
        replica=line.replica,
        stage=line.stage,
        what=what,
        unit=unit,
        points=tuple(points),
        changes=tuple(changes),
    )


def _change(
    change: ChangePoint, before: Sequence[_Capture], after: Sequence[_Capture], *, more_is_worse: bool
) -> TrendChange:
    is_worse = (change.after > change.before) == more_is_worse
    return TrendChange(
        index=change.index,
        before=change.before,
        after=change.after,
        ratio=change.after / change.before - 1 if change.before else None,
        p_value=change.p_value,
        is_worse=is_worse,
        parts=tuple(_parts(before, after, sign=1.0 if is_worse else -1.0)),
    )


_Selector = Callable[[RankNumbers], Mapping[str, float]]
"""Returns the parts of one kind: stages, classes or idle causes."""


def _parts(before: Sequence[_Capture], after: Sequence[_Capture], *, sign: float) -> Iterator[TrendPart]:
    """Yield the stage, the class and the idle cause that changed most, each if its change is significant."""
    kinds: dict[str, _Selector] = {
        "stage": lambda numbers: numbers.stages,
        "class": lambda numbers: numbers.classes,
        "idle": lambda numbers: numbers.idle,
    }
    for kind, select in kinds.items():
        deltas = _deltas(before, after, select)
        # A stage can be slow on one rank. Device times are averaged, because ranks that wait are busy as well.
        score = max if kind == "stage" else statistics.fmean
        scores = {name: score([sign * delta for delta in by_rank.values()]) for name, by_rank in deltas.items()}
        name = max(scores, key=lambda name: scores[name], default="")
        if not scores or scores[name] <= 0:
            continue
        by_rank = {rank: sign * delta for rank, delta in deltas[name].items()}
        slowest = max(by_rank, key=lambda rank: by_rank[rank])
        others = [delta for rank, delta in by_rank.items() if rank != slowest]
        is_single_rank = kind == "stage" and bool(others) and statistics.median(others) < _HALF * by_rank[slowest]
        if _is_significant(before, after, select, name, slowest):
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
