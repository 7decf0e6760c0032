"""Rules about several ranks together, and about what is missing."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import attrs

from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.analysis.capture_matching import stage_of
from profdeck_traces.analysis.collective_skew import can_name_straggler
from profdeck_traces.analysis.collectives import is_message
from profdeck_traces.analysis.detail_model import CollectiveCalls, RecordingCost
from profdeck_traces.analysis.formatting import ranges
from profdeck_traces.analysis.model import GroupSkew, RunSummary, StepSummary
from profdeck_traces.analysis.owner_names import function_text
from profdeck_traces.analysis.rank_labels import label_of, labels_of, strangers
from profdeck_traces.analysis.run_model import Finding, Place
from profdeck_traces.analysis.short_names import cut_middle
from profdeck_traces.analysis.step_names import GLOBAL_STEP
from profdeck_traces.attribution.frames import parse_frame
from profdeck_traces.base.text import plural
from profdeck_traces.findings.rank_finding import (
    WAITED_FOR_CPU,
    NotJudged,
    RankFinding,
    costly_options,
    draft,
    get_function,
    ms,
    percent,
    record_cheaply,
    record_in_a_row,
)
from profdeck_traces.findings.rank_view import RankView
from profdeck_traces.findings.rank_work import operator_work_ratio, work_ratio
from profdeck_traces.inputs.facts import CaptureStatus
from profdeck_traces.reading.event_names import is_data_loading, is_loader

_SDMA_BYTES_PER_S = 0.8 * 18e9
_SLOW_BYTES_PER_S = 5e9
_USUAL_BYTES_PER_S = 10e9
"""Bus bandwidth over PCIe 3.0 x16 or a network of 100 Gbit/s, at 80 % of the line rate of the latter."""
_MIN_BYTES = 1_000_000
"""Smallest size of a call whose time depends on bandwidth more than on latency."""
_MORE_MICROBATCHES = 4
_FEWEST_STEPS = 3
_MORE_WORK = 1.02
"""Minimum ratio of a rank's FLOPs to the other ranks' median that counts as more work."""
_MIN_REST = 0.1
_MAX_NAME = 48
_BETWEEN = OwnerKind.BETWEEN.label
_WAIT, _COLLECTIVE = OwnerKind.WAIT_FOR_RANK.label, OwnerKind.COLLECTIVE.label
_ON_HOST = frozenset(
    kind.label
    for kind in (OwnerKind.OPERATOR, OwnerKind.PYTHON, OwnerKind.RUNTIME_CALL, OwnerKind.ALLOCATION, OwnerKind.BETWEEN)
)
CAUSES = frozenset({"straggler", "imbalance", "slow-stage", "slow-link", "small-collectives", "pipeline-bubble"})
"""Causes that can only be found with several ranks."""
PARTIAL_RECORDING = "partial-recording"
FIRST_STEP = "the recorder's first step"
_CHECK_LINKS = "check the links between the ranks of this group: `nvidia-smi topo -m`, `ibstat`"
_EVEN_WORK = "give each rank the same amount of work per step"
_EVEN_EXPERTS = "balance the tokens of the experts between the ranks"


def incomplete(run: RunSummary) -> Iterator[Finding]:
    """What of the captures is missing or not whole."""
    for role in run.silent_roles:
        yield _notice(
            f"The role {role} recorded nothing", "see `profdeck ls`, and `profdeck check` before the next job"
        )
    poor = _steps_of_incomplete(run)
    if not all(poor.values()):
        worst = next(capture for capture, steps in poor.items() if not steps)
        who = label_of(worst.role, worst.replica, worst.rank, "")
        statuses = Counter(capture.status for capture in poor)
        counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
        why = f": {worst.problem.rstrip('.')}" if worst.problem else ""
        yield _notice(
            f"{len(poor)} of {len(run.captures)} recordings are not complete ({counts}), such as "
            f"{who} of step {worst.first_step}{why}",
            "see `profdeck ls`; this summary covers only what was recorded",
        )
    if run.unread and not poor:
        yield _notice(
            f"{plural(len(run.unread), 'path')} could not be read, such as {run.unread[0]}",
            "see the errors and warnings; this summary covers only the other paths",
        )
    broken = [rank for rank in run.ranks if rank.problem]
    if broken and not poor:
        yield _notice(
            f"{len(broken)} of {len(run.ranks)} traces are damaged, such as {labels_of(run.ranks)[broken[0].path]}",
            "record them again; what is said here is of what can be read",
        )


def partial_recordings(run: RunSummary) -> Iterator[Finding]:
    """Recordings that ended early, if all incomplete recordings have complete steps."""
    poor = _steps_of_incomplete(run)
    if not poor or not all(poor.values()):
        return
    first, steps = next(iter(poor.items()))
    who = label_of(first.role, first.replica, first.rank, "")
    numbers = [step.step for step in steps if step.kind == GLOBAL_STEP and step.step is not None]
    contents = f"step{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"
    if not numbers:
        contents = plural(len(steps), "step" if steps[0].kind == GLOBAL_STEP else "iteration")
    text = f"{len(poor)} of {len(run.captures)} recordings are partial, such as that of {who}, which contains"
    if len(run.captures) == 1:
        text = f"The recording of {who} is partial and contains"
    why = f": {first.problem.rstrip('.')}" if first.problem else ""
    yield _notice(f"{text} {contents}{why}", "see `profdeck ls`", rule=PARTIAL_RECORDING)


def _steps_of_incomplete(run: RunSummary) -> dict[CaptureStatus, list[StepSummary]]:
    """Return the complete steps of each incomplete recording. Missing, failed and damaged recordings have none."""
    steps: dict[tuple[object, ...], list[StepSummary]] = {}
    for rank in run.ranks:
        place = rank.run, rank.capture, rank.role, rank.replica, rank.rank
        steps.setdefault(place, []).extend(() if rank.problem else rank.steps)
    return {
        capture: steps.get((capture.run, capture.capture, capture.role, capture.replica, capture.rank), [])
        if capture.status == "partial"
        else []
        for capture in run.captures
        if capture.status != "complete"
    }


def unrecorded_work(run: RunSummary) -> Iterator[Finding]:
    """Yield notices about launches without device work, and about events with invalid times."""
    labels = labels_of(run.ranks)
    lost = [rank for rank in run.ranks if rank.launches and rank.launches_without_work == rank.launches]
    if lost:
        yield _notice(
            f"The device was not recorded: {lost[0].launches:,} launches have no kernel ({labels[lost[0].path]})",
            "include the device in the recorded activities, and check that no other profiler uses it",
            rule="device-not-recorded",
        )
    parts = [rank for rank in run.ranks if rank.unrecorded_steps]
    if parts:
        steps = parts[0].unrecorded_steps
        which = f"step {ranges([*steps])} has" if len(steps) == 1 else f"steps {ranges([*steps])} have"
        yield _notice(
            f"No kernels were recorded for some steps: {which} launches only ({labels[parts[0].path]})",
            "add warm-up steps; device times of these steps are unknown",
            rule="device-not-recorded",
        )
    odd = [rank for rank in run.ranks if rank.implausible]
    if odd:
        count = sum(events.count for rank in odd for events in rank.implausible)
        yield _notice(
            f"{plural(count, 'event')} with invalid times or outside the recording, such as "
            f"{odd[0].implausible[0].name} ({labels[odd[0].path]})",
            "these events are excluded from all other numbers",
            rule="implausible-times",
        )


def few_steps(views: Sequence[RankView]) -> Iterator[Finding]:
    """Fewer than three steps, not counting cold steps."""
    counts: Counter[str] = Counter()  # of a rank, over its captures
    for view in views:
        if view.kind == GLOBAL_STEP:
            counts[view.label] += len(view.steps)
    if counts and max(counts.values()) < _FEWEST_STEPS:
        without = f" after {FIRST_STEP}" if any(view.excluded for view in views) else ""
        yield _notice(
            f"Only {plural(max(counts.values()), 'step')} recorded{without}; step-to-step variation is unknown",
            record_in_a_row(next(view for view in views if view.kind == GLOBAL_STEP)),
            rule="few-steps",
        )


def cold_steps(views: Sequence[RankView]) -> Iterator[Finding]:
    """Traces whose only step is cold."""
    cold = [view for view in views if view.is_cold]
    steps = [view for view in cold if not stage_of(view.rank)]
    if steps:
        number = steps[0].steps[0].step
        which = f"{len(steps)} of {plural(len(views), 'trace')} have only" if len(views) > 1 else "The trace has only"
        which += f" step {number}," if len(steps) == 1 and number is not None else ""
        yield _notice(
            f"{which} {FIRST_STEP}, which takes longer than other steps; its times are not evaluated",
            f"{record_in_a_row(steps[0])}, or set `warmup_steps`",
            rule="cold-step",
        )
    if len(cold) > len(steps):
        yield _notice(
            "The stages were recorded without warm-up; their times include the recorder's start-up",
            "compare them only with stages recorded without warm-up",
            rule="cold-step",
        )


def slow_recording(views: Sequence[RankView]) -> Iterator[Finding]:
    """Recorded steps that take at least 1.15 times as long as the steps before the capture. The note of this ratio
    replaces the overhead that the profiler records.
    """
    roles: dict[str | None, list[tuple[RecordingCost, RankView]]] = {}
    for view in views:
        if (cost := view.slowdown) is not None:
            roles.setdefault(view.rank.role, []).append((cost, view))
    is_single = len({view.label for view in views}) == 1
    for role, slow in roles.items():
        slow.sort(key=lambda pair: -pair[0].ratio)
        cost, worst = slow[0]
        names = " and ".join(costly_options(worst).values())
        notice = _notice(
            f"Recorded steps{'' if is_single else f' of {worst.label}'} take {cost.ratio:.1f} times as long as the "
            f"steps before the capture ({ms(cost.unrecorded_step_us)}). The recording"
            f"{f' of {names}' if names else ''} or different work can be the reason; recording lengthens Python code "
            "and small operators most",
            record_cheaply(worst),
            rule="profiler",
        )
        ranks = dict.fromkeys(view.label for _, view in slow)
        yield attrs.evolve(notice, ranks=tuple(ranks), where=Place(role=role))


def _notice(text: str, do: str, rule: str = "incomplete") -> Finding:
    return Finding(rule=rule, text=f"{text}.", do=do, gain_us=None, share=None, ranks=(), evidence=None)


def skew(run: RunSummary, views: Sequence[RankView]) -> Iterator[RankFinding | NotJudged]:
    """The other ranks wait for one rank in collectives for over 1 % of the step (without a device, over 5 %). If there
    is no such rank, ranks that wait for each other for over 10 % of the step. Only waits on the critical path count.

    If the ranks also wait for a CPU, waits for a straggler in host collectives count only if they take over four times
    as long as the waits for a CPU, or if one owner explains at least half of them in most steps. If there is no
    straggler, the waits must exceed the ranks' waits for a CPU by 10 % of the step.
    """
    for group in run.skew:
        ranks = {rank.path: rank for rank in group.ranks}
        team = {ranks[view.rank.path].rank: view for view in views if view.rank.path in ranks}
        waits = {
            number: _waits_us(view, group.straggler, ranks[view.rank.path].wait_us) for number, view in team.items()
        }
        step_us = statistics.fmean(view.step_us for view in team.values()) if team else 0.0
        if group.straggler in team:
            others = [
                of_rank.get(group.straggler, 0.0) for number, of_rank in waits.items() if number != group.straggler
            ]
            slow = team[group.straggler]
            least_share = 0.01 if slow.rank.devices else 0.05  # on a CPU, the same work varies more
            if others and statistics.fmean(others) > least_share * step_us:
                team.pop(group.straggler)
                is_known = _is_consistent(slow, [*team.values()], statistics.fmean(others))
                # With one collective per step, the wait equals the entire delay.
                is_single = all(rank.collectives <= slow.count for rank in group.ranks)
                yield (
                    _straggler(slow, [*team.values()], others, is_single=is_single)
                    if is_known
                    else NotJudged("straggler", WAITED_FOR_CPU)
                )
        elif group.straggler is None and team:
            time_us = statistics.fmean(sum(of_rank.values()) for of_rank in waits.values())
            if time_us > 0.1 * step_us:
                is_unknown = any(view.is_due_to_cpu_waits(time_us, 0.1, step_us) for view in team.values())
                yield (
                    NotJudged("imbalance", WAITED_FOR_CPU)
                    if is_unknown
                    else _imbalance(group, [*team.values()], time_us)
                )


def _is_consistent(slow: RankView, others: Sequence[RankView], time_us: float) -> bool:
    """Return whether CPU contention cannot explain why other ranks wait `time_us` per step for a slow rank.

    Return True if the slow rank has devices, if only one side or neither waited for a CPU, or if the wait for the slow
    rank is over four times as long as the waits for a CPU. Otherwise, one owner must explain at least half of the wait,
    both in total and in most steps. Its relative growth must also be at least twice that of all other owners combined.
    """
    others_share = max(view.cpu_wait_share for view in others)
    if slow.rank.devices or not slow.cpu_wait_share or not others_share:
        return True
    if not slow.is_due_to_cpu_waits(time_us / 2, 0.0) and time_us > 4 * others_share * slow.step_us:
        return True
    owner = _main_owner(slow, others, time_us)
    if owner is None:
        return False
    own_us, own_rest_us = _time_and_rest_us(slow, owner)
    usual = [_time_and_rest_us(view, owner) for view in others]
    usual_us, usual_rest_us = (statistics.median(times) for times in zip(*usual, strict=True))
    if usual_rest_us < _MIN_REST * usual_us or 2 * (own_rest_us / usual_rest_us - 1) > own_us / max(usual_us, 1.0) - 1:
        return False
    own_steps_us = _steps_us(slow, owner)
    others_us = [_steps_us(view, owner) or [usual_us] * len(own_steps_us) for view in others]
    if not own_steps_us or {*map(len, others_us)} != {len(own_steps_us)}:
        return False
    excess_us: list[float] = [
        own - statistics.median(step) for own, *step in zip(own_steps_us, *others_us, strict=True)
    ]
    return statistics.median_low(excess_us) >= 0.5 * time_us


def _time_and_rest_us(view: RankView, owner: _Owner) -> tuple[float, float]:
    """Return the time per step that an owner takes on the rank's critical path, and the time of all other owners."""
    times = _own_times_us(view)
    return times.get(owner, 0.0), sum(times.values()) - times.get(owner, 0.0)


