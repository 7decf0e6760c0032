"""`profdeck view`: shows traces in the Perfetto UI."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from profdeck_traces.base.errors import ConfigError
from profdeck_traces.base.files import user_path
from profdeck_traces.base.text import printable
from profdeck_traces.cli import arguments, merging, terminal, trace_range

_PERFETTO_SUFFIXES = (".pftrace", ".pftrace.gz", ".perfetto-trace")


def command(  # noqa: PLR0913 - the options of a command line
    paths: arguments.Paths,
    *,
    operators: Annotated[
        bool | None,
        typer.Option(
            "--operators/--no-operators",
            help="Also show operators and runtime calls. Default: only if the traces have no device activity.",
            show_default=False,
        ),
    ] = None,
    critical_path: Annotated[
        bool,
        typer.Option("--critical-path/--no-critical-path", help="Show the critical path of the steps as a track."),
    ] = True,
    align: merging.Align = None,
    role: merging.Role = None,
    rank: merging.Rank = None,
    steps: trace_range.Steps = None,
    iterations: trace_range.Iterations = None,
    time: trace_range.Time = None,
    ui: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=user_path,
            help="Directory of an unpacked Perfetto UI release. Default: the UI of the extra profdeck[view] if "
            "installed, or else ui.perfetto.dev, which gets the trace inside the browser.",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="Port of the local server; 0: any free port.")
    ] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser.")] = True,
    processes: arguments.Processes = 0,
) -> None:
    """Show traces in Perfetto without uploading them. Press Ctrl+C to stop."""
    from profdeck_traces.cli.viewer.ui import find_ui

    interface = find_ui(ui)
    part = trace_range.TracePart.from_options(steps, iterations, time, None)
    with (
        terminal.exit_on_signals(),
        tempfile.TemporaryDirectory(prefix="profdeck-view-", ignore_cleanup_errors=True) as directory,
    ):
        if any(path.name.endswith(_PERFETTO_SUFFIXES) for path in paths):
            if len(paths) > 1 or not part.is_all or not paths[0].is_file():
                raise ConfigError("A file in Perfetto's format cannot be merged or trimmed. Specify only its path.")
            trace = paths[0]
        else:
            merge = merging.Merge(
                paths=paths,
                align=align,
                roles=role,
                ranks=rank,
                part=part,
                processes=processes,
                with_path=critical_path,
            )
            trace = _write_slim(merge, Path(directory), operators)
        title = printable(", ".join(map(terminal.short_path, paths)))
        try:
            asyncio.run(_serve(trace, title, interface, port, browser))
        except OSError as error:
            raise ConfigError(f"--port {port} cannot be used: {os.strerror(error.errno or 0)}.") from None


def _write_slim(merge: merging.Merge, directory: Path, operators: bool | None) -> Path:  # noqa: FBT001 - an option
    """Write a slim trace and return its path.

    Args:
        merge: The traces to merge.
        directory: Directory of the new file.
        operators: If True, include operators. If ``None``, include them if the traces have no device events.
    """
    from profdeck_traces.base.errors import TraceError

    merged = None
    trace = directory / "slim.pftrace"
    if not operators:
        with contextlib.suppress(*() if operators is False else (TraceError,)):
            merged = merging.write_merged(merge, trace)
    if merged is None or (operators is None and not merged.written.device_events):
        trace = directory / "operators.pftrace"
        merged = merging.write_merged(merging.with_operators(merge), trace)
    for problem in merged.written.problems:
        terminal.warn(f"{problem} Only the readable part is shown.")
    terminal.print_stderr(merged.contents)
    return trace


async def _serve(trace: Path, title: str, ui: Path | None, port: int, browser: bool) -> None:  # noqa: FBT001
    from profdeck_traces.cli.viewer.server import serve

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, *terminal.EXIT_SIGNALS):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stopped.set)
    async with serve(trace, title, ui, port=port) as url:
        typer.echo(url)
        sys.stdout.flush()
        is_open = browser and _has_display() and await asyncio.to_thread(webbrowser.open, url)
        if not is_open:
            actual_port = url.split(":")[2].partition("/")[0]
            forward = f"ssh -L {actual_port}:127.0.0.1:{actual_port} {socket.gethostname()}"
            terminal.print_stderr(f"From another machine: {forward}, then open this URL.")
        terminal.print_stderr("Press Ctrl+C to stop.")
        await stopped.wait()


def _has_display() -> bool:
    """Return True if this process has a display, and is not in an SSH session, whose user would not see the browser."""
    return "SSH_CONNECTION" not in os.environ and (
        sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    )
