"""``profdeck run``: profiles a PyTorch script that knows nothing of profdeck.

A global step ends whenever the script's first optimizer steps; steps count from 1. Later optimizers do not count,
so a script with a critic or a discriminator has one step per update of its first model.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from profdeck import Profiler
from profdeck.base.errors import ConfigError
from profdeck.cli import kit
from profdeck.cli.kit import Settings
from profdeck.config.sources import gather, parse_setting
from profdeck.records.run_directory import RUN_FILE

if TYPE_CHECKING:
    from profdeck import Capture


class StepSource:
    """Turns the optimizer's steps into global steps of a profiler."""

    def __init__(self, profiler: Profiler) -> None:
        self.profiler = profiler
        self._optimizer: object = None
        self._seen: dict[str, Capture] = {}
        self.step = 1

    @property
    def captures(self) -> list[Capture]:
        """The captures that have begun, in order."""
        return list(self._seen.values())

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Follow the optimizers of this process, from global step 1 on."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        handle = register_optimizer_step_post_hook(self._passed)
        try:
            self._begin()
            yield
        finally:
            handle.remove()

    def _passed(self, optimizer: object, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is self._optimizer:
            self.profiler.stop()
            self.step += 1
            self._begin()

    def _begin(self) -> None:
        self.profiler.start(self.step)
        if capture := self.profiler.active:
            self._seen[capture.id] = capture


def command(  # noqa: PLR0913  # a command line has as many options as it has
    script: Annotated[Path, typer.Argument(help="The script to run, unchanged.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments.", show_default=False)] = None,
    *,
    steps: Annotated[
        str | None,
        typer.Option(help="Optimizer steps to capture, from 1, such as '3..4' or '10, every 500'.", show_default=False),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Ranks that record: all, or a list such as 0,8. [default: 0]", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Directory for the runs. [default: ./profiles]", show_default=False)
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A config file.", show_default=False)] = None,
    role: Annotated[str, typer.Option(help="The role of this process.")] = "trainer",
    settings: Settings = None,
    json: Annotated[bool, typer.Option("--json", help="Report to stderr as one JSON document.")] = False,
) -> None:
    """Run a PyTorch script and capture some of its optimizer steps.

    Under torchrun: torchrun --nproc-per-node 2 -m profdeck run --steps 3..4 script.py. The exit status is the
    script's.
    """
    chosen = dict(map(parse_setting, settings or ()))
    if steps is not None:
        chosen["steps"] = [part.strip() for part in steps.split(",")]
    if ranks is not None:
        chosen[f"{role}.ranks"] = "all" if ranks == "all" else parse_setting(f"ranks=[{ranks}]")[1]
    if output is not None:
        chosen["output"] = str(output)
    draft = gather(config, settings=chosen, settings_source="command line")
    if draft.get("roles", role, "backend") is None:
        draft.set(f"{role}.backend", "torch", "command line")
    loaded = draft.checked().config
    if not loaded.steps.spans:
        raise ConfigError("No step is selected. Say which, such as: profdeck run --steps 3..4 script.py")
    if not script.is_file():
        raise ConfigError(f"{script}: there is no such script.")
    source = StepSource(Profiler.of(loaded, role=role))
    sys.argv = [str(script), *(arguments or ())]
    sys.path.insert(0, str(script.parent.resolve()))
    raised = False
    try:
        with source.attached(), source.profiler:
            runpy.run_path(str(script), run_name="__main__")
            last = source.step - 1
            source.profiler.close(
                f"the script ended after step {last}; if that was its last one, --set final_step={last}"
            )
    except Exception as error:  # noqa: BLE001  # the script's own, shown as Python would show it
        raised = True
        trace = _within(script, error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise typer.Exit(1) from None
    finally:
        _report(source, raised=raised, as_json=json)


# What follows the script is the script's, options too.
command.context_settings = {"allow_interspersed_args": False}  # type: ignore[attr-defined]  # read by the CLI


def _within(script: Path, trace: TracebackType | None) -> TracebackType | None:
    """Leave out the frames before the script's own."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename != str(script):
        inner = inner.tb_next
    return inner or trace


def _report(source: StepSource, *, raised: bool, as_json: bool) -> None:
    """Say on stderr what was captured: stdout belongs to the script."""
    if not source.profiler.enabled:
        return
    captures = source.captures
    run = next((path for capture in captures for path in capture.directory.parents if (path / RUN_FILE).exists()), None)
    if as_json:
        found = [
            {"id": capture.id, "rank": capture.identity.rank, "status": capture.status, "problems": capture.problems}
            for capture in captures
        ]
        typer.echo(dumps({"run": run and str(run), "optimizer_steps": source.step - 1, "captures": found}), err=True)
        return
    for capture in captures:
        line = f"profdeck: rank {capture.identity.rank}: {capture.id} is {capture.status}"
        kit.say(" - ".join([line, *capture.problems]))
    if run is not None:
        kit.say(f"profdeck: see it with: profdeck ls {os.path.relpath(run)}")
    elif source.step == 1 and raised:
        kit.say("profdeck: nothing was captured: the script raised before its first optimizer step.")
    elif source.step == 1:
        why = "the script stepped no torch optimizer. Mark its steps with profdeck.Profiler instead."
        kit.say(f"profdeck: nothing was captured: {why}")
    else:
        why = f"the script ended after optimizer step {source.step - 1}."
        kit.say(f"profdeck: nothing was captured: {why}")