def _steps_us(view: RankView, owner: _Owner) -> list[float]:
    """Return the time that an owner takes in each step, or an empty list if it is unknown."""
    account = view.rank.account
    same = [of for of in (account.owners if account else ()) if (of.kind, of.name, of.line, of.annotation) == owner]
    if not all(of.steps_us for of in same):
        return []
    return [sum(of_step) for of_step in zip(*(of.steps_us for of in same), strict=True)]


def _waits_us(view: RankView, straggler: int | None, skew_us: float) -> dict[int | None, float]:
    """Return the time per step that a rank waits for each of the other ranks.

    Args:
        view: Rank that waits.
        straggler: Rank that the others wait for.
        skew_us: Total wait in collectives. It is used if the account cannot contain these waits, because the account
            excludes the device, or because the host waits for the device outside recorded calls.
    """
    account = view.rank.account
    times: Counter[str] = Counter()
    waits: dict[int | None, float] = {}
    for owner in account.owners if account else ():
        times[owner.kind] += round(owner.time_us)
        if owner.kind == _WAIT and account:
            waits[owner.rank] = waits.get(owner.rank, 0.0) + owner.time_us / account.steps
    # Without launches, the account has only host owners.
    is_unseen = not view.rank.launches or times[OwnerKind.BETWEEN.label] >= skew_us
    if account is None or (is_unseen and not waits and not times[_COLLECTIVE]):
        return {straggler: skew_us / view.count}
    return waits


