"""`profdeck capture`: one capture of running servers or of a running job, from the command line."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from profdeck.after_capture.finish_child import await_own_finishes
from profdeck.base import ctrl_c
from profdeck.cli import _after_capture, _capture_job, _capture_servers, ls
from profdeck.cli._cluster_options import ClusterOptions
from profdeck.cli.options import SettingsOption
from profdeck.config.sources import parse_setting
from profdeck.config.targets import Policy, SampleBy, WorkerType
from profdeck.engine.clusters import ActorSelection
from profdeck.on_demand.requests import MOST_STEPS
from profdeck.records.run_directory import RUN_FILE, RUN_VARIABLE
from profdeck.records.status import Status
from profdeck_traces.base.errors import ConfigError
from profdeck_traces.cli import terminal
from profdeck_traces.cli.terminal import ExitCode

_OF_SERVERS = (
    *("worker_type", "sample", "sample_by", "policy", "quorum", "iterations", "skip", "batch_kind"),
    *("ranks", "role", "replica", "output", "backend", "settings"),
)
_OF_JOBS = ("store", "in_steps", "steps")
_TIMEOUT_OF_SERVERS_S = 300.0
_TIMEOUT_OF_JOBS_S = 3600.0

_Url = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL", help="A server to capture, such as http://127.0.0.1:8000 or unix:/run/engine.sock. Repeatable."
    ),
]
_Router = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Capture all workers of this router, as listed at its /workers. auto: find the router on this host or in "
        "its job's logs. Path of a log file: use the router mentioned there.",
    ),
]
_Targets = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A YAML or TOML file that lists servers to capture.")
]
_WorkerType = Annotated[list[WorkerType] | None, typer.Option(help="Capture only workers of this type. Repeatable.")]
_Sample = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Capture only N servers, of each worker type. Default: all.")
]
_SampleBy = Annotated[
    SampleBy, typer.Option(help="Which: the same each time, or those with the most requests, by --router.")
]
_Policy = Annotated[
    Policy | None,
    typer.Option(help="How many servers have to start; if fewer do, these are stopped again. Default: any."),
]
_Quorum = Annotated[int | None, typer.Option(min=1, metavar="N", help="With --policy quorum: how many have to start.")]
_Run = Annotated[
    str | None,
    typer.Option(
        metavar="RUN",
        help="The directory of a running job to capture. With servers, the name of the run; a new one by default.",
    ),
]
_Store = Annotated[
    str | None,
    typer.Option(
        metavar="NAME:ADDRESS",
        help="Where a job is asked whose hosts share no directory, such as tcpstore:10.0.0.1:29500. Default: as RUN "
        "says.",
    ),
]
_InSteps = Annotated[
    int | None,
    typer.Option(
        "--in",
        min=1,
        max=MOST_STEPS,
        metavar="N",
        help="Of a job: begin N global steps later. Default: 2, and those of warm-up.",
    ),
]
_Steps = Annotated[int, typer.Option(min=1, max=MOST_STEPS, metavar="N", help="Of a job: global steps to record.")]
_Iterations = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Engine iterations to record. Default: the config's, or until Ctrl-C, SIGTERM or --timeout.",
    ),
]
_Skip = Annotated[int, typer.Option(min=0, metavar="N", help="Iterations to skip before the recording.")]
_Kinds = Annotated[
    list[str] | None,
    typer.Option(
        "--batch-kind",
        metavar="KIND",
        help="Kind of batches to record: prefill, decode or mixed. Can be repeated. Each kind has separate captures, "
        "and its iterations are counted separately. Default: all kinds in one capture.",
    ),
]
_Stage = Annotated[list[str] | None, typer.Option("--stage", hidden=True)]
_WarmupRequests = Annotated[str | None, typer.Option("--warmup-requests", hidden=True)]
_Ranks = Annotated[
    str | None, typer.Option(help="The engine's ranks that record: all, or numbers such as 0,8 or 0..7. Default: 0.")
]
_Role = Annotated[
    str | None,
    typer.Option(
        help="What the servers do in the job: names the files. Default: server; with --config alone, all roles "
        "whose targets it names."
    ),
]
_Replica = Annotated[int | None, typer.Option(min=0, help="Which copy of the engine a single server is.")]
_Output = Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of the runs. Default: the servers' own.")]
_Backend = Annotated[
    str | None, typer.Option(metavar="NAME", help="The servers' backend. Default: the one that recognises them.")
]
_Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A config to start from. Alone, it also says which servers to capture."),
]
_Timeout = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        metavar="SECONDS",
        help="Wait no longer: stop servers with whatever has been recorded (default: 300), or take back what a "
        "job has not begun (default: 3600).",
    ),
]


def command(  # noqa: PLR0913  # the options of a command line
    ctx: typer.Context,
    *,
    url: _Url = None,
    router: _Router = None,
    targets: _Targets = None,
    of_clusters: ClusterOptions,
    worker_type: _WorkerType = None,
    sample: _Sample = None,
    sample_by: _SampleBy = SampleBy.NUMBER,
    policy: _Policy = None,
    quorum: _Quorum = None,
    run: _Run = None,
    store: _Store = None,
    in_steps: _InSteps = None,
    steps: _Steps = 1,
    iterations: _Iterations = None,
    skip: _Skip = 0,
    batch_kind: _Kinds = None,
    stage: _Stage = None,
    warmup_requests: _WarmupRequests = None,
    ranks: _Ranks = None,
    role: _Role = None,
    replica: _Replica = None,
    output: _Output = None,
    backend: _Backend = None,
    config: _Config = None,
    settings: SettingsOption = None,
    timeout: _Timeout = None,
    page: _after_capture.Page = None,
    json: terminal.JsonOption = False,
) -> None:
    """Capture running servers or a job; exit with 1 if incomplete."""
    if stage:
        raise ConfigError("--stage was renamed to --batch-kind.")
    if warmup_requests is not None:
        raise ConfigError(
            "--warmup-requests was removed: profdeck sends no requests to servers. Send your own requests before and "
            "during the capture. To exclude the first iterations, use --skip (iterations.skip in a config)."
        )
    selection: ActorSelection | None = of_clusters.selected()
    if not (url or router or targets or selection or config):
        where = ", ".join(["--router", "--targets", *of_clusters.flags])
        options = _capture_job.OnDemandOptions(
            run=_run_of_job(ctx, run, where),
            in_steps=in_steps,
            steps=steps,
            timeout_s=timeout or _TIMEOUT_OF_JOBS_S,
            page=page,
            store=store,
        )
        _capture_job.command(options, json=json)
        return
    _check_server_options(ctx, iterations=iterations, skip=skip, policy=policy, quorum=quorum)
    if run:
        os.environ.pop(RUN_VARIABLE, None)  # which is stronger than a config
    options_of_role: dict[str, Any] = {
        "backend": backend,
        "ranks": None if ranks is None else ranks if ranks == "all" else _numbers(ranks),
        "iterations": None if iterations is None else {"count": iterations, "skip": skip},
        "batch_kinds": batch_kind,
    }
    given = _capture_servers.ServerOptions(
        urls=tuple(url or ()),
        router=router,
        file=targets,
        actors=selection.names if selection else (),
        namespace=selection.namespace if selection else None,
        role=role,
        replica=replica,
        own={key: value for key, value in options_of_role.items() if value},
        of_targets={
            **({"worker_types": list(map(str, worker_type))} if worker_type else {}),
            **({"sample": sample} if sample else {}),
            **({"sample_by": str(sample_by)} if sample_by is not SampleBy.NUMBER else {}),
            **({"policy": str(policy), "quorum": quorum} if policy else {}),
        },
        settings={
            **({"output": str(output)} if output else {}),
            **({"run": run} if run else {}),
            **dict(map(parse_setting, settings or ())),
        },
        config=config,
        iterations=iterations,
        timeout_s=timeout or _TIMEOUT_OF_SERVERS_S,
    )
    stop = ctrl_c.StopSignal()
    with asyncio.Runner() as runner:
        captured = ctrl_c.run(runner, _capture_servers.capture(given, stop), stop)
    _report(captured, page, json=json)


def _run_of_job(ctx: typer.Context, run: str | None, where: str) -> Path:
    if run is None:
        raise ConfigError(
            "No server or job specified. Use --url URL for a server, or --run RUN for the directory of a running job. "
            f"For several servers, repeat --url or use {where} or --config."
        )
    _refuse(ctx, _OF_SERVERS, "applies only to servers and requires --url. A job records what its config specifies.")
    return Path(run)


def _check_server_options(
    ctx: typer.Context, *, iterations: int | None, skip: int, policy: Policy | None, quorum: int | None
) -> None:
    _refuse(ctx, _OF_JOBS, "is for jobs, and a server has no global steps. Use --iterations, or leave out --url.")
    if iterations is None and skip:
        raise ConfigError("--skip counts the iterations before those of --iterations, which is missing.")
    if (policy is Policy.QUORUM) != (quorum is not None):
        raise ConfigError("--quorum N requires --policy quorum, and the policy requires --quorum. Set both or neither.")


def _refuse(ctx: typer.Context, names: tuple[str, ...], why: str) -> None:
    given = [
        option.opts[0]
        for option in ctx.command.params
        if option.name in names and getattr(ctx.get_parameter_source(option.name), "name", None) == "COMMANDLINE"
    ]
    if given:
        raise ConfigError(f"{given[0]} {why}")


def _numbers(text: str) -> list[int | str]:
    """Read numbers; ranges stay what they are in a config."""
    try:
        return [part if ".." in part else int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--ranks {text}: expected all, or numbers such as 0,8 or 0..7.") from None


def _report(captured: _capture_servers.ServerCapture, page: Path | None, *, json: bool) -> None:
    report = ls.read(captured.run) if (captured.run / RUN_FILE).exists() else None
    with terminal.show_progress("Waiting for the finish"):
        await_own_finishes()
    whole = captured.error is None and all(one.status is Status.COMPLETE for one in captured.captures)
    complete = whole and report is not None and report.status is Status.COMPLETE
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
    if report is not None and captured.error is None:
        paths = [capture.directory for capture in captured.captures]
        _after_capture.show(report, paths, page, quiet=json)
    if captured.error is not None:
        raise captured.error
    if not complete:
        raise typer.Exit(ExitCode.INCOMPLETE)
