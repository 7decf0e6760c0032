"""The group of all subcommands: profdeck's own and those of plugins, imported when they are asked for.

A subcommand is an object ``command``: a function for `typer.Typer.command`, whose attribute ``context_settings`` is
passed on if it has one, or a `typer.Typer` with commands of its own. Plugins offer theirs under the entry-point group
``profdeck.commands``.
"""

from __future__ import annotations

import ast
import itertools
from importlib import import_module, metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from profdeck.base.errors import BrokenPluginError, PluginError, ProfdeckError, did_you_mean
from profdeck.cli import kit
from profdeck.cli.kit import ExitCode, exit_code

COMMANDS = "profdeck.commands"

_OWN = {
    "check": "Check a config before the job starts; show what is wrong.",
    "config": "Show the config.",
    "plugins": "List the installed plugins, or print the options of one.",
    "capture": "Capture running servers or a job; exit with 1 if incomplete.",
    "ls": "List a run's captures, or the runs; exit with 1 if incomplete.",
    "summary": "Say where the time went, and what stands out.",
    "report": "Write a page with findings, timelines and tables.",
    "view": "Show traces in Perfetto; nothing is uploaded.",
    "diff": "Compare two runs: what got slower or faster.",
    "trend": "Say since when a run, or its runs, got slower, and what changed.",
    "baseline": "Keep the numbers of a run, and check later runs against them.",
    "merge": "Merge traces into one that Perfetto opens.",
    "trim": "Trim a trace to steps, iterations, a time or categories.",
    "export": "Write the tables of a run for other tools.",
    "collect": "Fetch missing files from other hosts; exit with 1 if incomplete.",
    "upload": "Send what has ended of a run to a URL.",
    "prune": "Delete old captures of a run, whole steps at a time.",
}
"""Our commands, with what the list of commands says of each: to list them imports none."""
_UNTIL_STOPPED = "Use 'profdeck capture' without --iterations: it records until Ctrl-C, SIGTERM or --timeout."
_REPLACED = {
    "backends": "Use 'profdeck plugins'.",
    "capture start": _UNTIL_STOPPED,
    "capture stop": _UNTIL_STOPPED,
}
"""Removed commands, each with a message that names the replacement."""


class Commands(TyperGroup):
    """Finds the commands by name and ends with the exit codes of `ExitCode`."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  # click's signature
        """Name all commands: profdeck's own, then those of plugins."""
        plugins = {point.name for point in metadata.entry_points(group=COMMANDS)}
        return [*_OWN, *sorted(plugins.difference(_OWN))]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands without importing them, as far as that can be done."""
        points = {point.name: point for point in metadata.entry_points(group=COMMANDS)}
        rows = []
        for name in self.list_commands(ctx):
            text = _OWN.get(name) or _docstring(points[name])
            if text is None and (command := self.get_command(ctx, name)) is not None:
                text = command.get_short_help_str(formatter.width - 6 - max(map(len, (*points, *_OWN))))
            rows.append((name, text or ""))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command. One that cannot be imported explains itself in the help and when it is called."""
        if cmd_name not in _OWN and cmd_name not in self.list_commands(ctx):
            return None
        try:
            return _build(cmd_name)
        except PluginError as error:
            return _unavailable(cmd_name, error)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the arguments name, or fail with the nearest match."""
        for name in (args[0], " ".join(args[:2])):
            if name in _REPLACED:
                ctx.fail(f"No such command '{name}'. {_REPLACED[name]}")
        if self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command '{args[0]}'.{did_you_mean(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; our own errors end it with a sentence instead of a traceback."""
        try:
            return super().invoke(ctx)
        except ProfdeckError as error:
            typer.echo("error: " + str(error).replace("\n", "\n       "), err=True)
            ctx.exit(exit_code(error))
        except KeyboardInterrupt:
            kit.print_stderr("interrupted")
            ctx.exit(ExitCode.INTERRUPTED)


def _docstring(point: metadata.EntryPoint) -> str | None:
    """Return the first line that a plugin's command says of itself, read from its source; None if that has none."""
    spec, path = None, None
    for name in itertools.accumulate(point.module.split("."), "{}.{}".format):
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    try:
        tree = ast.parse(Path(str(spec and spec.origin)).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    # A function, or a group of commands with a callback.
    found = [node for node in functions if node.name == point.attr] or [
        node for node in functions if any(f"{point.attr}.callback" in ast.unparse(one) for one in node.decorator_list)
    ]
    text = ast.get_docstring(found[0]) if found else None
    return text.partition("\n")[0] if text else None


def _build(name: str) -> Any:
    if name in _OWN:
        from profdeck.cli._cluster_options import with_cluster_options

        return _as_command(name, with_cluster_options(name, import_module(f"profdeck.cli.{name}").command))
    from profdeck.base.entry_points import load

    command = load(COMMANDS, name)
    try:
        return _as_command(name, command)
    except Exception as error:
        raise BrokenPluginError(
            f"The command '{name}' is {command!r}, of which no command can be made: {type(error).__name__}: {error}"
        ) from error


def _as_command(name: str, command: Any) -> Any:
    holder = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    if isinstance(command, typer.Typer):
        holder.add_typer(command, name=name)
    else:
        holder.command(name, context_settings=getattr(command, "context_settings", None))(command)
    return get_group(holder).commands[name]


def _unavailable(name: str, error: PluginError) -> Any:
    def command(ctx: typer.Context) -> None:  # noqa: ARG001  # takes whatever arguments follow
        raise error

    holder = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    any_arguments = {"ignore_unknown_options": True, "allow_extra_args": True}
    holder.command(name, help=f"Unavailable: {error}", add_help_option=False, context_settings=any_arguments)(command)
    return get_group(holder).commands[name]
