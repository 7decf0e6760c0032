"""`profdeck diff`: compares two runs, and distinguishes changes from noise."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from profdeck_traces.account.borders import BORDER_TEXTS, HOST
from profdeck_traces.account.model import NAMELESS
from profdeck_traces.analysis.diff_text import (
    SECTIONS,
    basis_of,
    counted,
    headline_of,
    label_of_role,
    noise_of,
    spaced,
    verdict_of,
)
from profdeck_traces.analysis.formatting import ms, relative
from profdeck_traces.analysis.owner_names import OWNER, location_heading
from profdeck_traces.analysis.short_names import cut_middle, full_name, short_kernel
from profdeck_traces.base.errors import ConfigError
from profdeck_traces.base.text import plural
from profdeck_traces.cli import arguments, json_limit, regression_limit, terminal, text_layout
from profdeck_traces.cli.owner_labels import owner_columns

if TYPE_CHECKING:
    from profdeck_traces.analysis.diff_model import AccountDiff, Change, RoleDiff, RunDiff
    from profdeck_traces.analysis.model import RunSummary

_IMPORTANT = (
    "regressions",
    "undecided",
    "roles",
    "roles[].incomplete",
    "roles[].corrupt",
    "roles[].notes",
    "roles[].iterations",
    "roles[].account.owners",
    "roles[].contributions",
    "roles[].overall",
    "roles[].annotations",
    "roles[].kernels",
    "roles[].operators",
    "roles[].categories",
    "roles[].ranks",
)
"""Lists in the JSON document, most important first."""
_LEAST_OWNER = 0.001
"""Smallest owner change that is shown, as a fraction of the step."""
_FEWEST_OWNERS = 3
_NS_PER_US = 1000
_STYLES = {"slower": "red", "faster": "green", "inconclusive": "yellow", "appeared": "yellow", "vanished": "yellow"}


def command(  # noqa: PLR0913 - the options of the command line
    before: Annotated[
        Path,
        typer.Argument(
            metavar="A",
            parser=terminal.source_path,
            help="The baseline: a run, a capture, a trace, or a file with the output of `profdeck summary --json`.",
        ),
    ],
    after: Annotated[
        Path,
        typer.Argument(
            metavar="B", parser=terminal.source_path, help="The run to compare with A, of any of these kinds."
        ),
    ],
    *,
    fail_over: regression_limit.FailOver = None,
    fail_on: regression_limit.FailOn = None,
    top: Annotated[int, typer.Option(min=0, metavar="N", help="Number of changes of each kind; 0 for all.")] = 8,
    full_names: Annotated[bool, typer.Option("--full-names", help="Do not shorten names.")] = False,
    cache: arguments.Cache = True,
    json: terminal.JsonOption = False,
    max_bytes: json_limit.MaxBytes = None,
) -> None:
    """Compare two runs, and show what became slower or faster.

    A difference counts as a change if it exceeds both the noise between repeated steps and 0.1% of the total. If a side
    has fewer than 3 steps, the noise is unknown: a kernel must differ by 5%, and the run's result is inconclusive. The
    exit code is 6 if the result of a role is inconclusive. A terminal shows the tables that fit, and a pipe shows all.
    """
    from profdeck_traces.analysis.diff import diff_runs

    if fail_on and fail_over is None:
        raise ConfigError("--fail-on has no effect without --fail-over. Add a limit, such as --fail-over 5%.")
    json_limit.check_option(max_bytes, as_json=json)
    runs = []
    problems: list[str] = []
    for path in (before, after):
        run, path_problems = _read(path, cache=cache)
        runs.append(run)
        problems += path_problems
    for problem in problems:
        terminal.print_stderr(f"error: {problem}")
    if problems and not all(run.ranks for run in runs):
        raise typer.Exit(terminal.ExitCode.UNREADABLE)
    diff = diff_runs(*runs)
    warn(diff, runs, (before, after))
    judgement = regression_limit.judge(diff, fail_over, fail_on)
    if json:
        regressions = [
            {"role": role.role, "stage": role.stage, "name": change.name} for role, change in judgement.regressions
        ]
        plain = _plain(diff, judgement.limit, top or None)
        document = {
            "before": str(before),
            "after": str(after),
            **plain,
            "fail_over": fail_over,
            "regressions": regressions,
            "undecided": judgement.undecided,
        }
        json_limit.print_limited(document, max_bytes, _IMPORTANT)
    else:
        _print(diff, judgement, top, full_names=full_names)
    verdicts = () if json else [verdict_of(role, judgement.limit) for role in diff.roles]
    judgement.end(problems, verdicts=verdicts)


def _read(path: Path, *, cache: bool) -> tuple[RunSummary, list[str]]:
    """Load or compute a summary. Also return an error message for each trace that cannot be read."""
    from profdeck_traces.analysis.diff import is_summary, load_summary

    return (load_summary(path), []) if is_summary(path) else arguments.summarise_paths([path], cache=cache)


def warn(diff: RunDiff, runs: Sequence[RunSummary], paths: Sequence[Path]) -> None:
    """Print warnings about incomplete captures, corrupt traces, and traces without a counterpart in the other run."""
    for run, path in zip(runs, paths, strict=True):
        states = [state for state in run.captures if state.status != "complete"]
        if states:
            counts = ", ".join(
                f"{number} {status}" for status, number in Counter(state.status for state in states).items()
            )
            terminal.warn(
                f"{terminal.short_path(path)} has incomplete captures ({counts}). For details: "
                f"profdeck ls {terminal.shell_path(path)}"
            )
    for run in runs:
        for rank in run.ranks:
            if rank.problem:
                terminal.warn(
                    f"{terminal.short_path(Path(rank.path))}: {rank.problem} Only the readable part is compared."
                )
    for path, alone in zip(paths, (diff.only_before, diff.only_after), strict=True):
        if alone:
            names = ", ".join(terminal.short_path(Path(name)) for name in alone)
            terminal.warn(f"{terminal.short_path(path)}: the other run has no trace that corresponds to {names}")


def _plain(diff: RunDiff, limit: float, top: int | None) -> dict[str, Any]:
    plain = diff.to_dict()
    for role, document in zip(diff.roles, plain["roles"], strict=True):
        document |= {"verdict": role.verdict(limit), "headline": verdict_of(role, limit)}
        document |= {section: document[section][:top] for section in SECTIONS}
    return plain


def _print(diff: RunDiff, judgement: regression_limit.Judgement, top: int, *, full_names: bool) -> None:
    """Print each role's verdict, then the tables. A terminal shows only the tables that fit, unless `top` is 0."""
    console = terminal.stdout_console()
    width = text_layout.width_of(console, full_names=full_names)
    lines: list[Text] = []
    for role, change in judgement.regressions:
        text = f"Over the limit: {headline_of(role, change, judgement.limit)}"
        lines += text_layout.wrapped(text, width, indent="  ", first="", style="red")
    for role in diff.roles:
        lines += [*([Text()] if lines else []), *_heading(role, judgement.limit, width)]
    tables = [table for role in diff.roles for table in _tables(role, top or None, width, len(diff.roles) > 1)]
    notes: list[str] = []
    if top and sys.stdout.isatty():
        # Leave one line for the prompt.
        tables, notes = text_layout.fitted(tables, console.height - 1 - len(lines), "--top 0")
    for block in (
        *(table.lines for table in tables),
        *(text_layout.wrapped(note, width, style="dim") for note in notes),
    ):
        lines += [Text(), *block]
    text_layout.show(console, lines)


