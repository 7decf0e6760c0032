"""`profdeck diff`: what got slower or faster from one run to another, told from noise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import rich.table
import typer
from rich.console import Console
from rich.text import Text

from profdeck.cli import _trace_options, kit
from profdeck.cli.kit import ExitCode
from profdeck.traces.analysis.diff_model import Judge

if TYPE_CHECKING:
    from profdeck.traces.analysis.diff_model import Change, RoleDiff, RunDiff
    from profdeck.traces.analysis.model import RunSummary

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)(\s*%)?")
_LEAST_P = 0.0001
_CALLED_SAME = 0.05
"""A larger change that is not certain is not called the same: it may be chance."""
_STYLES = {"slower": "red", "faster": "green", "appeared": "yellow", "vanished": "yellow"}
_SECTIONS = {"annotations": "stage or mark", "categories": "class", "kernels": "kernel", "operators": "operator"}
_JUDGED = {"steps": "steps, kernels or operators", "device": "devices", "stages": "stages or other marks"}


def _percent(text: str) -> float:
    """Turn ``5%`` or ``5`` into 0.05.

    Raises:
        typer.BadParameter: It is no percentage, or it may be meant as a fraction.
    """
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"'{text}' is no percentage. Write 5% or 2.5%.")
    value = float(match[1])
    if not match[2] and 0 < value < 1:
        raise typer.BadParameter(f"'{text}' may be a fraction or a percentage. Write {value:.0%} or {value:g}%.")
    return value / 100


def command(  # noqa: PLR0913 - the options of the command line
    before: Annotated[
        Path,
        typer.Argument(
            metavar="A",
            help="The baseline: a run, a capture, a trace, or what `profdeck summary --json` printed of it.",
        ),
    ],
    after: Annotated[Path, typer.Argument(metavar="B", help="What is compared with it, of any of these kinds.")],
    *,
    fail_over: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT",
            parser=_percent,
            help="Exit with 5 if a role got slower by more than this and by more than its noise: in the median of its "
            "global steps or of its iterations of any stage; without steps, in the sum of its kernels; without "
            "kernels, in the self time of its operators. Where the noise is not known, this percentage alone decides.",
        ),
    ] = None,
    fail_on: Annotated[
        list[Judge] | None,
        typer.Option(
            help="What --fail-over judges: steps, as above; device, its busy time; stages, whatever the job marks. May "
            "be repeated; steps alone, if not given.",
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=0, metavar="N", help="How many changes of each kind; 0 for all.")] = 15,
    json: kit.Json = False,
) -> None:
    """Compare two runs: what got slower or faster.

    What changed by no more than the noise between repeated steps, or 0.1% of the total, is the same; where the noise is
    not known, as there are fewer than 3 steps on a side, what changed by no more than 5%.
    """
    from profdeck.traces.analysis.diff import diff_runs

    runs = []
    problems: list[str] = []
    for path in (before, after):
        run, of_path = _read(path)
        runs.append(run)
        problems += of_path
    for problem in problems:
        kit.say(f"error: {problem}")
    diff = diff_runs(*runs)
    _warn(diff, runs, (before, after))
    judges = fail_on or [Judge.STEPS]
    regressions = [
        (role, change)
        for role in diff.roles
        for judge in (judges if fail_over is not None else ())
        for change in role.regressions(fail_over or 0.0, judge)
    ]
    if json:
        found = [{"role": role.role, "stage": role.stage, "name": change.name} for role, change in regressions]
        plain = _plain(diff, top or None)
        kit.print_json(
            {"before": str(before), "after": str(after), **plain, "fail_over": fail_over, "regressions": found}
        )
    else:
        console = kit.stdout()
        for role in diff.roles:
            _print(console, role, top or None)
        for role, change in regressions:
            console.print(f"Over the limit: {_headline(role, change)}", style="red", soft_wrap=True)
    undecided = [
        f"{_label(role)}: there are no {_JUDGED[judge]} on both sides to judge by."
        for role in diff.roles
        for judge in (judges if fail_over is not None else ())
        if not role.judged(judge)
    ]
    for lack in undecided:
        kit.say(f"error: {lack}")
    if problems or undecided:
        raise typer.Exit(ExitCode.UNREADABLE)
    if regressions:
        raise typer.Exit(ExitCode.REGRESSION)


def _read(path: Path) -> tuple[RunSummary, list[str]]:
    """Read or make a summary; also return why some traces could not be read."""
    from profdeck.traces.analysis.diff import is_summary, load_summary

    return (load_summary(path), []) if is_summary(path) else _trace_options.summarise_paths([path])


def _warn(diff: RunDiff, runs: Sequence[RunSummary], paths: Sequence[Path]) -> None:
    for run in runs:
        for rank in run.ranks:
            if rank.problem:
                kit.warn(f"{kit.short(Path(rank.path))}: {rank.problem} What is compared is what can be read.")
    for path, alone in zip(paths, (diff.only_before, diff.only_after), strict=True):
        if alone:
            names = ", ".join(kit.short(Path(name)) for name in alone)
            kit.warn(f"{kit.short(path)}: the other side has no counterpart of {names}")


def _plain(diff: RunDiff, limit: int | None) -> dict[str, Any]:
    plain = diff.to_dict()
    for role in plain["roles"]:
        role |= {section: role[section][:limit] for section in _SECTIONS}
    return plain


def _print(console: Console, role: RoleDiff, limit: int | None) -> None:
    for change in role.iterations or role.decisive:
        console.print(_headline(role, change), style=_STYLES.get(change.verdict, ""), soft_wrap=True)
    console.print(_basis(role), soft_wrap=True)
    basis = _spaced(role.basis)
    for note in role.notes:
        console.print(note, soft_wrap=True)
    if role.overall:
        console.print("", _table("", basis, role.overall))
    for section, heading in _SECTIONS.items():
        changes: tuple[Change, ...] = getattr(role, section)
        changed = [change for change in changes if change.verdict != "same"]
        if changed:
            of_category = {change.name: change for change in role.categories} if section == "kernels" else {}
            console.print("", _table(heading, basis, changed[:limit], of_category))
        if len(changes) > len(changed[:limit]):
            more = f"{len(changed) - limit} more that changed, " if limit and len(changed) > limit else ""
            console.print(f"{section}: {more}{len(changes) - len(changed)} the same")
    console.print()


def _headline(role: RoleDiff, change: Change) -> str:
    """Write a change as ``trainer: global step 215.200 ms -> 224.700 ms, +4.4% (p 0.002): slower``."""
    times = f"{_ms(change.before_us)} ms -> {_ms(change.after_us)} ms"
    ratio = "" if change.ratio is None else f", {change.ratio:+.1%}"
    verdict: str = change.verdict
    if verdict == "same":
        inside = _slower_parts(role)
        large = abs(change.ratio or 0) > _CALLED_SAME
        verdict = "may be chance" if large else "same in all" if inside else "same"
        verdict += f"; slower inside: {inside}" if inside else ""
    return f"{_label(role)}: {change.name} {times}{ratio} ({_chance(change)}): {verdict}"


def _slower_parts(role: RoleDiff) -> str:
    """Count what got slower, as a step may be the same while they are not."""
    counts = {name: sum(one.verdict == "slower" for one in getattr(role, name)) for name in _SECTIONS}
    return ", ".join(f"{count} of {len(getattr(role, name))} {name}" for name, count in counts.items() if count)


def _chance(change: Change) -> str:
    """Say what decided: how likely chance is, where there are enough steps, else the noise."""
    if change.p_value is None:
        return f"noise {_noise(change)}"
    return "p < 0.0001" if change.p_value < _LEAST_P else f"p {change.p_value:.2g}"


def _label(role: RoleDiff) -> str:
    parts = [part for part in (role.role, role.stage) if part]
    if not parts:
        parts = ["trace" if len(role.ranks) == 1 else "traces"]
    return ", ".join(parts)


def _basis(role: RoleDiff) -> str:
    times = "Times" if len(role.ranks) == 1 else f"Times are means of {len(role.ranks)} ranks; they"
    if role.basis == "total":
        return f"{times} are totals, as not all traces have steps."
    return f"{times} are per {_spaced(role.basis)}, of {role.steps_before} before and {role.steps_after} after in all."


def _table(
    heading: str, basis: str, changes: Sequence[Change], of_category: dict[str, Change] | None = None
) -> rich.table.Table:
    numbers = ("before ms", "after ms", "change", "noise")
    others: dict[str, list[str]] = {}
    if any(change.category not in {None, change.name} for change in changes):
        others["kind"] = [change.category or "" for change in changes]
    if any(change.per != basis for change in changes):
        others["per"] = [change.per for change in changes]
    table = kit.table(heading, *others, *numbers, "", numbers=numbers)
    for row, change in enumerate(changes):
        table.add_row(
            change.name,
            *(column[row] for column in others.values()),
            _ms(change.before_us),
            _ms(change.after_us),
            "" if change.ratio is None else f"{change.ratio:+.1%}",
            _noise(change),
            Text(_verdict(change, of_category or {}), style=_STYLES.get(change.verdict, "")),
        )
    return table


def _verdict(change: Change, of_category: dict[str, Change]) -> str:
    """Write a verdict, with what explains it: other calls, or the sum of its kind, which shows a mere new name."""
    category = of_category.get(change.category or "")
    if change.verdict in {"appeared", "vanished"}:
        if category is None or category.ratio is None:
            return change.verdict
        return f"{change.verdict}; its kind {category.ratio:+.1%}"
    if change.calls_before is None or change.calls_after is None:
        return change.verdict
    before, after = (f"{calls:,.1f}".removesuffix(".0") for calls in (change.calls_before, change.calls_after))
    return change.verdict if before == after else f"{change.verdict}; calls {before} -> {after}"


def _noise(change: Change) -> str:
    if change.noise_us is None:
        return "unknown"
    return f"{change.noise_us / (change.before_us or change.after_us or 1):.1%}"


def _ms(time_us: float) -> str:
    return f"{time_us / 1000:,.3f}"


def _spaced(word: str) -> str:
    return word.replace("_", " ")
