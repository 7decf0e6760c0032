"""Puts the numbers of captures in their order, finds where they change, and what changed with them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from profdeck_traces.analysis.rank_sum_test import LEVEL as PART_LEVEL, rank_test
from profdeck_traces.trend.change_points import LEAST, LEVEL, ChangePoint, change_points
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
    """What becomes a series."""

    role: str
    replica: int | None
    stage: str | None
    what: str
    captures: Sequence[_Capture]
    """In their order."""


def trend_of(points: Sequence[RankPoint], *, left_out: int = 0, least: float = LEAST) -> Trend:
    """Return the series of all roles and replicas, and their changes.

    Args:
        points: What each rank of each capture says.
        left_out: Number of traces without usable values.
        least: Smallest change to report, as a fraction of the previous level.
    """
    kept = _without_cold(points)
    lines = list(_lines(kept))
    level = LEVEL / max(1, len(lines))  # of all series together
    return Trend(
        series=tuple(_series(line, level, least) for line in lines),
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
    began: dict[str, int] = {}
    for point in points:
        began[point.run] = min(point.started_ns, began.get(point.run, point.started_ns))
    teams: defaultdict[tuple[str, int, str], defaultdict[tuple[str, str], _Capture]]
    teams = defaultdict(lambda: defaultdict(list))
    for point in points:
        teams[_team(point)][point.run, point.capture].append(point)
    for (role, replica, stage), captures in sorted(teams.items()):
        in_order = sorted(captures.values(), key=lambda ranks: _order(ranks[0], began))
        for what in _names(in_order):
            having = [ranks for ranks in in_order if any(_value(rank, what) is not None for rank in ranks)]
            yield _Line(role, None if replica < 0 else replica, stage or None, what, having)


def _order(point: RankPoint, began: Mapping[str, int]) -> tuple[object, ...]:
    return began[point.run], point.run, point.first_step, point.started_ns


def _names(captures: Sequence[_Capture]) -> list[str]:
    """Return what the captures have numbers of: times of steps first, then rates, then the rest."""
    names = dict.fromkeys(name for ranks in captures for rank in ranks for name in rank.numbers.values)
    if any(rank.stall_s is not None for ranks in captures for rank in ranks):
        names[STALL] = None

    def place(name: str) -> tuple[object, ...]:
        return name in _LAST, name not in STEPS.values(), name.endswith(TOKENS), name

    return sorted(names, key=place)


def _value(rank: RankPoint, what: str) -> float | None:
    if what == STALL:
        return None if rank.stall_s is None else rank.stall_s * 1e6
    return rank.numbers.values.get(what)


def _series(line: _Line, level: float, least: float) -> TrendSeries:
    what, captures = line.what, line.captures
    together: Callable[[list[float]], float] = max if what == STALL else statistics.fmean
    points = []
    for ranks in captures:
        values = [value for rank in ranks if (value := _value(rank, what)) is not None]
        points.append(
            TrendPoint(
                run=ranks[0].run,
                capture=ranks[0].capture,
                first_step=ranks[0].first_step,
                started_ns=min(rank.started_ns for rank in ranks),
                value=together(values),
                ranks=len(values),
            )
        )
    found = change_points([point.value for point in points], level=level, least=least)
    edges = [0, *(one.index for one in found), len(points)]
    more_is_worse = not (what == BUSY or what.endswith(TOKENS))
    changes = [
        _change(one, captures[begin : one.index], captures[one.index : end], more_is_worse=more_is_worse)
        for begin, one, end in zip(edges, found, edges[2:], strict=False)
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
    found: ChangePoint, before: Sequence[_Capture], after: Sequence[_Capture], *, more_is_worse: bool
) -> TrendChange:
    is_worse = (found.after > found.before) == more_is_worse
    return TrendChange(
        index=found.index,
        before=found.before,
        after=found.after,
        ratio=found.after / found.before - 1 if found.before else None,
        p_value=found.p_value,
        is_worse=is_worse,
        parts=tuple(_parts(before, after, sign=1.0 if is_worse else -1.0)),
    )


# What changed with it.

_Of = Callable[[RankNumbers], Mapping[str, float]]
"""Takes the parts of a kind."""


def _parts(before: Sequence[_Capture], after: Sequence[_Capture], *, sign: float) -> Iterator[TrendPart]:
    """Yield the stage of one rank, the class and the cause of idle time that changed most, if not by chance."""
    kinds: dict[str, _Of] = {
        "stage": lambda numbers: numbers.stages,
        "class": lambda numbers: numbers.classes,
        "idle": lambda numbers: numbers.idle,
    }
    for kind, of in kinds.items():
        deltas = _deltas(before, after, of)
        # A stage is slow on a rank; what devices do is compared over all ranks, as those that wait are busy, too.
        score = max if kind == "stage" else statistics.fmean
        scores = {name: score([sign * delta for delta in of_ranks.values()]) for name, of_ranks in deltas.items()}
        name = max(scores, key=lambda name: scores[name], default="")
        if not scores or scores[name] <= 0:
            continue
        of_ranks = {rank: sign * delta for rank, delta in deltas[name].items()}
        slow = max(of_ranks, key=lambda rank: of_ranks[rank])
        others = [delta for rank, delta in of_ranks.items() if rank != slow]
        alone = kind == "stage" and bool(others) and statistics.median(others) < _HALF * of_ranks[slow]
        if _is_certain(before, after, of, name, slow):
            yield TrendPart(kind=kind, name=name, delta_us=sign * scores[name], rank=slow if alone else None)


def _deltas(before: Sequence[_Capture], after: Sequence[_Capture], of: _Of) -> dict[str, dict[int, float]]:
    """Return by name, and by the ranks that recorded on both sides, how much longer it is."""
    sides = [_by_rank(captures) for captures in (before, after)]
    names = dict.fromkeys(
        name for captures in (before, after) for ranks in captures for rank in ranks for name in of(rank.numbers)
    )
    found: dict[str, dict[int, float]] = {}
    for name in names:
        for rank in sorted(sides[0].keys() & sides[1].keys()):
            old, new = (statistics.median(of(one.numbers).get(name, 0.0) for one in side[rank]) for side in sides)
            found.setdefault(name, {})[rank] = new - old
    return found


def _by_rank(captures: Sequence[_Capture]) -> dict[int, list[RankPoint]]:
    found: defaultdict[int, list[RankPoint]] = defaultdict(list)
    for ranks in captures:
        for rank in ranks:
            found[rank.rank].append(rank)
    return found


def _is_certain(before: Sequence[_Capture], after: Sequence[_Capture], of: _Of, name: str, rank: int) -> bool:
    old, new = (
        [of(one.numbers).get(name, 0.0) for one in _by_rank(captures).get(rank, ())] for captures in (before, after)
    )
    tested = rank_test(old, new)
    return tested is not None and tested.p_value < PART_LEVEL
