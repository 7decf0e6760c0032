"""Report section of a role: stages, device time, steps, kernels, operators and more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from profdeck_traces.account.borders import BORDER_TEXTS
from profdeck_traces.analysis.detail_model import CollectiveCalls, FunctionTime, RuntimeCalls
from profdeck_traces.analysis.model import DeviceSummary, Gap, RankSummary
from profdeck_traces.analysis.owner_names import OWNER, function_text, location_heading
from profdeck_traces.base.text import plural
from profdeck_traces.findings.overview import StageRow, StepRow, Team, WorkRow, owner_text
from profdeck_traces.report import svg
from profdeck_traces.report.cells import Cell, Column, Grid, count, filled, ms, name, number, percent, table
from profdeck_traces.report.flame import flame_graph

_MOST_ROWS = 100
"""Maximum number of kernels and operators; `profdeck summary --csv` prints all."""
_MOST_SMALL_ROWS = 40
_MOST_OWNERS = 20
# With more traces, tables have fewer rows, to limit the size of the page.
_MANY_RANKS = 16
_LEAST_SHARE = 0.001
_Item = TypeVar("_Item")


def role_section(team: Team, place: int, ranks: int) -> dict[str, Any]:
    """Return the template context for a role.

    Args:
        team: The role.
        place: Its place among the roles.
        ranks: How many traces the page has.
    """
    few = 1 if ranks <= _MANY_RANKS else 4
    per = "ms" if team.unit == "recording" else f"ms/{team.unit}"
    labels = team.rank_labels
    tables = {
        "stage": table(team.stages, _stages(team, per)),
        "step": table(team.steps, _STEPS),
        "kernel": table(team.kernels[: _MOST_ROWS // few], _work("kernel", per)),
        "operator": table(team.operators[: _MOST_ROWS // few], _work("operator", per)),
    }
    return {
        "id": f"role{place}",
        **_account(team, per),
        "heading": f"{team.name or 'Trace'}" + (f", {len(labels)} ranks" if len(labels) > 1 else ""),
        "unit": team.unit,
        "bars": svg.bars([row for row in team.device if row.share >= _LEAST_SHARE]),
        "plot": svg.steps(_series(team)),
        "histogram": svg.histogram(team.views[0].rank.kernel_durations),
        **{key: value for what, of_what in tables.items() for key, value in _named(what, filled(*of_what))},
        **_stacks(team),
        "memory": _memory(team),
        **_shapes(team),
        **_small_tables(team, _MOST_SMALL_ROWS // few),
    }


def _named(what: str, of_what: tuple[list[Column], list[list[Cell]]]) -> list[tuple[str, object]]:
    """Return a table's columns and rows, each paired with its variable name in the template."""
    columns, rows = of_what
    return [(f"{what}_columns", columns), (f"{what}s", rows)]


_STEPS: Grid[StepRow] = {
    "steps": lambda row: Cell(row.title),
    "count": lambda row: count(row.count),
    "median ms": lambda row: ms(row.median_us),
    "min ms": lambda row: ms(row.min_us),
    "max ms": lambda row: ms(row.max_us),
    "tokens/s": lambda row: number(row.tokens_per_s, 1),
}


def _stages(team: Team, per: str) -> Grid[StageRow]:
    ranks = len(team.stages[0].of_ranks_us) if team.stages else 0
    labels = team.rank_labels if 1 < ranks <= _MANY_RANKS and ranks == len(team.rank_labels) else []
    grid: Grid[StageRow] = {
        "stage": lambda row: Cell(row.title),
        per: lambda row: ms(row.mean_us),
        "share": lambda row: percent(row.share),
    }
    grid |= {label: _stage_on_rank(rank) for rank, label in enumerate(labels)}
    if ranks > 1:
        grid |= {
            "slowest over mean": lambda row: percent(row.spread),
            "slowest": lambda row: Cell(row.slowest or ""),
        }
    return grid


def _stage_on_rank(rank: int) -> Callable[[StageRow], Cell]:
    return lambda row: ms(row.of_ranks_us[rank])