def _straggler(
    slow: RankView, others: Sequence[RankView], waits_us: Sequence[float], *, is_single: bool
) -> RankFinding:
    """Return the finding for a straggler.

    Args:
        slow: The slow rank.
        others: The ranks that wait for it.
        waits_us: Time per step that each other rank waits for it.
        is_single: True if there is at most one collective per step.
    """
    time_us = statistics.fmean(waits_us)
    count = "rank waits" if len(others) == 1 else "ranks wait"
    text = f"The other {count} {ms(time_us)} {slow.per} for {slow.label}"
    cause, do = _difference(slow, others, time_us)
    place: dict[str, Any] = {}
    key = _main_owner(slow, others, time_us)
    if key is not None:
        slow_us, others_us = _own_times_us(slow).get(key, 0.0), _median_us(others, key)
        text += (
            f", where {_label(key)} grows from {ms(others_us)} to {ms(slow_us)}"
            if key.kind == _BETWEEN
            else f", where {_label(key)} takes {ms(slow_us)} instead of {ms(others_us)}"
        )
        place = {"key": key.name or "", "line": key.line, "stage": key.annotation}
    elif not cause:
        text += ", which arrives last; no single operator, kernel or function explains half of the wait"
    is_shared = do in {_EVEN_WORK, _EVEN_EXPERTS}
    gain_us = _gain_us(slow, others, waits_us, is_shared=is_shared)
    if is_single and not slow.rank.devices:
        gain_us = min(waits_us)
    if gain_us is None and key is not None:
        gain_us = min(slow_us - others_us, *waits_us)
    if gain_us is not None and gain_us < 0.8 * time_us:
        change = "with equal work on all ranks" if is_shared else "without the difference"
        text += f"; {change}, {slow.each} would be {ms(gain_us)} shorter"
    return draft(
        slow,
        "straggler",
        f"{text}{cause}",
        do,
        gain_us=gain_us,
        time_us=time_us,
        rank=slow.rank.rank,
        **place,
    )


