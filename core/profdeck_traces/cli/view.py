"""`profdeck view`: traces in Perfetto, on this machine."""

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
from profdeck_traces.cli import arguments, merging, terminal, trace_range

_READY = (".pftrace", ".pftrace.gz", ".perfetto-trace")


def command(  # noqa: PLR0913 - the options of a command line
    paths: arguments.Paths,
    *,
    operators: Annotated[
        bool | None,
        typer.Option(
            "--operators/--no-operators",
            help="Also show operators and calls of the runtime. Default: where nothing ran on devices.",
            show_default=False,
        ),
    ] = None,
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
            help="Perfetto's user interface, unpacked. Default: that of the extra profdeck[view], or else "
            "ui.perfetto.dev, which is handed the trace inside of the browser.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Which port; 0: any that is free.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Whether to open a browser.")] = True,
    processes: arguments.Processes = 0,
) -> None:
    """Show traces in Perfetto; nothing is uploaded. Ends with Ctrl+C."""
    from profdeck_traces.cli.viewer.ui import find_ui

    interface = find_ui(ui)
    part = trace_range.TracePart.of(steps, iterations, time, None)
    with tempfile.TemporaryDirectory(prefix="profdeck-view-", ignore_cleanup_errors=True) as directory:
        if any(path.name.endswith(_READY) for path in paths):
            if len(paths) > 1 or not part.is_all or not paths[0].is_file():
                raise ConfigError("A trace of Perfetto's own is shown by itself and whole: give no more than its path.")
            trace = paths[0]
        else:
            merge = merging.Merge(paths=paths, align=align, roles=role, ranks=rank, part=part, processes=processes)
            trace = _converted(merge, Path(directory), operators)
        try:
            asyncio.run(_serve(trace, ", ".join(map(terminal.short_path, paths)), interface, port, browser))
        except OSError as error:
            raise ConfigError(f"--port {port} cannot be used: {os.strerror(error.errno or 0)}.") from None


def _converted(merge: merging.Merge, directory: Path, operators: bool | None) -> Path:  # noqa: FBT001 - an option
    """Write a slim trace; with operators, if that is wanted or nothing ran on devices."""
    from profdeck_traces.base.errors import TraceError

    written = None
    trace = directory / "slim.pftrace"
    if not operators:
        with contextlib.suppress(*() if operators is False else (TraceError,)):
            written = merging.write(merge, trace)
    if written is None or (operators is None and not written.device_events):
        trace = directory / "operators.pftrace"
        written = merging.write(merging.with_operators(merge), trace)
    for problem in written.problems:
        terminal.warn(f"{problem} Only the readable part is shown.")
    terminal.print_stderr(
        f"{len(written.sources)} traces, {written.events:,} events, {terminal.size(written.size_bytes)}"
    )
    return trace


async def _serve(trace: Path, title: str, ui: Path | None, port: int, browser: bool) -> None:  # noqa: FBT001
    from profdeck_traces.cli.viewer.server import serve

    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for end in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(end, ended.set)
    async with serve(trace, title, ui, port=port) as url:
        typer.echo(url)
        sys.stdout.flush()
        opened = browser and _has_display() and await asyncio.to_thread(webbrowser.open, url)
        if not opened:
            number = url.split(":")[2].partition("/")[0]
            terminal.print_stderr(
                f"From another machine: ssh -L {number}:127.0.0.1:{number} {socket.gethostname()}, then open this URL."
            )
        terminal.print_stderr("Press Ctrl+C to stop.")
        await ended.wait()


def _has_display() -> bool:
    """Tell whether a browser would be seen: not in a session from another machine."""
    return "SSH_CONNECTION" not in os.environ and (
        sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    )
