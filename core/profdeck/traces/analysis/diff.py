"""What changed between two runs: a pure function of their summaries, so that a small file can be the baseline."""

from __future__ import annotations

import bisect
import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import attrs
import msgspec

from profdeck.base.errors import TraceError
from profdeck.traces.analysis.model import PerStep, RankSummary, RunSummary, StepSummary

Verdict = Literal["slower", "faster", "same", "appeared", "vanished"]
Basis = Literal["global_step", "iteration", "total"]

NOISE_ERRORS = 3
"""A change is told from noise if it is greater than so many of its standard errors."""
FLOOR = 0.001
"""Changes up to this share of the total of their section are none; sums and steps count for themselves."""
THRESHOLD = 0.05
"""Where the noise is not known, changes up to this fraction of the smaller time are none."""

_FEWEST = 3  # measurements from which their spread says something
_OTHER_MIX = 0.1  # a stage's share of the iterations, or their batches, may differ by this without a note
# profdeck's names of captures: the step or request, the stage or batch, which one of them, and a repetition.
_CAPTURE = re.compile(r"(?:step\d+|iteration\d+|capture)(?:-(?P<stage>[A-Za-z].*?))??(?:-\d+)?(?:-take\d+)?")
# The first member that is no scalar tells what a document is, without reading it: traces are large.
_SUMMARY = re.compile(rb'\s*\{(?:\s*"\w+"\s*:\s*(?:"[^"\\]*"|[-+.\w]+)\s*,)*\s*"ranks"\s*:\s*\[')
_HEAD_BYTES = 4096


@attrs.frozen(kw_only=True)
class Change:
    """One time, before and after; the mean of the ranks."""

    name: str
    category: str | None
    """The class of a kernel, ``operator`` or ``annotation``, or the kind of a step."""
    per: str
    """What the times are of: ``total``, or a step such as ``global step``, ``decode iteration`` or ``iteration``."""
    before_us: float
    after_us: float
    delta_us: float
    ratio: float | None
    """``delta_us / before_us``: 0.05 is 5 % slower; ``None`` if there was no time before."""
    impact_us: float
    """``delta_us`` times the share that these steps have of all: how much it changes the mean step."""
    noise_us: float | None
    """Changes up to this may be chance; ``None`` where there are too few measurements to know."""
    verdict: Verdict
    calls_before: float | None
    """How often it ran, per step of the basis or in total; of steps, how many there are. ``None`` for sums."""
    calls_after: float | None


@attrs.frozen(kw_only=True)
class RankDiff:
    """One rank of both runs. Several traces of it are repeated measurements."""

    replica: int | None
    rank: int | None
    before: tuple[str, ...]
    """The paths of its traces."""
    after: tuple[str, ...]
    overall: tuple[Change, ...]
    iterations: tuple[Change, ...]
    categories: tuple[Change, ...]


@attrs.frozen(kw_only=True)
class RoleDiff:
    """All ranks of one role that both runs have; changes are sorted by their impact, the greatest first."""

    role: str | None
    stage: str | None
    """The stage or kind of batch that its captures are of, where they are of one."""
    basis: Basis
    """What times are per, so that recordings of different lengths compare: ``global_step`` where all traces have
    some, else ``iteration`` where all have some, else ``total``."""
    steps_before: int | None
    """How many of these the traces have together; ``None`` for totals."""
    steps_after: int | None
    overall: tuple[Change, ...]
    """``kernels`` and ``operators`` (their sums) and, of the devices, ``busy``, ``idle``, ``communication`` and
    ``exposed communication``, as far as all traces have them."""
    iterations: tuple[Change, ...]
    """The median time of the global steps and of the engine iterations of each stage, in the order of their names."""
    kernels: tuple[Change, ...]
    operators: tuple[Change, ...]
    """Operators and annotations, by self time."""
    categories: tuple[Change, ...]
    ranks: tuple[RankDiff, ...]
    notes: tuple[str, ...]
    """What makes the comparison weaker than it looks."""

    @property
    def decisive(self) -> tuple[Change, ...]:
        """What decides whether it got slower.

        The median of the global steps and of the iterations of each stage that both sides have; without any, the sum
        of the kernels; without kernels, the self time of the operators.
        """
        steps = tuple(change for change in self.iterations if change.verdict not in {"appeared", "vanished"})
        return steps or self.overall[:1]

    def regressions(self, fail_over: float) -> tuple[Change, ...]:
        """Return what of `decisive` got slower by more than a fraction of before, and by more than its noise."""
        return tuple(
            change
            for change in self.decisive
            if change.delta_us > fail_over * change.before_us and change.delta_us > (change.noise_us or 0)
        )


