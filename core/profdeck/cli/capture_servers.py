"""`profdeck capture servers`: captures running servers or actors once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from profdeck.after_capture.finish_child import await_own_finishes
from profdeck.backends.api import TargetState
from profdeck.cli import capture_report, ls
from profdeck.cli._cluster_options import ClusterOptions
from profdeck.cli.capture_progress import ProgressDisplay
from profdeck.cli.options import SETTINGS_SOURCE, SettingsOption
from profdeck.cli.terminal_observer import TerminalObserver
from profdeck.config.sources import parse_setting
from profdeck.records.manifest import Manifest
from profdeck.records.run_directory import RUN_FILE, RUN_VARIABLE
from profdeck.records.status import Status
from profdeck.replicas.survey import CheckedServer
from profdeck.server_capture import TIMEOUT_S, ServerCapture, ServerObserver, ServerRequest, capture_servers
from profdeck_traces.base.errors import ConfigError
from profdeck_traces.base.files import user_path
from profdeck_traces.cli import terminal
from profdeck_traces.cli.terminal import ExitCode

_MAX_ROWS = 16

REMOVED = {
    "--actor": "Specify actor names with the option of their cluster, such as --ray 'rollout_*'.",
    "--backend": "Use --set server.backend=NAME.",
    "--load": "profdeck sends no requests to servers. Send your own before and during the capture.",
    "--policy": "Use --set server.targets.policy=POLICY.",
    "--quorum": "Use --set server.targets.quorum=N, with --set server.targets.policy=quorum.",
    "--ray-namespace": "Use --set server.targets.actor_namespace=NAME.",
    "--replica": "To number servers, list them in a file for --targets.",
    "--report": "After the capture, use 'profdeck report latest'.",
    "--run": "To name the run, use --set run=NAME. To capture a running job, use 'profdeck capture job RUN'.",
    "--sample-by": "Use --set server.targets.sample_by=load.",
    "--stage": "Use --batch-kind.",
    "--warmup-requests": "profdeck sends no requests to servers. Send your own before and during the capture, and "
    "exclude the first iterations with --skip.",
    "--worker-type": "Use --set server.targets.worker_types=[decode].",
}
"""Removed options, each with a message that names the replacement."""


def command(  # noqa: PLR0913  # the options of a command line
    *,
    url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A server to capture, such as http://127.0.0.1:8000 or unix:/run/engine.sock. Repeatable.",
        ),
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Capture all workers of this router, as listed at its /workers. auto: find the router on this host or "
            "in its job's logs. Path of a log file: use the router mentioned there.",
        ),
    ] = None,
    targets: Annotated[
        Path | None,
        typer.Option(metavar="FILE", parser=user_path, help="A YAML or TOML file that lists servers to capture."),
    ] = None,
    of_clusters: ClusterOptions,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=user_path,
            help="A config to start from. Alone, it also specifies the servers.",
        ),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(
            help="Role of the servers in the job, which names the files. Default: server; with --config alone, all "
            "roles with targets."
        ),
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Capture only N servers of each worker type. Default: all.")
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Engine iterations to record. Default: the config's, or until Ctrl-C, SIGTERM or --timeout.",
        ),
    ] = None,
    skip: Annotated[int, typer.Option(min=0, metavar="N", help="Iterations to skip before the recording.")] = 0,
    batch_kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="Kind of batches to record: prefill, decode or mixed. Repeatable. Each kind has separate captures, "
            "and its iterations are counted separately. Default: all kinds in one capture.",
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(help="Ranks of each engine that record: all, or numbers such as 0,8 or 0..7. Default: 0."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=user_path, help="Directory of the runs. Default: that of the servers."),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1, metavar="SECONDS", help="Stop the recording after this time, and keep what has been recorded."
        ),
    ] = TIMEOUT_S,
    settings: SettingsOption = None,
    json: terminal.JsonOption = False,
) -> None:
    """Capture running servers; exit with 1 if a capture is incomplete."""
    actors: Sequence[str] | None = of_clusters.selected()
    if not (url or router or targets or actors or config):
        options = ", ".join(["--url", "--router", "--targets", *of_clusters.flags])
        raise ConfigError(
            f"No server is specified. Use {options} or --config. To capture a running job: profdeck capture job RUN"
        )
    values = dict(map(parse_setting, settings or ()))
    if "run" in values:
        os.environ.pop(RUN_VARIABLE, None)  # it would override the setting
    request = ServerRequest(
        urls=tuple(url or ()),
        router=router,
        targets_file=targets,
        actors=tuple(actors or ()),
        role=role,
        sample=sample,
        iterations=iterations,
        skip=skip,
        batch_kinds=tuple(batch_kind or ()),
        ranks=ranks,
        output=output,
        config=config,
        settings=values,
        timeout_s=timeout,
    )
    _report(capture_servers(request, _Terminal(iterations), settings_source=SETTINGS_SOURCE), json=json)


class _Terminal(TerminalObserver, ServerObserver):
    """Displays messages and progress on stderr.

    Args:
        iterations: Number of iterations that each server records, if known.
    """

    def __init__(self, iterations: int | None) -> None:
        self._iterations = iterations
        self._display: ProgressDisplay | None = None

    def servers_checked(self, servers: Sequence[CheckedServer]) -> None:
        _show_servers(servers)

    def recording_started(self, states: Callable[[], Mapping[str, TargetState]], count: int) -> None:
        self._display = ProgressDisplay.start(states, count, self._iterations)

    def recording_stopped(self) -> None:
        if self._display is not None:
            self._display.stopping = True

    def files_collected(self) -> None:
        if self._display is not None:
            self._display.close()


def _show_servers(servers: Sequence[CheckedServer]) -> None:
    """Print a table of the servers to stderr. A long table omits servers that are ready."""
    wraps = sys.stderr.isatty() or "COLUMNS" in os.environ
    console = Console(stderr=True, markup=False, highlight=False, emoji=False, width=None if wraps else 10_000)
    shown = servers if len(servers) <= _MAX_ROWS else [server for server in servers if server.state != "ready"]
    columns = {
        "server" if any(server.is_server for server in servers) else "actor": [server.name for server in shown],
        "role": [f"{server.role}/{server.replica}" for server in shown],
        "worker": [server.worker_type or "" for server in shown],
        "backend": [server.backend or "" for server in shown],
        "profdeck": [server.about.profdeck if server.about else "" for server in shown],
        "state": [server.state for server in shown],
    }
    not_empty = {name: cells for name, cells in columns.items() if any(cells)}
    if shown:
        table = terminal.make_table(*not_empty)
        table.columns[0].no_wrap = True
        for row in zip(*not_empty.values(), strict=True):
            table.add_row(*row)
        console.print(table)
    for server in filter(lambda server: server.reason, shown):
        console.print(server.complaint)
    if len(shown) < len(servers):
        console.print(f"{len(servers) - len(shown)} of {len(servers)} servers are ready.")


def _report(captured: ServerCapture, *, json: bool) -> None:
    own = {(capture.identity.role, capture.id) for capture in captured.captures}

    def is_own(manifest: Manifest) -> bool:
        # Another command may be capturing into the same run; its captures are not reported.
        return (manifest.role, manifest.request or manifest.capture) in own

    report = ls.read(captured.run, only=is_own if own else None) if (captured.run / RUN_FILE).exists() else None
    with terminal.show_progress("Waiting for the finish task"):
        await_own_finishes()
    captures_complete = all(capture.status is Status.COMPLETE for capture in captured.captures)
    complete = captured.error is None and captures_complete and report is not None and report.status is Status.COMPLETE
    if json:
        terminal.print_json(
            {
                "run": str(captured.run),
                "complete": complete,
                "problem": None if captured.error is None else str(captured.error),
                "servers": [server.plain for server in captured.servers],
                "ls": None if report is None else ls.plain(report),
            }
        )
    elif report is not None and captured.error is None:
        ls.show(report)
        capture_report.show_summary(report, [capture.directory for capture in captured.captures])
    if captured.error is not None:
        raise captured.error
    if not complete:
        raise typer.Exit(ExitCode.INCOMPLETE)
