"""Tables of `profdeck summary --full`: first for each trace, then across the ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from profdeck_traces.analysis.collective_skew import can_name_straggler
from profdeck_traces.analysis.formatting import percent
from profdeck_traces.analysis.rank_labels import label_of, labels_of, of_run, runs_of
from profdeck_traces.analysis.short_names import cut_middle, full_name, short_kernel
from profdeck_traces.base.text import printable
from profdeck_traces.cli import terminal, text_layout
from profdeck_traces.cli.text_layout import aligned
from profdeck_traces.inputs.facts import ENGINE_ITERATION

if TYPE_CHECKING:
    from profdeck_traces.analysis.model import DeviceSummary, GroupSkew, RankSummary, RunSummary
    from profdeck_traces.analysis.recorder_model import CommunicationSummary

_PERCENTILES = {90: 10, 99: 100}
"""Minimum number of steps for each percentile, so that at least one step exceeds it."""
_FLOPS_PER_GFLOP = 1e9
_BYTES_PER_GB = 1_000_000_000
# If the recording exceeds the active period of a device by this factor, the busy share of the recording is shown, too.
_MUCH_LONGER = 1.1
# Kernel names contain this many trailing digits of the process group's ID.
_GROUP_DIGITS = 3

_Table = list[Text]


def tables(run: RunSummary, width: int, limit: int | None) -> _Table:
    """Format all tables of a run.

    Args:
        run: The summary.
        width: Line width in terminal columns.
        limit: Maximum number of rows per table; ``None`` for no limit.
    """
    lines: _Table = []
    labels, runs = labels_of(run.ranks), runs_of(run.ranks)
    for rank in run.ranks:
        lines += _of_rank(rank, labels[rank.path], width, limit)
    if len(run.ranks) > 1:
        lines += [*_overview(run.ranks, labels, width), Text()]
    for group in run.skew:
        lines += _skew(group, of_run(group.run, runs), width, limit)
    return lines


def _of_rank(rank: RankSummary, label: str, width: int, limit: int | None) -> _Table:
    about = [] if label in rank.path else [label]
    about.append("devices only" if rank.events is None else f"{rank.events:,} events")
    if rank.graph_launches:
        about.append(f"{rank.graph_launches:,} launches of graphs")
    lines = [Text(printable(terminal.short_path(Path(rank.path))), style="bold"), Text(", ".join(about))]
    for device in rank.devices:
        lines += _device(device, rank.span_us)
    makers: tuple[Callable[[RankSummary, int, int | None], _Table], ...] = (
        _iterations, _steps, _recorder_steps, _cores, _classes, _kernels, _copies, _runtime, _collectives, _calls,
        _links, _operators, _shapes, _annotations, _functions, _memory,
    )  # fmt: skip
    for make in makers:
        if table := make(rank, width, limit):
            lines += [Text(), *table]
    return [*lines, Text()]


def _device(device: DeviceSummary, recorded_us: float) -> Iterator[Text]:
    name = f" ({printable(device.name)})" if device.name else ""
    yield Text(f"Device {device.device}{name}: busy {_ms(device.busy_us)} ms, idle {_ms(device.idle_us)} ms")
    shares = f"busy {_part(device.busy_us, device.span_us)} of the {_ms(device.span_us)} ms from first to last work"
    if recorded_us > _MUCH_LONGER * device.span_us:
        shares += f", {_part(device.busy_us, recorded_us)} of the {_ms(recorded_us)} ms recorded"
    yield Text(f"  {shares}")
    if device.communication_us:
        beside = _part(device.overlap_us, device.communication_us)
        yield Text(f"  communication {_ms(device.communication_us)} ms, of which {beside} runs beside other work")
    if causes := ", ".join(f"{cause.cause} {percent(cause.share)}" for cause in device.idle if cause.share >= 0.0005):  # noqa: PLR2004 - smaller shares are shown as 0.0%
        yield Text(f"  while idle, the host: {causes}")
    for gap in device.gaps[:3]:
        where = f" in step {gap.step}" if gap.step is not None else ""
        host = f" ({cut_middle(printable(gap.host), 40)})" if gap.host else ""
        yield Text(f"  gap of {_ms(gap.duration_us)} ms at {_ms(gap.start_us)} ms{where}: {gap.cause}{host}")


def _iterations(rank: RankSummary, width: int, _: int | None) -> _Table:
    """Format step times by kind and stage. Percentiles that no step exceeds are omitted."""
    rows = [
        [
            f"{group.count:,}",
            _ms(group.p50_us),
            _ms(group.p90_us) if group.count >= _PERCENTILES[90] else "",
            _ms(group.p99_us) if group.count >= _PERCENTILES[99] else "",
            _ms(group.max_us) if group.count > 1 else "",
            _number(group.tokens_per_wall_s),
            # Based on device time, because the host may launch the work faster than the device executes it.
            _number(group.tokens_per_s),
            " ".join(filter(None, [group.stage, _kind(group.kind, rank.unit)])),
        ]
        for group in rank.iterations
    ]
    of_time = "of device time" if rank.devices else "without pauses"
    header = ("count", "p50 ms", "p90 ms", "p99 ms", "max ms", "tokens/s", of_time, "steps")
    return aligned(header, rows, width)


def _kind(kind: str, unit: str | None) -> str:
    """Return the kind of a step for display. The recorder's steps are named after the unit that it counts."""
    if kind == "global_step" and unit is not None:
        kind = "profiler_step" if unit == ENGINE_ITERATION else unit
    return kind.replace("_", " ")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _steps(rank: RankSummary, width: int, limit: int | None) -> _Table:
    def on_device(step: object, field: str) -> str:
        times = [float(getattr(of, field)) for of in getattr(step, "devices", ())]
        return _ms(sum(times) / len(times)) if times and any(times) else ""

    rows = [
        [
            _ms(step.duration_us),
            on_device(step, "duration_us"),
            on_device(step, "busy_us"),
            on_device(step, "exposed_communication_us"),
            on_device(step, "idle_us"),
            "" if step.device_us is None else _ms(step.device_us),
            f"{step.name} (cold)" if step.cold else step.name,
        ]
        for step in rank.steps[:limit]
    ]
    header = ("ms", "device ms", "busy ms", "exposed ms", "idle ms", "kernels ms", "step")
    return _with_rest(aligned(header, rows, width), len(rank.steps), limit)


