"""What changed between two runs: a pure function of their summaries, so that a small file can be the baseline."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import attrs
import msgspec

from profdeck_traces.analysis.account_diff import account_diff
from profdeck_traces.analysis.capture_matching import RankPair, RankSummaries, names_of, paired, stage_of
from profdeck_traces.analysis.cold_steps import excluded_steps, is_cold, warm_steps
from profdeck_traces.analysis.contributions import bursts_of, contributions_of
from profdeck_traces.analysis.detail_model import PerStep
from profdeck_traces.analysis.device_ends import ends_on_device, global_steps_end_on_device, until_device_ends
from profdeck_traces.analysis.diff_model import (
    CALLED_SAME,
    FEWEST_MEASUREMENTS,
    Basis,
    Change,
    Contribution,
    RankDiff,
    RoleDiff,
    RunDiff,
)
from profdeck_traces.analysis.formatting import ms, ranges
from profdeck_traces.analysis.model import (
    CategorySummary,
    KernelSummary,
    OperatorSummary,
    RankSummary,
    RunSummary,
    StepSummary,
)
from profdeck_traces.analysis.rank_sum_test import LEVEL, rank_test
from profdeck_traces.analysis.recording_cost import median_ratio
from profdeck_traces.analysis.short_names import short_kernel
from profdeck_traces.analysis.significance import THRESHOLD, Measured, TimeSample, change_of, pooled, sample_of
from profdeck_traces.analysis.step_names import GLOBAL_STEP
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.text import plural
from profdeck_traces.inputs.host_load import HostLoad

_OTHER_MIX = 0.1  # a stage's share of the iterations, or their batches, may differ by this without a note
# The first member that is no scalar tells what a document is, without reading it: traces are large.
SUMMARY = re.compile(rb'\s*\{(?:\s*"\w+"\s*:\s*(?:"[^"\\]*"|[-+.\w]+)\s*,)*\s*"ranks"\s*:\s*\[')
"""How the JSON output of `profdeck summary` starts."""
_HEAD_BYTES = 4096
_OF_HOST = ("operators", "idle")
_SIDES = ("before", "after")
_LONGEST_NAME = 48
_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "t", "transpose", "view", "as_strided", "detach", "slice", "select", "reshape", "unsqueeze", "squeeze",
        "expand", "permute", "alias", "_unsafe_view", "narrow", "unbind", "split",
    )
)  # fmt: skip
"""Operators that only create views."""
_MIN_VIEWS_US = 50.0
_MIN_COST_DIFFERENCE = 0.2
"""Minimum difference between the recordings' slowdowns that a note reports."""
_MOST_OWNERS = 20
_decode = msgspec.json.Decoder(RunSummary).decode


def is_summary(path: Path) -> bool:
    """Return whether a path is a regular file that starts like a JSON summary rather than a trace."""
    try:
        if not path.is_file():  # opening a pipe would block
            return False
        with path.open("rb") as file:
            return SUMMARY.match(file.read(_HEAD_BYTES)) is not None
    except OSError:
        return False


def load_summary(path: Path) -> RunSummary:
    """Read the output of ``profdeck summary --json``. Unknown keys are ignored.

    Raises:
        TraceError: The file cannot be read, is not a regular file, or is not the output of this command.
    """
    try:
        if not path.is_file() and path.exists():  # a pipe would block, and a device has no end
            raise TraceError(f"{path} is not a regular file.")
        return _decode(path.read_bytes())
    except OSError as error:
        raise TraceError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(
            f"{path} is no summary by this version of profdeck: {error}. Make one with `profdeck summary RUN --json`."
        ) from error