@attrs.frozen(kw_only=True)
class RunDiff:
    """What changed from one run to another."""

    roles: tuple[RoleDiff, ...]
    only_before: tuple[str, ...]
    """The paths of traces that nothing was compared with."""
    only_after: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as dicts, tuples and scalars."""
        return attrs.asdict(self)


def is_summary(path: Path) -> bool:
    """Tell whether a file is the JSON of a summary rather than a trace, by its beginning."""
    try:
        with path.open("rb") as file:
            return _SUMMARY.match(file.read(_HEAD_BYTES)) is not None
    except OSError:
        return False


def load_summary(path: Path) -> RunSummary:
    """Read what ``profdeck summary --json`` printed; members that are not known are passed over.

    Raises:
        TraceError: It cannot be read, or is no such document.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunSummary)
    except OSError as error:
        raise TraceError(f"Cannot read {path}: {error.strerror}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path} is no summary by this version of profdeck: {error}. Make one with `profdeck summary RUN --json`."
        ) from error


def diff_runs(before: RunSummary, after: RunSummary) -> RunDiff:
    """Compare two runs, rank by rank, and tell changes from noise.

    A trace is compared with that of the same role, replica, rank and stage. Where one side does not know roles, ranks
    pair by their number, and those without one by their position; a single trace pairs with a single trace. The times
    of a role are means over its pairs.

    Times are the medians over the steps of a kind and stage, those without the kernel included, where both sides know
    them of the same steps. Else, as of what runs in few of the steps, they are the totals over the number of steps,
    or the totals where there are no steps, and each trace is one measurement. Several traces of a rank on one side are
    one sample: each stands in it with as many values as it has measurements, half of them one median absolute deviation
    (MAD) below its median and half of them one above, which has exactly its median and MAD.

    The standard error of a median of n values is taken as ``1.4826 * MAD * sqrt(pi / 2) * sqrt(n) / (n - 2)``. 1.4826
    MAD estimates the standard deviation s of a normal distribution (Rousseeuw and Croux, JASA 88, 1993), and the
    median of n values of it has the error ``s * sqrt(pi / 2 / n)`` for large n (Cramer, Mathematical Methods of
    Statistics, 1946, 28.5). ``n / (n - 2)`` widens that for few values, whose MAD is too small on average and
    uncertain itself: of simulated pairs of equal normal samples, 2 % differ by more than `NOISE_ERRORS` errors at n =
    3, and less than 1 % from n = 6 on. With fewer than three the noise is not known. With three traces or more the
    error is at least that of the median of their medians, without the widening: steps of one trace are more alike
    than those of several. The error of a change is the root of the sum of the squares of both sides; that of a mean
    over ranks is taken as the mean of their errors, which it cannot exceed, however much they vary together.

    What varies from run to run (clocks, neighbours, placement) is in the noise only as far as it varies between the
    traces of a side.

    Args:
        before: The baseline.
        after: What is compared with it.

    Raises:
        TraceError: The runs have no trace to compare.
    """
    pairs, only_before, only_after = _paired(before.ranks, after.ranks)
    if not pairs:
        raise TraceError(
            f"There is nothing to compare: no trace of one side ({_named(before.ranks)}) is of the same role, "
            f"replica, rank and stage as one of the other ({_named(after.ranks)}). Name two traces to compare them."
        )
    groups: dict[tuple[str | None, str | None], list[_Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.role, pair.stage), []).append(pair)
    return RunDiff(
        roles=tuple(_role(role, stage, of_role) for (role, stage), of_role in groups.items()),
        only_before=tuple(rank.path for rank in only_before),
        only_after=tuple(rank.path for rank in only_after),
    )


# Pairs.


@attrs.frozen
class _Pair:
    """One rank on both sides, with all its traces."""

    role: str | None
    stage: str | None
    replica: int | None
    rank: int | None
    before: tuple[RankSummary, ...]
    after: tuple[RankSummary, ...]

    @property
    def sides(self) -> tuple[tuple[RankSummary, ...], tuple[RankSummary, ...]]:
        return self.before, self.after


