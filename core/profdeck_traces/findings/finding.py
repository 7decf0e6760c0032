"""Applies all rules to a run, and merges findings that several ranks have in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence, Set as AbstractSet

import attrs

from profdeck_traces.analysis.capture_matching import stage_of
from profdeck_traces.analysis.model import RankSummary, RunSummary
from profdeck_traces.analysis.rank_labels import strangers
from profdeck_traces.analysis.run_model import CauseState, Finding, Place
from profdeck_traces.attribution.frames import parse_frame
from profdeck_traces.findings import account_rules, device_rules, host_rules, run_rules, server_findings
from profdeck_traces.findings.device_rules import DECODE_LAUNCH_BOUND
from profdeck_traces.findings.engine_rules import DETOKENISATION, PREFILL_NEXT_TO_DECODE
from profdeck_traces.findings.engine_view import servers_in
from profdeck_traces.findings.rank_finding import NotJudged, RankFinding
from profdeck_traces.findings.rank_view import RankView, views_of
from profdeck_traces.findings.rollout_rules import IDLE_TRAINER, NO_REQUESTS, TOOL_CALL, WEIGHT_SYNC

_LEAST_SHARE = 0.005
"""Findings whose gain is a smaller fraction of the step are omitted."""
_MAX_CPU_WAIT = 0.2
"""A busy machine's CPU wait up to this fraction of the step is a note. A longer wait is a finding, and its share is
doubled to sort the findings."""
_MAX_PROFILER_NOTE = 0.2
"""Profiler work up to this fraction of the step is a note, not a cause, because it lengthens all times alike."""
_NOTES = frozenset({"few-steps", "cold-step", run_rules.PARTIAL_RECORDING})
_PROFILER = "profiler"
_PAIR = 2
_HOST_RULES = (account_rules.RULES, host_rules.RULES)


def findings_of(run: RunSummary) -> tuple[Finding, ...]:
    """Return the findings of a run.

    Missing data comes first. The remaining findings are sorted by their gain as a share of the step. If the gain is
    unknown, the time counts instead. The share of a busy machine is doubled. Notes come last.
    """
    return with_findings(run).findings


def with_findings(run: RunSummary) -> RunSummary:
    """Return a run with its findings and the state of each cause."""
    everyone = [view for view in views_of(run) if view.rank.span_us]
    # Stages cannot warm up, because no step precedes them. Their cold times are the only ones available.
    views = [view for view in everyone if not view.is_cold or stage_of(view.rank)]
    drafts: list[RankFinding] = []
    not_judged: dict[str, dict[str, list[RankView]]] = {}
    servers = servers_in(run, views)
    for view, result in (*_of_single_ranks(views), *server_findings.results_of(servers, views)):
        if isinstance(result, NotJudged):
            not_judged.setdefault(result.rule, {}).setdefault(result.reason, []).append(view)
        else:
            drafts.append(result)
    for result in (*run_rules.skew(run, views), *run_rules.slow_stage(run, views)):
        if isinstance(result, NotJudged):
            not_judged.setdefault(result.rule, {})[result.reason] = views
        else:
            drafts.append(result)
    drafts += [draft for rule in run_rules.RULES for draft in rule(views)]
    teams: dict[tuple[str | None, ...], list[RankFinding]] = {}
    for draft in drafts:
        if draft.share is not None and draft.share < _LEAST_SHARE:
            continue
        frame = parse_frame(draft.line) if draft.line else None
        function = f"{frame[0]}: {frame[2]}" if frame else draft.line
        teams.setdefault((draft.role, draft.rule, draft.key, draft.stage, function), []).append(draft)
    noun = "traces" if strangers(run.ranks) else "ranks"
    captures: dict[str | None, dict[str, set[str | None]]] = {}
    for view in everyone:
        captures.setdefault(view.rank.role, {}).setdefault(view.label, set()).add(view.rank.capture)
    of_label = {view.label: view.rank for view in everyone}
    found = [_combined(team, captures[team[0].role], noun, of_label) for team in teams.values()]
    found.sort(
        key=lambda finding: (
            is_note(finding),
            -_time_share(finding) * (2 if finding.rule == host_rules.BUSY_MACHINE else 1),
            finding.rule,
        )
    )
    findings = (
        *run_rules.incomplete(run),
        *run_rules.unrecorded_work(run),
        *_without_repeats(found),
        *run_rules.partial_recordings(run),
        *run_rules.few_steps(views),
        *run_rules.cold_steps(everyone),
        *run_rules.slow_recording(views),
    )
    findings = tuple(attrs.evolve(finding, id=_id(finding)) for finding in findings)
    causes = _causes(findings, not_judged, views, server_findings.CAUSES if servers else frozenset())
    return attrs.evolve(run, findings=findings, causes=causes)


def is_note(finding: Finding) -> bool:
    """Return whether a finding concerns only the recording and does not explain long steps.

    If profiler work exceeds 20 % of the step, it counts as a cause, because the step differs too much from usual ones.
    The same applies to a busy machine, which makes all times uncertain. An unknown wait counts as longer.
    """
    if finding.rule == host_rules.BUSY_MACHINE:
        return finding.time_us is not None and _time_share(finding) <= _MAX_CPU_WAIT
    return finding.rule in _NOTES or (finding.rule == _PROFILER and _time_share(finding) <= _MAX_PROFILER_NOTE)


def _time_share(finding: Finding) -> float:
    if finding.share is not None:
        return finding.share
    return (finding.time_us or 0.0) / finding.step_us if finding.step_us else 0.0


def _of_single_ranks(views: Sequence[RankView]) -> Iterator[tuple[RankView, RankFinding | NotJudged]]:
    for view in views:
        typical = view.typical()
        yield from ((view, result) for rule in device_rules.RULES for result in rule(typical))
        yield from ((view, result) for rules in _HOST_RULES for rule in rules for result in rule(view))


def _causes(
    findings: Sequence[Finding],
    not_judged: Mapping[str, Mapping[str, list[RankView]]],
    views: Sequence[RankView],
    more_causes: AbstractSet[str],
) -> tuple[CauseState, ...]:
    """Return the state of each cause: found if it has a finding, not judged if a rank lacks data, otherwise clear."""
    ids: dict[str, list[str]] = {}
    for finding in findings:
        ids.setdefault(finding.rule, []).append(finding.id)
    rules = (device_rules.RULES, *_HOST_RULES)
    of_ranks = {cause for of_rules in rules for causes in of_rules.values() for cause in causes}
    states = []
    for cause in sorted({*ids, *of_ranks, *run_rules.CAUSES, *more_causes}):
        reason = "; ".join(_reason(text, affected, views) for text, affected in not_judged.get(cause, {}).items())
        if cause in run_rules.CAUSES and len({view.label for view in views}) < _PAIR:
            reason = "only one rank was recorded"
        elif not views:
            reason = "no trace with warm steps"
        state = "found" if cause in ids else "not_judged" if reason else "clear"
        states.append(
            CauseState(
                cause=cause,
                state=state,
                reason=reason if state == "not_judged" else None,
                findings=tuple(ids.get(cause, ())),
            )
        )
    return tuple(states)


def _reason(text: str, affected: Sequence[RankView], views: Sequence[RankView]) -> str:
    """Return why a cause was not judged. If it was judged on other ranks, append the affected ranks."""
    labels = list(dict.fromkeys(view.label for view in affected))
    if len(labels) == len({view.label for view in views}):
        return text
    return f"{text} ({labels[0]}{f' and {len(labels) - 1} more' if len(labels) > 1 else ''})"


def _id(finding: Finding) -> str:
    """Return an ID that depends on the cause and location of a finding, but not on its numbers."""
    where = finding.where
    place = [where.role, where.replica, where.rank, where.stage, where.file, where.function, where.name]
    digest = hashlib.sha256(json.dumps(place).encode()).hexdigest()[:8]
    return f"{finding.rule}-{digest}"


def _combined(
    team: list[RankFinding], captures: Mapping[str, set[str | None]], noun: str, of_label: Mapping[str, RankSummary]
) -> Finding:
    """Merge the findings from several ranks and captures into one, with the numbers of the worst.

    Args:
        team: Findings with the same cause and location.
        captures: Captures of each rank in the role, by rank label.
        noun: "ranks" or "traces".
        of_label: Rank with each label.
    """
    ranks = len(captures)
    in_order = sorted(team, key=lambda draft: (-(draft.share or 0.0), -(draft.gain_us or 0.0), draft.label))
    worst = in_order[0]
    of_many = dict.fromkeys(draft.label for draft in in_order)
    parts = []
    if len(of_many) > 1 and not worst.of_all:
        which = f"{len(of_many)} of {ranks}" if len(of_many) < ranks else "both" if ranks == _PAIR else f"all {ranks}"
        parts = [f"{which} {noun}", f"most on {worst.label}"]
    elif ranks > 1 and not worst.of_all and worst.label not in worst.text:
        parts = [worst.label]
    if len(captures[worst.label]) > 1:
        parts.append(f"capture {worst.capture}")
    where = f" ({', '.join(parts)})" if parts else ""
    time_us = worst.gain_us if worst.time_us is None else worst.time_us
    if len(of_many) > 1:
        worst = attrs.evolve(worst, replica=None, rank=None)
    elif ranks > 1 and not worst.of_all and (only := of_label.get(worst.label)) is not None:
        worst = attrs.evolve(worst, replica=only.replica, rank=only.rank)
    return Finding(
        rule=worst.rule,
        text=f"{worst.text}{where}.",
        do=worst.do,
        gain_us=_at_most(worst.gain_us, worst.step_us),
        share=worst.share,
        ranks=tuple(of_many),
        evidence=worst.evidence,
        time_us=_at_most(time_us, worst.step_us),
        step_us=worst.step_us or None,
        where=_place(worst),
        confidence=worst.confidence,
        check=worst.check,
    )


def _at_most(time_us: float | None, step_us: float) -> float | None:
    return min(time_us, step_us) if time_us is not None and step_us else time_us


def _place(draft: RankFinding) -> Place:
    frame = parse_frame(draft.line) if draft.line else None
    file, line, function = frame or (None, None, draft.line)
    return Place(
        role=draft.role,
        replica=draft.replica,
        rank=draft.rank,
        stage=draft.stage,
        file=file,
        line=line,
        function=function,
        name=draft.key or None,
    )


# More specific causes for each cause. Skew and slow stages compare ranks, so they explain times that other causes only
# measure on one rank.
_PART_OF = {
    "data-loading": {"slow-stage", "straggler"},
    "exposed-communication": {"straggler", "imbalance", "slow-link", "small-collectives", "pipeline-bubble"},
    "little-overlap": {"slow-link"},
    "imbalance": {"straggler"},
    "pipeline-bubble": {"slow-stage"},
    # Without requests, an engine runs no operators.
    "outside-operators": {"straggler", "imbalance", NO_REQUESTS, TOOL_CALL, IDLE_TRAINER},
    # The rules about trainers and servers name the awaited role or tool.
    "waiting": {IDLE_TRAINER, WEIGHT_SYNC, NO_REQUESTS, TOOL_CALL},
    "python-code": {DETOKENISATION},
    # An engine's CUDA graphs also remove the launches of small kernels.
    "small-kernels": {DECODE_LAUNCH_BOUND},
    "host-bound": {DECODE_LAUNCH_BOUND},
    "unsteady-steps": {PREFILL_NEXT_TO_DECODE, host_rules.THROTTLING},
    "unsteady-decode": {PREFILL_NEXT_TO_DECODE},
}

_PART_OF_RANK = {
    "host-bound": ("straggler",),
    # On a late rank, the device is idle while the host works, so synchronisations seem expensive.
    "synchronisation": ("straggler",),
    # The other ranks are waiting for a rank that has one of these problems.
    "straggler": (
        "checkpoint", "compilation", "deep-copies", "garbage-collection", "lock", "output", "python-code", "validation",
    ),
}  # fmt: skip
"""For each cause, the more specific causes that replace it if both affect the same ranks."""


def _without_repeats(findings: Sequence[Finding]) -> list[Finding]:
    time_us: dict[str, float] = {}
    for finding in findings:
        time_us[finding.rule] = max(finding.time_us or 0.0, time_us.get(finding.rule, 0.0))
    of_ranks = {(finding.rule, finding.ranks): finding.time_us or 0.0 for finding in findings}

    def is_part(finding: Finding) -> bool:
        """Return whether a more specific finding accounts for at least half of the time."""
        named = [time_us[rule] for rule in _PART_OF.get(finding.rule, ()) if rule in time_us]
        of_rank = ((rule, finding.ranks) for rule in _PART_OF_RANK.get(finding.rule, ()))
        named += [of_ranks[key] for key in of_rank if key in of_ranks]
        return bool(named) and max(named) >= (finding.time_us or 0.0) / 2

    return [finding for finding in findings if not is_part(finding)]
