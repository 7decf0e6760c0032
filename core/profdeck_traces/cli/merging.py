"""Merges traces for `profdeck merge` and `profdeck view`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from profdeck_traces.analysis.formatting import ranges
from profdeck_traces.analysis.step_names import GLOBAL_STEP
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.text import plural
from profdeck_traces.cli import arguments, terminal, trace_range

if TYPE_CHECKING:
    from profdeck_traces.account.owned_path import RankWaits
    from profdeck_traces.analysis.clock_alignment import Alignment, Shifts
    from profdeck_traces.base.progress import Progress
    from profdeck_traces.inputs.sources import TraceSource
    from profdeck_traces.writing.selection import Selection
    from profdeck_traces.writing.slim import Written

PERFETTO = (".pftrace", ".pftrace.gz")
"""File name suffixes of slim traces."""

_USE_ITERATIONS = " For engine iterations, use --iterations; they count from 0 in each trace."

Align = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="Clock alignment: none, anchors (annotations of the recorder) or collectives. "
        "Default: anchors for traces from several hosts, otherwise none.",
    ),
]
Role = Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this role. Repeatable.")]
Rank = Annotated[
    list[range] | None,
    typer.Option(
        metavar="RANGE", parser=trace_range.parse_range, help="Only these ranks, such as 3 or 0..7. Repeatable."
    ),
]


CriticalPath = Annotated[
    bool | None,
    typer.Option(
        "--critical-path/--no-critical-path",
        help="Add the critical path of the steps of each trace as a track. Default: only to slim traces without "
        "--category.",
        show_default=False,
    ),
]


@attrs.frozen(kw_only=True)
class Merge:
    """Parameters of a merge."""

    paths: Sequence[Path]
    align: str | None
    """Value of ``--align``."""
    roles: Sequence[str] | None
    """Roles to merge. Default: all."""
    ranks: Sequence[range] | None
    """Ranks to merge. Default: all."""
    part: trace_range.TracePart
    """Events to keep from each trace."""
    processes: int
    """Number of traces to read in parallel; 0: one per core."""
    with_path: bool = False
    """True to add the critical path of each trace."""


@attrs.frozen(kw_only=True)
class Merged:
    """Result of a merge."""

    sources: Sequence[TraceSource]
    alignment: Alignment
    unaligned: int
    """Number of traces whose clocks were not aligned, if other clocks were."""
    clock_error_ns: int | None
    """Maximum error of aligned times; see `profdeck_traces.analysis.clock_alignment.Shifts`."""
    written: Written

    @property
    def contents(self) -> str:
        """Numbers of traces and events, and the size."""
        written, count = self.written, len(self.sources)
        exception = " (not all could be read completely)" if written.problems else ""
        traces = f"{count - written.unread} of {plural(count, 'trace')}" if written.unread else plural(count, "trace")
        return f"{traces}{exception}, {plural(written.events, 'event')}, {terminal.size(written.size_bytes)}"


_Aligned = tuple["TraceSource", int, "Selection | None", "RankWaits | None"]
"""A source trace, its clock shift in nanoseconds, the events to keep (``None`` for all), and its waits for peers."""


def with_operators(merge: Merge) -> Merge:
    """Return a copy of `merge` that also keeps operators and runtime calls in a slim trace."""
    from profdeck_traces.writing.slim import WITH_OPERATORS

    return attrs.evolve(merge, part=attrs.evolve(merge.part, categories=tuple(sorted(WITH_OPERATORS))))


def write_merged(merge: Merge, destination: Path) -> Merged:
    """Merge traces into a new file. A slim trace is written if the file name has a suffix in `PERFETTO`.

    Raises:
        TraceError: No trace matches, or a trace cannot be read.
        ConfigError: The file cannot be written.
    """
    from profdeck_traces.analysis.clock_alignment import Alignment
    from profdeck_traces.inputs.sources import find_sources

    is_slim = destination.name.endswith(PERFETTO)
    sources = _matching(find_sources(merge.paths, on_left_out=arguments.warn_skipped), merge.roles, merge.ranks)
    if not is_slim:
        sources = _only_json(sources)
    if merge.part.steps is not None:
        sources = _with_global_steps(sources, merge.part.steps)
    alignment = _alignment(merge.align, sources)
    processes = arguments.process_count(merge.processes)
    shifts = _shifts(sources, alignment, processes)
    if len(shifts.unknown) == len(sources):
        alignment = Alignment.NONE  # no trace has clock data
    waits = _waits(sources, processes) if merge.with_path and len(sources) > 1 else [None] * len(sources)
    aligned = list(zip(sources, shifts.shift_ns, _selections(sources, merge.part), waits, strict=True))
    with terminal.show_progress("Merging the traces") as on_progress, trace_range.write_errors(destination):
        write = _write_slim if is_slim else _write_chrome
        written = write(aligned, destination, processes, on_progress, with_path=merge.with_path)
    for reason in written.without_path:
        terminal.warn(f"Could not add the critical path: {reason}")
    return Merged(
        sources=sources,
        alignment=alignment,
        unaligned=0 if alignment is Alignment.NONE else len(shifts.unknown),
        clock_error_ns=shifts.error_ns,
        written=written,
    )


def _matching(
    sources: list[TraceSource], roles: Sequence[str] | None, ranks: Sequence[range] | None
) -> list[TraceSource]:
    """Return the traces of the requested roles and ranks.

    Raises:
        TraceError: No trace matches.
    """
    matching = [
        source
        for source in sources
        if (not roles or (source.facts is not None and source.facts.role in roles))
        and (not ranks or any(source.rank in numbers for numbers in ranks))
    ]
    if not matching:
        labels = sorted({source.label for source in sources if source.facts or source.rank is not None})
        raise TraceError(
            "No trace matches --role and --rank. "
            + (f"Available: {', '.join(labels)}." if labels else "The traces have no manifests.")
        )
    return matching


def _only_json(sources: list[TraceSource]) -> list[TraceSource]:
    """Return the JSON traces, and print a warning for each other trace.

    Raises:
        TraceError: There is no JSON trace.
    """
    json_sources = [source for source in sources if source.is_json]
    for source in sources:
        if not source.is_json:
            terminal.warn(
                f"{terminal.short_path(source.path)} is skipped. It can be merged only into a slim trace (.pftrace)."
            )
    if not json_sources:
        raise TraceError("There are no JSON traces. To merge these traces, use a slim trace: -o OUT.pftrace")
    return json_sources


def _alignment(option: str | None, sources: Sequence[TraceSource]) -> Alignment:
    """Parse the value of ``--align``, or return the default for the sources."""
    from profdeck_traces.analysis.clock_alignment import Alignment

    if option is None:
        hosts = {source.facts.host for source in sources if source.facts}
        return Alignment.ANCHORS if len(hosts) > 1 else Alignment.NONE
    try:
        return Alignment(option)
    except ValueError:
        raise typer.BadParameter(f"--align {option}: expected one of {', '.join(Alignment)}.") from None


def _shifts(sources: Sequence[TraceSource], alignment: Alignment, processes: int) -> Shifts:
    from profdeck_traces.analysis.clock_alignment import align

    with terminal.show_progress("Aligning the clocks") as on_progress:
        shifts = align(sources, alignment, processes=processes, on_progress=on_progress)
    for source in shifts.unknown:
        terminal.warn(
            f"{terminal.short_path(source.path)}: no clock data for --align {alignment}. The times are unchanged."
        )
    return shifts


def _waits(sources: Sequence[TraceSource], processes: int) -> Sequence[RankWaits | None]:
    """Return each trace's waits for other ranks on its critical path. Use cached results if available."""
    from profdeck_traces.analysis.run_summary import rank_waits
    from profdeck_traces.base.result_cache import ResultCache

    with terminal.show_progress("Comparing the ranks") as on_progress:
        return rank_waits(sources, processes=processes, cache=ResultCache.of_user(), on_progress=on_progress)