def _with_rest(table: _Table, count: int, limit: int | None) -> _Table:
    more = count - limit if limit else 0
    return [*table, Text(f"... and {more:,} more: --top 0 shows all.")] if more > 0 else table


def _recorder_steps(rank: RankSummary, width: int, limit: int | None) -> _Table:
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
        return []
    rows = [
        [
            "" if step.device is None else str(step.device),
            *("" if (time_us := times_us[row]) is None else _ms(time_us) for times_us in columns.values()),
            "all" if step.step is None else str(step.step),
        ]
        for row, step in enumerate(steps[:limit])
    ]
    return _with_rest(aligned(("device", *columns, "recorder's step"), rows, width), len(steps), limit)


def _cores(rank: RankSummary, width: int, _: int | None) -> _Table:
    rows = [[f"{core.count:,}", _ms(core.total_us), percent(core.share), core.core] for core in rank.cores]
    return aligned(("kernels", "total ms", "share", "core"), rows, width)


def _classes(rank: RankSummary, width: int, _: int | None) -> _Table:
    rows = [[f"{of.count:,}", _ms(of.total_us), percent(of.share), of.category] for of in rank.categories]
    return aligned(("calls", "total ms", "share", "class"), rows, width)


def _kernels(rank: RankSummary, width: int, limit: int | None) -> _Table:
    rows = [
        [
            f"{kernel.count:,}",
            _ms(kernel.total_us),
            f"{kernel.mean_us:,.1f}",
            f"{kernel.max_us:,.1f}",
            percent(kernel.share),
            kernel.category,
            kernel.name,
        ]
        for kernel in rank.kernels[:limit]
    ]
    cut = functools.partial(_cut, full=width >= text_layout.UNLIMITED)
    header = ("calls", "total ms", "mean us", "max us", "share", "class", "kernel")
    return _with_rest(aligned(header, rows, width, left=("class",), cut=cut), len(rank.kernels), limit)


