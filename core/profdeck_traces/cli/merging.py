"""Writes the traces of many ranks, roles and engines into one: what `profdeck merge` and `profdeck view` share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from profdeck_traces.base.errors import TraceError
from profdeck_traces.cli import arguments, terminal, trace_range

if TYPE_CHECKING:
    from profdeck_traces.analysis.clock_alignment import Alignment, Shifts
    from profdeck_traces.base.progress import Progress
    from profdeck_traces.inputs.sources import TraceSource
    from profdeck_traces.writing.selection import Selection

PERFETTO = (".pftrace", ".pftrace.gz")
"""Endings of slim traces."""

Align = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="How to align clocks: none, anchors (of the recorder), collectives. "
        "Default: anchors if the ranks are of several hosts, else none.",
    ),
]
Role = Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this role; may be given again.")]
Rank = Annotated[
    list[range] | None,
    typer.Option(metavar="RANGE", parser=trace_range.numbers, help="Only these ranks: 3 or 0..7; may be given again."),
]


@attrs.frozen(kw_only=True)
class Merge:
    """What is to be merged."""

    paths: Sequence[Path]
    align: str | None
    roles: Sequence[str] | None
    ranks: Sequence[range] | None
    part: trace_range.TracePart
    processes: int


@attrs.frozen(kw_only=True)
class Merged:
    """What became of it."""

    sources: Sequence[TraceSource]
    how: Alignment
    unaligned: int
    """How many traces kept their clocks, though others were aligned."""
    clock_error_ns: int | None
    """By how much aligned times can be wrong; see `profdeck_traces.analysis.clock_alignment.Shifts`."""
    events: int
    device_events: int | None
    """Work of devices, of a slim trace."""
    size_bytes: int
    problems: Sequence[str]
    """What is wrong with the sources."""


@attrs.frozen
class _Written:
    """What became of the new file."""

    events: int
    device_events: int | None
    size_bytes: int
    problems: Sequence[str]
    """What is wrong with the sources."""


@attrs.frozen
class _Piece:
    """One trace, and what of it comes where."""

    source: TraceSource
    shift_ns: int
    selection: Selection | None
    """``None``: all of it."""


def with_operators(merge: Merge) -> Merge:
    """Return the same with operators and calls of the runtime in a slim trace."""
    from profdeck_traces.writing.slim import WITH_OPERATORS

    return attrs.evolve(merge, part=attrs.evolve(merge.part, categories=tuple(sorted(WITH_OPERATORS))))


def write(merge: Merge, destination: Path) -> Merged:
    """Write a new file, slim if its name says so.

    Raises:
        TraceError: There is nothing to merge, or it cannot be read.
        ConfigError: The file cannot be written.
    """
    from profdeck_traces.analysis.clock_alignment import Alignment
    from profdeck_traces.inputs.sources import find_sources

    slim = destination.name.endswith(PERFETTO)
    sources = _chosen(find_sources(merge.paths, on_left_out=arguments.left_out), merge.roles, merge.ranks)
    if not slim:
        sources = _in_json(sources)
    how = _alignment(merge.align, sources)
    count = arguments.cores(merge.processes)
    shifts = _shifts(sources, how, count)
    if len(shifts.unknown) == len(sources):
        how = Alignment.NONE  # what was asked for found nothing
    pieces = list(map(_Piece, sources, shifts.shift_ns, _selections(sources, merge.part)))
    with terminal.show_progress("Merging the traces") as on_progress, trace_range.writing(destination):
        written = (_write_slim if slim else _write_chrome)(pieces, destination, count, on_progress)
    unaligned = len(shifts.unknown) if how is not Alignment.NONE else 0
    return Merged(
        sources=sources,
        how=how,
        unaligned=unaligned,
        clock_error_ns=shifts.error_ns,
        events=written.events,
        device_events=written.device_events,
        size_bytes=written.size_bytes,
        problems=written.problems,
    )


def _chosen(
    sources: list[TraceSource], roles: Sequence[str] | None, ranks: Sequence[range] | None
) -> list[TraceSource]:
    """Leave out what is of other roles or ranks.

    Raises:
        TraceError: Nothing is left.
    """
    chosen = [
        source
        for source in sources
        if (not roles or (source.facts is not None and source.facts.role in roles))
        and (not ranks or any(source.rank in some for some in ranks))
    ]
    if not chosen:
        there = sorted({source.label for source in sources if source.facts or source.rank is not None})
        raise TraceError(f"No trace is of these roles and ranks. There are: {', '.join(there) or 'no manifests'}.")
    return chosen


def _in_json(sources: list[TraceSource]) -> list[TraceSource]:
    """Leave out what is no JSON.

    Raises:
        TraceError: Nothing is left.
    """
    kept = [source for source in sources if source.is_json]
    for source in sources:
        if not source.is_json:
            terminal.warn(
                f"{terminal.short_path(source.path)} is skipped. It can be merged only into a slim trace (.pftrace)."
            )
    if not kept:
        raise TraceError("There is no trace in JSON to merge; a slim trace (-o OUT.pftrace) can have the others.")
    return kept


def _alignment(how: str | None, sources: Sequence[TraceSource]) -> Alignment:
    from profdeck_traces.analysis.clock_alignment import Alignment

    if how is None:
        hosts = {source.facts.host for source in sources if source.facts}
        return Alignment.ANCHORS if len(hosts) > 1 else Alignment.NONE
    try:
        return Alignment(how)
    except ValueError:
        raise typer.BadParameter(f"--align {how}: it is one of {', '.join(Alignment)}.") from None


def _shifts(sources: Sequence[TraceSource], how: Alignment, processes: int) -> Shifts:
    from profdeck_traces.analysis.clock_alignment import align

    with terminal.show_progress("Aligning the clocks") as on_progress:
        shifts = align(sources, how, processes=processes, on_progress=on_progress)
    for source in shifts.unknown:
        terminal.warn(f"{terminal.short_path(source.path)}: no clock data for --align {how}. The times are unchanged.")
    return shifts


def _selections(sources: Sequence[TraceSource], part: trace_range.TracePart) -> list[Selection | None]:
    if part.is_all:
        return [None] * len(sources)
    from profdeck_traces.base.progress import Meter

    selections: list[Selection | None] = []
    with terminal.show_progress("Finding the events to keep") as on_progress:
        meter = Meter(sum(source.size_bytes for source in sources), on_progress)
        for source in sources:
            selections.append(part.selection(source.path, meter.within))
            meter.passed(source.size_bytes)
    return selections


def _write_chrome(pieces: Sequence[_Piece], destination: Path, processes: int, on_progress: Progress) -> _Written:
    from profdeck_traces.merge import MergeSource, merge_traces
    from profdeck_traces.merge.origin import far_origin_ns

    sources = [
        MergeSource(piece.source.path, piece.source.label, number, piece.shift_ns, piece.selection)
        for number, piece in enumerate(pieces)
    ]
    check = merge_traces(
        sources,
        destination,
        gzip=destination.name.endswith(".gz"),
        origin_ns=far_origin_ns(sources),
        processes=processes,
        on_progress=on_progress,
    )
    return _Written(check.events, None, check.size_bytes, [check.problem] if check.problem else [])


def _write_slim(pieces: Sequence[_Piece], destination: Path, processes: int, on_progress: Progress) -> _Written:
    from profdeck_traces.writing.selection import Selection
    from profdeck_traces.writing.slim import LANES, SlimSource, write_slim

    chosen = [piece.selection or Selection() for piece in pieces]
    written = write_slim(
        [
            SlimSource(
                path=piece.source.path,
                label=piece.source.label,
                sort_index=number,
                shift_ns=piece.shift_ns,
                selection=attrs.evolve(selection, categories=selection.categories or LANES),
            )
            for number, (piece, selection) in enumerate(zip(pieces, chosen, strict=True))
        ],
        destination,
        gzip=destination.name.endswith(".gz"),
        processes=processes,
        on_progress=on_progress,
    )
    return _Written(written.slices, written.device_slices, written.size_bytes, written.problems)