def _account(team: Team, per: str) -> dict[str, Any]:
    """Return the template context for the account: the owners of time on the critical path, and explanatory text."""
    shown, others = team.largest_owners(_MOST_OWNERS)
    columns, rows = table(
        shown,
        {
            "share": lambda row: percent(row.share),
            "": lambda row: Cell(svg.share(row.share / shown[0].share)),
            per: lambda row: ms(row.mean_us),
            "gain": lambda row: ms(row.gain_us),
            OWNER: lambda row: name(owner_text(row.title, row.name and function_text(row.name))),
            location_heading([row.origin for row in shown]): lambda row: Cell(
                function_text(row.origin or ""), kind="name copy"
            ),
        },
    )
    if others:
        share, mean_us = sum(row.share for row in others), sum(row.mean_us for row in others)
        rows.append([percent(share), Cell(""), ms(mean_us), number(None), Cell(plural(len(others), "other")), Cell("")])
    return {
        "headline": team.headline,
        **dict(_named("owner", filled(columns, rows))),
        "account_texts": [*team.captions(shown), *(BORDER_TEXTS[border] for border in team.borders)],
        "account_notes": team.notes,
    }


def _memory(team: Team) -> list[dict[str, Any]]:
    """Return plots of device memory for the rank with the highest peak."""
    view = max(team.views, key=lambda view: max((one.peak_allocated_bytes for one in view.rank.memory), default=-1))
    return [
        {
            "label": f"Memory of {one.device}, {view.label}",
            "text": f"Peak: {one.peak_allocated_bytes / 1e6:,.6g} MB allocated at {one.peak_us / 1000:,.3f} ms"
            + (f", {one.peak_reserved_bytes / 1e6:,.6g} MB reserved" if one.peak_reserved_bytes else "")
            + ".",
            "plot": svg.memory(one),
        }
        for one in view.rank.memory
    ]


def _shapes(team: Team) -> dict[str, Any]:
    """Return operators by input shape, from the first rank with shapes."""
    view = next((view for view in team.views if view.rank.shapes), None)
    columns, rows = table(
        view.rank.shapes[:_MOST_SMALL_ROWS] if view else (),
        {
            "total ms": lambda one: ms(one.total_us),
            "calls": lambda one: count(one.count),
            "GFLOP": lambda one: number(None if one.flops is None else one.flops / 1e9),
            "dtypes": lambda one: Cell(one.dtypes or ""),
            "operator": lambda one: Cell(one.name),
            "shapes": lambda one: Cell(one.shapes, kind="name copy"),
        },
    )
    return {**dict(_named("shape", filled(columns, rows))), "flops": _flops(view.rank) if view else ""}


def _flops(rank: RankSummary) -> str:
    """Format the rate of a rank's counted FLOPs, averaged over the recording."""
    if not rank.product_flops or not rank.span_us:
        return ""
    unit, size = ("TFLOP", 1e12) if rank.devices else ("GFLOP", 1e9)
    count = rank.product_flops / size
    rate = count / rank.span_us * 1e6
    return f"Counted operators: {count:,.4g} {unit}, {rate:,.3g} {unit}/s averaged over the recording."


def _stacks(team: Team) -> dict[str, Any]:
    """Return the flame graph and the slowest functions of the first rank with stacks."""
    view = next((view for view in team.views if view.rank.stacks), None)
    label = f"Calls by Python stack, {view.label}" if view else ""
    return {
        "flame": flame_graph(view.rank.stacks, label) if view else "",
        "flame_label": label,
        **dict(_named("function", table(view.rank.functions[:_MOST_SMALL_ROWS] if view else (), _FUNCTIONS))),
    }


_FUNCTIONS: Grid[FunctionTime] = {
    "own ms": lambda one: ms(one.self_us),
    "total ms": lambda one: ms(one.total_us),
    "calls": lambda one: count(one.count),
    "Python function": lambda one: name(one.name),
}


