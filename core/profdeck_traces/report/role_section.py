"""Report section of a role: stages, device time, steps, kernels, operators and more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from profdeck_traces.account.borders import BORDER_TEXTS
from profdeck_traces.account.model import NAMELESS
from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.base.text import plural
from profdeck_traces.findings.overview import OwnerRow, Team, WorkRow
from profdeck_traces.report import svg
from profdeck_traces.report.cells import Cell, Column, filled, ms, name, number, percent
from profdeck_traces.report.flame import flame_graph

_MOST_ROWS = 100
"""Maximum number of kernels and operators; `profdeck summary --csv` prints all."""
_MOST_SMALL_ROWS = 40
_MOST_OWNERS = 20
# With more traces, tables have fewer rows, to limit the size of the page.
_MANY_RANKS = 16
_LEAST_SHARE = 0.001


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
    of_ranks = len(team.stages[0].of_ranks_us) if team.stages else 0
    shown = labels if 1 < of_ranks <= _MANY_RANKS and of_ranks == len(labels) else []
    stages = [
        [
            Cell(("" if row.is_stage else "of all: ") + row.name),
            ms(row.mean_us),
            percent(row.share),
            *(map(ms, row.of_ranks_us) if shown else ()),
            *([percent(row.spread), Cell(row.slowest or "")] if of_ranks > 1 else ()),
        ]
        for row in team.stages
    ]
    found = {
        "id": f"role{place}",
        **_account(team, per),
        "heading": f"{team.name or 'Trace'}" + (f", {len(labels)} ranks" if len(labels) > 1 else ""),
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
                Cell(row.title),
                Cell(f"{row.count:,}", kind="n"),
                ms(row.median_us),
                ms(row.min_us),
                ms(row.max_us),
                number(row.tokens_per_s, 1),
            ]
            for row in team.steps
        ],
        "step_columns": [
            Column("steps", number=False),
            *map(Column, ("count", "median ms", "min ms", "max ms", "tokens/s")),
        ],
        "kernels": [_work(row, kernel=True) for row in team.kernels[: _MOST_ROWS // few]],
        "kernel_columns": _work_columns("kernel", per),
        "histogram": svg.histogram(team.views[0].rank.kernel_durations),
        "operators": [_work(row, kernel=False) for row in team.operators[: _MOST_ROWS // few]],
        "operator_columns": _work_columns("operator", per),
        **_stacks(team),
        "memory": _memory(team),
        **_shapes(team),
        **_small_tables(team, _MOST_SMALL_ROWS // few),
    }
    for one, rows in (
        ("owner", "owners"),
        ("stage", "stages"),
        ("step", "steps"),
        ("kernel", "kernels"),
        ("operator", "operators"),
    ):
        found[f"{one}_columns"], found[rows] = filled(found[f"{one}_columns"], found[rows])
    return found


def _account(team: Team, per: str) -> dict[str, Any]:
    """Return the template context for the account: the owners of time on the critical path, and explanatory text."""
    named = [row for row in team.account if row.name or row.kind in NAMELESS]
    shown = [row for row in named if row.share >= _LEAST_SHARE][:_MOST_OWNERS]
    rows = [
        [
            percent(row.share),
            Cell(svg.share(row.share / shown[0].share)),
            ms(row.mean_us),
            ms(row.gain_us),
            name(
                f"{row.title} {row.name}" if row.name and not row.name.startswith(row.kind) else row.name or row.title
            ),
            Cell(row.origin or "", kind="name copy"),
        ]
        for row in shown
    ]
    others = [row for row in team.account if row not in shown]
    if others:
        share, mean_us = sum(row.share for row in others), sum(row.mean_us for row in others)
        rows.append(
            [percent(share), Cell(""), ms(mean_us), number(None), Cell(plural(len(others), "other owner")), Cell("")]
        )
    longest = team.longest
    texts = [team.next_limit, *(BORDER_TEXTS[border] for border in team.borders)]
    if longest is not None:
        times = f"{longest.step_us / 1000:,.3f} ms. Mean of the ranks: {longest.mean_us / 1000:,.3f} ms."
        texts.append(f"The longest step is on {longest.label}: {times}")
    return {
        "headline": team.headline,
        "owners": rows,
        "owner_columns": [
            Column("share"),
            Column("", number=False),
            Column(per),
            Column("gain"),
            Column("owner on the critical path", number=False),
            Column("location", number=False),
        ],
        "account_texts": [text for text in texts if text],
        "account_notes": team.notes,
    }


def _owner(row: OwnerRow) -> str:
    if row.name is None:
        return row.title
    return row.name if row.name.startswith(row.kind) else f"{row.title} {row.name}"


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
    rows = view.rank.shapes[:_MOST_SMALL_ROWS] if view else ()
    columns, cells = filled(
        [
            *map(Column, ("total ms", "calls", "GFLOP")),
            Column("dtypes", number=False),
            Column("operator", number=False),
            Column("shapes", number=False),
        ],
        [
            [
                ms(one.total_us),
                number(one.count, 0),
                number(None if one.flops is None else one.flops / 1e9),
                Cell(one.dtypes or ""),
                Cell(one.name),
                Cell(one.shapes, kind="name copy"),
            ]
            for one in rows
        ],
    )
    return {"shapes": cells, "shape_columns": columns, "flops": _flops(view.rank) if view else ""}


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
        "functions": [
            [ms(one.self_us), ms(one.total_us), number(one.count, 0), name(one.name)]
            for one in (view.rank.functions[:_MOST_SMALL_ROWS] if view else ())
        ],
        "function_columns": [*map(Column, ("own ms", "total ms", "calls")), Column("Python function", number=False)],
    }


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
        ms(row.mean_us),
        percent(row.share),
        number(row.calls, 1),
        number(row.max_us, 1),
        Cell(row.category),
        name(row.name, kernel=kernel),
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
        "devices": rows(
            lambda rank: [
                (
                    device.busy_us,
                    [
                        Cell(str(device.device) if device.name is None else f"{device.device} ({device.name})"),
                        ms(device.span_us),
                        ms(device.busy_us),
                        ms(device.idle_us),
                        ms(device.compute_us),
                        ms(device.communication_us),
                        ms(device.exposed_communication_us),
                        percent(device.overlap_us / device.communication_us if device.communication_us else None),
                        ms(device.memory_us),
                    ],
                )
                for device in rank.devices
            ]
        ),
        "device_columns": [
            Column("rank", **text),
            Column("device", **text),
            *map(
                Column,
                (
                    "first to last work ms",
                    "busy ms",
                    "idle ms",
                    "compute ms",
                    "communication ms",
                    "of it exposed ms",
                    "overlapped",
                    "copies ms",
                ),
            ),
        ],
        "gaps": rows(
            lambda rank: [
                (
                    gap.duration_us,
                    [
                        ms(gap.duration_us),
                        ms(gap.start_us),
                        Cell("" if gap.step is None else str(gap.step), kind="n"),
                        Cell(gap.cause),
                        name(gap.host or ""),
                        name(gap.before or "", kernel=True),
                        name(gap.after or "", kernel=True),
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
            *(Column(words, **text) for words in ("cause", "host", "ran before", "ran after")),
        ],
        "collectives": rows(
            lambda rank: [
                (
                    one.total_us,
                    [
                        Cell(one.name),
                        Cell(one.group),
                        number(one.size_bytes, 0),
                        Cell(f"{one.count:,}", kind="n"),
                        ms(one.total_us),
                        number(one.min_us, 1),
                        number(None if one.bus_bytes_per_s is None else one.bus_bytes_per_s / 1e9, 1),
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
                        ms(call.total_us),
                        number(call.max_us, 1),
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