def _gain_us(slow: RankView, others: Sequence[RankView], waits_us: Sequence[float], *, is_shared: bool) -> float | None:
    """Return the time per step that the ranks would save if the slow rank had no more work than the next one.

    Waits of several collectives overlap with the work of the waiting ranks, so that their sum exceeds this time.

    Args:
        slow: The slow rank.
        others: The ranks that wait for it.
        waits_us: Their waits per step.
        is_shared: True if the other ranks would take over the work, so that all have the mean.

    Returns:
        ``None`` if the slow rank has no more work on its critical path than another rank.
    """
    slow_us = sum(_own_times_us(slow).values())
    if not slow_us:
        return min(waits_us)
    others_us = [_work_us(view) for view in others]
    excess_us = slow_us - (statistics.fmean([slow_us, *others_us]) if is_shared else max(others_us))
    return min(excess_us, *waits_us) if excess_us > 0 else None


def _work_us(view: RankView) -> float:
    """Return the time per step that a rank would need without collectives, as far as its trace shows it.

    While a collective is on the critical path, kernels of other streams may run that the path does not contain.
    """
    account = view.rank.account
    own_us = sum(_own_times_us(view).values())
    in_collectives_us = account.time_us / account.steps - own_us if account else 0.0
    overlap_us = view.of_devices("communication_us") - view.of_devices("exposed_communication_us")
    return own_us + min(overlap_us, in_collectives_us)


