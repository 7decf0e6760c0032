"""`profdeck summary`: where the time went, trace by trace and between the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from profdeck.cli import _trace_options, kit
from profdeck.cli._trace_csv import CsvRows, print_csv
from profdeck.cli.kit import ExitCode

if TYPE_CHECKING:
    from profdeck.traces.analysis.model import DeviceSummary, GroupSkew, RankSummary, RunSummary
    from profdeck.traces.analysis.recorder_model import CommunicationSummary
_PERCENTILES = {90: 10, 99: 100}
"""How many steps each needs: one that is beyond."""
_MAX_DETAILED = 4
_BYTES_PER_GB = 1_000_000_000
# How many digits of the number of a process group are in the names of its kernels.
# Of a device whose work fills no more of the recording, both shares are told.
_MUCH_LONGER = 1.1
_GROUP_DIGITS = 3


def command(  # noqa: PLR0913  # the options of a command line
    paths: _trace_options.Paths,
    *,
    top: Annotated[
        int, typer.Option(min=0, metavar="N", help="How many rows of each table; 0 for all. JSON has all.")
    ] = 15,
    details: Annotated[
        bool | None,
        typer.Option("--details/--overview", help="Tables for each trace, or one line; default: up to 4 traces."),
    ] = None,
    devices_only: _trace_options.DevicesOnly = False,
    rules: _trace_options.Rules = None,
    processes: _trace_options.Processes = 0,
    ray: _trace_options.Ray = None,
    json: kit.Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the kernels of all traces as CSV, or --rows.")] = False,
    rows: Annotated[
        CsvRows | None,
        typer.Option(
            "--rows", metavar="ROWS", help=f"What --csv prints: {', '.join(CsvRows)}; as far as traces have them."
        ),
    ] = None,
) -> None:
    """Summarise traces: kernels, operators, idle devices, steps."""
    if json and as_csv:
        raise typer.BadParameter("--json and --csv exclude each other: choose one.")
    if rows and not as_csv:
        raise typer.BadParameter("--rows says what --csv prints: give --csv as well.")
    run, problems = _trace_options.summarise_paths(
        paths, devices_only=devices_only, rules=rules, processes=processes, ray=ray
    )
    limit = top or None
    if json:
        kit.print_json(run.to_dict())
    elif as_csv:
        print_csv(run.ranks, rows or CsvRows.KERNELS)
    else:
        _print(kit.stdout(), run, limit, detailed=len(run.ranks) <= _MAX_DETAILED if details is None else details)
    for problem in problems:
        kit.say(f"error: {problem}")
    for rank in run.ranks:
        if rank.problem:
            kit.warn(f"{kit.short(Path(rank.path))}: {rank.problem} The summary covers what can be read.")
    if problems:
        raise typer.Exit(ExitCode.UNREADABLE)


def _print(console: Console, run: RunSummary, limit: int | None, *, detailed: bool) -> None:
    if detailed:
        for rank in run.ranks:
            _print_rank(console, rank, limit)
    if len(run.ranks) > 1 or not detailed:
        _print_overview(console, run.ranks)
    for group in run.skew:
        _print_skew(console, group, limit)


def _print_overview(console: Console, ranks: Iterable[RankSummary]) -> None:
    numbers = ("rank", "span ms", "busy", "communication", "overlapped", "events")
    table = kit.table("role", *numbers, "whole", numbers=numbers)
    for rank in ranks:
        table.add_row(
            _name(rank),
            "" if rank.rank is None else str(rank.rank),
            _ms(rank.span_us),
            _percent(rank.busy_us, _sum(rank.busy_us, rank.idle_us)),
            _percent(rank.communication_us, _sum(rank.busy_us, rank.idle_us)),
            _percent(rank.overlap_us, rank.communication_us),
            "" if rank.events is None else f"{rank.events:,}",
            "yes" if rank.whole else "not proved" if rank.problem is None else "no",
        )
    console.print(table)
    console.print()


def _print_rank(console: Console, rank: RankSummary, limit: int | None) -> None:
    about = [] if rank.role is None else [_name(rank)]
    if rank.rank is not None:
        about.append(f"rank {rank.rank}")
    about.append("devices only" if rank.events is None else f"{rank.events:,} events")
    console.print(kit.short(Path(rank.path)), style="bold", soft_wrap=True)
    console.print(", ".join(about))
    for device in rank.devices:
        _print_device(console, device, rank.span_us)
    if rank.graph_launches:
        console.print(f"Launches of graphs: {rank.graph_launches:,}")
    _print_steps(console, rank, limit)
    _print_device_steps(console, rank, limit)
    for table in (
        _cores(rank),
        _categories(rank),
        _kernels(rank, limit),
        _copies(rank),
        _calls(rank, limit),
        _links(rank, limit),
        _operators(rank, limit),
    ):
        if table.row_count:
            console.print("", table)
    console.print()


def _cores(rank: RankSummary) -> Table:
    table = kit.table("core", "kernels", "total ms", "share", numbers=("kernels", "total ms", "share"))
    for core in rank.cores:
        table.add_row(core.core, f"{core.count:,}", _ms(core.total_us), f"{core.share:.1%}")
    return table


def _categories(rank: RankSummary) -> Table:
    table = kit.table("class", "calls", "total ms", "share", numbers=("calls", "total ms", "share"))
    for category in rank.categories:
        table.add_row(category.category, f"{category.count:,}", _ms(category.total_us), f"{category.share:.1%}")
    return table


def _kernels(rank: RankSummary, limit: int | None) -> Table:
    numbers = ("calls", "total ms", "mean us", "max us", "share")
    table = kit.table(*numbers, "class", "kernel", numbers=numbers)
    for kernel in rank.kernels[:limit]:
        table.add_row(
            f"{kernel.count:,}",
            _ms(kernel.total_us),
            f"{kernel.mean_us:,.1f}",
            f"{kernel.max_us:,.1f}",
            f"{kernel.share:.1%}",
            kernel.category,
            kernel.name,
        )
    return table


def _copies(rank: RankSummary) -> Table:
    table = kit.table("copy", "calls", "total ms", "size", numbers=("calls", "total ms", "size"))
    for copy in rank.copies:
        moved = "" if copy.size_bytes is None else kit.size(copy.size_bytes)
        table.add_row(copy.name, f"{copy.count:,}", _ms(copy.total_us), moved)
    return table


def _calls(rank: RankSummary, limit: int | None) -> Table:
    numbers = ("calls", "total ms", "transit ms", "wait ms", "sync ms", "idle ms")
    table = kit.table(*numbers, "group", "communication", numbers=numbers)
    for operation in rank.communication[:limit]:
        times_us = (operation.transit_us, operation.wait_us, operation.synchronisation_us, operation.idle_us)
        table.add_row(
            f"{operation.count:,}", _ms(operation.total_us), *map(_ms, times_us), _group(operation), operation.name
        )
    return table


def _links(rank: RankSummary, limit: int | None) -> Table:
    numbers = ("size", "transit ms", "GB/s", "packets", "large")
    table = kit.table("link", *numbers, "group", "communication", numbers=numbers)
    for operation in rank.communication[:limit]:
        for link in operation.links:
            table.add_row(
                link.link,
                kit.size(link.size_bytes),
                _ms(link.transit_us),
                "" if link.bytes_per_s is None else f"{link.bytes_per_s / _BYTES_PER_GB:,.1f}",
                "" if link.packets is None else f"{link.packets:,}",
                "" if link.large_packet_share is None else f"{link.large_packet_share:.1%}",
                _group(operation),
                operation.name,
            )
    return table


def _group(operation: CommunicationSummary) -> str:
    group = operation.group or ""
    return group[-_GROUP_DIGITS:] if group.isdecimal() else group


def _operators(rank: RankSummary, limit: int | None) -> Table:
    table = kit.table("operator", "calls", "self ms", "total ms", numbers=("calls", "self ms", "total ms"))
    for operator in rank.operators[:limit]:
        table.add_row(operator.name, f"{operator.count:,}", _ms(operator.self_us or 0), _ms(operator.total_us))
    return table


def _print_device(console: Console, device: DeviceSummary, recorded_us: float) -> None:
    name = f" ({device.name})" if device.name else ""
    console.print(f"Device {device.device}{name}: busy {_ms(device.busy_us)} ms, idle {_ms(device.idle_us)} ms")
    shares = f"busy {_percent(device.busy_us, device.span_us)} of the {_ms(device.span_us)} ms from first to last work"
    if recorded_us > _MUCH_LONGER * device.span_us:
        shares += f", {_percent(device.busy_us, recorded_us)} of the {_ms(recorded_us)} ms recorded"
    console.print(f"  {shares}")
    if device.communication_us:
        console.print(
            f"  communication {_ms(device.communication_us)} ms, of which "
            f"{_percent(device.overlap_us, device.communication_us)} runs beside other work"
        )
    if device.idle:
        causes = ", ".join(f"{cause.cause} {cause.share:.0%}" for cause in device.idle if cause.idle_us)
        console.print(f"  while idle, the host: {causes}")


def _print_steps(console: Console, rank: RankSummary, limit: int | None) -> None:
    if rank.iterations:
        console.print("", _iterations(rank))
    if rank.steps:
        table = kit.table("step", "duration ms", "device ms", numbers=("duration ms", "device ms"))
        for step in rank.steps[:limit]:
            device = "" if step.device_us is None else _ms(step.device_us)
            table.add_row(step.name if step.step is None else str(step.step), _ms(step.duration_us), device)
        console.print("", table)
        if more := len(rank.steps[limit:]) if limit else 0:
            console.print(f"... and {more:,} more: --top 0 shows all.")


def _iterations(rank: RankSummary) -> Table:
    """Write the times of steps by kind and stage; a percentile of which no step is beyond says nothing."""
    most = max(group.count for group in rank.iterations)
    shown = {f"p{percent} ms": fewest for percent, fewest in _PERCENTILES.items() if most >= fewest}
    # The host launches work in less time than the device takes for it.
    rates = (
        ["tokens/s of device time" if rank.devices else "tokens/s"]
        if any(group.tokens_per_s is not None for group in rank.iterations)
        else []
    )
    numbers = ("count", "p50 ms", *shown, "max ms", *rates)
    table = kit.table("steps", *numbers, numbers=numbers)
    for group in rank.iterations:
        times_us = {"p90 ms": group.p90_us, "p99 ms": group.p99_us}
        table.add_row(
            " ".join(filter(None, [_kind(group.kind, rank.unit), group.stage])),
            f"{group.count:,}",
            _ms(group.p50_us),
            *(_ms(times_us[name]) if group.count >= fewest else "" for name, fewest in shown.items()),
            _ms(group.max_us),
            *("" if group.tokens_per_s is None else f"{group.tokens_per_s:,.1f}" for _ in rates),
        )
    return table


def _kind(kind: str, unit: str | None) -> str:
    """Say what steps are; those of the recorder are what it counts."""
    if kind == "global_step" and unit is not None:
        kind = "iteration" if unit == "engine_iteration" else unit
    return kind.replace("_", " ")


def _print_device_steps(console: Console, rank: RankSummary, limit: int | None) -> None:
    steps = rank.device_steps
    columns = {
        "compute ms": [step.compute_us for step in steps],
        "communication ms": [step.communication_us for step in steps],
        "exposed ms": [step.exposed_communication_us for step in steps],
        "idle ms": [step.idle_us for step in steps],
        "bubble ms": [step.pipeline_bubble_us for step in steps],
        "prepare ms": [step.preparation_us for step in steps],
    }
    columns = {heading: times_us for heading, times_us in columns.items() if any(times_us)}
    if not columns:
        return
    table = kit.table("device", "step", *columns, numbers=tuple(columns))
    for row, step in enumerate(steps[:limit]):
        table.add_row(
            "" if step.device is None else str(step.device),
            "all" if step.step is None else str(step.step),
            *("" if (time_us := times_us[row]) is None else _ms(time_us) for times_us in columns.values()),
        )
    console.print("", table)
    if more := len(steps[limit:]) if limit else 0:
        console.print(f"... and {more:,} more: --top 0 shows all.")


def _print_skew(console: Console, group: GroupSkew, limit: int | None) -> None:
    if any(rank.collectives for rank in group.ranks):
        what = " ".join(filter(None, [group.role, None if group.replica is None else str(group.replica)]))
        who = "no rank stands out" if group.straggler is None else f"rank {group.straggler} arrives last most often"
        console.print(f"Collectives{f' of {what}' if what else ''}: {who}", style="bold")
        numbers = ("rank", "clock offset us", "collectives", "last", "late ms", "waited ms")
        table = kit.table(*numbers, numbers=numbers)
        for rank in group.ranks:
            table.add_row(
                "" if rank.rank is None else str(rank.rank),
                f"{rank.clock_offset_us:,.1f}",
                f"{rank.collectives:,}",
                f"{rank.last:,}",
                _ms(rank.late_us),
                _ms(rank.wait_us),
            )
        console.print(table)
        table = kit.table("collective", "calls", "transfer ms", "skew ms", numbers=("calls", "transfer ms", "skew ms"))
        for collective in group.collectives[:limit]:
            table.add_row(
                collective.name, f"{collective.count:,}", _ms(collective.transfer_us), _ms(collective.skew_us)
            )
        console.print("", table)
    if group.note:
        console.print(group.note, soft_wrap=True)
    console.print()


def _name(rank: RankSummary) -> str:
    if rank.role is None:
        return kit.short(Path(rank.path))
    return rank.role if rank.replica is None else f"{rank.role}/{rank.replica}"


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def _percent(part: float | None, whole: float | None) -> str:
    if part is None or whole is None:
        return ""
    return f"{part / whole if whole else 0.0:.1%}"


def _ms(time_us: float) -> str:
    return f"{time_us / 1000:,.3f}"
