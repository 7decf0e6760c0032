"""`profdeck summary`: where the time went, trace by trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer
from rich.console import Console

from profdeck.cli import _output
from profdeck.cli._exit import ExitCode
from profdeck.errors import ProfdeckError, TraceError
from profdeck.progress import Meter
from profdeck.run import Manifest, is_manifest, read_manifest

if TYPE_CHECKING:
    from profdeck.traces.summary import TraceSummary

_TRACES = ("*.trace.json", "*.trace.json.gz")


@attrs.frozen
class Traced:
    """A trace and what its manifest says of where it comes from."""

    path: Path
    manifest: Manifest | None
    summary: TraceSummary

    @property
    def rank(self) -> int | None:
        """The rank by the manifest, else by the trace."""
        return self.manifest.rank if self.manifest else self.summary.rank


def command(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="Runs, captures or trace files.")],
    *,
    top: Annotated[int, typer.Option(min=0, metavar="N", help="How many operators and kernels; 0 for all.")] = 15,
    json: _output.Json = False,
) -> None:
    """Summarise traces: operators, kernels, busy devices, steps."""
    files = _find(paths)
    traces, problems = _read(files)
    limit = top or None
    if json:
        _output.print_json({"traces": [_plain(traced, limit) for traced in traces]})
    else:
        console = _output.stdout()
        for traced in traces:
            _print(console, traced, limit)
    for problem in problems:
        typer.echo(f"error: {problem}", err=True)
    for traced in traces:
        if traced.summary.problem:
            _output.warn(f"{_output.short(traced.path)}: {traced.summary.problem} The summary covers what can be read.")
    if problems:
        raise typer.Exit(ExitCode.UNREADABLE)


def _find(paths: Sequence[Path]) -> dict[Path, Manifest | None]:
    """Find the traces below some paths, each once, and their manifests."""
    found: dict[Path, Manifest | None] = {}
    for path in paths:
        manifests = dict(_manifests(path))
        if not path.is_dir():
            found[path] = manifests.get(path)
            continue
        below = {file for pattern in _TRACES for file in path.rglob(pattern)} | manifests.keys()
        if not below:
            raise TraceError(f"{path}: there is no trace below this directory; their names end in .trace.json[.gz].")
        found |= {file: manifests.get(file) for file in sorted(below)}
    return found


def _manifests(path: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yield the traces that manifests beside a file, or below a directory, tell of."""
    beside = path.rglob("*.json") if path.is_dir() else path.parent.glob("*.json")
    for file in filter(is_manifest, beside):
        try:
            manifest = read_manifest(file)
        except ProfdeckError:  # `profdeck ls` tells of it; the traces can be read without
            continue
        for artifact in manifest.artifacts:
            trace = file.parent / artifact.name
            if artifact.kind == "trace" and trace.is_file():
                yield trace, manifest


def _read(files: dict[Path, Manifest | None]) -> tuple[list[Traced], list[str]]:
    from profdeck.traces.summary import summarise_trace

    traces, problems = [], []
    sizes = {file: file.stat().st_size if file.exists() else 0 for file in files}
    with _output.progress("Reading the traces") as on_progress:
        meter = Meter(sum(sizes.values()), on_progress)
        for file, manifest in files.items():
            try:
                summary = summarise_trace(file, on_progress=meter.within)
            except TraceError as error:
                problems.append(str(error))
            else:
                if summary.check.events:
                    traces.append(Traced(file, manifest, summary))
                else:
                    problems.append(f"{_output.short(file)}: {summary.problem}")
            meter.passed(sizes[file])
    return traces, problems


def _plain(traced: Traced, limit: int | None) -> dict[str, Any]:
    summary = traced.summary.to_dict()
    return {
        "path": str(traced.path),
        "role": traced.manifest.role if traced.manifest else None,
        "replica": traced.manifest.replica if traced.manifest else None,
        "rank": traced.rank,
        "capture": traced.manifest.capture if traced.manifest else None,
        "whole": traced.summary.check.whole,
        "problem": traced.summary.problem,
        "events": traced.summary.check.events,
        "operators": summary["operators"][:limit],
        "annotations": summary["annotations"][:limit],
        "kernels": summary["kernels"][:limit],
        "devices": summary["devices"],
        "steps": summary["steps"],
    }


def _print(console: Console, traced: Traced, limit: int | None) -> None:
    summary = traced.summary
    about = [f"{summary.check.events:,} events"]
    if traced.rank is not None:
        about.insert(0, f"rank {traced.rank}")
    if traced.manifest:
        replica = "" if traced.manifest.replica is None else f"/{traced.manifest.replica}"
        about.insert(0, f"{traced.manifest.role}{replica}")
    console.print(_output.short(traced.path), style="bold", soft_wrap=True)
    console.print(", ".join(about))
    for device in summary.devices:
        share = device.busy_us / device.span_us if device.span_us else 0.0
        name = f" ({device.name})" if device.name else ""
        console.print(
            f"Device {device.device}{name}: busy {_ms(device.busy_us)} ms of {_ms(device.span_us)} ms ({share:.1%}), "
            f"idle {_ms(device.idle_us)} ms"
        )
    if summary.steps:
        table = _output.table("step", "duration ms", numbers=("step", "duration ms"))
        for step in summary.steps:
            table.add_row(str(step.step), _ms(step.duration_us))
        console.print("", table)
    if summary.operators:
        table = _output.table("operator", "calls", "self ms", "total ms", numbers=("calls", "self ms", "total ms"))
        for operator in summary.operators[:limit]:
            table.add_row(operator.name, f"{operator.count:,}", _ms(operator.self_us), _ms(operator.total_us))
        console.print("", table)
    if summary.kernels:
        table = _output.table("kernel", "calls", "total ms", "mean ms", numbers=("calls", "total ms", "mean ms"))
        for kernel in summary.kernels[:limit]:
            table.add_row(kernel.name, f"{kernel.count:,}", _ms(kernel.total_us), _ms(kernel.mean_us))
        console.print("", table)
    console.print()


def _ms(time_us: float) -> str:
    return f"{time_us / 1000:,.3f}"