class _Owner(NamedTuple):
    """Owner fields that identify the same work on different ranks."""

    kind: str
    name: str | None
    line: str | None
    annotation: str | None

    @property
    def loads_data(self) -> bool:
        """True if the owner's time is spent loading data."""
        return (
            self.kind == OwnerKind.DATA_LOADING.label
            or is_data_loading(self.annotation or "")
            or is_loader(self.line or "")
        )


def _own_times_us(view: RankView) -> dict[_Owner, float]:
    """Return the time per step of each owner on a rank's critical path, excluding collectives and waits for ranks."""
    times: dict[_Owner, float] = {}
    account = view.rank.account
    for owner in account.owners if account else ():
        if owner.kind not in {_WAIT, _COLLECTIVE}:
            key = _Owner(owner.kind, owner.name, owner.line, owner.annotation)
            times[key] = times.get(key, 0.0) + owner.time_us / (account.steps if account else 1)
    return times


def _median_us(views: Sequence[RankView], owner: _Owner) -> float:
    return statistics.median(_own_times_us(view).get(owner, 0.0) for view in views)


def _excess_us(slow: RankView, others: Sequence[RankView]) -> dict[_Owner, float]:
    """Return each owner's excess over the median of the other ranks, if it is positive."""
    of_others = [_own_times_us(view) for view in others]
    excess = {
        owner: time_us - statistics.median(times.get(owner, 0.0) for times in of_others)
        for owner, time_us in _own_times_us(slow).items()
    }
    return {owner: time_us for owner, time_us in excess.items() if time_us > 0}


def _main_owner(slow: RankView, others: Sequence[RankView], time_us: float) -> _Owner | None:
    """Return the owner with the largest excess, or ``None`` if it explains less than half of the wait `time_us`."""
    excess_us = _excess_us(slow, others)
    owner = max(excess_us, key=lambda key: excess_us[key], default=None)
    return owner if owner is not None and excess_us[owner] >= 0.5 * time_us else None


def _difference(slow: RankView, others: Sequence[RankView], time_us: float) -> tuple[str, str]:
    """Return a phrase for the cause of a slow rank, or an empty string, and the suggested action.

    Args:
        slow: The slow rank.
        others: The ranks that wait for it.
        time_us: Their mean wait per step.
    """
    excess_us = _excess_us(slow, others)
    total_us = sum(excess_us.values())

    def is_most(selected: Callable[[_Owner], bool]) -> bool:
        selected_us = sum(excess_us[owner] for owner in excess_us if selected(owner))
        return bool(total_us) and selected_us >= 0.5 * max(total_us, time_us)

    load = slow.rank.host_load
    busy = load.describe_contention() if load else None
    if busy and not any(view.is_contended for view in others):
        return f"; its host is busy: {busy}", f"free CPUs on the host of {slow.label}"
    if is_most(lambda owner: owner.loads_data):
        return "", f"load the batches of {slow.label} in the background, and check its storage"
    work = work_ratio(slow, others) or (
        operator_work_ratio(slow, others) if is_most(lambda owner: owner.kind == OwnerKind.OPERATOR.label) else None
    )
    is_same_work = work is not None and 1 / _MORE_WORK < work.ratio < _MORE_WORK
    is_spread = bool(total_us) and max(excess_us.values()) < 0.5 * total_us
    even = _EVEN_EXPERTS if _exchanges_work(slow) else _EVEN_WORK
    if work is not None and work.ratio >= _MORE_WORK:
        cause, do = f"; {work.text}", even
    elif is_same_work and is_most(lambda owner: owner.kind == OwnerKind.KERNEL.label):
        cause = "; its device runs the same work more slowly"
        do = f"check clocks and temperature of the device of {slow.label}: `nvidia-smi -q -d CLOCK,PERFORMANCE`"
    elif is_same_work and is_spread and is_most(lambda owner: owner.kind in _ON_HOST):
        cause = "; its CPU runs the same operators more slowly"
        do = f"check the CPU load and clocks of {slow.label}"
    elif work is None and is_most(lambda owner: owner.kind == OwnerKind.KERNEL.label) and even is _EVEN_EXPERTS:
        cause, do = "; the ranks exchange their work in all-to-alls", even
    elif (longest := _main_owner(slow, others, time_us)) and longest.kind != _BETWEEN:
        cause, do = "", f"shorten {_label(longest)} on {slow.label}, or move it out of the step"
    elif longest and slow.rank.account and not slow.rank.account.has_stacks:
        cause, do = "", get_function(slow)
    else:
        cause, do = "", f"compare {slow.label} with another rank: `profdeck view`"
    return cause, do


