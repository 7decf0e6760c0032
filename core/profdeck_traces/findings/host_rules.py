"""Rules for the steps of one rank and for its machine."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator

import attrs

from profdeck_traces.account.model import Account, OwnerTime
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.analysis.contributions import OUTLIER
from profdeck_traces.analysis.detail_model import StageSummary
from profdeck_traces.analysis.device_ends import ends_on_device, until_device_ends
from profdeck_traces.analysis.model import StepSummary
from profdeck_traces.analysis.owner_names import function_text
from profdeck_traces.analysis.step_names import DECODE, ITERATION
from profdeck_traces.base.text import plural
from profdeck_traces.findings.account_rules import explains_step
from profdeck_traces.findings.rank_finding import (
    MACHINE_BUSY,
    WAITED_FOR_CPU,
    NotJudged,
    RankFinding,
    draft,
    ms,
    percent,
)
from profdeck_traces.findings.rank_view import RankView
from profdeck_traces.reading.event_names import is_data_loading

BUSY_MACHINE, OVERSUBSCRIPTION, THROTTLING = "busy-machine", "oversubscription", "throttling"
_FEWEST_STEPS = 3
_LONGER = 1.1
_MIN_EXPLAINED = 0.5
_MIN_LEAD = 0.35
"""Minimum difference between a `_Part`'s share of the excess and its share of the median step."""
_NEARLY_ALL = 0.9
_NOISE_US = 1000
"""Additional time that the start of recording or the host scheduler can cause in any step."""


def _is_loading(stage: StageSummary) -> bool:
    return is_data_loading(stage.name) or stage.loading_us >= 0.5 * stage.total_us


def unsteady(view: RankView) -> Iterator[RankFinding | NotJudged]:
    """Report the longest step if it takes over 1.25 times the median and one owner, function or stage explains it.

    If the host runs ahead of the device, a step lasts until its device work ends, because the host's own steps are
    short until the launch queue is full.

    A longest step below twice the median counts only if the mean exceeds the median by over 5 %. If the FLOPs of the
    longest step explain its duration, report uneven batches instead. Report decode iterations with a p99 over twice the
    median.
    """
    account = view.rank.account
    steps = until_device_ends([step for step in view.steps if step.kind != ITERATION], account)
    # The first step can be longer, because the launch queue is empty when the recording starts.
    judged = steps[1:] if ends_on_device(account) and len(steps) > _FEWEST_STEPS else steps
    slowest = max(judged, key=lambda step: step.duration_us, default=None)
    is_explained = account and slowest and explains_step(view, account, steps.index(slowest))
    if slowest is not None and _has_more_work(account, steps.index(slowest)):
        yield from _uneven_work(view, slowest, steps.index(slowest))
    elif view.cpu_wait_share:
        yield NotJudged("unsteady-steps", MACHINE_BUSY if view.is_contended else WAITED_FOR_CPU)
    elif view.rank.launches and not view.rank.devices:
        # The host can run ahead of the device until the launch queue is full.
        yield NotJudged("unsteady-steps", "no device work was recorded")
    elif slowest is not None and len(judged) >= _FEWEST_STEPS and not is_explained:
        yield from _unsteady(view, judged, slowest, steps.index(slowest))
    decode = next((of for of in view.rank.iterations if (of.kind, of.stage) == (ITERATION, DECODE)), None)
    if decode is not None and decode.count >= 100 and decode.p99_us > 2 * decode.p50_us:
        slow = max(view.of_kind(ITERATION, DECODE), key=lambda step: step.duration_us)
        yield draft(
            view,
            "unsteady-decode",
            f"Of {decode.count:,} decode iterations the slowest 1% take over {ms(decode.p99_us)}, the median "
            f"{ms(decode.p50_us)}",
            "see the longest decode iteration: `profdeck report`",
            gain_us=max(0.0, decode.mean_us - decode.p50_us),
            step_us=decode.mean_us,
            evidence=view.evidence(slow),
        )


