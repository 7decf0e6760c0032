"""Makes the page of a run, or of two runs: what the terminal says, with pictures and a timeline to look into."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import attrs
import jinja2
from markupsafe import Markup

from profdeck.base.version import __version__
from profdeck.traces.analysis.diff import diff_runs
from profdeck.traces.analysis.diff_model import Change, RoleDiff
from profdeck.traces.analysis.diff_words import SECTIONS, basis_of, verdict_of
from profdeck.traces.analysis.model import GroupSkew, RankSummary, RunSummary
from profdeck.traces.analysis.run_model import label_of
from profdeck.traces.analysis.short_names import full_name, short_kernel
from profdeck.traces.overview import Team, WorkRow, about, not_complete, teams_of
from profdeck.traces.report import svg
from profdeck.traces.report.timeline_data import timeline_data

_MOST_ROWS = 100
"""Of kernels and operators: more is for tables."""
_MOST_SMALL_ROWS = 40
_NAME_LENGTH = 110
# Of so many traces the rows of each table are fewer, so that the page stays small.
_MANY_RANKS = 16
_LEAST_SHARE = 0.001
_STYLES = {"slower": "poor", "faster": "good"}


@attrs.frozen
class Column:
    """A heading."""

    name: str
    number: bool = True


@attrs.frozen
class Cell:
    """What a table shows; numbers are sorted as such."""

    text: str
    title: str = ""
    kind: str = ""


def write_page(runs: Sequence[RunSummary], labels: Sequence[str]) -> str:
    """Return the page as HTML.

    It loads nothing: style and script are in it, and its policy allows no others. All texts of traces are escaped.

    Args:
        runs: One run, or a baseline and what is compared with it; with pictures: see `summarise_trace`.
        labels: What to call each.
    """
    run = runs[-1]
    teams = teams_of(run)
    ranks = [(labels[number] if len(runs) > 1 else "", rank) for number, one in enumerate(runs) for rank in one.ranks]
    payload = timeline_data(ranks, shared=len(runs) == 1)
    style, script = (_file(name) for name in ("page.css", "page.js"))
    verdicts = _changes(runs) if len(runs) > 1 else []
    capture_columns, captures = _filled(
        [
            Column("step"),
            *(Column(name, number=False) for name in ("role", "rank", "state", "host", "trace", "problem")),
        ],
        _captures(run),
    )
    context = {
        "title": " and ".join(labels),
        "about": about(run, teams),
        "poor": not_complete(run),
        "labels": labels,
        "verdicts": verdicts,
        "findings": _findings(run, [rank for _, rank in ranks]),
        "has_timeline": bool(payload["ranks"]),
        "ranks": payload["ranks"],
        "teams": [_team(team, number, len(run.ranks)) for number, team in enumerate(teams)],
        "skew": [_skew(group, number) for number, group in enumerate(run.skew) if group.ranks],
        "captures": captures,
        "capture_columns": capture_columns,
        "version": __version__,
        "style": Markup(style),  # noqa: S704 - our own file
        "style_hash": _hash(style),
        "script": Markup(script),  # noqa: S704 - our own file
        "script_hash": _hash(script),
        # What could end the element is written as an escape of JSON.
        "data": Markup(json.dumps(payload, separators=(",", ":")).replace("<", "\\u003c")),  # noqa: S704
    }
    context["sections"] = [
        *([("changes", "Changes")] if verdicts else []),
        ("findings", "Findings"),
        *([("timeline", "Timeline")] if payload["ranks"] else []),
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


def _filled(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> tuple[list[Column], list[list[Cell]]]:
    """Return columns and rows without the columns in which all rows are empty."""
    used = [place for place in range(len(columns)) if any(row[place].text for row in rows)]
    return [columns[place] for place in used], [[row[place] for place in used] for row in rows]


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


def _number(value: float | None, digits: int = 3) -> Cell:
    return Cell("", kind="n") if value is None else Cell(f"{value:,.{digits}f}", kind="n")


def _ms(time_us: float | None) -> Cell:
    return _number(None if time_us is None else time_us / 1000)


def _percent(share: float | None) -> Cell:
    return Cell("", kind="n") if share is None else Cell(f"{share:.1%}", kind="n")


def _name(name: str, *, kernel: bool = False) -> Cell:
    short = short_kernel(name, _NAME_LENGTH) if kernel else name
    return Cell(short, title=full_name(name)[:300] if short != name else "", kind="name copy")


def _team(team: Team, number: int, ranks: int) -> dict[str, Any]:
    few = 1 if ranks <= _MANY_RANKS else 4
    per = "ms" if team.unit == "recording" else f"ms/{team.unit}"
    views = team.views
    labels = [view.label for view in views]
    stages = [
        [
            Cell(("" if row.is_stage else "of all: ") + row.name),
            _ms(row.mean_us),
            _percent(row.share),
            *(map(_ms, row.of_ranks_us) if 1 < len(row.of_ranks_us) <= _MANY_RANKS else ()),
            *([_percent(row.spread), Cell(row.slowest or "")] if len(row.of_ranks_us) > 1 else ()),
        ]
        for row in team.stages
    ]
    of_ranks = len(team.stages[0].of_ranks_us) if team.stages else 0
    shown = labels if 1 < of_ranks <= _MANY_RANKS and of_ranks == len(labels) else []
    found = {
        "id": f"role{number}",
        "heading": f"{team.name or 'Trace'}" + (f", {len(views)} ranks" if len(views) > 1 else ""),
        "unit": team.unit,
        "stages": stages,
        "stage_columns": [
            Column("stage", number=False),
            Column(per),
            Column("share"),
            *(Column(label) for label in shown),
            *([Column("slowest over mean"), Column("slowest", number=False)] if of_ranks > 1 else []),
        ],
        "bars": svg.bars([row for row in team.device if row.share >= _LEAST_SHARE]),
        "plot": svg.steps(_series(team)),
        "steps": [
            [
                Cell(row.name),
                Cell(f"{row.count:,}", kind="n"),
                _ms(row.median_us),
                _ms(row.min_us),
                _ms(row.max_us),
                _number(row.tokens_per_s, 1),
            ]
            for row in team.steps
        ],
        "step_columns": [
            Column("steps", number=False),
            *map(Column, ("count", "median ms", "min ms", "max ms", "tokens/s")),
        ],
        "kernels": [_work(row, kernel=True) for row in team.kernels[: _MOST_ROWS // few]],
        "kernel_columns": _work_columns("kernel", per),
        "histogram": svg.histogram(views[0].rank.kernel_durations),
        "operators": [_work(row, kernel=False) for row in team.operators[: _MOST_ROWS // few]],
        "operator_columns": _work_columns("operator", per),
        **_small_tables(team, _MOST_SMALL_ROWS // few),
    }
    for name, rows in (("stage", "stages"), ("step", "steps"), ("kernel", "kernels"), ("operator", "operators")):
        found[f"{name}_columns"], found[rows] = _filled(found[f"{name}_columns"], found[rows])
    return found


def _work_columns(what: str, per: str) -> list[Column]:
    return [
        Column(per),
        Column("share"),
        Column("calls"),
        Column("max us"),
        Column("class", number=False),
        Column(what, number=False),
    ]


def _work(row: WorkRow, *, kernel: bool) -> list[Cell]:
    return [
        _ms(row.mean_us),
        _percent(row.share),
        _number(row.calls, 1),
        _number(row.max_us, 1),
        Cell(row.category),
        _name(row.name, kernel=kernel),
    ]


def _series(team: Team) -> list[tuple[str, list[tuple[float, float]]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for step in team.views[0].rank.steps:
        found.setdefault(f"{step.stage or ''} {step.kind}", []).append((step.start_us, step.duration_us))
    return list(found.items())


def _small_tables(team: Team, most: int) -> dict[str, Any]:
    ranks = [(view.label, view.rank) for view in team.views]

    def rows(of_rank: Callable[[RankSummary], Sequence[tuple[float, list[Cell]]]]) -> list[list[Cell]]:
        found = [(key, [Cell(label), *cells]) for label, rank in ranks for key, cells in of_rank(rank)]
        found.sort(key=lambda item: -item[0])
        return [cells for _, cells in found[:most]]

    text = {"number": False}
    return {
        "gaps": rows(
            lambda rank: [
                (
                    gap.duration_us,
                    [
                        _ms(gap.duration_us),
                        _ms(gap.start_us),
                        Cell("" if gap.step is None else str(gap.step), kind="n"),
                        Cell(gap.cause),
                        _name(gap.host or ""),
                        _name(gap.before or "", kernel=True),
                        _name(gap.after or "", kernel=True),
                    ],
                )
                for device in rank.devices
                for gap in device.gaps
            ]
        ),
        "gap_columns": [
            Column("rank", **text),
            Column("ms"),
            Column("at ms"),
            Column("step"),
            *(Column(name, **text) for name in ("cause", "host", "ran before", "ran after")),
        ],
        "collectives": rows(
            lambda rank: [
                (
                    one.total_us,
                    [
                        Cell(one.name),
                        Cell(one.group),
                        _number(one.size_bytes, 0),
                        Cell(f"{one.count:,}", kind="n"),
                        _ms(one.total_us),
                        _number(one.min_us, 1),
                        _number(None if one.bus_bytes_per_s is None else one.bus_bytes_per_s / 1e9, 1),
                    ],
                )
                for one in rank.collectives
            ]
        ),
        "collective_columns": [
            Column("rank", **text),
            Column("collective", **text),
            Column("group", **text),
            *map(Column, ("bytes", "calls", "total ms", "shortest us", "bus GB/s")),
        ],
        "runtime": rows(
            lambda rank: [
                (
                    call.total_us,
                    [
                        Cell(call.name),
                        Cell(call.state),
                        Cell(f"{call.count:,}", kind="n"),
                        _ms(call.total_us),
                        _number(call.max_us, 1),
                    ],
                )
                for call in rank.runtime
            ]
        ),
        "runtime_columns": [
            Column("rank", **text),
            Column("call", **text),
            Column("does", **text),
            *map(Column, ("calls", "total ms", "max us")),
        ],
    }


def _skew(group: GroupSkew, number: int) -> dict[str, Any]:
    who = "No rank stands out" if group.straggler is None else f"Rank {group.straggler} arrives last most often"
    return {
        "id": f"skew{number}",
        "text": f"{label_of(group.role, group.replica, None, 'All ranks')}: {who}. {group.note or ''}",
        "columns": [*map(Column, ("rank", "collectives", "last at", "late ms", "waited ms", "clock offset us"))],
        "rows": [
            [
                Cell("" if rank.rank is None else str(rank.rank), kind="n"),
                Cell(f"{rank.collectives:,}", kind="n"),
                Cell(f"{rank.last:,}", kind="n"),
                _ms(rank.late_us),
                _ms(rank.wait_us),
                _number(rank.clock_offset_us, 1),
            ]
            for rank in group.ranks
        ],
    }


def _captures(run: RunSummary) -> list[list[Cell]]:
    rows = []
    paths = {(rank.capture, rank.role, rank.replica, rank.rank): rank for rank in run.ranks}
    for capture in run.captures:
        rank = paths.pop((capture.capture, capture.role, capture.replica, capture.rank), None)
        step = f"{capture.first_step}" + (f"..{capture.last_step}" if capture.last_step > capture.first_step else "")
        rows.append(
            [
                Cell(step, kind="n"),
                Cell(
                    label_of(capture.role, capture.replica, None, "") + (f", {capture.stage}" if capture.stage else "")
                ),
                Cell("" if capture.rank is None else str(capture.rank)),
                Cell(capture.status, kind="good" if capture.status == "complete" else "poor"),
                Cell(capture.host or ""),
                Cell(rank.path if rank else "", kind="name"),
                Cell(capture.problem or ""),
            ]
        )
    for rank in run.ranks:
        if paths.get((rank.capture, rank.role, rank.replica, rank.rank)) is rank or not run.captures:
            whole = "whole" if rank.whole else "not proved" if rank.problem is None else "partial"
            rows.append(
                [
                    Cell("", kind="n"),
                    Cell(rank.role or ""),
                    Cell("" if rank.rank is None else str(rank.rank)),
                    Cell(whole, kind="good" if rank.whole else "poor" if rank.problem else ""),
                    Cell(rank.host or ""),
                    Cell(rank.path, kind="name"),
                    Cell(rank.problem or ""),
                ]
            )
    return rows


def _changes(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    diff = diff_runs(runs[0], runs[1])
    return [_change(role, number) for number, role in enumerate(diff.roles)]


def _change(role: RoleDiff, number: int) -> dict[str, Any]:
    verdicts = {change.verdict for change in role.decisive} - {"same"}
    tables = []
    for section, heading in SECTIONS.items():
        changes: tuple[Change, ...] = getattr(role, section)
        changed = [change for change in changes if change.verdict != "same"][:_MOST_SMALL_ROWS]
        if changed:
            tables.append(
                {
                    "id": f"change{number}-{section}",
                    "heading": f"{heading.capitalize()}, {len(changed)} of {len(changes)}",
                    "columns": [
                        *map(Column, ("before ms", "after ms", "change")),
                        Column("verdict", number=False),
                        Column(heading, number=False),
                    ],
                    "rows": [
                        [
                            _ms(change.before_us),
                            _ms(change.after_us),
                            _percent(change.ratio),
                            Cell(change.verdict, kind=_STYLES.get(change.verdict, "")),
                            _name(change.name, kernel=section == "kernels"),
                        ]
                        for change in changed
                    ],
                }
            )
    return {
        "verdict": verdict_of(role),
        "basis": " ".join([basis_of(role), *role.notes]),
        "style": _STYLES.get(verdicts.pop(), "") if len(verdicts) == 1 else "",
        "tables": tables,
    }