def _exchanges_work(view: RankView) -> bool:
    """Return whether most collectives of a rank are all-to-alls, as between the experts of a model."""
    calls = [call for call in view.rank.collectives if not is_message(call.name)]
    exchanges = sum(call.count for call in calls if _is_all_to_all(call.name))
    return 2 * exchanges > sum(call.count for call in calls)


def _label(owner: _Owner) -> str:
    """Return an owner's name and, if known, its line."""
    if owner.kind == _BETWEEN:
        return (
            f"time outside operators in {cut_middle(owner.name, _MAX_NAME)}" if owner.name else "time outside operators"
        )
    name = owner.kind
    if owner.name:
        name = function_text(owner.name) if parse_frame(owner.name) else cut_middle(owner.name, _MAX_NAME)
    line = owner.line if owner.line and owner.line != owner.name else None
    return f"{name} in {function_text(line)}" if line else name


def _imbalance(group: GroupSkew, views: Sequence[RankView], time_us: float) -> RankFinding:
    """Return the finding for ranks that wait for each other for `time_us` per step."""
    whose = f"Ranks of {group.role}" if group.role else "Ranks"
    awaited: Counter[_Owner] = Counter()
    for view in views:
        for owner in view.rank.account.owners if view.rank.account else ():
            if owner.kind == _WAIT and owner.awaited and owner.name:
                awaited[_Owner(owner.awaited, owner.name, owner.line, owner.annotation)] += round(owner.time_us)
    longest, text = next(iter(awaited.most_common(1)), None), ""
    place: dict[str, Any] = {}
    kernels_us = sum(us for owner, us in awaited.items() if owner.kind == OwnerKind.KERNEL.label)
    if longest is not None:
        text = f", mostly for {_label(longest[0])}"
        place = {"line": longest[0].line, "stage": longest[0].annotation}
    view = views[0]
    # Only kernel times are available per step.
    on_device = 2 * kernels_us > awaited.total()
    gain_us = _imbalance_us(views, time_us) if on_device else _lead_us(group, time_us)
    lead = "" if on_device else f"; the last rank arrives {ms(gain_us)} {view.per} after the first"
    return draft(
        view,
        "imbalance",
        f"{whose} wait for each other {ms(time_us)} {view.per}{text}, {_last_arrivals(group)}{lead}",
        _EVEN_EXPERTS if any(map(_exchanges_work, views)) else _EVEN_WORK,
        gain_us=gain_us,
        time_us=time_us,
        of_all=True,
        **place,
    )


def _lead_us(group: GroupSkew, waits_us: float) -> float:
    """Return the time per step between the first and the last arrival at collectives.

    Args:
        group: Arrivals of the ranks.
        waits_us: Mean wait of the ranks per step. Only waits on the critical path count.
    """
    mean_us = statistics.fmean(rank.wait_us for rank in group.ranks)
    return waits_us * sum(of.skew_us for of in group.collectives) / mean_us if mean_us else waits_us


def _imbalance_us(views: Sequence[RankView], waits_us: float) -> float:
    """Return the time per step that equal work on all ranks would save, at most the waits.

    The rank with the most compute determines the duration of a step. If the ranks have different numbers of steps, the
    waits are returned.
    """
    compute_us = [[sum(of.compute_us for of in step.devices) for step in view.steps] for view in views]
    if len({len(of_rank) for of_rank in compute_us}) != 1:
        return waits_us
    excess_us = [max(of_step) - statistics.fmean(of_step) for of_step in zip(*compute_us, strict=True)]
    return min(waits_us, statistics.fmean(excess_us))


def _last_arrivals(group: GroupSkew) -> str:
    """Describe which ranks arrive last in a group that has no straggler."""
    if can_name_straggler(group):
        return "no rank more than the others"
    collectives = max(rank.collectives for rank in group.ranks)
    return f"with too few collectives ({collectives}) to name a rank"


def _path_us(view: RankView, selected: Callable[[str], bool]) -> float:
    """Return the time per step of selected collectives on the critical path, excluding waits for ranks."""
    account = view.rank.account
    if account is None:
        return 0.0
    owners = [owner for owner in account.owners if owner.kind == _COLLECTIVE and owner.name]
    return sum(owner.time_us for owner in owners if selected(owner.name or "")) / account.steps


def _sends_all_to_all(view: RankView) -> bool:
    """Return whether a rank's sends and receives belong to all-to-alls, which NCCL implements that way."""
    names = {call.name for call in view.rank.collectives}
    names |= {of.name.removeprefix("nccl:") for of in view.rank.annotations if of.name.startswith("nccl:")}
    return any(map(_is_all_to_all, names)) and not any(map(is_message, names))


def _is_all_to_all(name: str) -> bool:
    return "alltoall" in name.lower().replace("_", "")