def diff_runs(before: RunSummary, after: RunSummary) -> RunDiff:
    """Compare two runs rank by rank and distinguish changes from noise.

    A trace is compared with the trace of the same role, replica, rank and stage. If one side has no roles, traces are
    paired by rank number, or by position if they have no rank number. A single trace is paired with a single trace. The
    times of a role are means over its pairs.

    If both sides have times for the same steps, times are medians over the steps of a kind and stage, including steps
    without the kernel. Otherwise, for example for kernels that run in few steps, times are totals divided by the number
    of steps, or totals if there are no steps, and each trace is one measurement. Several traces of a rank on one side
    form one sample. Each trace contributes one value per measurement, half of them one median absolute deviation (MAD)
    below its median and half of them one MAD above, so that its median and MAD are preserved.

    The standard error of the median of n values is ``1.4826 * MAD * sqrt(pi / 2) * sqrt(n) / (n - 2)``. The factor
    1.4826 converts the MAD of a normal distribution into an estimate of its standard deviation s (Rousseeuw and Croux,
    JASA 88, 1993). For large n, the median has the standard error ``s * sqrt(pi / 2 / n)`` (Cramer, Mathematical
    Methods of Statistics, 1946, 28.5). The MAD of few values is uncertain and on average too small, so the factor
    ``n / (n - 2)`` widens the error. Among simulated pairs of equal normal samples, 2 % differ by more than
    `NOISE_ERRORS` errors at n = 3, and less than 1 % for n >= 6. With fewer than three values, the noise is unknown.

    With three or more traces, the error is at least that of the median of the traces' medians, without the widening,
    because steps of one trace are more alike than steps of different traces. The error of a change is the root of the
    sum of the squares of both sides' errors. The error of a mean over ranks is the mean of the ranks' errors, which is
    an upper bound for any correlation between the ranks.

    Cold steps are excluded if a trace has other steps. Traces with only a cold step are excluded if their side has
    other traces. If all traces of only one side have only a cold step, host times are not compared.

    Effects that vary from run to run (clocks, neighbours, placement) are part of the noise only if they also vary
    between the traces of a side.

    Args:
        before: The baseline.
        after: The run to compare with the baseline.

    Raises:
        TraceError: The runs have no trace to compare.
    """
    pairs, only_before, only_after = paired(before.ranks, after.ranks)
    if not pairs:
        raise TraceError(
            f"There is nothing to compare: no trace of one side ({names_of(before.ranks)}) is of the same role, "
            f"replica, rank and stage as one of the other ({names_of(after.ranks)}). Name two traces to compare them."
        )
    groups: dict[tuple[str | None, str | None], list[RankPair]] = {}
    for pair in pairs:
        groups.setdefault((pair.role, pair.stage), []).append(pair)
    unread = [*before.unread, *after.unread]
    return RunDiff(
        roles=tuple(
            _role(
                role,
                stage,
                of_role,
                [rank.path for rank in (*only_before, *only_after) if (rank.role, stage_of(rank)) == (role, stage)],
                unread,
            )
            for (role, stage), of_role in groups.items()
        ),
        only_before=tuple(rank.path for rank in only_before),
        only_after=tuple(rank.path for rank in only_after),
        lost_roles=tuple(
            dict.fromkeys(
                ", ".join(filter(None, (rank.role, stage_of(rank)))) or rank.path
                for rank in only_before
                if (rank.role, stage_of(rank)) not in groups
            )
        ),
    )


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
    cold_us: float = 0.0
    """Portion of ``total_us`` in excluded cold steps."""


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
    """Number of steps of each kind and stage; empty if totals are compared."""
    steps: int
    """Number of steps in the basis; 1 if totals are compared."""
    recorded_steps: int
    """Number of steps in the basis, including excluded cold steps."""

    def calls(self, key: _Key) -> float:
        """Return the number of calls per step."""
        time = self.by_key.get(key)
        return (time.count or 0) / self.recorded_steps if time else 0.0

    def mean_us(self, key: _Key) -> float:
        """Return the mean time per step."""
        time = self.by_key.get(key)
        return time.total_us / self.steps if time else 0.0

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

    def sample(self, key: _Key, group: _Group | None) -> TimeSample:
        """Return what the trace says of a time per step of a group; if that is ``None``, per step of the basis."""
        time = self.by_key.get(key)
        if group is None:
            return TimeSample(self.mean_us(key), 0.0, 1)
        if time is None or time.per_step is None:  # it took no time, or there is one step
            return TimeSample(time.total_us if time else 0.0, 0.0, self.groups[group])
        return TimeSample(time.per_step.median_us, time.per_step.mad_us, time.per_step.measured)


_Section = Callable[[RankSummary], dict[_Key, _Time]]


def _kernels(rank: RankSummary) -> dict[_Key, _Time]:
    return {_Key(kernel.name, kernel.kind): _time(kernel, kernel.category) for kernel in rank.kernels}


