"""Text output of `profdeck summary --by`: device time by operator, shape, module, stage or line of code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.text import Text

from profdeck_traces.analysis.formatting import ms, percent
from profdeck_traces.base.text import plural
from profdeck_traces.cli.text_layout import aligned, wrapped
from profdeck_traces.findings.overview import teams_of

if TYPE_CHECKING:
    from profdeck_traces.analysis.model import RunSummary
    from profdeck_traces.attribution.model import AttributedTime, AttributedTimes, Utilization
    from profdeck_traces.findings.overview import Team

_Key = tuple[str, str, str, str]
_BASES = {"device": "Device time", "host": "Self CPU time of operators"}
_STACKS = "Modules and lines require stacks. To record them, set the backend option with_stack."
_US_PER_S = 1e6
_WITH_WORK = ("operator", "shape")
_PEAK = (
    "of peak: share of the dense peak rate, or of the memory bandwidth if the bound is memory. Operators without a "
    "number are not counted."
)


class _Screen(NamedTuple):
    """Line width in terminal columns and maximum number of rows per table."""

    width: int
    limit: int | None


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
                name = team.name if len(teams) > 1 else ""
                lines += _of_team(team, name, of_basis, by, _Screen(width, limit))
    if not lines:
        lines = wrapped("No trace has operators, or device events together with events of the host.", width)
    elif tables_only := sum(rank.attributed is None for rank in run.ranks):
        lines += wrapped(f"Excluded: {plural(tables_only, 'trace')} without events of the host.", width)
    return lines


def _of_team(team: Team, name: str, times: Sequence[AttributedTimes], by: str, screen: _Screen) -> Iterator[Text]:
    width = screen.width
    total_us = sum(one.total_us for one in times)
    title = f"{_BASES[times[0].basis]} by {by}: {ms(total_us)} ms"
    title += f" in {plural(len(times), 'trace')}" if len(times) > 1 else ""
    yield Text(f"{name}: {title}" if name else title, style="bold")
    sums = _sums(row for one in times for row in getattr(one, f"{by}s"))
    shown = [*sums.items()][: screen.limit]
    others = [row for rows in [*sums.values()][len(shown) :] for row in rows]
    if others:
        hidden = plural(len(sums) - len(shown), "more row")
        shown.append((("none", f"{hidden} (--top 0 shows all)", "", ""), others))
    rate_unit, flops_per_unit = ("TFLOP/s", 1e12) if times[0].basis == "device" else ("GFLOP/s", 1e9)
    rows = [
        [
            ms(sum(row.time_us for row in of_owner)),
            percent(sum(row.time_us for row in of_owner) / total_us),
            f"{sum(row.count for row in of_owner):,}",
            *(_work(of_owner, flops_per_unit) if by in _WITH_WORK and kind != "none" else ("", "", "")),
            dtypes,
            f"{_label(kind, owner, by)} {shapes}".strip(),
        ]
        for (kind, owner, shapes, dtypes), of_owner in shown
    ]
    calls = "kernels" if times[0].basis == "device" else "calls"
    name_column = "operator and shapes" if by == "shape" else by
    header = ("ms", "share", calls, rate_unit, "of peak", "bound", "dtypes", name_column)
    yield from aligned(header, rows, width, left=("bound", "dtypes"))
    if by in ("module", "line") and not any(one.has_stacks for one in times):
        yield from wrapped(_STACKS, width, style="dim")
    elif by == "line":
        note = "The number is the first line of the function, or the line it had reached when the recording started."
        yield from wrapped(note, width, style="dim")
    if by == "shape" and not any(one.has_shapes for one in times):
        yield from wrapped("Shapes were not recorded. Set the backend option record_shapes.", width, style="dim")
    for note in dict.fromkeys(one.note for one in times if one.note):
        yield from wrapped(note, width, style="dim")
    if any(row[4] for row in rows):
        yield from wrapped(_PEAK, width, style="dim")
    if by in _WITH_WORK:
        for text in dict.fromkeys(_unknown_peak(view.rank.utilization) for view in team.views if view.rank.utilization):
            yield from wrapped(text, width, style="dim")


def _work(rows: Sequence[AttributedTime], flops_per_unit: float) -> tuple[str, str, str]:
    """Format the rate, the share of the peak and the bound. Unknown values are empty.

    Args:
        rows: Rows of one owner.
        flops_per_unit: FLOP/s per unit of the displayed rate, such as 1e12 for TFLOP/s.
    """
    timed = [row for row in rows if row.work_us]
    work_us = sum(row.work_us or 0.0 for row in timed)
    if not work_us:
        return "", "", ""
    rate = sum(row.flops or 0 for row in timed) / work_us * _US_PER_S / flops_per_unit
    text = f"{rate:,.0f}" if rate >= 100 else f"{rate:,.1f}" if rate >= 10 else f"{rate:.2g}"  # noqa: PLR2004
    bounds = {row.bound for row in timed}
    if None in bounds:
        return text if rate else "", "", ""
    share = sum((row.peak_share or 0.0) * (row.work_us or 0.0) for row in timed) / work_us
    return text if rate else "", percent(share), bounds.pop() or "" if len(bounds) == 1 else "both"


def _unknown_peak(utilization: Utilization) -> str:
    """Return a sentence about the missing peak, or an empty string if the peak is known."""
    if utilization.peak_flops_per_s is not None:
        return ""
    if utilization.device is None:
        return "The peak is unknown because the trace does not name a single device model."
    dtype = utilization.dtype or "the data type"
    return f"The peak of {utilization.device} for {dtype} is unknown."


def _label(kind: str, name: str, by: str) -> str:
    """Return an owner's name, preceded by its kind if that is not the requested kind."""
    if kind == "none":
        return name
    return name if kind == by or (by, kind) == ("shape", "operator") else f"{kind} {name}"


def _sums(rows: Iterator[AttributedTime]) -> dict[_Key, list[AttributedTime]]:
    """Group the rows of all traces by owner, sorted by total time."""
    groups: dict[_Key, list[AttributedTime]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.name, row.shapes or "", row.dtypes or ""), []).append(row)
    order = sorted(groups, key=lambda key: (-sum(row.time_us for row in groups[key]), key))
    return {key: groups[key] for key in order}