def small_collectives(views: Sequence[RankView]) -> Iterator[RankFinding]:
    """At least 20 collectives per step that are smaller than 1 MB and take over 5 % of the step on the critical path.
    Waits for other ranks do not count.
    """
    for view in views:
        sized = [call for call in view.rank.collectives if call.size_bytes is not None and not is_message(call.name)]
        calls = [call for call in sized if (call.size_bytes or 0) < _MIN_BYTES]
        count = view.calls_per_step(sum(call.count for call in calls))
        time_us = _path_us(view, lambda name: not is_message(name))
        if len(calls) < len(sized):
            # The path doesn't distinguish sizes and may contain larger collectives.
            time_us = min(time_us, view.calls_per_step(sum(call.min_us * call.count for call in calls)))
        if count >= 20 and time_us > 0.05 * view.step_us:
            mean_bytes = sum((call.size_bytes or 0) * call.count for call in calls) / sum(call.count for call in calls)
            yield draft(
                view,
                "small-collectives",
                f"{count:,.0f} collectives {view.per} with {mean_bytes / 1000:,.0f} kB on average take {ms(time_us)} "
                "on the critical path",
                "combine them, for example with a larger bucket_cap_mb of DistributedDataParallel",
                gain_us=time_us * (1 - 1 / count),
                time_us=time_us,
            )


def slow_groups(views: Sequence[RankView]) -> Iterator[RankFinding]:
    """A process group whose fastest call of a collective takes over 1.5 times as long as the median of at least two
    other groups. Only groups of the same size, all of whose ranks were recorded, and calls with the same number of
    bytes are compared.
    """
    groups: dict[tuple[object, ...], dict[str, list[tuple[CollectiveCalls, RankView]]]] = {}
    for view in views:
        for call in view.rank.collectives:
            if call.size_bytes and not is_message(call.name):
                rank = view.rank
                key = rank.run, rank.role, rank.replica, rank.capture, call.name, call.size_bytes, call.group_size
                groups.setdefault(key, {}).setdefault(call.group, []).append((call, view))
    for by_group in groups.values():
        # A rank that arrives early measures its wait. The last rank, which measures the transfer, must be recorded.
        best_us = {
            group: min(call.min_us for call, _ in calls)
            for group, calls in by_group.items()
            if len({view.rank.path for _, view in calls}) == calls[0][0].group_size
        }
        if not best_us:
            continue
        slow = max(best_us, key=lambda group: best_us[group])
        others = [time_us for group, time_us in best_us.items() if group != slow]
        if len(others) < 2 or best_us[slow] <= 1.5 * statistics.median(others):
            continue
        usual_us = statistics.median(others)
        for call, view in by_group[slow]:
            size = f"{(call.size_bytes or 0) / 1e6:,.1f} MB"
            excess_us = (best_us[slow] - usual_us) * view.calls_per_step(call.count)
            yield draft(
                view,
                "slow-link",
                f"{call.name} of {size} takes {ms(best_us[slow])} in process group {slow}, but {ms(usual_us)} in "
                f"{len(others)} other groups",
                _CHECK_LINKS,
                gain_us=min(excess_us, _path_us(view, lambda name: not is_message(name))),
                time_us=excess_us,
                key=f"{call.name} {slow}",
            )


def low_bandwidth(views: Sequence[RankView]) -> Iterator[RankFinding]:
    """A process group of devices, all of whose ranks were recorded, without a collective of at least 1 MB that reaches
    a bus bandwidth of 5 GB/s, half of that of a network of 100 Gbit/s.
    """
    groups: dict[tuple[object, ...], list[tuple[CollectiveCalls, RankView]]] = {}
    for view in views:
        for call in view.rank.collectives if view.rank.devices else ():
            if (call.size_bytes or 0) >= _MIN_BYTES and call.bus_bytes_per_s and not is_message(call.name):
                rank = view.rank
                groups.setdefault((rank.run, rank.role, rank.replica, rank.capture, call.group), []).append(
                    (call, view)
                )
    for calls in groups.values():
        members = {view.rank.path: view for _, view in calls}
        # A rank that arrives early measures its wait. The last rank measures the transfer.
        fastest, _ = max(calls, key=lambda pair: pair[0].bus_bytes_per_s or 0.0)
        best = fastest.bus_bytes_per_s or 0.0
        if len(members) != fastest.group_size or best >= _SLOW_BYTES_PER_S:
            continue
        min_us: dict[tuple[str, int | None], float] = {}
        for call, _ in calls:
            key = call.name, call.size_bytes
            min_us[key] = min(call.min_us, min_us.get(key, call.min_us))
        for path, view in members.items():
            own = [call for call, of in calls if of.rank.path == path]
            time_us = sum(min_us[call.name, call.size_bytes] * view.calls_per_step(call.count) for call in own)
            path_us = _path_us(view, lambda name: not is_message(name))
            # At normal bandwidth, communication that currently overlaps with compute would still overlap.
            gain_us = min(time_us * (1 - best / _USUAL_BYTES_PER_S), path_us, view.exposed_communication_us)
            yield draft(
                view,
                "slow-link",
                f"{fastest.name} of {(fastest.size_bytes or 0) / 1e6:,.1f} MB, the fastest collective of process group "
                f"{fastest.group}, reaches only {best / 1e9:.1f} GB/s of bus bandwidth",
                _CHECK_LINKS,
                gain_us=gain_us,
                time_us=time_us,
                key=fastest.group,
            )