def _categories(rank: RankSummary) -> dict[_Key, _Time]:
    return {_Key(of.category, ""): _time(of, of.category) for of in rank.categories}


def _operators(rank: RankSummary) -> dict[_Key, _Time]:
    return {
        _Key(operator.name, ""): attrs.evolve(_time(operator), total_us=operator.self_us or 0.0)
        for operator in rank.operators
    }


def _annotations(rank: RankSummary) -> dict[_Key, _Time]:
    """Return the job's annotations, except step annotations, whose names contain numbers."""
    marks = {step.name for step in rank.steps}
    return {_Key(mark.name, ""): _time(mark) for mark in rank.annotations if mark.name not in marks}


def _time(of: KernelSummary | CategorySummary | OperatorSummary, category: str | None = None) -> _Time:
    return _Time(category, of.count, of.total_us, of.per_step, of.cold_us)


def _overall(rank: RankSummary) -> dict[_Key, _Time]:
    """Return the sums of a trace. Sums that were not computed are absent."""
    cold = [of for step in excluded_steps(rank.steps) for of in step.devices]
    in_cold_step = {
        "kernels": sum(of.cold_us for of in rank.categories),
        "operators": sum(of.cold_us for of in rank.operators),
        "busy": sum(of.busy_us for of in cold),
        "idle": sum(of.duration_us - of.busy_us for of in cold),
        "communication": sum(of.communication_us for of in cold),
        "exposed communication": sum(of.exposed_communication_us for of in cold),
    }
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
    busy = _busy_per_step(rank)
    return {
        _Key(name, ""): _Time(None, None, total_us, busy if name == "busy" else None, in_cold_step[name])
        for name, total_us in sums.items()
        if total_us is not None
    }


def _busy_per_step(rank: RankSummary) -> PerStep | None:
    """Return how much device busy time varies between steps of the kind and stage with the longest total time."""
    busy_us = {
        group: [sum(of.busy_us for of in step.devices) for step in steps]
        for group, steps in _groups(rank).items()
        if len(steps) > 1 and any(step.devices for step in steps)
    }
    if not busy_us:
        return None
    group = max(busy_us, key=lambda group: sum(busy_us[group]))
    sample = sample_of(busy_us[group])
    return PerStep(
        kind=group.kind,
        stage=group.stage or None,
        steps=sample.count,
        measured=sample.count,
        median_us=sample.median_us,
        mad_us=sample.mad_us,
    )


def _groups(*traces: RankSummary) -> dict[_Group, list[StepSummary]]:
    groups: dict[_Group, list[StepSummary]] = {}
    for trace in traces:
        of_trace: dict[_Group, list[StepSummary]] = {}
        for step in trace.steps:
            of_trace.setdefault(_Group(step.kind, step.stage or ""), []).append(step)
        for group, steps in of_trace.items():
            groups.setdefault(group, []).extend(warm_steps(steps))
    return groups


