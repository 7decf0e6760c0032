"""Text output of `profdeck summary`: a heading, the findings, and the time breakdown of each role."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from rich.text import Text

from profdeck_traces.account.borders import BORDER_TEXTS, HOST
from profdeck_traces.account.table import NO_STACKS
from profdeck_traces.analysis.formatting import ms, percent
from profdeck_traces.analysis.host_states import NOT_READ
from profdeck_traces.analysis.owner_names import OWNER, location_heading
from profdeck_traces.analysis.short_names import cut_middle
from profdeck_traces.base.text import plural, printable
from profdeck_traces.cli import terminal, text_layout
from profdeck_traces.cli.owner_labels import owner_columns, short_event
from profdeck_traces.cli.server_table import server_table
from profdeck_traces.cli.text_layout import ScreenTable, aligned, bar, fitted, side_by_side, wrapped
from profdeck_traces.findings.finding import is_note
from profdeck_traces.findings.overview import (
    OUTSIDE_STAGES,
    Team,
    WorkRow,
    about,
    first_of,
    headlines_of,
    not_complete,
    notes_of,
    sentence_of,
    teams_of,
)

if TYPE_CHECKING:
    from profdeck_traces.analysis.model import RunSummary

MAX_FINDINGS = 5
_STAGES, _FEWEST_STAGES, _LEAST_STAGE = 6, 2, 0.01
_SERVERS = 8
_MOST_TRACES = 4
_IDLE = "device: idle"
_TIMES, _LEAST_TIME = 5, 0.01
_FEWEST_ROWS, _USUAL_ROWS = 2, 10
_GAP = 2
_LONGEST_BAR, _LONGEST_CLASS = 14, 26
_OWNERS, _FEWEST_OWNERS, _FEWEST_OWNERS_OF_ROLE = 8, 3, 2
_ACCOUNT = 1
"""Priority of the account tables."""
_STYLES = {"complete": "green", "partial": "yellow", "recording": "cyan", "failed": "red", "missing": "red"}


@attrs.frozen(kw_only=True)
class Screen:
    """Size limits of the output."""

    width: int
    """Line width in terminal columns."""
    height: int | None = None
    """Maximum number of lines; ``None`` for no limit."""
    top: int | None = None
    """Number of kernels or operators per role; 0 for all, ``None`` for as many as fit in `height`."""
    findings: int | None = MAX_FINDINGS
    """Maximum number of findings. With ``None``, all findings and all roles are shown."""


def page(run: RunSummary, paths: Sequence[Path], screen: Screen) -> list[Text]:
    """Format a summary for the terminal.

    Args:
        run: The summary.
        paths: The paths from the command line.
        screen: Size limits of the output.
    """
    width = screen.width
    everyone = teams_of(run)
    is_full = screen.findings is None
    teams = everyone if is_full else first_of(everyone, _MOST_TRACES)
    tables = [table for team in teams for table in _tables_of(team, len(everyone) > 1, screen)]
    notes = [f"{plural(len(everyone) - len(teams), 'more trace')} with --full."] if len(everyone) > len(teams) else []
    about_run = _about(run, paths, everyone, width)
    about_run += [line for text in headlines_of(teams) for line in wrapped(text, width, indent="  ")]
    about_run += [
        line
        for text in notes_of(run, advice=is_full)
        for line in wrapped(f"Note: {text}", width, indent="    ", first="  ")
    ]
    if screen.height is None:
        lines = [*_findings(run, width, screen.findings), Text(), *about_run]
    else:
        room = screen.height - 2 - len(about_run)  # leaves one line for the prompt
        accounts = [attrs.evolve(table, rows=table.fewest).lines for table in tables if table.priority <= _ACCOUNT]
        reserved = sum(len(account) + 1 for account in accounts) + 2 * (len(notes) + 1)
        lines = [*_findings(run, width, screen.findings, max_lines=room - reserved), Text(), *about_run]
        room = screen.height - 1 - len(lines)
        tables, hidden = fitted(tables, room - 2 * len(notes), "--full")
        notes += hidden
    for table in tables:
        lines += [Text(), *table.lines]
    for note in notes:
        lines += [Text(), *wrapped(note, width, style="dim")]
    return lines


def _about(run: RunSummary, paths: Sequence[Path], teams: Sequence[Team], width: int) -> list[Text]:
    names = ", ".join(map(terminal.short_path, paths[:3])) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")  # noqa: PLR2004
    lines = wrapped(f"{names}: {about(run, teams)}", width, indent="  ", first="")
    for line in lines[:1]:
        line.stylize("bold", 0, len(names))
    poor = [
        wrapped(text, width, indent="    ", first="  ", style=_STYLES[status]) for status, text in not_complete(run)
    ]
    return [*lines, *(line for block in poor for line in block)]


def _findings(run: RunSummary, width: int, most: int | None, max_lines: int = text_layout.UNLIMITED) -> list[Text]:
    """Format the verdict and the other findings. The verdict is the first finding, unless all findings are notes.

    Advice is omitted if an earlier finding gives the same advice.
    """
    findings = [finding for finding in run.findings if not is_note(finding)]
    if not findings:
        return wrapped(run.verdict, width, indent="  ", first="", style="bold")
    blocks: list[list[Text]] = []
    advice: set[str] = set()
    for number, finding in enumerate(findings[:most], 1):
        style = "bold" if finding.text == run.verdict else ""
        block = wrapped(finding.text, width, indent="   ", first=f"{number}. ", style=style)
        if finding.do not in advice:
            block += wrapped(sentence_of(finding.do), width, indent="   ", style="dim")
        advice.add(finding.do)
        blocks.append(block)
    shown = blocks
    while len(shown) > 1 and sum(map(len, shown)) + (len(shown) < len(findings)) > max_lines:
        shown = shown[:-1]
    lines = [line for block in shown for line in block]
    if more := len(findings) - len(shown):
        lines.append(Text(f"   {more} more with --full.", style="dim"))
    return lines


def _tables_of(team: Team, named: bool, screen: Screen) -> list[ScreenTable]:  # noqa: FBT001
    """Return the non-empty tables of a role in display order."""
    width, is_full = screen.width, screen.findings is None
    most_rows = _USUAL_ROWS if screen.top is None else screen.top or len(team.kernels) + len(team.operators)
    tables = [
        ScreenTable(
            lambda rows: _account(team, named, width, rows, full=is_full),
            priority=_ACCOUNT,
            rows=len(team.account) if is_full else _OWNERS,
            fewest=_FEWEST_OWNERS_OF_ROLE if named else _FEWEST_OWNERS,
        ),
        ScreenTable(
            lambda rows: server_table(team.servers, width, rows),
            priority=2,
            rows=len(team.servers) if is_full else _SERVERS,
            fewest=_FEWEST_ROWS,
        ),
        ScreenTable(
            lambda rows: _stages(team, named, width, rows),
            priority=2 if any(row.is_stage and row.name != OUTSIDE_STAGES for row in team.stages) else 4,
            rows=_STAGES,
            fewest=_FEWEST_STAGES,
        ),
        ScreenTable(lambda rows: _device(team, named, width, rows), priority=3, rows=_TIMES, fewest=1),
        ScreenTable(
            lambda rows: _work(team, rows, width, named),
            priority=2 if screen.top is None else 0,
            rows=most_rows,
            fewest=_FEWEST_ROWS if screen.top is None else most_rows,
        ),
        ScreenTable(lambda rows: _steps(team, named, width, rows), priority=5, rows=len(team.steps), fewest=1),
    ]
    return [table for table in tables if table.lines]


def _per(team: Team) -> str:
    return "ms" if team.unit == "recording" else f"ms/{team.unit}"


def _heading(team: Team, what: str, named: bool) -> str:  # noqa: FBT001
    return f"{team.name or 'trace'}: {what}" if named else what


def _account(team: Team, named: bool, width: int, limit: int, *, full: bool) -> list[Text]:  # noqa: FBT001
    """Format the owners of time on the critical path. Their shares add up to 100 %."""
    shown, rest = team.largest_owners(limit)
    if not shown:
        return []
    # Show the gain column only if there are gains.
    gains = ["" if row.gain_us is None else ms(row.gain_us) for row in shown]
    front = ("share", _per(team), *["gain"] * any(gains))
    room = width - sum(_GAP + max(7, len(cell)) for cell in front)
    places = [(row.title, row.name, row.origin) for row in shown]
    columns = owner_columns(places, room, full=width >= text_layout.UNLIMITED)
    rows = [
        [percent(row.share), ms(row.mean_us), *[gain] * any(gains), *of_row]
        for row, gain, of_row in zip(shown, gains, columns, strict=True)
    ]
    if rest:
        share, mean_us = sum(row.share for row in rest), sum(row.mean_us for row in rest)
        rows.append([percent(share), ms(mean_us), *[""] * any(gains), plural(len(rest), "other"), "-"])
    place = location_heading([row.origin for row in shown])
    heading = _heading(team, OWNER, named)
    lines = aligned((*front, heading, place), rows, width, left=(heading,))
    texts = [*team.captions(shown), *(BORDER_TEXTS[border] for border in team.borders if full or border != HOST)]
    texts += team.notes if full else [note for note in team.notes if note == NO_STACKS]
    return [*lines, *(part for text in texts for part in wrapped(text, width, indent="  ", first="  ", style="dim"))]


def _stages(team: Team, named: bool, width: int, limit: int) -> list[Text]:  # noqa: FBT001
    shown = [row for row in team.stages if row.share >= _LEAST_STAGE]
    if len(shown) > limit:
        totals = [row for row in shown if not row.is_stage][: max(0, limit - _FEWEST_STAGES)]
        shown = [*[row for row in shown if row.is_stage][: limit - len(totals)], *totals]
    ranked = any(row.slowest for row in shown)
    rows = [
        [
            ms(row.mean_us),
            percent(row.share),
            f"+{row.spread:.0%}" if ranked and row.spread >= 0.005 else "",  # noqa: PLR2004 - a half percent
            _short_rank(row.slowest) if ranked and row.spread >= 0.05 else "",  # noqa: PLR2004 - five percent
            row.title,
        ]
        for row in shown
    ]
    return aligned((_per(team), "share", "spread", "slowest", _heading(team, "stage", named)), rows, width)


def _short_rank(label: str | None) -> str:
    """Remove the role from a rank label, because the table heading contains the role. The replica is kept."""
    label = label or ""
    role, slash, replica = label.partition("/")
    return f"/{replica}" if slash and role.isidentifier() else label[max(0, label.find("rank ")) :]


def _device(team: Team, named: bool, width: int, limit: int) -> list[Text]:  # noqa: FBT001
    room = min(width, text_layout.PIPED_WIDTH)
    blocks: list[list[Text]] = []
    shown = [row for row in team.device if row.share >= _LEAST_TIME]
    longest = max((row.share for row in shown), default=1.0)
    for is_idle, heading in ((False, "device: work"), (True, f"{_IDLE}, while the host was")):
        rows = [row for row in shown if row.is_idle is is_idle][:limit]
        if not rows:
            continue
        size = min(_LONGEST_CLASS, max(len(row.name) for row in rows))
        length = max(4, min(_LONGEST_BAR, room // 2 - size - 20))
        known = {row.name for row in rows} != {NOT_READ}
        lines = [Text(_heading(team, heading if known else _IDLE, named), style="bold")]
        for row in rows:
            name = cut_middle(printable(row.name), size)
            line = Text(f"{name:<{size}} {ms(row.mean_us):>7} {percent(row.share):>6} ")
            line.append(bar(row.share / longest, length), style="yellow" if is_idle else "green")
            lines.append(line)
        blocks.append(lines)
    mfu = wrapped(team.mfu.text, width) if team.mfu else []
    if len(blocks) < 2:  # noqa: PLR2004 - two blocks for the two columns
        return [*(line for block in blocks for line in block), *mfu]
    return [*side_by_side(blocks[0], blocks[1], room), *mfu]


def _work(team: Team, limit: int, width: int, named: bool) -> list[Text]:  # noqa: FBT001
    rows = team.kernels or team.operators

    def cut(name: str, room: int) -> str:
        return short_event(name, None if width >= text_layout.UNLIMITED else room, is_kernel=bool(team.kernels))

    table = [
        [ms(row.mean_us), percent(row.share), _calls(row), row.category, row.name]
        for row in rows[:limit]
        if row.mean_us
    ]
    what = "kernel" if team.kernels else "operator, by self time"
    calls = "calls" if team.unit == "recording" else f"calls/{team.unit}"
    name = _heading(team, what, named)
    return aligned((_per(team), "share", calls, "class", name), table, width, left=("class",), cut=cut)


def _calls(row: WorkRow) -> str:
    return f"{row.calls:,.0f}" if row.calls >= 10 or row.calls == int(row.calls) else f"{row.calls:,.1f}"  # noqa: PLR2004


def _steps(team: Team, named: bool, width: int, limit: int) -> list[Text]:  # noqa: FBT001
    rows = [
        [
            f"{row.count:,}",
            ms(row.median_us),
            ms(row.min_us) if row.count > 1 else "",
            ms(row.max_us) if row.count > 1 else "",
            "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
            row.title,
        ]
        for row in team.steps[:limit]
    ]
    header = ("count", "median ms", "min ms", "max ms", "tokens/s", _heading(team, "steps on the host", named))
    return aligned(header, rows, width)