def pipeline_bubble(views: Sequence[RankView]) -> Iterator[RankFinding]:
    """Report sends and receives that take over 10 % of the step on the critical path. Traces do not name the sender.

    The gain assumes four times as many microbatches. The bubble of p stages takes (p - 1) / m of the work of m
    microbatches (Narayanan et al., SC 2021, section 2.2).
    """
    for view in views:
        time_us = 0.0 if _sends_all_to_all(view) else _path_us(view, is_message)
        if time_us > 0.1 * view.step_us:
            yield draft(
                view,
                "pipeline-bubble",
                f"Sends and receives take {percent(time_us / view.step_us)} of {view.each} ({ms(time_us)}) on the "
                "critical path",
                "use more microbatches per step, or balance the pipeline stages",
                gain_us=time_us * (1 - 1 / _MORE_MICROBATCHES),
                time_us=time_us,
            )


def slow_stage(run: RunSummary, views: Sequence[RankView]) -> Iterator[RankFinding | NotJudged]:
    """A stage in which one rank exceeds the median of the other ranks by over 10 % of the step, excluding time in host
    collectives. Ranks whose collectives were matched are compared by their waits instead. If the ranks wait for a CPU,
    the excess must exceed these waits, summed over the ranks, by 10 % of the step.
    """
    teams: dict[tuple[object, ...], list[RankView]] = {}
    alone = strangers(run.ranks) | {rank.path for group in run.skew for rank in group.ranks if rank.collectives}
    for view in views:
        if view.stages and view.rank.host_times is not None and view.rank.path not in alone:
            key = (view.rank.run, view.rank.role, view.rank.replica, view.rank.capture, view.rank.host_times.basis)
            teams.setdefault(key, []).append(view)
    for team in teams.values():
        names = {stage.name for view in team for stage in view.stages}
        for name in sorted(names) if len(team) > 1 else ():
            times = {index: view.stage_without_collectives_us.get(name, 0.0) for index, view in enumerate(team)}
            slow = max(times, key=lambda index: times[index])
            others = statistics.median(time for index, time in times.items() if index != slow)
            view = team[slow]
            excess = times[slow] - others
            if excess > 0.1 * view.host_step_us and excess > 0.1 * others:
                if view.is_due_to_cpu_waits(excess, 0.1, view.host_step_us):
                    yield NotJudged("slow-stage", WAITED_FOR_CPU)
                    continue
                work = operator_work_ratio(view, [other for other in team if other is not view])
                yield draft(
                    view,
                    "slow-stage",
                    f"{name} takes {view.label} {ms(times[slow])} {view.per}, the other"
                    f"{'s' if len(team) > 2 else ''} {ms(others)}{f'; {work.text}' if work else ''}",
                    _EVEN_WORK if work else f"compare {name} on {view.label} with another rank: `profdeck view`",
                    gain_us=excess,
                    step_us=view.host_step_us,
                    key=name,
                )


def slow_links(views: Sequence[RankView]) -> Iterator[RankFinding]:
    """Ascend's links: SDMA below 80 % of 18 GB/s, or over 20 % small packets (msprof's advisor)."""
    for view in views:
        for operation in view.rank.communication:
            for link in operation.links:
                if link.link == "SDMA" and link.bytes_per_s is not None and link.bytes_per_s < _SDMA_BYTES_PER_S:
                    best_us = link.size_bytes / _SDMA_BYTES_PER_S * 1e6
                    yield _link(
                        view,
                        f"{operation.name} sends {link.bytes_per_s / 1e9:.1f} GB/s over SDMA, where 14.4 are usual",
                        "move ranks to other devices, so that fewer of them share this link",
                        operation.name,
                        (link.transit_us - best_us) / view.count,
                    )
                elif link.large_packet_share is not None and link.large_packet_share < 0.8:
                    yield _link(
                        view,
                        f"{percent(1 - link.large_packet_share)} of the packets of {operation.name} over {link.link} "
                        "are small",
                        "send larger buckets",
                        operation.name,
                        None,
                    )


def _link(view: RankView, text: str, do: str, key: str, gain_us: float | None) -> RankFinding:
    return draft(view, "slow-link", text, do, gain_us=gain_us, key=key)


RULES: tuple[Callable[[Sequence[RankView]], Iterator[RankFinding]], ...] = (
    slow_links,
    slow_groups,
    low_bandwidth,
    small_collectives,
    pipeline_bubble,
)
"""Cross-rank rules that take only the views of the ranks."""
