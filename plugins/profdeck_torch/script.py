"""``profdeck run``: profiles a PyTorch script or module that knows nothing of profdeck.

A global step ends whenever the script's first optimizer steps; steps count from 1. Later optimizers do not count,
so a script with a critic or a discriminator has one step per update of its first model.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from json import dumps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from profdeck import ProfdeckError, Profiler
from profdeck.base.errors import ConfigError
from profdeck.cli import kit
from profdeck.cli.kit import Settings
from profdeck.config.sources import gather, parse_setting, variables
from profdeck.lifecycle import last_word
from profdeck.records.run_directory import run_name

if TYPE_CHECKING:
    from profdeck import Capture
    from profdeck.config.model import Config


class StepSource:
    """Turns the optimizer's steps into global steps of a profiler.

    The profiler is built with the first optimizer: a process without one, such as the driver of a job, records nothing.
    """

    def __init__(self, build: Callable[[], Profiler]) -> None:
        self.profiler = Profiler()
        self.step = 1
        self._build = build
        self._optimizer: object = None
        self._seen: dict[str, Capture] = {}

    @property
    def captures(self) -> list[Capture]:
        """The captures that have begun, in order."""
        return list(self._seen.values())

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Follow the optimizers of this process, from global step 1 on."""
        from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

        initialise = Optimizer.__init__
        with ExitStack() as stack:

            @functools.wraps(initialise)
            def init(optimizer: Optimizer, *arguments: Any, **keywords: Any) -> None:
                initialise(optimizer, *arguments, **keywords)
                if self._optimizer is None:
                    self._optimizer = optimizer
                    self.profiler = stack.enter_context(self._build())
                    self._begin()

            stack.callback(register_optimizer_step_post_hook(self._passed).remove)
            stack.callback(setattr, Optimizer, "__init__", initialise)
            setattr(Optimizer, "__init__", init)  # noqa: B010  # torch has hooks of steps only
            yield

    def _passed(self, optimizer: object, *_: Any) -> None:
        if optimizer is self._optimizer:
            self.profiler.stop()
            self.step += 1
            self._begin()

    def _begin(self) -> None:
        self.profiler.start(self.step)
        if capture := self.profiler.active:
            self._seen[capture.id] = capture


@attrs.frozen
class Program:
    """What is run, as Python itself runs it."""

    script: Path | None
    module: str | None
    arguments: tuple[str, ...]

    @classmethod
    def found(cls, script: str | None, module: str | None, arguments: list[str]) -> Program:
        """Find a script, or a module, whose first argument stands where a script's name would.

        Raises:
            ConfigError: there is none.
        """
        if module is None:
            if script is None:
                raise ConfigError("Say what to run: a script, or -m and a module.")
            if not Path(script).is_file():
                raise ConfigError(f"{script}: there is no such script.")
            return cls(Path(script), None, tuple(arguments))
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"-m {module}: it cannot be imported: {error}") from error
        if spec is None:
            raise ConfigError(f"-m {module}: there is no such module in the environment of {sys.executable}.")
        return cls(None, module, ((script, *arguments) if script is not None else ()))

    def run(self) -> None:
        """Run it to its end, with its own arguments."""
        sys.argv = [str(self.script or self.module), *self.arguments]
        if self.module is not None:
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)
        else:
            assert self.script is not None  # noqa: S101  # one of them is there
            sys.path.insert(0, str(self.script.parent.resolve()))
            runpy.run_path(str(self.script), run_name="__main__")

    def within(self, trace: TracebackType | None) -> TracebackType | None:
        """Leave out the frames before the program's own."""
        frames = []
        while trace is not None:
            frames.append(trace)
            trace = trace.tb_next
        ours = (__file__, runpy.__file__)
        own = (frame for frame in frames if frame.tb_frame.f_code.co_filename not in ours and not _is_frozen(frame))
        return next(own, frames[0] if frames else None)


