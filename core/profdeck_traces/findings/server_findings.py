"""Applies the engine rules to the servers of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from profdeck_traces.findings import engine_rules, fleet_rules, rollout_rules
from profdeck_traces.findings.engine_view import ServerView, fleets
from profdeck_traces.findings.rank_finding import NotJudged, RankFinding
from profdeck_traces.findings.rank_view import RankView

_Result = tuple[RankView, RankFinding | NotJudged]

CAUSES = frozenset(
    cause
    for rules in (engine_rules.RULES, fleet_rules.RULES, rollout_rules.RULES)
    for causes in rules.values()
    for cause in causes
)


def results_of(servers: Sequence[ServerView], views: Sequence[RankView]) -> Iterator[_Result]:
    """Yield the results of all engine rules, each with a trace that it applies to.

    Args:
        servers: Servers in the run.
        views: All traces in the run.
    """
    for server in servers:
        yield from ((server.views[0], result) for rule in engine_rules.RULES for result in rule(server))
    groups = fleets(servers)
    for group in groups:
        yield from ((group[0].views[0], result) for rule in fleet_rules.RULES for result in rule(group))
    captures = rollout_rules.captures_of(servers, views)
    for capture in captures:
        members = [*(view for _, view, _ in capture.servers), *capture.others]
        for result in (result for rule in rollout_rules.RULES for result in rule(capture)):
            yield from ((view, result) for view in (members if isinstance(result, NotJudged) else members[:1]))
    if not groups:
        yield from _not_judged(servers, fleet_rules.RULES.values(), "only one server was recorded")
    if not any(capture.others for capture in captures):
        of_turns = rollout_rules.RULES[rollout_rules.turns], rollout_rules.RULES[rollout_rules.weight_sync]
        yield from _not_judged(servers, of_turns, "no trainer was recorded in the same capture")


def _not_judged(servers: Sequence[ServerView], causes: Iterable[Sequence[str]], reason: str) -> Iterator[_Result]:
    for cause in (cause for rule in causes for cause in rule):
        yield from ((server.views[0], NotJudged(cause, reason)) for server in servers)
