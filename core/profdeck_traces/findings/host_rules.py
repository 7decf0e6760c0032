"""Rules for the steps of one rank and for its machine."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

import attrs

from profdeck_traces.account.borders import DEVICE as DEVICE_BORDER
from profdeck_traces.account.model import Account
from profdeck_traces.analysis.contributions import OUTLIER
from profdeck_traces.analysis.detail_model import StageSummary, StepPart
from profdeck_traces.analysis.model import StepSummary
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
_NOISE_US = 1000
"""Additional time that the start of recording or the host scheduler can cause in any step."""


def _is_loading(stage: StageSummary) -> bool:
    return is_data_loading(stage.name) or stage.loading_us >= 0.5 * stage.total_us


def unsteady(view: RankView) -> Iterator[RankFinding | NotJudged]:
    """Report steps if the longest takes over 1.25 times the median, or if steps deviate from the median by over 10 %.

    If the host runs ahead of the device, the steps last until their device work ends. On the host, such steps are short
    until the launch queue is full.

    A longest step below twice the median counts only if the mean exceeds the median by over 5 %.
    If the FLOPs of the longest step explain its duration, report uneven batches instead. Report decode iterations
    with a p99 over twice the median.
    """
    account = view.rank.account
    steps = _until_device_ends([step for step in view.steps if step.kind != ITERATION], account)
    # The launch queue is empty when the recording starts, so the first step can be longer.
    judged = steps[1:] if _ends_on_device(account) and len(steps) > _FEWEST_STEPS else steps
    slowest = max(judged, key=lambda step: step.duration_us, default=None)
    is_explained = account and slowest and explains_step(view, account, steps.index(slowest))
    if slowest is not None and _has_more_work(account, steps.index(slowest)):
        yield from _uneven_work(view, slowest, steps.index(slowest))
    elif view.cpu_wait_share:
        yield NotJudged("unsteady-steps", MACHINE_BUSY if view.is_contended else WAITED_FOR_CPU)
    elif view.rank.launches and not view.rank.devices:
        # The host can run ahead of the device until the launch queue is full.
        yield NotJudged("unsteady-steps", "no device work was recorded")
    elif len(judged) >= _FEWEST_STEPS and slowest and not is_explained and (text := _unsteady(view, judged)):
        yield draft(
            view,
            "unsteady-steps",
            text,
            _step_cure(view, slowest),
            # Of steps that differ to both sides the mean is no longer than the median: no bound is known.
            gain_us=_over_median(judged) if _has_outlier(judged) else None,
            step_us=statistics.fmean(step.duration_us for step in judged),
            evidence=view.evidence(slowest),
        )
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


def _ends_on_device(account: Account | None) -> bool:
    return account is not None and account.border == DEVICE_BORDER


def _until_device_ends(steps: list[StepSummary], account: Account | None) -> list[StepSummary]:
    """Return the steps with the durations of the account if its steps end when their device work ends."""
    if account is None or not _ends_on_device(account) or len(account.step_us) != len(steps):
        return steps
    return [attrs.evolve(step, duration_us=time) for step, time in zip(steps, account.step_us, strict=True)]


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


def _unsteady(view: RankView, steps: list[StepSummary]) -> str | None:
    durations = [step.duration_us for step in steps]
    if not (median := statistics.median(durations)):
        return None
    deviation = statistics.median(abs(duration - median) for duration in durations)
    slowest = max(steps, key=lambda step: step.duration_us)
    if slowest.duration_us - median < _NOISE_US:
        return None
    if _has_outlier(steps) and (slowest.duration_us > 2 * median or _over_median(steps) > 0.05 * median):
        which = f"Step {slowest.step}" if slowest.step is not None else "The slowest step"
        outliers = sum(duration > OUTLIER * median for duration in durations)
        more = f"; {outliers} of {len(steps)} steps exceed {OUTLIER:g} times the median" if outliers > 1 else ""
        part = _main_part(view, slowest)
        why = f": {part.name} {ms(part.time_us)} instead of {ms(part.median_us)}" if part else ""
        return f"{which} takes {ms(slowest.duration_us)} instead of {ms(median)}{why}{more}"
    if deviation > 0.1 * median:
        return f"Steps differ by {percent(deviation / median)} from their median of {ms(median)}"
    return None


def _main_part(view: RankView, slowest: StepSummary) -> StepPart | None:
    """Return the stage, device work or host state that explains at least half of a step's excess over the median."""
    longest = view.rank.host_times.longest_step if view.rank.host_times else None
    if longest is None or longest.step != slowest.step:
        return None
    # If the host runs ahead of the device, its stages do not make a step longer.
    of_host = () if _ends_on_device(view.rank.account) else longest.parts
    parts = [part for part in of_host if part.kind == "stage"]
    on_device = [step.device_us for step in view.steps if step.device_us is not None]
    if slowest.device_us is not None:
        median_us = statistics.median(on_device)
        parts.append(StepPart(name="device work", kind="device", time_us=slowest.device_us, median_us=median_us))
    parts += [part for part in of_host if part.kind == "host state"]
    least_us = 0.5 * (longest.duration_us - longest.median_us)
    return next((part for part in parts if part.time_us - part.median_us >= least_us), None)


def _step_cure(view: RankView, slowest: StepSummary) -> str:
    part = _main_part(view, slowest)
    if part is not None and any(_is_loading(stage) and stage.name == part.name for stage in view.stages):
        return "load batches further ahead, such as with a larger prefetch_factor of DataLoader"
    number = "" if slowest.step is None else f" --steps {slowest.step}"
    return f"see it: `profdeck view TRACE{number}`"


def _has_outlier(steps: list[StepSummary]) -> bool:
    durations = [step.duration_us for step in steps]
    return max(durations) > OUTLIER * statistics.median(durations)


def _over_median(steps: list[StepSummary]) -> float:
    durations = [step.duration_us for step in steps]
    return max(0.0, statistics.fmean(durations) - statistics.median(durations))


def busy_machine(view: RankView) -> Iterator[RankFinding]:
    """The recording thread waited for a CPU that other processes used, or its cgroup was throttled, for over 5 % of the
    recording.
    """
    load = view.rank.host_load
    if load is not None and (reason := load.describe_contention()):
        yield draft(
            view,
            BUSY_MACHINE,
            f"The machine was busy: {reason}",
            "record again on an idle machine",
            # Not a gain, because only an idle machine would save this time, not a change to the job.
            time_us=None if load.run_queue_s is None else load.run_queue_s / load.wall_s * view.host_step_us,
            step_us=view.host_step_us,
            confidence="high",
        )


def oversubscription(view: RankView) -> Iterator[RankFinding | NotJudged]:
    """The ranks of a host had over 1.25 times as many runnable threads as CPUs, or one rank more than the CPUs on which
    it may run, and the recording thread waited for a CPU for over 5 % of the recording.
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
        # Fewer threads do not make the work itself shorter, so no gain is known.
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