def _role(
    role: str | None, stage: str | None, all_pairs: Sequence[RankPair], alone: Sequence[str], unread: Sequence[str]
) -> RoleDiff:
    pairs = list(map(_without_cold, all_pairs))
    sides = [[trace for pair in pairs for trace in pair.sides[side]] for side in (0, 1)]
    basis = _basis([*sides[0], *sides[1]])
    before, after = (
        _count([(pair, sum(_steps(trace, basis) for trace in pair.sides[side])) for pair in pairs]) for side in (0, 1)
    )
    on_host = all(trace.graph_launches is not None for side in sides for trace in side)
    # Starting the recorder affects only host times.
    alike = len({all(map(is_cold, side)) for side in sides}) == 1
    with_stacks = _with_stacks(sides)
    comparable = alike and with_stacks is None
    kernels = _changes(pairs, _kernels, basis)
    operators = _changes(pairs, _operators, basis) if on_host and alike else ()
    loads = _busiest(sides[0]), _busiest(sides[1])
    iterations = _iterations(pairs) if alike else ()
    return RoleDiff(
        role=role,
        stage=stage,
        basis=basis,
        steps_before=None if basis == "total" else before,
        steps_after=None if basis == "total" else after,
        overall=_sums(pairs, basis, alike=alike),
        iterations=iterations,
        kernels=kernels,
        operators=operators,
        annotations=_changes(pairs, _annotations, basis) if alike else (),
        categories=_changes(pairs, _categories, basis),
        ranks=tuple(
            RankDiff(
                replica=pair.replica,
                rank=pair.rank,
                before=tuple(trace.path for trace in pair.before),
                after=tuple(trace.path for trace in pair.after),
                overall=_sums([pair], basis, alike=alike),
                iterations=_iterations([pair]) if alike else (),
                categories=_changes([pair], _categories, basis),
                account=account_diff([pair], max_owners=_MOST_OWNERS) if comparable and len(pairs) > 1 else None,
                contributions=_contributions([pair], alike=alike) if len(pairs) > 1 else (),
            )
            for pair in pairs
        ),
        notes=(*_notes(sides, on_host=on_host), *_cold_notes(all_pairs, sides)),
        contributions=_contributions(pairs, alike=alike),
        busy=(
            loads[0].describe_contention() if loads[0] else None,
            loads[1].describe_contention() if loads[1] else None,
        ),
        lost_fractions=(loads[0].lost_fraction if loads[0] else 0.0, loads[1].lost_fraction if loads[1] else 0.0),
        machine_ratio=_machine_ratio(pairs, operators),
        corrupt=tuple(dict.fromkeys(trace.path for side in sides for trace in side if trace.problem)),
        incomplete=(
            *_incomplete(pairs, kernels, iterations),
            *(f"only one side has {path}" for path in alone[:1]),
            *(f"{path} could not be read" for path in unread[:1]),
        ),
        account=account_diff(pairs) if comparable else None,
        recorded_differently=tuple(filter(None, (with_stacks, _incomparable_steps(pairs, iterations)))),
    )


def _with_stacks(sides: Sequence[RankSummaries]) -> str | None:
    """If only one side has Python stacks, return a sentence that says so. Recording stacks slows down the host."""
    with_stacks = [{trace.account.has_stacks for trace in side if trace.account} for side in sides]
    if with_stacks[0] == with_stacks[1] or not all(len(side) == 1 for side in with_stacks):
        return None
    which = _SIDES[with_stacks[1] == {True}]
    return f"only the run {which} has Python stacks, and recording them lengthens its steps; record both runs alike"


def _count(counts: Iterable[tuple[RankPair, int]]) -> int:
    """Return how many steps a role ran. The ranks of a replica run each step together, so it counts once for them."""
    of_replica: dict[int | None, int] = {}
    for pair, count in counts:
        of_replica[pair.replica] = max(count, of_replica.get(pair.replica, 0))
    return sum(of_replica.values())


def _incomplete(pairs: Sequence[RankPair], kernels: Sequence[Change], iterations: Sequence[Change]) -> Iterator[str]:
    """Yield a reason if kernels disappeared without a replacement, unless the steps became faster.

    A rank without kernels is always a reason, because the means over ranks would hide it.
    """
    before_us = sum(kernel.before_us for kernel in kernels)
    after_us = sum(kernel.after_us for kernel in kernels)
    if bool(before_us) != bool(after_us):
        yield f"side '{_SIDES[before_us > 0]}' has no kernels"
        return
    without = [trace.path for pair in pairs for trace in _without_kernels(pair)]
    if without:
        yield f"{without[0]} has no kernels, but the traces of this rank on the other side have kernels"
        return
    vanished = [kernel for kernel in kernels if kernel.verdict == "vanished"]
    replaced_us = sum(kernel.impact_us for kernel in kernels if kernel.verdict in {"appeared", "vanished"})
    if vanished and -replaced_us > THRESHOLD * before_us and not any(step.verdict == "faster" for step in iterations):
        yield f"{plural(len(vanished), 'kernel')} vanished, such as {short_kernel(vanished[0].name, _LONGEST_NAME)}"


def _without_kernels(pair: RankPair) -> Sequence[RankSummary]:
    """Return a rank's traces without kernels, if all of its traces on the other side have kernels."""
    before, after = ([trace for trace in side if not _kernels(trace)] for side in pair.sides)
    return () if before and after else before or after