_Ranks = Sequence[RankSummary]


def _paired(before: _Ranks, after: _Ranks) -> tuple[list[_Pair], list[RankSummary], list[RankSummary]]:
    """Return the pairs, and what only one side has."""
    if len(before) == len(after) == 1:
        return [_pair(before, after)], [], []
    # A number alone is ambiguous if it is one of several roles or replicas.
    by_role = all(any(rank.role for rank in side) for side in (before, after)) or any(
        len({(rank.role, rank.replica) for rank in side}) > 1 for side in (before, after)
    )
    old, new = (_by_key(side, by_role=by_role) for side in (before, after))
    pairs = [_pair(old[key], new[key]) for key in old if key in new]
    only_before, only_after = (
        [rank for key, ranks in side.items() if key not in other for rank in ranks]
        for side, other in ((old, new), (new, old))
    )
    return pairs, only_before, only_after


def _by_key(ranks: _Ranks, *, by_role: bool) -> dict[tuple[object, ...], list[RankSummary]]:
    """Group the traces of a side by what they are of."""
    groups: dict[tuple[object, ...], list[RankSummary]] = {}
    nameless: Counter[tuple[object, ...]] = Counter()
    for rank in ranks:
        of = (rank.role, rank.replica, _stage(rank)) if by_role else (_stage(rank),)
        number: object = rank.rank
        if number is None:
            number = f"position {nameless[of]}"
            nameless[of] += 1
        groups.setdefault((*of, number), []).append(rank)
    return groups


def _pair(before: _Ranks, after: _Ranks) -> _Pair:
    known = next((rank for rank in (*after, *before) if rank.role), after[0])
    return _Pair(known.role, _stage(known), known.replica, known.rank, tuple(before), tuple(after))


def _stage(rank: RankSummary) -> str | None:
    match = _CAPTURE.fullmatch(rank.capture or "")
    return match["stage"] if match else None


def _named(ranks: _Ranks) -> str:
    names = [rank.path for rank in ranks]
    return ", ".join([*names[:3], "..."] if len(names) > 3 else names) or "no trace"  # noqa: PLR2004  # enough to see


# Measurements.


@attrs.frozen
class _Sample:
    """Measurements of one time in one trace, by their median and median absolute deviation."""

    median_us: float
    mad_us: float
    count: int


@attrs.frozen
class _Estimate:
    """A time on one side."""

    time_us: float
    error_us: float | None
    """Its standard error; ``None`` if there are too few measurements."""


def _sample(times_us: Sequence[float]) -> _Sample:
    median = statistics.median(times_us)
    return _Sample(median, statistics.median(abs(time - median) for time in times_us), len(times_us))


def _pooled(samples: Sequence[_Sample]) -> _Estimate:
    """Estimate a time from several traces, or none: 0; see `diff_runs` for the formulas and their sources."""
    if not samples:
        return _Estimate(0.0, None)
    points = []
    for sample in samples:
        aside = sample.count // 2
        points += [(sample.median_us - sample.mad_us, aside), (sample.median_us + sample.mad_us, aside)]
        points.append((sample.median_us, sample.count % 2))
    if len(samples) == 1:
        median, mad = samples[0].median_us, samples[0].mad_us
    else:
        median = _weighted_median(points)
        mad = _weighted_median([(abs(time - median), weight) for time, weight in points])
    count = sum(sample.count for sample in samples)
    if count < _FEWEST:
        return _Estimate(median, None)
    error = _asymptotic_error(mad, count) * count / (count - 2)
    if len(samples) >= _FEWEST:
        between = _sample([sample.median_us for sample in samples])
        error = max(error, _asymptotic_error(between.mad_us, between.count))
    return _Estimate(median, error)


def _asymptotic_error(mad_us: float, count: int) -> float:
    """Return the standard error of a median of many values."""
    return 1.4826 * mad_us * math.sqrt(math.pi / 2 / count)