def _heading(role: RoleDiff, limit: float, width: int) -> list[Text]:
    """Return the verdict of a role and its basis.

    Args:
        role: The comparison of the role.
        limit: Insignificant changes are reported as "same" up to this fraction, and as "inconclusive" above it.
        width: Width of the terminal.
    """
    lines = text_layout.wrapped(verdict_of(role, limit), width, indent="  ", first="", style=_style_of(role, limit))
    for change in role.iterations if len(role.iterations) > 1 else ():
        lines += text_layout.wrapped(headline_of(role, change, limit), width, indent="    ", first="  ")
    return lines + text_layout.wrapped(" ".join([basis_of(role), *role.notes]), width, style="dim")


def _tables(role: RoleDiff, top: int | None, width: int, named: bool) -> list[text_layout.ScreenTable]:  # noqa: FBT001
    """Return the tables with a role's largest changes. The account table has the highest priority for screen space.

    Args:
        role: The comparison of the role.
        top: Maximum number of changes of each kind; ``None`` for all.
        width: Width of the terminal.
        named: If True, include the role's name in the headings.
    """
    tables = []
    if (account := role.account) is not None:
        heading = _named(OWNER, role, named=named)
        most = len(account.owners) if top is None else top
        render = functools.partial(_account, heading, account, width)
        tables.append(text_layout.ScreenTable(render, 1, most, _FEWEST_OWNERS))
    overall = functools.partial(_table, _named("sum", role, named=named), role, role.overall, width)
    tables.append(text_layout.ScreenTable(lambda _: overall(), 3, 1, 1))
    same = []
    for section, heading in SECTIONS.items():
        changes: tuple[Change, ...] = getattr(role, section)
        changed = [change for change in changes if change.verdict != "same"]
        section_lines = functools.partial(_section, _named(heading, role, named=named), role, changed, width, section)
        tables.append(text_layout.ScreenTable(section_lines, 2, len(changed) if top is None else top, 1))
        if len(changes) > len(changed):
            same.append(counted(len(changes) - len(changed), section))
    text = f"The same: {', '.join(same)}." if same else ""
    tables.append(text_layout.ScreenTable(lambda _: text_layout.wrapped(text, width), 4, 1, 1))
    return [table for table in tables if table.lines]


