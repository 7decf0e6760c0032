"""`profdeck capture`: one capture of running servers or of a running job, from the command line."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from profdeck.after_run import start
from profdeck.base import ctrl_c
from profdeck.base.errors import ConfigError
from profdeck.cli import _capture_job, _capture_servers, _warm_up, kit, ls, summary
from profdeck.cli.kit import ExitCode, Settings
from profdeck.config.sources import parse_setting
from profdeck.config.targets import Policy, WorkerType
from profdeck.on_demand.requests import MOST_STEPS
from profdeck.records.run_directory import RUN_FILE, RUN_VARIABLE
from profdeck.records.status import Status

_OF_SERVERS = (
    *("worker_type", "policy", "quorum", "iterations", "skip", "stage", "warmup_requests", "load", "ranks", "role"),
    *("replica", "output", "backend", "settings"),
)
_OF_JOBS = ("in_steps", "steps")
_TIMEOUT_OF_SERVERS_S = 300.0
_TIMEOUT_OF_JOBS_S = 3600.0


def command(  # noqa: PLR0913  # the options of a command line
    ctx: typer.Context,
    *,
    url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A server to capture, such as http://127.0.0.1:8000. Repeatable."),
    ] = None,
    router: Annotated[
        str | None, typer.Option(metavar="URL", help="A router whose workers are to be captured, as at its /workers.")
    ] = None,
    targets: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A YAML or TOML file that lists servers to capture.")
    ] = None,
    worker_type: Annotated[
        list[WorkerType] | None, typer.Option(help="Capture only workers of this type. Repeatable.")
    ] = None,
    policy: Annotated[
        Policy | None,
        typer.Option(help="How many servers have to start; if fewer do, these are stopped again. Default: any."),
    ] = None,
    quorum: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --policy quorum: how many have to start.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="The directory of a running job to capture. With servers, the name of the run; a new one by default.",
        ),
    ] = None,
    in_steps: Annotated[
        int | None,
        typer.Option(
            "--in",
            min=1,
            max=MOST_STEPS,
            metavar="N",
            help="Of a job: begin N global steps later. Default: 2, and those of warm-up.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, max=MOST_STEPS, metavar="N", help="Of a job: global steps to record.")
    ] = 1,
    iterations: Annotated[int | None, typer.Option(min=1, metavar="N", help="Engine iterations to record.")] = None,
    skip: Annotated[int, typer.Option(min=0, metavar="N", help="Iterations to pass over first.")] = 0,
    stage: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE", help="Record only prefill, decode or mixed batches; counted apart. Repeatable."),
    ] = None,
    warmup_requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Once all record, send each server N short completions, one after the other, so that an idle one has "
            "iterations. They are recorded too: --skip passes over the first iterations.",
        ),
    ] = None,
    load: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Once all record, send each server the requests in this file of JSON lines, over and over, until all "
            "windows are full.",
        ),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="The engine's ranks that record: all, or numbers such as 0,8. Default: 0.")
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(
            help="What the servers do in the job: names the files. Default: server; with --config alone, all roles "
            "whose targets it names."
        ),
    ] = None,
    replica: Annotated[int | None, typer.Option(min=0, help="Which copy of the engine a single server is.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the runs. Default: the servers' own.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="The servers' backend. Default: the one that recognises them.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A config to start from. Alone, it also says which servers to capture."),
    ] = None,
    settings: Settings = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="Wait no longer: stop servers with whatever has been recorded (default: 300), or take back what a "
            "job has not begun (default: 3600).",
        ),
    ] = None,
    json: kit.Json = False,
) -> None:
    """Capture running servers or a job; exit with 1 if incomplete."""
    if not (url or router or targets or config):
        if run is None:
            raise ConfigError(
                "Say what to capture: --url URL, a server, or --run RUN, the directory of a running job. Many servers "
                "are named by several --url, by --router, --targets or --config."
            )
        _refuse(ctx, _OF_SERVERS, "is for servers, and needs --url. What a job records is said by its config.")
        wish = _capture_job.OnDemandOptions(
            run=Path(run), in_steps=in_steps, steps=steps, timeout_s=timeout or _TIMEOUT_OF_JOBS_S
        )
        _capture_job.command(wish, json=json)
        return
    _refuse(ctx, _OF_JOBS, "is for jobs, and a server has no global steps. Use --iterations, or leave out --url.")
    if iterations is None and skip:
        raise ConfigError("--skip counts the iterations before those of --iterations, which is missing.")
    if (policy is Policy.QUORUM) != (quorum is not None):
        raise ConfigError("--quorum N goes with --policy quorum, which needs it; give both or neither.")
    if warmup_requests and load:
        raise ConfigError("--warmup-requests and --load both say what to send to the servers; give one.")
    if run:
        os.environ.pop(RUN_VARIABLE, None)  # which is stronger than a config
    own: dict[str, Any] = {
        "backend": backend,
        "ranks": None if ranks is None else ranks if ranks == "all" else _numbers(ranks),
        "iterations": None if iterations is None else {"count": iterations, "skip": skip},
        "stages": stage,
    }
    given = _capture_servers.ServerOptions(
        urls=tuple(url or ()),
        router=router,
        file=targets,
        role=role,
        replica=replica,
        own={key: value for key, value in own.items() if value},
        of_targets={
            **({"worker_types": list(map(str, worker_type))} if worker_type else {}),
            **({"policy": str(policy), "quorum": quorum} if policy else {}),
        },
        settings={
            **({"output": str(output)} if output else {}),
            **({"run": run} if run else {}),
            **dict(map(parse_setting, settings or ())),
        },
        config=config,
        load=_warm_up.read(load) if load else _warm_up.WarmUp(warmup_requests) if warmup_requests else None,
        iterations=iterations,
        timeout_s=timeout or _TIMEOUT_OF_SERVERS_S,
    )
    with asyncio.Runner() as runner:
        done = ctrl_c.run(runner, _capture_servers.capture(given))
    _report(done, json=json)


def _refuse(ctx: typer.Context, names: tuple[str, ...], why: str) -> None:
    given = [
        option.opts[0]
        for option in ctx.command.params
        if option.name in names and getattr(ctx.get_parameter_source(option.name), "name", None) == "COMMANDLINE"
    ]
    if given:
        raise ConfigError(f"{given[0]} {why}")


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--ranks {text}: expected all, or numbers such as 0,8.") from None


def _report(done: _capture_servers.ServerCapture, *, json: bool) -> None:
    if done.sent is not None:
        typer.echo(str(done.sent), err=True)
    report = ls.read(done.run) if (done.run / RUN_FILE).exists() else None
    with kit.progress("Waiting for the finish"):
        start.await_own()
    captured = done.error is None and all(capture.status is Status.COMPLETE for capture in done.captures)
    complete = captured and report is not None and report.status is Status.COMPLETE
    if json:
        kit.print_json(
            {
                "run": str(done.run),
                "complete": complete,
                "problem": None if done.error is None else str(done.error),
                "servers": [server.plain for server in done.servers],
                "requests": None if done.sent is None else done.sent.plain,
                "ls": None if report is None else ls.plain(report),
            }
        )
    elif report is not None and done.error is None:
        ls.show(report)
        if any(rank.events for found in report.captures for rank in found.ranks):
            kit.stdout().print()
            summary.command([capture.directory for capture in done.captures], top=8)
    if done.error is not None:
        raise done.error
    if not complete:
        raise typer.Exit(ExitCode.INCOMPLETE)