def _basis(traces: RankSummaries) -> Basis:
    kinds: tuple[Basis, ...] = ("global_step", "iteration")
    return next((kind for kind in kinds if all(_steps(trace, kind) for trace in traces)), "total")


def _steps(trace: RankSummary, basis: Basis) -> int:
    return 1 if basis == "total" else len(warm_steps([step for step in trace.steps if step.kind == basis]))


def _without_cold(pair: RankPair) -> RankPair:
    """Remove the traces with only a cold step from each side that has other traces."""
    before, after = (tuple(trace for trace in side if not is_cold(trace)) or side for side in pair.sides)
    return attrs.evolve(pair, before=before, after=after)


_Read = list[tuple[list[_Times], list[_Times]]]


def _read(pairs: Sequence[RankPair], section: _Section, basis: Basis) -> _Read:
    def times(trace: RankSummary) -> _Times:
        groups = {} if basis == "total" else {group: len(steps) for group, steps in _groups(trace).items()}
        steps, by_key = _steps(trace, basis), section(trace)
        if basis == "total":
            return _Times(by_key, groups, steps, steps)
        by_key = {key: attrs.evolve(time, total_us=time.total_us - time.cold_us) for key, time in by_key.items()}
        return _Times(by_key, groups, steps, sum(step.kind == basis for step in trace.steps))

    return [([times(trace) for trace in pair.before], [times(trace) for trace in pair.after]) for pair in pairs]


def _changes(pairs: Sequence[RankPair], section: _Section, basis: Basis) -> tuple[Change, ...]:
    """Compare all that any trace has in a section."""
    read = _read(pairs, section, basis)
    sum_us = max(_mean([[times.sum_us for times in sides[side]] for sides in read]) for side in (0, 1))
    known = {key: time for sides in read for side in sides for times in side for key, time in times.by_key.items()}
    changes = []
    for key, time in known.items():
        old, new = (_mean([[times.calls(key) for times in sides[side]] for sides in read]) for side in (0, 1))
        change = change_of(key.name, time.category, _measured(read, key, basis), sum_us, (old, new))
        before_us, after_us = (
            _mean([[times.mean_us(key) for times in sides[side]] for sides in read]) for side in (0, 1)
        )
        changes.append(attrs.evolve(change, mean_before_us=before_us, mean_after_us=after_us))
    return tuple(sorted(changes, key=lambda change: (-abs(change.impact_us), change.name)))


def _measured(read: _Read, key: _Key, basis: Basis) -> Measured:
    """Estimate a time per step of a group, if all traces that have it know its median of these, else of the basis."""
    every = [times for sides in read for side in sides for times in side]
    known = {times.group_of(key) for times in every if times.runs(key)}
    group = known.pop() if len(known) == 1 else None
    if any(group not in times.groups for times in every):
        group = None
    estimates = [
        (pooled([times.sample(key, group) for times in old]), pooled([times.sample(key, group) for times in new]))
        for old, new in read
    ]
    if group is None:
        return Measured(estimates, str(_Group(basis, "")))
    share = sum(times.groups[group] for times in every) / sum(times.steps for times in every)
    return Measured(estimates, str(group), share)


def _sums(pairs: Sequence[RankPair], basis: Basis, *, alike: bool) -> tuple[Change, ...]:
    """Compare the sums that all traces have. If only one side is entirely cold, host times are omitted."""
    read = _read(pairs, _overall, basis)
    every = [times.by_key for sides in read for side in sides for times in side]
    keys = [key for key in every[0] if all(key in by_key for by_key in every)]
    keys = [key for key in keys if alike or key.name not in _OF_HOST]
    return tuple(change_of(key.name, None, _measured(read, key, basis)) for key in keys)


def _mean(values: Iterable[Iterable[float]]) -> float:
    """Return the mean over ranks of the mean over their traces."""
    return statistics.fmean(map(statistics.fmean, values))


def _ends_on_device(pairs: Sequence[RankPair]) -> bool:
    """Return whether the host runs ahead in all traces, so that steps last until their device work is done."""
    return all(global_steps_end_on_device(trace) for pair in pairs for side in pair.sides for trace in side)