def _selections(sources: Sequence[TraceSource], part: trace_range.TracePart) -> list[Selection | None]:
    if part.is_all:
        return [None] * len(sources)
    from profdeck_traces.base.progress import Meter

    selections: list[Selection | None] = []
    with terminal.show_progress("Finding the events to keep") as on_progress:
        meter = Meter(sum(source.size_bytes for source in sources), on_progress)
        for source in sources:
            selections.append(_part_of(source, part).selection(source.path, meter.within))
            meter.passed(source.size_bytes)
    return selections


def _with_global_steps(sources: list[TraceSource], steps: range) -> list[TraceSource]:
    """Return the traces whose capture includes any of the global steps, and all traces without a manifest.

    Raises:
        TraceError: Every trace has a manifest, but one of the steps is not in any capture.
    """
    captured = {step for source in sources for step in _captured_steps(source)}
    missing = [step for step in steps if step not in captured]
    if missing and all(source.facts is not None for source in sources):
        counted = any(source.facts is not None and source.facts.unit != GLOBAL_STEP for source in sources)
        raise TraceError(
            f"--steps {ranges([*steps])}: no trace covers global step {ranges(missing)}. Captured: "
            f"{ranges(sorted(captured)) or 'none'}.{_USE_ITERATIONS if counted else ''}"
        )
    return [
        source for source in sources if source.facts is None or not captured.isdisjoint(_common_steps(source, steps))
    ]


