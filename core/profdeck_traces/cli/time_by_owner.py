"""Text output of `profdeck summary --by`: device time by operator, shape, module, stage or line of code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from profdeck_traces.analysis.formatting import ms, percent
from profdeck_traces.base.text import plural
from profdeck_traces.cli.text_layout import aligned, wrapped
from profdeck_traces.findings.overview import teams_of

if TYPE_CHECKING:
    from profdeck_traces.analysis.model import RunSummary
    from profdeck_traces.attribution.model import AttributedTime, AttributedTimes

_Key = tuple[str, str, str, str]
_BASES = {"device": "Device time", "host": "Self CPU time of operators"}
_STACKS = "Modules and lines require stacks. To record them, set the backend option with_stack."


def tables(run: RunSummary, by: str, width: int, limit: int | None) -> list[Text]:
    """Format the times of each role by owner.

    Args:
        run: The summary.
        by: ``operator``, ``shape``, ``module``, ``stage`` or ``line``.
        width: Line width in terminal columns.
        limit: Maximum number of rows per table; ``None`` for no limit.
    """
    teams = teams_of(run)
    lines: list[Text] = []
    for team in teams:
        times = [view.rank.attributed for view in team.views if view.rank.attributed]
        for basis in _BASES:
            of_basis = [one for one in times if one.basis == basis and one.total_us]
            if of_basis:
                lines += [Text()] if lines else []
                lines += _of_team(team.name if len(teams) > 1 else "", of_basis, by, width, limit)
    if not lines:
        lines = wrapped("No trace has operators, or device events together with events of the host.", width)
    elif tables_only := sum(rank.attributed is None for rank in run.ranks):
        lines += wrapped(f"Excluded: {plural(tables_only, 'trace')} without events of the host.", width)
    return lines


def _of_team(name: str, times: Sequence[AttributedTimes], by: str, width: int, limit: int | None) -> Iterator[Text]:
    total_us = sum(one.total_us for one in times)
    title = f"{_BASES[times[0].basis]} by {by}: {ms(total_us)} ms"
    title += f" in {plural(len(times), 'trace')}" if len(times) > 1 else ""
    yield Text(f"{name}: {title}" if name else title, style="bold")
    sums = _sums(row for one in times for row in getattr(one, f"{by}s"))
    shown = [*sums.items()][:limit]
    others = [*sums.values()][len(shown) :]
    if others:
        key = "none", f"{plural(len(others), 'more row')} (--top 0 shows all)", "", ""
        shown.append((key, (sum(time_us for time_us, _ in others), sum(count for _, count in others))))
    rows = [
        [ms(time_us), percent(time_us / total_us), f"{count:,}", dtypes, f"{_label(kind, name, by)} {shapes}".strip()]
        for (kind, name, shapes, dtypes), (time_us, count) in shown
    ]
    calls = "kernels" if times[0].basis == "device" else "calls"
    header = ("ms", "share", calls, "dtypes", "operator and shapes" if by == "shape" else by)
    yield from aligned(header, rows, width, left=("dtypes",))
    if by in ("module", "line") and not any(one.has_stacks for one in times):
        yield from wrapped(_STACKS, width, style="dim")
    elif by == "line":
        yield from wrapped("The number is the first line of the function.", width, style="dim")
    if by == "shape" and not any(one.has_shapes for one in times):
        yield from wrapped("Shapes were not recorded. Set the backend option record_shapes.", width, style="dim")


def _label(kind: str, name: str, by: str) -> str:
    """Return an owner's name, preceded by its kind if that is not the requested kind."""
    if kind == "none":
        return name
    return name if kind == by or (by, kind) == ("shape", "operator") else f"{kind} {name}"


def _sums(rows: Iterator[AttributedTime]) -> dict[_Key, tuple[float, int]]:
    """Return each owner's total time and count over all traces, sorted by time."""
    sums: dict[_Key, list[float]] = {}
    for row in rows:
        times = sums.setdefault((row.kind, row.name, row.shapes or "", row.dtypes or ""), [0.0, 0])
        times[0] += row.time_us
        times[1] += row.count
    order = sorted(sums, key=lambda key: (-sums[key][0], key))
    return {key: (sums[key][0], int(sums[key][1])) for key in order}
