"""Asks all rules, and makes one finding of what several ranks have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from profdeck_traces.analysis.capture_matching import stage_of
from profdeck_traces.analysis.model import RunSummary
from profdeck_traces.analysis.rank_labels import strangers
from profdeck_traces.analysis.run_model import Finding
from profdeck_traces.findings import device_rules, host_rules, run_rules
from profdeck_traces.findings.rank_finding import RankFinding
from profdeck_traces.findings.rank_view import views_of

# What can gain less is not worth a sentence.
_LEAST_SHARE = 0.005
_PAIR = 2


def findings_of(run: RunSummary) -> tuple[Finding, ...]:
    """Return the findings of a run: first missing data, then findings sorted by the share of a step to be gained."""
    everyone = [view for view in views_of(run) if view.rank.span_us]
    # Stages cannot warm up, because no step precedes them. Their cold times are the only ones available.
    views = [view for view in everyone if not view.is_cold or stage_of(view.rank)]
    typical = [view.typical() for view in views]
    drafts = [draft for view in typical for rule in device_rules.RULES for draft in rule(view)]
    drafts += [draft for view in views for rule in host_rules.RULES for draft in rule(view)]
    drafts += [*run_rules.skew(run, views), *run_rules.slow_stage(run, views), *run_rules.slow_links(views)]
    teams: dict[tuple[str, str], list[RankFinding]] = {}
    for draft in drafts:
        if draft.share is not None and draft.share < _LEAST_SHARE:
            continue
        teams.setdefault((draft.rule, draft.key), []).append(draft)
    noun = "traces" if strangers(run.ranks) else "ranks"
    captures: dict[str, set[str | None]] = {}
    for view in everyone:
        captures.setdefault(view.label, set()).add(view.rank.capture)
    found = [_one(team, captures, noun) for team in teams.values()]
    found.sort(key=lambda finding: (finding.share is None, -(finding.share or 0.0), finding.rule))
    return (
        *run_rules.incomplete(run),
        *run_rules.unrecorded_work(run),
        *_without_repeats(found),
        *run_rules.few_steps(views),
        *run_rules.cold_steps(everyone),
    )


def _one(team: list[RankFinding], captures: Mapping[str, set[str | None]], noun: str) -> Finding:
    """Merge the findings of several ranks and captures into one, with the numbers of the worst.

    Args:
        team: findings of one rule.
        captures: captures of each rank, by label.
        noun: "ranks" or "traces".
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
    return Finding(
        rule=worst.rule,
        text=f"{worst.text}{where}.",
        do=worst.do,
        gain_us=worst.gain_us,
        share=worst.share,
        ranks=tuple(of_many),
        evidence=worst.evidence,
    )


# What a rule says is a part of what another says, which names it more exactly.
_PART_OF = {
    "long-gap": {"data-loading", "garbage-collection", "idle-stage"},
    "data-loading": {"slow-stage", "straggler"},
    "exposed-communication": {"straggler"},
    "small-kernels": {"host-bound"},
    "imbalance": {"straggler"},
}


def _without_repeats(findings: Iterable[Finding]) -> list[Finding]:
    found = list(findings)
    slow = next((finding for finding in found if finding.rule == "slow-stage"), None)
    for place, finding in enumerate(found):
        # Which rank the others wait for, and why.
        if slow and finding.rule == "straggler" and set(finding.ranks) & set(slow.ranks):
            found[place] = attrs.evolve(finding, text=f"{finding.text.rstrip('.')}; {slow.text}", do=slow.do)
            found.remove(slow)
            break
    rules = {finding.rule for finding in found}
    return [finding for finding in found if not _PART_OF.get(finding.rule, set()) & rules]