def slow_device(view: RankView) -> Iterator[RankFinding | NotJudged]:
    """Report kernels that run over 10 % slower than in the fastest quarter of the steps.

    This must happen in at least two consecutive steps with the same input sizes.
    """
    steps = [step for step in view.steps if step.slowdown is not None]
    factors = [step.slowdown or 1.0 for step in steps]
    if len(steps) < 2 * _FEWEST_STEPS or 2 * len(steps) <= len(view.steps):
        few = "fewer than six steps were recorded"
        reason = few if len(view.steps) < 2 * _FEWEST_STEPS else "the sizes of kernels differ or were not recorded"
        yield NotJudged(THROTTLING, reason if view.rank.devices else "no device work was recorded")
        return
    is_slow = [factor > _LONGER for factor in factors]
    if not any(first and second for first, second in itertools.pairwise(is_slow)):
        return
    saved_us = sum(
        sum(of.compute_us for of in step.devices) / view.device_count * max(0.0, 1 - 1 / factor)
        for step, factor in zip(steps, factors, strict=True)
    )
    slowest = max(steps, key=lambda step: step.slowdown or 1.0)
    first = steps[is_slow.index(True)]
    since = "" if first.step is None else f", first in step {first.step}"
    yield draft(
        view,
        THROTTLING,
        f"In {sum(is_slow)} of {len(steps)} steps{since}, the device is slower: the same kernels take up to "
        f"{max(factors):.2f} times as long",
        "check clocks, power, temperature and other processes of the device: `nvidia-smi -q -d CLOCK,PERFORMANCE`",
        gain_us=saved_us / len(steps),
        evidence=view.evidence(slowest),
        check=view.show_step(slowest),
    )


def _has_more_work(account: Account | None, step: int) -> bool:
    """Return whether a step is over 10 % longer than the median, and extra FLOPs explain half of the excess or more."""
    if account is None or len(account.step_flops) < _FEWEST_STEPS or step >= len(account.step_flops):
        return False
    median_flops = statistics.median(account.step_flops)
    if not median_flops:
        return False
    work = account.step_flops[step] / median_flops
    time = account.step_us[step] / statistics.median(account.step_us)
    return time > _LONGER and work > _LONGER and work - 1 >= (time - 1) / 2


def _uneven_work(view: RankView, slowest: StepSummary, index: int) -> Iterator[RankFinding]:
    account = view.rank.account
    if account is None:
        return
    work = account.step_flops[index] / statistics.median(account.step_flops)
    median_us = statistics.median(account.step_us)
    which = f"Step {slowest.step}" if slowest.step is not None else "The slowest step"
    yield draft(
        view,
        "uneven-batches",
        f"{which} takes {ms(account.step_us[index])} instead of {ms(median_us)} because its batch is larger: it has "
        f"{work:.1f} times the FLOPs of the median step",
        "put the same number of tokens into each batch",
        time_us=max(0.0, statistics.fmean(account.step_us) - median_us),
        step_us=account.time_us / account.steps,
        evidence=view.evidence(slowest),
        check=view.show_step(slowest),
        confidence="high",
    )


def _unsteady(
    view: RankView, steps: list[StepSummary], slowest: StepSummary, index: int
) -> Iterator[RankFinding | NotJudged]:
    """Yield a finding for the longest step if it has a single explanation. Otherwise, report that it can't be judged.

    Args:
        view: The rank.
        steps: Its steps.
        slowest: The longest of them.
        index: Index of the longest step in the account.
    """
    durations = [step.duration_us for step in steps]
    median = statistics.median(durations)
    is_long = _has_outlier(steps) and (slowest.duration_us > 2 * median or _over_median(steps) > 0.05 * median)
    if not median or not is_long or slowest.duration_us - median < _NOISE_US:
        return
    which = f"Step {slowest.step}" if slowest.step is not None else "The slowest step"
    text = f"{which} takes {ms(slowest.duration_us)} instead of {ms(median)}"
    part = _main_part(view, slowest, index, slowest.duration_us - median)
    if part is None:
        yield NotJudged("unsteady-steps", f"{text[:1].lower()}{text[1:]}, but no single owner explains half of it")
        return
    outliers = sum(duration > OUTLIER * median for duration in durations)
    more = f"; {outliers} of {len(steps)} steps exceed {OUTLIER:g} times the median" if outliers > 1 else ""
    yield draft(
        view,
        "unsteady-steps",
        f"{text}: {part.name} {ms(part.time_us)} instead of {ms(part.median_us)}{more}",
        _step_cure(view, slowest, part),
        gain_us=_over_median(steps),
        step_us=statistics.fmean(durations),
        stage=part.stage,
        line=part.line,
        evidence=view.evidence(slowest),
        check=view.show_step(slowest),
    )