def _work(what: str, per: str) -> Grid[WorkRow]:
    return {
        per: lambda row: ms(row.mean_us),
        "share": lambda row: percent(row.share),
        "calls": lambda row: number(row.calls, 1),
        "max us": lambda row: number(row.max_us, 1),
        "class": lambda row: Cell(row.category),
        what: lambda row: name(row.name, kernel=what == "kernel"),
    }


def _series(team: Team) -> list[tuple[str, list[tuple[float, float]]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for step in team.views[0].rank.steps:
        found.setdefault(f"{step.stage or ''} {step.kind}", []).append((step.start_us, step.duration_us))
    return list(found.items())


def _small_tables(team: Team, most: int) -> dict[str, Any]:
    """Return the tables that have the rank in the first column. Sort their rows by time, longest first."""
    ranks = [(view.label, view.rank) for view in team.views]
    devices = [(label, one) for label, rank in ranks for one in rank.devices]
    found: dict[str, Any] = {}

    def add(what: str, items: list[tuple[str, _Item]], time_us: Callable[[_Item], float], grid: Grid[_Item]) -> None:
        longest = sorted(items, key=lambda item: -time_us(item[1]))[:most]
        columns, rows = table([one for _, one in longest], grid)
        found[f"{what}_columns"] = [Column("rank", number=False), *columns]
        found[what if what == "runtime" else f"{what}s"] = [
            [Cell(label), *row] for (label, _), row in zip(longest, rows, strict=True)
        ]

    add("device", devices, lambda device: device.busy_us, _DEVICES)
    add("gap", [(label, one) for label, device in devices for one in device.gaps], lambda gap: gap.duration_us, _GAPS)
    collectives = [(label, one) for label, rank in ranks for one in rank.collectives]
    add("collective", collectives, lambda one: one.total_us, _COLLECTIVES)
    add("runtime", [(label, one) for label, rank in ranks for one in rank.runtime], lambda one: one.total_us, _RUNTIME)
    return found


_DEVICES: Grid[DeviceSummary] = {
    "device": lambda one: Cell(str(one.device) if one.name is None else f"{one.device} ({one.name})"),
    "first to last work ms": lambda one: ms(one.span_us),
    "busy ms": lambda one: ms(one.busy_us),
    "idle ms": lambda one: ms(one.idle_us),
    "compute ms": lambda one: ms(one.compute_us),
    "communication ms": lambda one: ms(one.communication_us),
    "of it exposed ms": lambda one: ms(one.exposed_communication_us),
    "overlapped": lambda one: percent(one.overlap_us / one.communication_us if one.communication_us else None),
    "copies ms": lambda one: ms(one.memory_us),
}
_GAPS: Grid[Gap] = {
    "ms": lambda gap: ms(gap.duration_us),
    "at ms": lambda gap: ms(gap.start_us),
    "step": lambda gap: Cell("" if gap.step is None else str(gap.step), kind="n"),
    "cause": lambda gap: Cell(gap.cause),
    "host": lambda gap: name(gap.host or ""),
    "ran before": lambda gap: name(gap.before or "", kernel=True),
    "ran after": lambda gap: name(gap.after or "", kernel=True),
}
_COLLECTIVES: Grid[CollectiveCalls] = {
    "collective": lambda one: Cell(one.name),
    "group": lambda one: Cell(one.group),
    "bytes": lambda one: count(one.size_bytes),
    "calls": lambda one: count(one.count),
    "total ms": lambda one: ms(one.total_us),
    "shortest us": lambda one: number(one.min_us, 1),
    "bus GB/s": lambda one: number(None if one.bus_bytes_per_s is None else one.bus_bytes_per_s / 1e9, 1),
}
_RUNTIME: Grid[RuntimeCalls] = {
    "call": lambda call: Cell(call.name),
    "does": lambda call: Cell(call.state),
    "calls": lambda call: count(call.count),
    "total ms": lambda call: ms(call.total_us),
    "max us": lambda call: number(call.max_us, 1),
}