def _captured_steps(source: TraceSource) -> range:
    """Return the global steps of a trace's capture, or an empty range if the trace has no manifest."""
    if source.facts is None:
        return range(0)
    first = source.facts.first_step
    return range(first, max(first, source.facts.last_step or first) + 1)


def _common_steps(source: TraceSource, steps: range) -> range:
    captured = _captured_steps(source)
    return range(max(steps.start, captured.start), min(steps.stop, captured.stop))


def _part_of(source: TraceSource, part: trace_range.TracePart) -> trace_range.TracePart:
    """Convert the requested global steps to the part to read from one trace.

    A capture of a stage, mini-batches or engine iterations has no global step annotations. It belongs entirely to its
    global step, so its events are not filtered by step.
    """
    if part.steps is None or source.facts is None:
        return part
    is_within_step = source.facts.unit != GLOBAL_STEP or source.facts.stage is not None
    return attrs.evolve(part, steps=None if is_within_step else _common_steps(source, part.steps))


def _write_chrome(
    aligned: Sequence[_Aligned], destination: Path, processes: int, on_progress: Progress, *, with_path: bool
) -> Written:
    from profdeck_traces.merge import MergeSource, merge_traces
    from profdeck_traces.writing.selection import Selection
    from profdeck_traces.writing.slim import Written

    sources = [
        MergeSource(
            source.path,
            source.label,
            number,
            shift_ns,
            selection,
            (selection or Selection()).host_bounds if with_path else None,
            waits,
        )
        for number, (source, shift_ns, selection, waits) in enumerate(aligned)
    ]
    unread: list[MergeSource] = []
    without_path: list[str] = []
    check = merge_traces(
        sources,
        destination,
        gzip=destination.name.endswith(".gz"),
        origin_ns=None,
        processes=processes,
        on_progress=on_progress,
        on_unread=unread.append,
        on_missing_path=without_path.append,
    )
    return Written(
        events=check.events,
        size_bytes=check.size_bytes,
        problems=[check.problem] if check.problem else [],
        unread=len(unread),
        without_path=without_path,
    )


def _write_slim(
    aligned: Sequence[_Aligned], destination: Path, processes: int, on_progress: Progress, *, with_path: bool
) -> Written:
    from profdeck_traces.writing.selection import Selection
    from profdeck_traces.writing.slim import LANES, SlimSource, write_slim

    return write_slim(
        [
            SlimSource(
                path=source.path,
                label=source.label,
                sort_index=number,
                shift_ns=shift_ns,
                selection=attrs.evolve(
                    selection or Selection(), categories=(selection and selection.categories) or LANES
                ),
                with_path=with_path,
                waits=waits,
            )
            for number, (source, shift_ns, selection, waits) in enumerate(aligned)
        ],
        destination,
        gzip=destination.name.endswith(".gz"),
        processes=processes,
        on_progress=on_progress,
    )
