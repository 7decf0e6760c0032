"""Creates the HTML report of a run, or of a comparison of two runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from profdeck_traces.analysis.model import RankSummary, RunSummary
from profdeck_traces.analysis.rank_labels import of_run, runs_of
from profdeck_traces.base.text import plural
from profdeck_traces.findings.finding import is_note
from profdeck_traces.findings.overview import about, first_of, not_complete, notes_of, sentence_of, teams_of
from profdeck_traces.report.rendering import Markup, render
from profdeck_traces.report.role_section import role_section
from profdeck_traces.report.run_sections import captures, changes, recordings, skew_section
from profdeck_traces.report.timeline_data import timeline_data
from profdeck_traces.report.trend_section import has_trend, trend_section
from profdeck_traces.trend.model import Trend

_MOST_TRACES = 16


def write_page(runs: Sequence[RunSummary], labels: Sequence[str], trend: Trend | None = None) -> str:
    """Return the page as HTML.

    The page is self-contained, and its content security policy blocks other scripts. Texts from traces are escaped.

    Args:
        runs: One run, or a baseline and the run to compare with it. The summaries must contain timelines.
        labels: What to call each.
        trend: How the numbers of its captures change, or those of both runs.
    """
    run = runs[-1]
    teams = teams_of(run)
    shown = first_of(teams, _MOST_TRACES)
    of_runs = runs_of(run.ranks)
    ranks = [
        (labels[number] if len(runs) > 1 else "", rank)
        for number, one in enumerate(runs)
        for rank in one.ranks
        if rank.timelines
    ]
    payload = timeline_data(ranks, shared=len(runs) == 1)
    verdicts = changes(runs) if len(runs) > 1 else []
    capture_columns, capture_rows = captures(run)
    recording_columns, recording_rows = recordings(run)
    context = {
        "title": " and ".join(labels),
        "about": about(run, teams),
        "poor": not_complete(run),
        "labels": labels,
        "verdicts": verdicts,
        # The verdict is the first finding, unless all findings are notes.
        "verdict": "" if run.findings and run.findings[0].text == run.verdict else run.verdict,
        "notes": notes_of(run, advice=True),
        "findings": _findings(run, [rank for _, rank in ranks]),
        "has_timeline": bool(payload["ranks"]),
        "ranks": payload["ranks"],
        "teams": [role_section(team, number, len(run.ranks)) for number, team in enumerate(shown)],
        "more_traces": plural(len(teams) - len(shown), "more trace") if len(teams) > len(shown) else "",
        "skew": [
            skew_section(group, of_run(group.run, of_runs), number)
            for number, group in enumerate(run.skew)
            if group.ranks
        ],
        "captures": capture_rows,
        "capture_columns": capture_columns,
        "recordings": recording_rows,
        "recording_columns": recording_columns,
        "trend": trend_section(trend) if trend is not None and has_trend(trend) else None,
        # Escape characters that could close the script element.
        "data": Markup(json.dumps(payload, separators=(",", ":")).replace("<", "\\u003c")),
    }
    context["sections"] = [
        ("findings", "Findings"),
        *([("trend", "Over time")] if context["trend"] else []),
        *([("timeline", "Timeline")] if payload["ranks"] else []),
        *([("changes", "Changes")] if verdicts else []),
        *((team["id"], team["heading"]) for team in context["teams"]),
        *([("skew", "Skew")] if context["skew"] else []),
        ("captures", "Captures"),
    ]
    return render("page.html.jinja", context)


def _findings(run: RunSummary, ranks: Sequence[RankSummary]) -> list[dict[str, Any]]:
    places = {rank.path: place for place, rank in enumerate(ranks)}  # a trace in both runs counts for the second
    return [
        {
            "text": finding.text,
            "do": sentence_of(finding.do),
            "rule": finding.rule,
            "share": "" if finding.share is None else f"{finding.share:.0%}",
            "rank": None if finding.evidence is None else places.get(finding.evidence.path),
            "start": 0 if finding.evidence is None else round(finding.evidence.start_us, 3),
            "duration": 0 if finding.evidence is None else round(finding.evidence.duration_us, 3),
        }
        for finding in run.findings
        if not is_note(finding)
    ]