def _cut(name: str, width: int, *, full: bool) -> str:
    return full_name(name) if full else short_kernel(name, width)


def _copies(rank: RankSummary, width: int, _: int | None) -> _Table:
    rows = [
        [
            f"{copy.count:,}",
            _ms(copy.total_us),
            "" if copy.size_bytes is None else terminal.size(copy.size_bytes),
            "" if not copy.size_bytes else f"{copy.size_bytes / copy.total_us / 1000:,.1f}" if copy.total_us else "",
            copy.name,
        ]
        for copy in rank.copies
    ]
    return aligned(("calls", "total ms", "size", "GB/s", "copy"), rows, width)


def _runtime(rank: RankSummary, width: int, limit: int | None) -> _Table:
    rows = [
        [f"{call.count:,}", _ms(call.total_us), f"{call.max_us:,.1f}", call.state, call.name]
        for call in rank.runtime[:limit]
    ]
    header = ("calls", "total ms", "max us", "does", "runtime call")
    return _with_rest(aligned(header, rows, width, left=("does",)), len(rank.runtime), limit)


def _shapes(rank: RankSummary, width: int, limit: int | None) -> _Table:
    rows = [
        [
            f"{one.count:,}",
            _ms(one.total_us),
            "" if one.flops is None else f"{one.flops / _FLOPS_PER_GFLOP:,.3f}",
            one.dtypes or "",
            one.name,
            one.shapes,
        ]
        for one in rank.shapes[:limit]
    ]
    header = ("calls", "total ms", "GFLOP", "dtypes", "operator", "shapes")
    return _with_rest(aligned(header, rows, width, left=("dtypes", "operator")), len(rank.shapes), limit)


def _memory(rank: RankSummary, width: int, limit: int | None) -> _Table:
    rows = [
        [
            terminal.size(one.peak_allocated_bytes),
            terminal.size(one.peak_reserved_bytes) if one.peak_reserved_bytes else "",
            _ms(one.peak_us),
            one.device,
        ]
        for one in rank.memory[:limit]
    ]
    return aligned(("allocated at most", "reserved", "at ms", "memory"), rows, width)


def _functions(rank: RankSummary, width: int, limit: int | None) -> _Table:
    rows = [[f"{one.count:,}", _ms(one.self_us), _ms(one.total_us), one.name] for one in rank.functions[:limit]]
    header = ("calls", "own ms", "total ms", "Python function")
    return _with_rest(aligned(header, rows, width), len(rank.functions), limit)


def _collectives(rank: RankSummary, width: int, limit: int | None) -> _Table:
    rows = [
        [
            f"{one.count:,}",
            _ms(one.total_us),
            f"{one.min_us:,.1f}",
            "" if one.size_bytes is None else terminal.size(one.size_bytes),
            "" if one.bus_bytes_per_s is None else f"{one.bus_bytes_per_s / _BYTES_PER_GB:,.1f}",
            one.group,
            one.name,
        ]
        for one in rank.collectives[:limit]
    ]
    header = ("calls", "total ms", "min us", "size", "bus GB/s", "group", "collective")
    return _with_rest(aligned(header, rows, width, left=("group",)), len(rank.collectives), limit)


def _calls(rank: RankSummary, width: int, limit: int | None) -> _Table:
    rows = []
    for operation in rank.communication[:limit]:
        times_us = (operation.transit_us, operation.wait_us, operation.synchronisation_us, operation.idle_us)
        rows.append(
            [f"{operation.count:,}", _ms(operation.total_us), *map(_ms, times_us), _group(operation), operation.name]
        )
    header = ("calls", "total ms", "transit ms", "wait ms", "sync ms", "idle ms", "group", "communication")
    return aligned(header, rows, width, left=("group",))