@attrs.frozen(kw_only=True)
class _Part:
    """Owner, function or stage that explains a long step."""

    name: str
    time_us: float
    median_us: float
    stage: str | None = None
    line: str | None = None
    is_owner: bool = False
    """True for a single owner, False for a function or stage."""

    @property
    def excess_us(self) -> float:
        """Time above the median."""
        return self.time_us - self.median_us


def _main_part(view: RankView, slowest: StepSummary, index: int, excess_us: float) -> _Part | None:
    """Return the owner, function, stage or device work that explains at least half of a step's excess over the median.

    On the host, its share of the excess must also exceed its share of the median step. Otherwise, the entire step is
    slower. An owner with nearly all of the excess always qualifies if its own time at least doubled.
    """
    load = view.rank.host_load
    if load is not None and load.run_queue_s is not None and load.run_queue_s * 1e6 >= excess_us / 2:
        return None
    return (
        _part_on_path(view.rank.account, index)
        or _host_stage(view, slowest, excess_us)
        or _device_work(view, index, excess_us)
    )


def _host_stage(view: RankView, slowest: StepSummary, excess_us: float) -> _Part | None:
    """Return the stage that explains at least half of a step's excess, unless the host runs ahead of the device."""
    longest = view.rank.host_times.longest_step if view.rank.host_times else None
    if longest is None or longest.step != slowest.step or not view.rank.devices or ends_on_device(view.rank.account):
        return None
    stages = [part for part in longest.parts if part.kind == "stage" and part.time_us - part.median_us >= excess_us / 2]
    return next((_Part(name=of.name, stage=of.name, time_us=of.time_us, median_us=of.median_us) for of in stages), None)


def _device_work(view: RankView, index: int, excess_us: float) -> _Part | None:
    """Return the device work if it explains at least half of a step's excess over the median."""
    busy_us = [sum(of.busy_us for of in step.devices) / view.device_count for step in view.steps if step.devices]
    if len(busy_us) < len(view.steps):
        return None
    median_us = statistics.median(busy_us)
    is_longer = busy_us[index] - median_us >= excess_us / 2
    return _Part(name="device work", time_us=busy_us[index], median_us=median_us) if is_longer else None


def _part_on_path(account: Account | None, index: int) -> _Part | None:
    """Return the owner, function or stage that explains at least half of a step's excess on the critical path."""
    if account is None or index >= len(account.step_us):
        return None
    median_us = statistics.median(account.step_us)
    excess_us = max(1.0, account.step_us[index] - median_us)
    parts = [
        part
        for part in _parts(account, index)
        if part.excess_us >= _MIN_EXPLAINED * excess_us
        and (
            part.excess_us / excess_us - part.median_us / median_us >= _MIN_LEAD
            or (part.is_owner and part.excess_us >= _NEARLY_ALL * excess_us and part.time_us >= 2 * part.median_us)
        )
    ]
    most_us = max((part.excess_us for part in parts), default=0.0)
    return next((part for part in parts if part.excess_us >= _NEARLY_ALL * most_us), None)