def _incomparable_steps(pairs: Sequence[RankPair], iterations: Sequence[Change]) -> str | None:
    """Return why step times can't be compared: the host runs ahead in only some traces, and that hides a change.

    The durations of single steps depend on the border rule. Their means do not, apart from the first and last steps.
    """
    accounts = [[trace.account for pair in pairs for trace in pair.sides[side] if trace.account] for side in (0, 1)]
    known = [*accounts[0], *accounts[1]]
    steps = [change for change in iterations if change.category == GLOBAL_STEP]
    if len({ends_on_device(account) for account in known}) == 1 or len(steps) != 1 or not all(accounts):
        return None
    if any(account.basis != GLOBAL_STEP or account.steps < FEWEST_MEASUREMENTS for account in known):
        return None
    before_us, after_us = (statistics.fmean(account.time_us / account.steps for account in side) for side in accounts)
    if not before_us or abs(after_us / before_us - 1 - (steps[0].ratio or 0.0)) <= CALLED_SAME:
        return None
    return (
        "the host runs ahead of the device in only some traces, so their step times cannot be compared (mean until the "
        f"device is done: {ms(after_us)} ms, before {ms(before_us)} ms); synchronise in the last step of both runs"
    )


def _contributions(pairs: Sequence[RankPair], *, alike: bool) -> tuple[Contribution, ...]:
    return contributions_of(pairs) if alike and not _ends_on_device(pairs) else ()


def _until_device_ends(trace: RankSummary) -> RankSummary:
    account = trace.account
    if account is None:
        return trace
    steps = until_device_ends(warm_steps([step for step in trace.steps if step.kind == account.basis]), account)
    return attrs.evolve(trace, steps=(*(step for step in trace.steps if step.kind != account.basis), *steps))


def _iterations(pairs: Sequence[RankPair]) -> tuple[Change, ...]:
    """Compare the steps of each kind and stage, on the ranks that have them on both sides, if there are any."""
    if _ends_on_device(pairs):
        pairs = [
            attrs.evolve(
                pair,
                before=tuple(map(_until_device_ends, pair.before)),
                after=tuple(map(_until_device_ends, pair.after)),
            )
            for pair in pairs
        ]
    stepped = [tuple([_groups(trace) for trace in side] for side in pair.sides) for pair in pairs]
    changes = []
    for group in sorted({group for sides in stepped for side in sides for groups in side for group in groups}):
        samples = [
            (
                pair,
                tuple(
                    [sample_of([step.duration_us for step in of[group]]) for of in side if group in of]
                    for side in sides
                ),
            )
            for pair, sides in zip(pairs, stepped, strict=True)
        ]
        used = [(pair, sides) for pair, sides in samples if all(sides)] or [
            (pair, sides) for pair, sides in samples if any(sides)
        ]
        before, after = _step_times(stepped, group)
        changes.append(
            _with_means(
                change_of(
                    str(group),
                    group.kind,
                    Measured(
                        [(pooled(old), pooled(new)) for _, (old, new) in used],
                        str(group),
                        ranks=rank_test(before, after),
                    ),
                    calls=(
                        _count((pair, sum(sample.count for sample in old)) for pair, (old, _) in used),
                        _count((pair, sum(sample.count for sample in new)) for pair, (_, new) in used),
                    ),
                ),
                before,
                after,
                _causes_per_step(pairs),
            )
        )
    return tuple(changes)


def _causes_per_step(pairs: Sequence[RankPair]) -> list[tuple[float, ...]]:
    """Return the time of each cause in each later step, or an empty list unless there is one rank with one trace."""
    if len(pairs) != 1 or len(pairs[0].after) != 1 or (account := pairs[0].after[0].account) is None:
        return []
    return [cause.steps_us for cause in account.causes if cause.steps_us]


def _step_times(
    stepped: Sequence[Sequence[Sequence[dict[_Group, list[StepSummary]]]]], group: _Group
) -> tuple[list[float], list[float]]:
    """Return the step durations before and after, in microseconds, each averaged over the ranks."""
    sides = []
    for side in (0, 1):
        ranks = [[step.duration_us for of in sides[side] for step in of.get(group, ())] for sides in stepped]
        sides.append([statistics.fmean(step) for step in zip(*filter(None, ranks), strict=False)])
    return sides[0], sides[1]


