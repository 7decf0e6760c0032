"""Applies the rules about engines to the servers of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from profdeck_traces.findings import engine_rules, fleet_rules
from profdeck_traces.findings.engine_view import ServerView, fleets
from profdeck_traces.findings.rank_finding import NotJudged, RankFinding
from profdeck_traces.findings.rank_view import RankView

CAUSES = frozenset(cause for causes in engine_rules.RULES.values() for cause in causes) | {*fleet_rules.RULES.values()}


def results_of(servers: Sequence[ServerView]) -> Iterator[tuple[RankView, RankFinding | NotJudged]]:
    """Yield the result of each rule about engines, with a trace of the server that it is about."""
    for server in servers:
        yield from ((server.views[0], result) for rule in engine_rules.RULES for result in rule(server))
    groups = fleets(servers)
    for rule, cause in fleet_rules.RULES.items():
        for group in groups:
            yield from ((group[0].views[0], result) for result in rule(group))
        if not groups:
            reason = "only one server was recorded"
            yield from ((server.views[0], NotJudged(cause, reason)) for server in servers)