def _weighted_median(points: Iterable[tuple[float, int]]) -> float:
    """Return the median of values, each repeated as often as its weight says."""
    ordered = sorted(points)
    passed = list(itertools.accumulate(weight for _, weight in ordered))
    middle = ((passed[-1] - 1) // 2, passed[-1] // 2)
    return statistics.fmean(ordered[bisect.bisect_right(passed, rank)][0] for rank in middle)


class _Key(NamedTuple):
    """What is compared with what of the same key."""

    name: str
    kind: str


@attrs.frozen
class _Time:
    """All runs or calls of one thing in one trace."""

    category: str | None
    count: int | None
    total_us: float
    per_step: PerStep | None = None


class _Group(NamedTuple):
    """Steps of one kind and stage."""

    kind: str
    stage: str

    def __str__(self) -> str:
        return f"{self.stage} {self.kind.replace('_', ' ')}".lstrip()


@attrs.frozen
class _Times:
    """One section of one trace."""

    by_key: dict[_Key, _Time]
    groups: Mapping[_Group, int]
    """How many steps there are of each kind and stage; empty if totals are compared."""
    steps: int
    """How many are the basis; 1 if totals are compared."""

    def calls(self, key: _Key) -> float:
        """Return how often it ran per step."""
        time = self.by_key.get(key)
        return (time.count or 0) / self.steps if time else 0.0

    @property
    def sum_us(self) -> float:
        """The time of the whole section per step."""
        return sum(time.total_us for time in self.by_key.values()) / self.steps

    def runs(self, key: _Key) -> bool:
        time = self.by_key.get(key)
        return time is not None and time.total_us > 0

    def group_of(self, key: _Key) -> _Group | None:
        """Return the steps of which its median is known: those of the trace, if there is only one."""
        per_step = self.by_key[key].per_step
        if per_step is not None:
            return _Group(per_step.kind, per_step.stage or "")
        return next(iter(self.groups)) if sum(self.groups.values()) == 1 else None

    def sample(self, key: _Key, group: _Group | None) -> _Sample:
        """Return what the trace says of a time per step of a group; if that is ``None``, per step of the basis."""
        time = self.by_key.get(key)
        if group is None:
            return _Sample(time.total_us / self.steps if time else 0.0, 0.0, 1)
        if time is None or time.per_step is None:  # it took no time, or there is one step
            return _Sample(time.total_us if time else 0.0, 0.0, self.groups[group])
        return _Sample(time.per_step.median_us, time.per_step.mad_us, time.per_step.measured)


_Section = Callable[[RankSummary], dict[_Key, _Time]]


def _kernels(rank: RankSummary) -> dict[_Key, _Time]:
    return {
        _Key(kernel.name, kernel.kind): _Time(kernel.category, kernel.count, kernel.total_us, kernel.per_step)
        for kernel in rank.kernels
    }


def _categories(rank: RankSummary) -> dict[_Key, _Time]:
    return {_Key(of.category, ""): _Time(of.category, of.count, of.total_us, of.per_step) for of in rank.categories}


def _operators(rank: RankSummary) -> dict[_Key, _Time]:
    """Read operators and annotations, without the marks of steps, whose names hold numbers."""
    marks = {step.name for step in rank.steps}
    return {
        _Key(operator.name, kind): _Time(kind, operator.count, operator.self_us, operator.per_step)
        for kind, operators in (("operator", rank.operators), ("annotation", rank.annotations))
        for operator in operators
        if kind == "operator" or operator.name not in marks
    }


def _overall(rank: RankSummary) -> dict[_Key, _Time]:
    """Read the sums; what was not looked at is absent."""
    exposed = None
    if rank.communication_us is not None and rank.overlap_us is not None:
        exposed = rank.communication_us - rank.overlap_us
    sums = {
        "kernels": sum(of.total_us for of in rank.categories) if rank.categories else None,
        "operators": sum(time.total_us for time in _operators(rank).values()) if rank.operators else None,
        "busy": rank.busy_us,
        "idle": rank.idle_us,
        "communication": rank.communication_us,
        "exposed communication": exposed,
    }
    return {_Key(name, ""): _Time(None, None, total_us) for name, total_us in sums.items() if total_us is not None}


def _groups(*traces: RankSummary) -> dict[_Group, list[StepSummary]]:
    groups: dict[_Group, list[StepSummary]] = {}
    for trace in traces:
        for step in trace.steps:
            groups.setdefault(_Group(step.kind, step.stage or ""), []).append(step)
    return groups


# Changes.


@attrs.frozen
class _Measured:
    """A time on both sides, of each rank."""

    estimates: Sequence[tuple[_Estimate, _Estimate]]
    per: str
    share: float = 1.0
    """Of the steps that it is per, of all."""


def _change(
    name: str,
    category: str | None,
    measured: _Measured,
    sum_us: float | None = None,
    calls: tuple[float | None, float | None] = (None, None),
) -> Change:
    """Compare both sides; without a sum that it is a part of, a time counts for itself."""
    before_us, after_us = (statistics.fmean(sides[side].time_us for sides in measured.estimates) for side in (0, 1))
    errors = [
        None if old.error_us is None or new.error_us is None else math.hypot(old.error_us, new.error_us)
        for old, new in measured.estimates
    ]
    known = [error for error in errors if error is not None]
    noise_us = NOISE_ERRORS * statistics.fmean(known) if len(known) == len(errors) else None
    delta_us = after_us - before_us
    impact_us = delta_us * measured.share
    limit_us = THRESHOLD * min(before_us, after_us) if noise_us is None else noise_us
    least_us = FLOOR * (max(before_us, after_us) if sum_us is None else sum_us)
    verdict: Verdict
    if calls[0] == 0 and calls[1]:
        verdict = "appeared"
    elif calls[1] == 0 and calls[0]:
        verdict = "vanished"
    elif abs(delta_us) <= limit_us or abs(impact_us) <= least_us:
        verdict = "same"
    else:
        verdict = "slower" if delta_us > 0 else "faster"
    return Change(
        name=name,
        category=category,
        per=measured.per,
        before_us=before_us,
        after_us=after_us,
        delta_us=delta_us,
        ratio=delta_us / before_us if before_us else None,
        impact_us=impact_us,
        noise_us=noise_us,
        verdict=verdict,
        calls_before=calls[0],
        calls_after=calls[1],
    )


def _role(role: str | None, stage: str | None, pairs: Sequence[_Pair]) -> RoleDiff:
    sides = [[trace for pair in pairs for trace in pair.sides[side]] for side in (0, 1)]
    basis = _basis([*sides[0], *sides[1]])
    before, after = (sum(_steps(trace, basis) for trace in side) for side in sides)
    on_host = all(trace.events is not None for side in sides for trace in side)
    return RoleDiff(
        role=role,
        stage=stage,
        basis=basis,
        steps_before=None if basis == "total" else before,
        steps_after=None if basis == "total" else after,
        overall=_sums(pairs, basis),
        iterations=_iterations(pairs),
        kernels=_changes(pairs, _kernels, basis),
        operators=_changes(pairs, _operators, basis) if on_host else (),
        categories=_changes(pairs, _categories, basis),
        ranks=tuple(
            RankDiff(
                replica=pair.replica,
                rank=pair.rank,
                before=tuple(trace.path for trace in pair.before),
                after=tuple(trace.path for trace in pair.after),
                overall=_sums([pair], basis),
                iterations=_iterations([pair]),
                categories=_changes([pair], _categories, basis),
            )
            for pair in pairs
        ),
        notes=tuple(_notes(sides, on_host=on_host)),
    )


def _basis(traces: _Ranks) -> Basis:
    kinds: tuple[Basis, ...] = ("global_step", "iteration")
    return next((kind for kind in kinds if all(_steps(trace, kind) for trace in traces)), "total")


def _steps(trace: RankSummary, basis: Basis) -> int:
    return 1 if basis == "total" else sum(step.kind == basis for step in trace.steps)


_Read = list[tuple[list[_Times], list[_Times]]]


def _read(pairs: Sequence[_Pair], section: _Section, basis: Basis) -> _Read:
    def times(trace: RankSummary) -> _Times:
        groups = {} if basis == "total" else {group: len(steps) for group, steps in _groups(trace).items()}
        return _Times(section(trace), groups, _steps(trace, basis))

    return [([times(trace) for trace in pair.before], [times(trace) for trace in pair.after]) for pair in pairs]


def _changes(pairs: Sequence[_Pair], section: _Section, basis: Basis) -> tuple[Change, ...]:
    """Compare all that any trace has in a section."""
    read = _read(pairs, section, basis)
    sum_us = max(_mean([[times.sum_us for times in sides[side]] for sides in read]) for side in (0, 1))
    known = {key: time for sides in read for side in sides for times in side for key, time in times.by_key.items()}
    changes = []
    for key, time in known.items():
        old, new = (_mean([[times.calls(key) for times in sides[side]] for sides in read]) for side in (0, 1))
        changes.append(_change(key.name, time.category, _measured(read, key, basis), sum_us, (old, new)))
    return tuple(sorted(changes, key=lambda change: (-abs(change.impact_us), change.name)))


def _measured(read: _Read, key: _Key, basis: Basis) -> _Measured:
    """Estimate a time per step of a group, if all traces that have it know its median of these, else of the basis."""
    every = [times for sides in read for side in sides for times in side]
    known = {times.group_of(key) for times in every if times.runs(key)}
    group = known.pop() if len(known) == 1 else None
    if any(group not in times.groups for times in every):
        group = None
    estimates = [
        (_pooled([times.sample(key, group) for times in old]), _pooled([times.sample(key, group) for times in new]))
        for old, new in read
    ]
    if group is None:
        return _Measured(estimates, str(_Group(basis, "")))
    share = sum(times.groups[group] for times in every) / sum(times.steps for times in every)
    return _Measured(estimates, str(group), share)


def _sums(pairs: Sequence[_Pair], basis: Basis) -> tuple[Change, ...]:
    """Compare the sums that all traces have."""
    read = _read(pairs, _overall, basis)
    every = [times.by_key for sides in read for side in sides for times in side]
    keys = [key for key in every[0] if all(key in by_key for by_key in every)]
    return tuple(_change(key.name, None, _measured(read, key, basis)) for key in keys)


def _mean(values: Iterable[Iterable[float]]) -> float:
    """Return the mean over ranks of the mean over their traces."""
    return statistics.fmean(map(statistics.fmean, values))


def _iterations(pairs: Sequence[_Pair]) -> tuple[Change, ...]:
    """Compare the steps of each kind and stage, on the ranks that have them on both sides, if there are any."""
    stepped = [tuple([_groups(trace) for trace in side] for side in pair.sides) for pair in pairs]
    changes = []
    for group in sorted({group for sides in stepped for side in sides for groups in side for group in groups}):
        samples = [tuple([_durations(of[group]) for of in side if group in of] for side in sides) for sides in stepped]
        used = [(old, new) for old, new in samples if old and new] or [(old, new) for old, new in samples if old or new]
        changes.append(
            _change(
                str(group),
                group.kind,
                _Measured([(_pooled(old), _pooled(new)) for old, new in used], str(group)),
                calls=(
                    sum(sample.count for old, _ in used for sample in old),
                    sum(sample.count for _, new in used for sample in new),
                ),
            )
        )
    return tuple(changes)


def _durations(steps: Sequence[StepSummary]) -> _Sample:
    return _sample([step.duration_us for step in steps])


def _notes(sides: Sequence[_Ranks], *, on_host: bool) -> Iterator[str]:
    if not on_host:
        yield "Operators are not compared: of some traces only the devices were read."
    before, after = (_groups(*side) for side in sides)
    for group in sorted(before.keys() & after.keys()):
        old, new = (_batch(side[group]) for side in (before, after))
        if old and new and abs(new - old) > _OTHER_MIX * min(old, new):
            yield f"The load differs: the median {group} has {old:g} tokens before and {new:g} after."
    shares = [_shares(side) for side in (before, after)]
    for group in sorted(before.keys() | after.keys()):
        old, new = (side.get(group, 0.0) for side in shares)
        if abs(new - old) > _OTHER_MIX:
            yield (
                f"The mix differs: {old:.0%} of the steps of that kind are {group}s before and {new:.0%} after; what "
                "is not per stage changes with that."
            )


def _batch(steps: Sequence[StepSummary]) -> float | None:
    """Return the median of the tokens of the steps that tell."""
    tokens = [
        (step.prefill_tokens or 0) + (step.decode_tokens or 0)
        for step in steps
        if step.prefill_tokens is not None or step.decode_tokens is not None
    ]
    return statistics.median(tokens) if tokens else None


def _shares(groups: Mapping[_Group, Sequence[StepSummary]]) -> dict[_Group, float]:
    """Return which fraction of the steps of its kind each stage has."""
    totals: Counter[str] = Counter()
    for group, steps in groups.items():
        totals[group.kind] += len(steps)
    return {group: len(steps) / totals[group.kind] for group, steps in groups.items()}
