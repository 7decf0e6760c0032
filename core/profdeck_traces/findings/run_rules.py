"""Rules about several ranks together, and about what is missing."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from profdeck_traces.analysis.capture_matching import stage_of
from profdeck_traces.analysis.collective_skew import can_name_straggler
from profdeck_traces.analysis.formatting import ranges
from profdeck_traces.analysis.model import GroupSkew, RunSummary
from profdeck_traces.analysis.rank_labels import label_of, labels_of, strangers
from profdeck_traces.analysis.run_model import Finding
from profdeck_traces.analysis.step_names import GLOBAL_STEP
from profdeck_traces.base.text import plural
from profdeck_traces.findings.rank_finding import RankFinding, draft, ms, percent
from profdeck_traces.findings.rank_view import RankView

_SDMA_BYTES_PER_S = 0.8 * 18e9
_FEWEST_STEPS = 3
FIRST_STEP = "the recorder's first step"


def incomplete(run: RunSummary) -> Iterator[Finding]:
    """What of the captures is missing or not whole."""
    for role in run.silent_roles:
        yield _notice(
            f"The role {role} recorded nothing", "see `profdeck ls`, and `profdeck check` before the next job"
        )
    statuses = Counter(capture.status for capture in run.captures if capture.status != "complete")
    if statuses:
        worst = next(capture for capture in run.captures if capture.status != "complete")
        who = label_of(worst.role, worst.replica, worst.rank, "")
        counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
        why = f": {worst.problem.rstrip('.')}" if worst.problem else ""
        yield _notice(
            f"{sum(statuses.values())} of {len(run.captures)} recordings are not complete ({counts}), such as "
            f"{who} of step {worst.first_step}{why}",
            "see `profdeck ls`; what is said here is of the others",
        )
    if run.unread and not statuses:
        yield _notice(
            f"{plural(len(run.unread), 'path')} could not be read, such as {run.unread[0]}",
            "see the errors and warnings; this summary covers only the other paths",
        )
    broken = [rank for rank in run.ranks if rank.problem]
    if broken and not statuses:
        yield _notice(
            f"{len(broken)} of {len(run.ranks)} traces are damaged, such as {labels_of(run.ranks)[broken[0].path]}",
            "record them again; what is said here is of what can be read",
        )


def unrecorded_work(run: RunSummary) -> Iterator[Finding]:
    """Launches without device work, and events with invalid times or outside the recording."""
    labels = labels_of(run.ranks)
    lost = [rank for rank in run.ranks if rank.launches and rank.launches_without_work == rank.launches]
    if lost:
        yield _notice(
            f"The device was not recorded: {lost[0].launches:,} launches have no kernel ({labels[lost[0].path]})",
            "check that the profiler may record the device, for example that no other profiler uses it",
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
            "record at least three steps in a row",
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
            "record at least three steps in a row, or set `warmup_steps`",
            rule="cold-step",
        )
    if len(cold) > len(steps):
        yield _notice(
            "The stages were recorded without warm-up; their times include the recorder's start-up",
            "compare them only with stages recorded without warm-up",
            rule="cold-step",
        )


def _notice(text: str, do: str, rule: str = "incomplete") -> Finding:
    return Finding(rule=rule, text=f"{text}.", do=do, gain_us=None, share=None, ranks=(), evidence=None)


def skew(run: RunSummary, views: Sequence[RankView]) -> Iterator[RankFinding]:
    """One rank that the others wait for: skew over 10 % of the time of collectives (HTA; msprof slow rank). No such
    rank, but over 30 % skew: the ranks differ (TraceLens).
    """
    for group in run.skew:
        total_us = sum(one.skew_us + one.transfer_us for one in group.collectives)
        skew_us = sum(one.skew_us for one in group.collectives)
        view = _slow_view(group, views)
        if not total_us or view is None:
            continue
        # Of each collective all wait but the last, so that its skew is what the step can gain.
        gain_us = skew_us / view.count
        if group.straggler is not None and skew_us >= 0.1 * total_us:
            slow = next(rank for rank in group.ranks if rank.rank == group.straggler)
            yield draft(
                view,
                "straggler",
                f"The others wait for rank {group.straggler}: it arrives last at {slow.last} of "
                f"{slow.collectives} collectives, {ms(gain_us)} {view.per} are lost",
                "compare its stages with those of the other ranks: `profdeck report`",
                gain_us=gain_us,
            )
        elif group.straggler is None and skew_us > 0.3 * total_us:
            whose = f"Ranks of {group.role}" if group.role else "Ranks"
            yield draft(
                view,
                "imbalance",
                f"{whose} wait for each other {percent(skew_us / total_us)} of the time in collectives "
                f"({ms(gain_us)} {view.per}), {_last_arrivals(group)}",
                "give each rank the same amount of work per step",
                gain_us=gain_us,
                of_all=True,
            )


def _last_arrivals(group: GroupSkew) -> str:
    """Describe which ranks arrive last in a group that has no straggler."""
    if can_name_straggler(group):
        return "no rank more than the others"
    collectives = max(rank.collectives for rank in group.ranks)
    return f"with too few collectives ({collectives}) to name a rank"


def _slow_view(group: GroupSkew, views: Sequence[RankView]) -> RankView | None:
    paths = {rank.path: rank.rank for rank in group.ranks}
    mine = [view for view in views if view.rank.path in paths]
    slow = [view for view in mine if paths[view.rank.path] == group.straggler]
    return next(iter(slow or mine), None)


def slow_stage(run: RunSummary, views: Sequence[RankView]) -> Iterator[RankFinding]:
    """A stage that takes one rank 10 % of the step longer than the median of the other ranks, without the time in which
    a collective of the host was open: that waits for others.
    """
    teams: dict[tuple[object, ...], list[RankView]] = {}
    alone = strangers(run.ranks)
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
                yield draft(
                    view,
                    "slow-stage",
                    f"{name} takes {view.label} {ms(times[slow])} {view.per}, the other"
                    f"{'s' if len(team) > 2 else ''} {ms(others)}",
                    f"compare {name} on {view.label} with another rank: `profdeck view`",
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