def _with_means(
    change: Change, before: Sequence[float], after: Sequence[float], causes: Sequence[Sequence[float]]
) -> Change:
    """Add the means, bursts and gap to a change in step time, and mark it as inconclusive if necessary.

    If the medians are the same but the share of bursts changed significantly, and the mean changed in the same
    direction, the verdict becomes "slower" or "faster".
    """
    if not before or not after or change.verdict in {"appeared", "vanished"}:
        return change
    means, bursts = (statistics.fmean(before), statistics.fmean(after)), bursts_of(before, after, causes)
    verdict = change.verdict
    if (
        verdict == "same"
        and bursts is not None
        and bursts.p_value < LEVEL
        and (means[1] > means[0]) == (bursts.increase > 0)
    ):
        verdict = "slower" if bursts.increase > 0 else "faster"
    gaps = min(after) - max(before), max(after) - min(before)
    change = attrs.evolve(
        change,
        mean_before_us=means[0],
        mean_after_us=means[1],
        bursts=bursts,
        verdict=verdict,
        gap_us=gaps[0] if gaps[0] > 0 else gaps[1] if gaps[1] < 0 else None,
    )
    return attrs.evolve(change, verdict="inconclusive") if change.undecided(CALLED_SAME) else change


def _notes(sides: Sequence[RankSummaries], *, on_host: bool) -> Iterator[str]:
    shapes = [{trace.attributed.has_shapes for trace in side if trace.attributed} for side in sides]
    if shapes[0] != shapes[1] and all(len(side) == 1 for side in shapes):
        yield (
            f"Only the run {_SIDES[shapes[1] == {True}]} has the shapes of tensors, and recording them lengthens its "
            "operators."
        )
    ratios = [median_ratio(side) for side in sides]
    if ratios[0] and ratios[1] and abs(ratios[1] - ratios[0]) > _MIN_COST_DIFFERENCE:
        yield (
            f"The recordings may slow down the job differently: recorded steps take {ratios[0]:.1f} times as long as "
            f"unrecorded steps in the run before, and {ratios[1]:.1f} times in the run after."
        )
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


def _machine_ratio(pairs: Sequence[RankPair], operators: Sequence[Change]) -> float | None:
    """Return the time spent in operators that only create views, relative to the earlier run.

    These operators read no data, so their time depends only on the speed of the machine. Return ``None`` if they take
    less than 50 us per step, if there is a device, or if a side has several captures. In the last case, the noise
    already includes differences between runs.
    """
    traces = [trace for pair in pairs for side in pair.sides for trace in side]
    if len(traces) > 2 * len(pairs) or any(trace.devices or trace.launches for trace in traces):
        return None
    views = [of for of in operators if of.name in _VIEWS and of.calls_before == of.calls_after]
    before_us, after_us = sum(of.before_us for of in views), sum(of.after_us for of in views)
    return after_us / before_us if before_us >= _MIN_VIEWS_US else None


def _busiest(traces: RankSummaries) -> HostLoad | None:
    """Return the load of the trace that lost the largest fraction of its recording to contention."""
    loads = (trace.host_load for trace in traces if trace.host_load is not None)
    return max(loads, key=lambda load: load.lost_fraction, default=None)


def _cold_notes(pairs: Sequence[RankPair], sides: Sequence[RankSummaries]) -> Iterator[str]:
    """Yield notes about excluded cold steps, and about cold steps that could not be excluded."""
    excluded = []
    for side, name in enumerate(_SIDES):
        traces = [trace for pair in pairs for trace in pair.sides[side]]
        if not all(map(is_cold, traces)):
            numbers = {step.step for trace in traces for step in trace.steps if step.cold and step.step is not None}
            excluded += [f"step{'s' if len(numbers) > 1 else ''} {ranges([*numbers])} {name}"] if numbers else []
    if excluded:
        yield f"Excluded the recorder's first steps: {', '.join(excluded)}."
    cold = [name for name, side in zip(_SIDES, sides, strict=True) if all(map(is_cold, side))]
    if len(cold) == len(_SIDES):
        yield "All steps are first steps of a recorder, which take longer than other steps."
    elif cold:
        yield f"Host times are not compared: side '{cold[0]}' has only the recorder's first step, which takes longer."


def _batch(steps: Sequence[StepSummary]) -> float | None:
    """Return the median token count of the steps that report one."""
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