def _links(rank: RankSummary, width: int, limit: int | None) -> _Table:
    rows = [
        [
            link.link,
            terminal.size(link.size_bytes),
            _ms(link.transit_us),
            "" if link.bytes_per_s is None else f"{link.bytes_per_s / _BYTES_PER_GB:,.1f}",
            "" if link.packets is None else f"{link.packets:,}",
            "" if link.large_packet_share is None else percent(link.large_packet_share),
            _group(operation),
            operation.name,
        ]
        for operation in rank.communication[:limit]
        for link in operation.links
    ]
    header = ("link", "size", "transit ms", "GB/s", "packets", "large", "group", "communication")
    return aligned(header, rows, width, left=("link", "group"))


def _group(operation: CommunicationSummary) -> str:
    group = operation.group or ""
    return group[-_GROUP_DIGITS:] if group.isdecimal() else group


def _operators(rank: RankSummary, width: int, limit: int | None) -> _Table:
    rows = [
        [f"{one.count:,}", "" if one.self_us is None else _ms(one.self_us), _ms(one.total_us), one.name]
        for one in rank.operators[:limit]
    ]
    return _with_rest(aligned(("calls", "self ms", "total ms", "operator"), rows, width), len(rank.operators), limit)


def _annotations(rank: RankSummary, width: int, limit: int | None) -> _Table:
    marks = {step.name for step in rank.steps}
    found = sorted((one for one in rank.annotations if one.name not in marks), key=lambda one: -one.total_us)
    rows = [[f"{one.count:,}", _ms(one.total_us), f"{one.max_us / 1000:,.3f}", one.name] for one in found[:limit]]
    return _with_rest(aligned(("calls", "total ms", "max ms", "stage or annotation"), rows, width), len(found), limit)


def _overview(ranks: Sequence[RankSummary], labels: Mapping[str, str], width: int) -> _Table:
    rows = [
        [
            _ms(rank.span_us),
            _part(rank.busy_us, _sum(rank.busy_us, rank.idle_us)),
            _part(rank.communication_us, _sum(rank.busy_us, rank.idle_us)),
            _part(rank.overlap_us, rank.communication_us),
            "" if rank.events is None else f"{rank.events:,}",
            "yes" if rank.whole else "not proved" if rank.problem is None else "no",
            rank.capture or "",
            labels[rank.path],
        ]
        for rank in ranks
    ]
    if len({row[-2] for row in rows}) == 1:
        for row in rows:
            row[-2] = ""
    header = ("span ms", "busy", "communication", "overlapped", "events", "whole", "capture", "trace")
    return aligned(header, rows, width, left=("whole", "capture"))


def _skew(group: GroupSkew, of_run: str, width: int, limit: int | None) -> _Table:
    lines: _Table = []
    if any(rank.collectives for rank in group.ranks):
        what = label_of(group.role, group.replica, None, "") + of_run
        who = "no rank stands out" if can_name_straggler(group) else "too few collectives to name a rank"
        if group.straggler is not None:
            who = f"the others wait for rank {group.straggler}"
        lines.append(Text(f"Collectives{f' of {what}' if what else ''}: {who}", style="bold"))
        rows = [
            [
                f"{rank.clock_offset_us:,.1f}",
                f"{rank.collectives:,}",
                f"{rank.last:,}",
                _ms(rank.late_us),
                _ms(rank.wait_us),
                "" if rank.rank is None else str(rank.rank),
            ]
            for rank in group.ranks
        ]
        lines += aligned(("clock offset us", "collectives", "last", "late ms", "waited ms", "rank"), rows, width)
        rows = [
            [f"{one.count:,}", _ms(one.transfer_us), _ms(one.skew_us), one.name] for one in group.collectives[:limit]
        ]
        lines += [Text(), *aligned(("calls", "transfer ms", "skew ms", "collective"), rows, width)]
    if group.note:
        lines += text_layout.wrapped(group.note, width)
    return [*lines, Text()]


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def _part(part: float | None, whole: float | None) -> str:
    if part is None or whole is None:
        return ""
    return f"{part / whole if whole else 0.0:.1%}"


def _ms(time_us: float) -> str:
    return f"{time_us / 1000:,.3f}"
