"""`profdeck merge`: the traces of many ranks, roles and engines as one timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from profdeck.base.errors import ConfigError, TraceError
from profdeck.cli import _trace_options, _trace_part, kit
from profdeck.cli.kit import ExitCode

if TYPE_CHECKING:
    from profdeck.base.progress import Progress
    from profdeck.traces.analysis.alignment import Alignment, Shifts
    from profdeck.traces.sources import TraceSource
    from profdeck.traces.writing.selection import Selection

_CHROME, _PERFETTO = (".json", ".json.gz"), (".pftrace", ".pftrace.gz")


@attrs.frozen
class Written:
    """What became of the new file."""

    events: int
    size_bytes: int
    problems: Sequence[str]
    """What is wrong with the sources."""


@attrs.frozen
class WrittenPiece:
    """One trace, and what of it comes where."""

    source: TraceSource
    shift_ns: int
    selection: Selection | None
    """``None``: all of it."""


def command(  # noqa: PLR0913  # the options of a command line
    paths: _trace_options.Paths,
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="OUT", help="The new file: .json, or .pftrace for a slim one; .gz compresses."
        ),
    ],
    align: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="How to align clocks: none, anchors (of the recorder), collectives. "
            "Default: anchors if the ranks are of several hosts, else none.",
        ),
    ] = None,
    role: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this role; may be given again.")] = None,
    rank: Annotated[
        list[range] | None,
        typer.Option(
            metavar="RANGE", parser=_trace_part.numbers, help="Only these ranks: 3 or 0..7; may be given again."
        ),
    ] = None,
    steps: _trace_part.Steps = None,
    iterations: _trace_part.Iterations = None,
    time: _trace_part.Time = None,
    category: _trace_part.Category = None,
    processes: _trace_options.Processes = 0,
    json: kit.Json = False,
) -> None:
    """Merge traces into one that Perfetto opens.

    Processes are named by role, replica and rank. A slim trace has the names and times of what ran on devices and of
    annotations, or of the events of each --category.
    """
    from profdeck.traces.sources import find_sources

    if not output.name.endswith((*_CHROME, *_PERFETTO)):
        raise ConfigError(f"--output {output}: its name must end in {', '.join((*_CHROME, *_PERFETTO))}.")
    part = _trace_part.TracePart.of(steps, iterations, time, category)
    destination = _trace_part.new_file(output)
    slim = output.name.endswith(_PERFETTO)
    sources = _chosen(find_sources(paths, on_left_out=_trace_options.left_out), role, rank)
    if not slim:
        sources = _in_json(sources)
    how = _alignment(align, sources)
    count = _trace_options.cores(processes)
    from profdeck.traces.analysis.alignment import Alignment

    shifts = _shifts(sources, how, count)
    if len(shifts.unknown) == len(sources):
        how = Alignment.NONE  # what was asked for found nothing
    pieces = list(map(WrittenPiece, sources, shifts.shift_ns, _selections(sources, part)))
    write = _write_slim if slim else _write_chrome
    with kit.progress("Merging the traces") as on_progress, _trace_part.writing(destination):
        written = write(pieces, destination, count, on_progress)
    for problem in written.problems:
        kit.warn(f"{problem} What is readable was merged.")
    _report(destination, sources, how, len(shifts.unknown) if how is not Alignment.NONE else 0, written, json=json)
    if written.problems:
        raise typer.Exit(ExitCode.UNREADABLE)


def _chosen(sources: list[TraceSource], roles: list[str] | None, ranks: list[range] | None) -> list[TraceSource]:
    """Leave out what is of other roles or ranks.

    Raises:
        TraceError: Nothing is left.
    """
    chosen = [
        source
        for source in sources
        if (not roles or (source.manifest is not None and source.manifest.role in roles))
        and (not ranks or any(source.rank in some for some in ranks))
    ]
    if not chosen:
        there = sorted({source.label for source in sources if source.manifest or source.rank is not None})
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
            kit.warn(f"{kit.short(source.path)} is left out: only a slim trace (.pftrace) can have it.")
    if not kept:
        raise TraceError("There is no trace in JSON to merge; a slim trace (-o OUT.pftrace) can have the others.")
    return kept


def _alignment(how: str | None, sources: Sequence[TraceSource]) -> Alignment:
    from profdeck.traces.analysis.alignment import Alignment

    if how is None:
        hosts = {source.manifest.host for source in sources if source.manifest}
        return Alignment.ANCHORS if len(hosts) > 1 else Alignment.NONE
    try:
        return Alignment(how)
    except ValueError:
        raise typer.BadParameter(f"--align {how}: it is one of {', '.join(Alignment)}.") from None


def _shifts(sources: Sequence[TraceSource], how: Alignment, processes: int) -> Shifts:
    from profdeck.traces.analysis.alignment import align

    with kit.progress("Aligning the clocks") as on_progress:
        shifts = align(sources, how, processes=processes, on_progress=on_progress)
    for source in shifts.unknown:
        kit.warn(f"{kit.short(source.path)}: --align {how} finds nothing there; its clock stays as it is.")
    return shifts


def _selections(sources: Sequence[TraceSource], part: _trace_part.TracePart) -> list[Selection | None]:
    if part.is_all:
        return [None] * len(sources)
    from profdeck.base.progress import Meter

    selections: list[Selection | None] = []
    with kit.progress("Looking for what to keep") as on_progress:
        meter = Meter(sum(source.size_bytes for source in sources), on_progress)
        for source in sources:
            selections.append(part.selection(source.path, meter.within))
            meter.passed(source.size_bytes)
    return selections


def _write_chrome(pieces: Sequence[WrittenPiece], destination: Path, processes: int, on_progress: Progress) -> Written:
    from profdeck.traces.merge import MergeSource, merge_traces

    check = merge_traces(
        [
            MergeSource(piece.source.path, piece.source.label, number, piece.shift_ns, piece.selection)
            for number, piece in enumerate(pieces)
        ],
        destination,
        gzip=destination.name.endswith(".gz"),
        processes=processes,
        on_progress=on_progress,
    )
    return Written(check.events, check.size_bytes, [check.problem] if check.problem else [])


def _write_slim(pieces: Sequence[WrittenPiece], destination: Path, processes: int, on_progress: Progress) -> Written:
    from profdeck.traces.writing.selection import Selection
    from profdeck.traces.writing.slim import LANES, SlimSource, write_slim

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
    return Written(written.slices, written.size_bytes, written.problems)


def _report(  # noqa: PLR0913  # what there is to say
    destination: Path, sources: Sequence[TraceSource], how: Alignment, unknown: int, written: Written, *, json: bool
) -> None:
    if json:
        kit.print_json(
            {
                "path": str(destination),
                "traces": [str(source.path) for source in sources],
                "align": str(how),
                "unaligned": unknown,
                "events": written.events,
                "size_bytes": written.size_bytes,
                "problems": list(written.problems),
            }
        )
        return
    but = f", but {unknown} of them" if unknown else ""
    about = f"{len(sources)} traces, {written.events:,} events, {kit.size(written.size_bytes)}"
    kit.stdout().print(f"{destination}: {about}; clocks aligned by: {how}{but}", soft_wrap=True)
