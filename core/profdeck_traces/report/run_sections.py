"""Report sections of a run: captures, skew between ranks, and changes between two runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from profdeck_traces.analysis.collective_skew import can_name_straggler
from profdeck_traces.analysis.diff import diff_runs
from profdeck_traces.analysis.diff_model import Change, RoleDiff
from profdeck_traces.analysis.diff_text import MANY, SECTIONS, basis_of, verdict_of
from profdeck_traces.analysis.model import CollectiveSkew, GroupSkew, RankSkew, RankSummary, RunSummary
from profdeck_traces.analysis.rank_labels import label_of, runs_of
from profdeck_traces.inputs.facts import CaptureStatus
from profdeck_traces.report.cells import Cell, Column, Grid, count, filled, ms, name, number, percent, table

_MOST_ROWS = 40
_PLURALS = {section: words.capitalize() for section, words in MANY.items()}
_STYLES = {"slower": "poor", "faster": "good"}


def skew_section(group: GroupSkew, of_run: str, place: int) -> dict[str, Any]:
    """Return the section about arrival times at collectives."""
    who = "No rank stands out" if can_name_straggler(group) else "Too few collectives to name a rank"
    if group.straggler is not None:
        who = f"The others wait for rank {group.straggler}"
    columns, rows = table(group.ranks, _RANKS)
    collective_columns, collectives = table(group.collectives[:_MOST_ROWS], _COLLECTIVES)
    return {
        "id": f"skew{place}",
        "text": f"{label_of(group.role, group.replica, None, 'All ranks')}{of_run}: {who}. {group.note or ''}",
        "collective_columns": collective_columns,
        "collectives": collectives,
        "columns": columns,
        "rows": rows,
    }


_COLLECTIVES: Grid[CollectiveSkew] = {
    "calls": lambda one: count(one.count),
    "all are in it ms": lambda one: ms(one.transfer_us),
    "first waits for last ms": lambda one: ms(one.skew_us),
    "collective": lambda one: name(one.name, kernel=True),
}
_RANKS: Grid[RankSkew] = {
    "rank": lambda rank: Cell("" if rank.rank is None else str(rank.rank), kind="n"),
    "collectives": lambda rank: count(rank.collectives),
    "last at": lambda rank: count(rank.last),
    "late ms": lambda rank: ms(rank.late_us),
    "waited ms": lambda rank: ms(rank.wait_us),
    "clock offset us": lambda rank: number(rank.clock_offset_us, 1),
}


def captures(run: RunSummary) -> tuple[list[Column], list[list[Cell]]]:
    """Return the status of each capture, and of traces outside runs."""
    rows, runs = [], runs_of(run.captures)
    paths = {_place(rank): rank for rank in run.ranks if rank.run is not None}
    listed: set[str] = set()
    for capture in run.captures:
        rank = paths.get(_place(capture))
        listed |= {rank.path} if rank else set()
        step = f"{capture.first_step}" + (f"..{capture.last_step}" if capture.last_step > capture.first_step else "")
        rows.append(
            [
                Cell(step, kind="n"),
                Cell(runs[capture.run] if len(runs) > 1 else ""),
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
        if rank.path not in listed:
            whole = "whole" if rank.whole else "not proved" if rank.problem is None else "partial"
            rows.append(
                [
                    Cell("", kind="n"),
                    Cell(""),
                    Cell(rank.role or ""),
                    Cell("" if rank.rank is None else str(rank.rank)),
                    Cell(whole, kind="good" if rank.whole else "poor" if rank.problem else ""),
                    Cell(rank.host or ""),
                    Cell(rank.path, kind="name"),
                    Cell(rank.problem or ""),
                ]
            )
    words = ("run", "role", "rank", "state", "host", "trace", "problem")
    return filled([Column("step"), *(Column(word, number=False) for word in words)], rows)


def _place(one: RankSummary | CaptureStatus) -> tuple[object, ...]:
    return one.run, one.capture, one.role, one.replica, one.rank


def recordings(run: RunSummary) -> tuple[list[Column], list[list[Cell]]]:
    """Return the backend, versions and options of each role."""
    columns = [Column(words, number=False) for words in ("role", "backend", "versions", "options", "profdeck")]
    rows = [
        [Cell(one.role), Cell(one.backend), Cell(one.versions), Cell(_options(one.options)), Cell(one.profdeck)]
        for one in run.recordings
    ]
    return filled(columns, rows)


def _options(text: str) -> str:
    """Format options, omitting disabled and empty ones."""
    return ", ".join(f"{name}: {json.dumps(value)}" for name, value in json.loads(text).items() if value)


def changes(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """Return the changes of each role from the first to the second run, and the verdict."""
    diff = diff_runs(runs[0], runs[1])
    return [_change(role, place) for place, role in enumerate(diff.roles)]


def _change(role: RoleDiff, place: int) -> dict[str, Any]:
    tables = []
    for section, heading in SECTIONS.items():
        changes: tuple[Change, ...] = getattr(role, section)
        changed = [change for change in changes if change.verdict != "same"][:_MOST_ROWS]
        if changed:
            columns, rows = table(changed, _changes(heading, is_kernel=section == "kernels"))
            title = f"{_PLURALS[section]}: {len(changed)} of {len(changes)}"
            tables.append({"id": f"change{place}-{section}", "heading": title, "columns": columns, "rows": rows})
    return {
        "verdict": verdict_of(role),
        "basis": " ".join([basis_of(role), *role.notes]),
        "style": _STYLES.get(role.verdict(), ""),
        "tables": tables,
    }


def _changes(heading: str, *, is_kernel: bool) -> Grid[Change]:
    return {
        "before ms": lambda change: ms(change.before_us),
        "after ms": lambda change: ms(change.after_us),
        "change": lambda change: percent(change.ratio),
        "verdict": lambda change: Cell(change.verdict, kind=_STYLES.get(change.verdict, "")),
        heading: lambda change: name(change.name, kernel=is_kernel),
    }
