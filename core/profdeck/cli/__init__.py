"""The command-line interface. Each command has its own module, which is imported only when the command is used."""

from __future__ import annotations

import atexit
import functools
import gc
import logging
from typing import Annotated

import typer

from profdeck.cli._commands import Commands
from profdeck_traces.base.text import printable
from profdeck_traces.base.version import __version__

app = typer.Typer(
    name="profdeck",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command-line interface. The exit code is one of `profdeck_traces.cli.terminal.ExitCode`."""
    # Commands release little memory before exiting, but default garbage collection takes 25 % of their time.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)  # otherwise, garbage collection at exit visits every object
    app(prog_name="profdeck")


def _print_version(value: bool) -> None:  # noqa: FBT001  # typer calls it with the option's value
    if value:
        typer.echo(f"profdeck {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    *,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log to stderr.")] = False,
    version: Annotated[  # noqa: ARG001  # handled by its callback
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Profile LLM jobs: check the config before a job, and verify and analyse the traces after it."""
    logger = logging.getLogger("profdeck")
    handler = logging.StreamHandler()
    handler.setFormatter(_LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s" if verbose else None))
    handler.setLevel(logging.DEBUG if verbose else logging.WARNING)
    ctx.call_on_close(functools.partial(logger.removeHandler, handler))
    logger.addHandler(handler)
    if verbose:
        ctx.call_on_close(functools.partial(logger.setLevel, logger.level))
        logger.setLevel(logging.DEBUG)


class _LineFormatter(logging.Formatter):
    """Formatter that escapes line breaks and control characters. Messages can quote files and server replies."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # overrides a method of logging.Formatter
        return printable(super().formatMessage(record))