def _is_frozen(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith("<frozen ")


def command(  # noqa: PLR0913  # a command line has as many options as it has
    script: Annotated[str | None, typer.Argument(help="The script to run, unchanged.", show_default=False)] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments.", show_default=False)] = None,
    *,
    module: Annotated[
        str | None, typer.Option("-m", help="A module to run instead of a script, as python -m.", show_default=False)
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(help="Optimizer steps to capture, from 1, such as '3..4' or '10, every 500'.", show_default=False),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(help="Ranks that record: all, or numbers such as 0,8 or 0..7. [default: 0]", show_default=False),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Directory for the runs. [default: ./profiles]", show_default=False)
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A config file.", show_default=False)] = None,
    role: Annotated[str, typer.Option(help="The role of this process.")] = "trainer",
    settings: Settings = None,
    json: Annotated[bool, typer.Option("--json", help="Report to stderr as one JSON document.")] = False,
) -> None:
    """Run a PyTorch script or module, and capture optimizer steps.

    Under torchrun: torchrun --nproc-per-node 2 -m profdeck run --steps 3..4 script.py. What it is given reaches the
    processes that it starts, engines among them. The exit status is the script's.
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
    program = Program.found(script, module, arguments or [])
    run = run_name(loaded.run)
    loaded = attrs.evolve(loaded, run=run)
    # What is wrong is said before the script runs; requests are taken once it has an optimizer.
    selected = Profiler.of(attrs.evolve(loaded, on_demand=False), role=role).enabled
    _pass_on(config, chosen | {"run": run, "output": str(loaded.output.absolute())})
    source = StepSource(functools.partial(_built, loaded, role))
    raised = False
    try:
        with source.attached():
            program.run()
            last = source.step - 1
            source.profiler.close(
                f"the script ended after step {last}; if that was its last one, --set final_step={last}"
            )
    except Exception as error:  # noqa: BLE001  # the script's own, shown as Python would show it
        raised = True
        trace = program.within(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise typer.Exit(1) from None
    finally:
        if selected:
            _report(source, loaded.output / run, raised=raised, as_json=json)


# What follows the script is the script's, options too.
command.context_settings = {"allow_interspersed_args": False}  # type: ignore[attr-defined]  # read by the CLI


def _built(config: Config, role: str) -> Profiler:
    """Build the profiler amid the script, which goes on without one if that fails."""
    try:
        return Profiler.of(config, role=role)
    except ProfdeckError as error:
        kit.say(f"profdeck: nothing is captured: {error}")
        return Profiler()


def _pass_on(config: Path | None, chosen: Mapping[str, Any]) -> None:
    """Let processes that the program starts find the same config, and write to the same run."""
    if config is not None:
        os.environ["PROFDECK_CONFIG"] = str(config.absolute())
    os.environ.update(variables(chosen))


def _report(source: StepSource, run: Path, *, raised: bool, as_json: bool) -> None:
    """Say on stderr what was captured: stdout belongs to the script."""
    made = next(run.glob("step_*"), None) is not None  # by this process, or by one that it started
    if as_json:
        last_word.withdraw()
        found = [
            {"id": capture.id, "rank": capture.identity.rank, "status": capture.status, "problems": capture.problems}
            for capture in source.captures
        ]
        document = {"run": str(run) if made else None, "optimizer_steps": source.step - 1, "captures": found}
        typer.echo(dumps(document), err=True)
        return
    for capture in source.captures:
        if capture.problems:
            line = f"profdeck: rank {capture.identity.rank}: {capture.id} is {capture.status}"
            kit.say(" - ".join([line, *capture.problems]))
    if made and source.captures:
        return  # the last word is the profiler's, once for all ranks
    if made:
        at = kit.short(run)
        kit.say(f"profdeck: captures are in {at}. Next: profdeck summary {at}")
    elif source.step == 1 and raised:
        kit.say("profdeck: nothing was captured: the script raised before its first optimizer step.")
    elif source.step == 1:
        why = "the script stepped no torch optimizer. Mark its steps with profdeck.Profiler instead."
        kit.say(f"profdeck: nothing was captured: {why}")
    else:
        why = f"the script ended after optimizer step {source.step - 1}."
        kit.say(f"profdeck: nothing was captured: {why}")