def _section(  # noqa: PLR0913, PLR0917 - callers bind all parameters but the last
    heading: str, role: RoleDiff, changed: Sequence[Change], width: int, section: str, limit: int
) -> list[Text]:
    lines = _table(heading, role, changed[:limit], width, section=section)
    if more := len(changed) - len(changed[:limit]):
        lines.append(Text(f"... and {more:,} more that changed: --top 0 shows all."))
    return lines


def _account(heading: str, account: AccountDiff, width: int, limit: int) -> list[Text]:
    """Format the owners whose time changed. The last row is the step, the sum of all other rows."""
    times = account.rows
    least = _LEAST_OWNER * max(account.step_before_ns, account.step_after_ns)
    changed = [key for key, (before, after) in times.items() if abs(after - before) >= least]
    changed = [key for key in changed if key[2] or key[0] in NAMELESS]
    shown = sorted(changed, key=lambda key: -abs(times[key][1] - times[key][0]))[:limit]
    if not shown:
        return []
    room = width - 32  # the other columns and the gaps take 32
    columns = owner_columns(
        [(title, name, origin) for _, title, name, _, origin in shown], room, full=width >= text_layout.UNLIMITED
    )
    rows = [
        [*_of_times(*times[key]), owner, place if key[4] else ""]
        for key, (owner, place) in zip(shown, columns, strict=True)
    ]
    others = [sides for key, sides in times.items() if key not in shown]
    if others:
        before, after = (sum(sides[side] for sides in others) for side in (0, 1))
        rows.append([*_of_times(before, after), plural(len(others), "other"), ""])
    rows.append([*_of_times(account.step_before_ns, account.step_after_ns), "step", ""])
    header = ("before ms", "after ms", "change ms", heading, location_heading([key[4] for key in shown]))
    lines = text_layout.aligned(header, rows, width, left=(heading,))
    if account.borders_before != account.borders_after:
        rules = f"before: {', '.join(account.borders_before)}; after: {', '.join(account.borders_after)}"
        text = f"The steps have different border rules ({rules}). Owners near the borders may not correspond."
        lines += text_layout.wrapped(text, width, indent="  ", style="dim")
    elif account.borders_after != (HOST,):
        for border in account.borders_after:
            lines += text_layout.wrapped(BORDER_TEXTS[border], width, indent="  ", style="dim")
    return lines


def _of_times(before_ns: int, after_ns: int) -> tuple[str, str, str]:
    change = after_ns - before_ns
    sign = "+" if change > 0 else "-" if change < 0 else ""
    return ms(before_ns / _NS_PER_US), ms(after_ns / _NS_PER_US), sign + ms(abs(change) / _NS_PER_US)


def _named(heading: str, role: RoleDiff, *, named: bool) -> str:
    return f"{label_of_role(role)}: {heading}" if named else heading


def _style_of(role: RoleDiff, limit: float) -> str:
    return f"bold {_STYLES.get(role.verdict(limit), '')}".strip()


def _table(heading: str, role: RoleDiff, changes: Sequence[Change], width: int, *, section: str = "") -> list[Text]:
    if not changes:
        return []
    of_category = {change.name: change for change in role.categories} if section == "kernels" else {}
    with_noise = any(change.p_value is None and change.noise_us is not None for change in changes)
    rows = [
        [
            ms(change.before_us),
            ms(change.after_us),
            "" if change.ratio is None else relative(change.ratio),
            noise_of(change) if with_noise else "",
            change.per if change.per != spaced(role.basis) else "",
            change.category or "" if change.category != change.name else "",
            _in_words(change, of_category),
            change.name,
        ]
        for change in changes
    ]
    header = ("before ms", "after ms", "change", "noise", "per", "class", "verdict", heading)
    cut = short_kernel if section == "kernels" else cut_middle
    if width >= text_layout.UNLIMITED:
        cut = lambda name, _: full_name(name)  # noqa: E731 - one of three functions that format names
    lines = text_layout.aligned(header, rows, width, left=("per", "class", "verdict"), cut=cut)
    for line, change in zip(lines[1:], changes, strict=True):
        line.stylize(_STYLES.get(change.verdict, ""))
    return lines


def _in_words(change: Change, of_category: dict[str, Change]) -> str:
    """Format a verdict with its likely cause.

    The cause is a different number of calls. For a kernel that appeared or vanished, it is the change of the kernel's
    class: if the class did not change, the kernel was probably only renamed.
    """
    category = of_category.get(change.category or "")
    if change.verdict in {"appeared", "vanished"}:
        if category is None or category.ratio is None:
            return change.verdict
        return f"{change.verdict}; its class {relative(category.ratio)}"
    if change.calls_before is None or change.calls_after is None:
        return change.verdict
    before, after = (f"{calls:,.1f}".removesuffix(".0") for calls in (change.calls_before, change.calls_after))
    return change.verdict if before == after else f"{change.verdict}; calls {before}→{after}"
