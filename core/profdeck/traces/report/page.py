"""Makes the page of a run, or of two runs: what the terminal says, with pictures and a timeline to look into."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from profdeck.base.version import __version__
from profdeck.base.words import plural
from profdeck.traces.analysis.labels import of_run, runs_of
from profdeck.traces.analysis.model import RankSummary, RunSummary
from profdeck.traces.overview import about, first_of, not_complete, teams_of
from profdeck.traces.report.role_section import role_section
from profdeck.traces.report.run_sections import captures, changes, recordings, skew_section
from profdeck.traces.report.timeline_data import timeline_data

_MOST_TRACES = 16


def write_page(runs: Sequence[RunSummary], labels: Sequence[str]) -> str:
    """Return the page as HTML.

    It loads nothing: style and script are in it, and its policy allows no others. All texts of traces are escaped.

    Args:
        runs: One run, or a baseline and what is compared with it; with pictures: see `summarise_trace`.
        labels: What to call each.
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
    style, script = (_file(name) for name in ("page.css", "page.js"))
    verdicts = changes(runs) if len(runs) > 1 else []
    capture_columns, capture_rows = captures(run)
    recording_columns, recording_rows = recordings(run)
    context = {
        "title": " and ".join(labels),
        "about": about(run, teams),
        "poor": not_complete(run),
        "labels": labels,
        "verdicts": verdicts,
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
        "version": __version__,
        "style": Markup(style),  # noqa: S704 - our own file
        "style_hash": _hash(style),
        "script": Markup(script),  # noqa: S704 - our own file
        "script_hash": _hash(script),
        # What could end the element is written as an escape of JSON.
        "data": Markup(json.dumps(payload, separators=(",", ":")).replace("<", "\\u003c")),  # noqa: S704
    }
    context["sections"] = [
        ("findings", "Findings"),
        *([("timeline", "Timeline")] if payload["ranks"] else []),
        *([("changes", "Changes")] if verdicts else []),
        *((team["id"], team["heading"]) for team in context["teams"]),
        *([("skew", "Skew")] if context["skew"] else []),
        ("captures", "Captures"),
    ]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(_file("page.html.jinja")).render(context)


def _file(name: str) -> str:
    return resources.files(__package__ or "").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _findings(run: RunSummary, ranks: Sequence[RankSummary]) -> list[dict[str, Any]]:
    places = {rank.path: place for place, rank in enumerate(ranks)}  # of two runs the last one counts
    return [
        {
            "text": finding.text,
            "do": f"{finding.do[:1].upper()}{finding.do[1:]}.",
            "rule": finding.rule,
            "share": "" if finding.share is None else f"{finding.share:.0%}",
            "rank": None if finding.evidence is None else places.get(finding.evidence.path),
            "start": 0 if finding.evidence is None else round(finding.evidence.start_us, 3),
            "duration": 0 if finding.evidence is None else round(finding.evidence.duration_us, 3),
        }
        for finding in run.findings
    ]
