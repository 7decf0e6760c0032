"""`profdeck capture`: one capture of a running server, from the command line."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from profdeck.backend import EngineBackend, TargetState
from profdeck.capture import Capture, Status
from profdeck.cli import _output, ls, summary
from profdeck.cli._exit import ExitCode
from profdeck.cli._settings import Settings
from profdeck.entry_points import installed
from profdeck.errors import CaptureError, ConfigError, UnknownPluginError
from profdeck.layers import gather, parse_setting
from profdeck.plugins import BACKENDS, load_backend
from profdeck.profiler import Profiler
from profdeck.run import RUN_VARIABLE


def command(  # noqa: PLR0913  # the options of a command line
    url: Annotated[str, typer.Option(metavar="URL", help="The server, such as http://127.0.0.1:8000.")],
    *,
    iterations: Annotated[int | None, typer.Option(min=1, metavar="N", help="Engine iterations to record.")] = None,
    skip: Annotated[int, typer.Option(min=0, metavar="N", help="Iterations to pass over first.")] = 0,
    stage: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE", help="Record only prefill, decode or mixed batches; counted apart. Repeatable."),
    ] = None,
    ranks: Annotated[str, typer.Option(help="The engine's ranks that record: all, or numbers such as 0,8.")] = "0",
    role: Annotated[str, typer.Option(help="What the server does in the job: names the files.")] = "server",
    replica: Annotated[int | None, typer.Option(min=0, help="Which copy of the engine the server is.")] = None,
    run: Annotated[str | None, typer.Option(metavar="NAME", help="The run. Default: a new one.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the runs. Default: the server's own.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="The server's backend. Default: the one that recognises it.")
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="A config to start from.")] = None,
    settings: Settings = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Stop then, with whatever has been recorded.")
    ] = 300.0,
    json: _output.Json = False,
) -> None:
    """Capture a running server; exit with 1 if a rank is incomplete."""
    given = _Given(
        url=url,
        iterations=None if iterations is None else {"count": iterations, "skip": skip},
        stages=stage or [],
        ranks=ranks if ranks == "all" else _numbers(ranks),
        role=role,
        replica=replica,
        settings={
            **({"output": str(output)} if output else {}),
            **dict(map(parse_setting, settings or ())),
        },
        backend=backend,
        config=config,
        timeout_s=timeout,
    )
    if run:
        os.environ[RUN_VARIABLE] = run  # which is stronger than a config
    if iterations is None and skip:
        raise ConfigError("--skip counts the iterations before those of --iterations, which is missing.")
    with _output.progress(f"Recording {iterations or ''} iterations".replace("  ", " ")) as on_progress:
        capture = asyncio.run(_capture(given, on_progress))
    _report(capture, json=json)


@attrs.frozen(kw_only=True)
class _Given:
    url: str
    iterations: dict[str, int] | None
    stages: list[str]
    ranks: str | list[int]
    role: str
    replica: int | None
    settings: dict[str, Any]
    backend: str | None
    config: Path | None
    timeout_s: float


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--ranks {text}: expected all, or numbers such as 0,8.") from None


async def _capture(given: _Given, on_progress: Callable[[int, int], None]) -> Capture:
    from profdeck.identity import Identity

    name = given.backend or await _recognised(given.url)
    own = f"roles.{given.role}"
    settings: dict[str, Any] = {f"{own}.backend": name, f"{own}.ranks": given.ranks, "on_error": "raise"}
    if given.iterations:
        settings[f"{own}.iterations"] = given.iterations
    if given.stages:
        settings[f"{own}.stages"] = given.stages
    if "output" not in given.settings and "output" not in gather(given.config)[0]:
        directory = await _output_of(name, given.url)
        settings |= {"output": str(directory)} if directory else {}
    profiler = Profiler.from_config(
        given.config,
        identity=Identity(role=given.role, replica=given.replica),
        settings=settings | given.settings | {"steps": [0], "mode": "continuous"},
        target=given.url,
    )
    wanted = (given.iterations or {}).get("count")

    def told(state: TargetState) -> None:
        on_progress(state.iterations, wanted or state.iterations)

    try:
        capture = await profiler.astart(0)
        assert capture is not None  # noqa: S101  # step 0 is selected, and failures are raised
        await profiler.await_window(given.timeout_s, told)
        with contextlib.suppress(CaptureError):  # what is incomplete is in the report
            await profiler.astop()
    finally:
        await profiler.aclose("interrupted")  # the server must not go on recording
    return capture


async def _recognised(url: str) -> str:
    """Return the name of the backend that knows the server."""
    asked = []
    for name in installed(BACKENDS):
        cls = load_backend(name)
        if issubclass(cls, EngineBackend):
            asked.append(name)
            if await cls.recognises(url):
                return name
    raise UnknownPluginError(
        f"No backend recognises the server at {url} (asked: {', '.join(asked) or 'none'}). Is it up, and is that its "
        "address? --backend names the backend of a server that hides what it is."
    )


async def _output_of(name: str, url: str) -> Path | None:
    cls = load_backend(name)
    if not issubclass(cls, EngineBackend):
        raise ConfigError(f"--backend {name}: it records its own process and controls no server.")
    backend = cls(cls.Options())
    backend.bind(url)
    return await backend.output()


def _report(capture: Capture, *, json: bool) -> None:
    assert capture.request is not None  # noqa: S101  # it was of a server
    run = capture.request.output / capture.request.run
    report = ls.read(run)
    complete = capture.status is Status.COMPLETE and report.status is Status.COMPLETE
    if json:
        _output.print_json({"run": str(run), "complete": complete, "ls": ls.plain(report)})
    else:
        ls.show(report)
        if any(rank.events for found in report.captures for rank in found.ranks):
            _output.stdout().print()
            summary.command([capture.directory], top=8)
    if not complete:
        raise typer.Exit(ExitCode.INCOMPLETE)
