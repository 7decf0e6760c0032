"""Text output of `profdeck summary`: a heading, the findings, and the time breakdown of each role."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from rich.text import Text

from profdeck_traces.analysis.formatting import ms, percent
from profdeck_traces.analysis.host_states import NOT_READ
from profdeck_traces.analysis.short_names import cut_middle, full_name, short_kernel
from profdeck_traces.base.text import plural, printable
from profdeck_traces.cli import terminal, text_layout
from profdeck_traces.cli.text_layout import aligned, bar, beside, wrapped
from profdeck_traces.findings.overview import Team, WorkRow, about, first_of, not_complete, teams_of

if TYPE_CHECKING:
    from profdeck_traces.analysis.model import RunSummary
    from profdeck_traces.analysis.run_model import Finding

MAX_FINDINGS = 5
_STAGES, _LEAST_STAGE = 6, 0.01
_MOST_TRACES = 4
_IDLE = "device: idle"
_TIMES, _LEAST_TIME = 5, 0.01
_FEWEST_ROWS, _USUAL_ROWS = 3, 10
_LONGEST_BAR, _LONGEST_CLASS = 14, 26
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
    head = [*_about(run, paths, everyone, width), Text(), *_findings(run.findings, width, screen.findings)]
    teams = everyone if screen.findings is None else first_of(everyone, _MOST_TRACES)
    blocks = [_of_team(team, len(everyone) > 1, width) for team in teams]
    used = len(head) + sum(len(block) + 1 for before, after in blocks for block in (*before, *after) if block)
    rows = _USUAL_ROWS
    if screen.height is not None and teams:
        # Each table needs two more lines, for an empty line and the heading. The shell prompt needs one.
        rows = max(_FEWEST_ROWS, min(_USUAL_ROWS, (screen.height - 1 - used) // len(teams) - 2))
    limit = rows if screen.top is None else screen.top or None
    lines = head
    for team, (before, after) in zip(teams, blocks, strict=True):
        for block in (*before, _work(team, limit, width, len(everyone) > 1), *after):
            if block:
                lines += [Text(), *block]
    if more := len(everyone) - len(teams):
        lines += [Text(), Text(f"{plural(more, 'more trace')} with --full.", style="dim")]
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


def _findings(findings: Sequence[Finding], width: int, most: int | None) -> list[Text]:
    if not findings:
        return [Text("Findings: nothing stands out.", style="bold")]
    lines = [Text("Findings", style="bold")]
    for number, finding in enumerate(findings[:most], 1):
        lines += wrapped(finding.text, width, indent="   ", first=f"{number}. ")
        lines += wrapped(f"{finding.do[:1].upper()}{finding.do[1:]}.", width, indent="   ", style="dim")
    if most is not None and (more := len(findings) - most) > 0:
        lines.append(Text(f"   {more} more with --full.", style="dim"))
    return lines


def _of_team(team: Team, named: bool, width: int) -> tuple[list[list[Text]], list[list[Text]]]:  # noqa: FBT001
    """Return the blocks of a role before its kernel table, and the blocks after it."""
    return [_stages(team, named, width), _device(team, named, width)], [_steps(team, named, width)]


def _per(team: Team) -> str:
    return "ms" if team.unit == "recording" else f"ms/{team.unit}"


def _heading(team: Team, what: str, named: bool) -> str:  # noqa: FBT001
    return f"{team.name or 'trace'}: {what}" if named else what


def _stages(team: Team, named: bool, width: int) -> list[Text]:  # noqa: FBT001
    shown = [row for row in team.stages if row.share >= _LEAST_STAGE]
    if len(shown) > _STAGES:
        of_stages = [row for row in shown if row.is_stage][: _STAGES - sum(not row.is_stage for row in shown)]
        shown = [row for row in shown if row in of_stages or not row.is_stage]
    ranked = any(row.slowest for row in shown)
    rows = [
        [
            ms(row.mean_us),
            percent(row.share),
            f"+{row.spread:.0%}" if ranked and row.spread >= 0.005 else "",  # noqa: PLR2004 - a half percent
            _short_rank(row.slowest) if ranked and row.spread >= 0.05 else "",  # noqa: PLR2004 - five percent
            ("" if row.is_stage else "of all: ") + row.name,
        ]
        for row in shown
    ]
    return aligned((_per(team), "share", "spread", "slowest", _heading(team, "stage", named)), rows, width)


def _short_rank(label: str | None) -> str:
    """Remove the role from a rank label, because the table heading contains the role. The replica is kept."""
    label = label or ""
    role, slash, replica = label.partition("/")
    return f"/{replica}" if slash and role.isidentifier() else label[max(0, label.find("rank ")) :]


def _device(team: Team, named: bool, width: int) -> list[Text]:  # noqa: FBT001
    room = min(width, text_layout.PIPED_WIDTH)
    blocks: list[list[Text]] = []
    shown = [row for row in team.device if row.share >= _LEAST_TIME]
    longest = max((row.share for row in shown), default=1.0)
    for is_idle, heading in ((False, "device: work"), (True, f"{_IDLE}, while the host was")):
        rows = [row for row in shown if row.is_idle is is_idle][:_TIMES]
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
    return [*beside(blocks[0], blocks[1], room), *mfu]


def _work(team: Team, limit: int | None, width: int, named: bool) -> list[Text]:  # noqa: FBT001
    rows = team.kernels or team.operators
    cut = functools.partial(_cut, kernels=bool(team.kernels), full=width >= text_layout.UNLIMITED)
    table = [
        [ms(row.mean_us), percent(row.share), _calls(row), row.category, row.name]
        for row in rows[:limit]
        if row.mean_us
    ]
    what = "kernel" if team.kernels else "operator, by self time"
    calls = "calls" if team.unit == "recording" else f"calls/{team.unit}"
    name = _heading(team, what, named)
    return aligned((_per(team), "share", calls, "class", name), table, width, left=("class",), cut=cut)


def _cut(name: str, width: int, *, kernels: bool, full: bool) -> str:
    if full:
        return full_name(name)
    return short_kernel(name, width) if kernels else cut_middle(name, width)


def _calls(row: WorkRow) -> str:
    return f"{row.calls:,.0f}" if row.calls >= 10 or row.calls == int(row.calls) else f"{row.calls:,.1f}"  # noqa: PLR2004


def _steps(team: Team, named: bool, width: int) -> list[Text]:  # noqa: FBT001
    rows = [
        [
            f"{row.count:,}",
            ms(row.median_us),
            ms(row.min_us) if row.count > 1 else "",
            ms(row.max_us) if row.count > 1 else "",
            "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
            row.title,
        ]
        for row in team.steps
    ]
    header = ("count", "median ms", "min ms", "max ms", "tokens/s", _heading(team, "steps on the host", named))
    return aligned(header, rows, width)