def _parts(account: Account, index: int) -> Iterator[_Part]:
    """Yield the owners, then the functions, then the stages of a step."""
    named = [owner for owner in account.owners if len(owner.steps_us) == len(account.step_us)]
    keys: tuple[Callable[[OwnerTime], tuple[str | None, ...]], ...] = (
        lambda owner: (_owner_name(owner), owner.annotation, owner.line),
        lambda owner: (owner.line and function_text(owner.line), None, owner.line),
        lambda owner: (owner.annotation, owner.annotation, None),
    )
    for level, key in enumerate(keys):
        sums: dict[tuple[str | None, ...], list[float]] = {}
        for owner in named:
            total = sums.setdefault(key(owner), [0.0] * len(account.step_us))
            for step, time_us in enumerate(owner.steps_us):
                total[step] += time_us
        for (name, stage, line), times in sums.items():
            if name:
                yield _Part(
                    name=name,
                    stage=stage,
                    line=line,
                    time_us=times[index],
                    median_us=statistics.median(times),
                    is_owner=level == 0,
                )


def _owner_name(owner: OwnerTime) -> str | None:
    if owner.kind == OwnerKind.BETWEEN.label:
        return "time outside operators" + (f" in {owner.annotation}" if owner.annotation else "")
    return owner.name and owner.label


def _step_cure(view: RankView, slowest: StepSummary, part: _Part) -> str:
    if any(_is_loading(stage) and stage.name == part.stage for stage in view.stages):
        return "load batches further ahead, such as with a larger prefetch_factor of DataLoader"
    if part.line is not None or part.stage is not None:
        return "do this extra work less often, or spread it evenly over the steps"
    return f"look at this step: `{view.show_step(slowest)}`"


def _has_outlier(steps: list[StepSummary]) -> bool:
    durations = [step.duration_us for step in steps]
    return max(durations) > OUTLIER * statistics.median(durations)


def _over_median(steps: list[StepSummary]) -> float:
    durations = [step.duration_us for step in steps]
    return max(0.0, statistics.fmean(durations) - statistics.median(durations))


def busy_machine(view: RankView) -> Iterator[RankFinding]:
    """For over 5 % of the recording, the recording thread could not run, because other processes used the CPU or its
    cgroup was throttled.
    """
    load = view.rank.host_load
    if load is not None and (reason := load.describe_contention()):
        yield draft(
            view,
            BUSY_MACHINE,
            f"The machine was busy: {reason}",
            "record again on an idle machine",
            # Not a gain, because only an idle machine would save this time, not a change to the job.
            time_us=None if load.run_queue_s is None else load.lost_fraction * view.host_step_us,
            step_us=view.host_step_us,
            confidence="high",
        )


def oversubscription(view: RankView) -> Iterator[RankFinding | NotJudged]:
    """The recording thread waited for a CPU for over 5 % of the recording, because the ranks of its host had too many
    runnable threads: over 1.25 per CPU for all ranks, or over 1.25 per usable CPU for its own rank alone.
    """
    load = view.rank.host_load
    if load is None or load.wanted_cpus is None:
        yield NotJudged(OVERSUBSCRIPTION, "the number of runnable threads was not recorded")
        return
    if not load.is_oversubscribed:
        return
    own, usable = load.own_wanted_cpus or 0.0, load.usable_cpus or load.cpus
    is_pinned = usable < load.cpus and own > usable
    wanted, cpus = (own, usable) if is_pinned else (load.wanted_cpus, load.cpus)
    whose = "its threads" if is_pinned else "the threads of the ranks on this host"
    per_rank = own > _LONGER
    yield draft(
        view,
        OVERSUBSCRIPTION,
        f"The main thread waits {percent(load.wait_fraction)} of the time for a CPU because {whose} need {wanted:.1f} "
        f"CPUs, but have {plural(cpus, 'CPU')}",
        (
            f"use fewer threads per rank: set OMP_NUM_THREADS to {max(1, int(cpus / max(1.0, load.wanted_cpus / own)))}"
            if per_rank
            else "run fewer ranks on this host, or give it more CPUs"
        ),
        # Using fewer threads doesn't reduce the work itself, so the gain is unknown.
        time_us=load.wait_fraction * view.host_step_us,
        step_us=view.host_step_us,
    )


RULES = {
    unsteady: ("unsteady-steps", "uneven-batches", "unsteady-decode"),
    busy_machine: (BUSY_MACHINE,),
    oversubscription: (OVERSUBSCRIPTION,),
    slow_device: (THROTTLING,),
}
"""Rules, and the causes that each rule can report."""
