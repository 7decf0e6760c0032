"""The group of all `profdeck` commands, which imports each command on first use.

The commands are entry points of the group ``profdeck.commands``. Each entry point is a function for
`typer.Typer.command`, or a `typer.Typer` with subcommands. If a function has the attribute ``context_settings``, it is
passed to `typer.Typer.command`.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from profdeck.cli._values import convert_without_pydantic, parameters_without_pydantic
from profdeck_traces.base.entry_points import installed, load
from profdeck_traces.base.errors import BrokenPluginError, PluginError, ProfdeckError, describe_error, did_you_mean
from profdeck_traces.base.text import printable
from profdeck_traces.cli import terminal
from profdeck_traces.cli.terminal import ExitCode

COMMANDS = "profdeck.commands"


_SECTIONS = {"profdeck": "Capture", "profdeck_traces": "Read traces"}
"""Section headings in the list of commands, by package. Commands of other packages are listed last."""
_UNTIL_STOPPED = "Use 'profdeck capture servers' without --iterations: it records until Ctrl-C, SIGTERM or --timeout."
_UsageError: Any = typer.BadParameter.__base__
"""Base class of click's command-line errors. typer bundles a copy of click, but does not export this class."""
_REPLACED = {
    "backends": "Use 'profdeck plugins'.",
    "capture start": _UNTIL_STOPPED,
    "capture stop": _UNTIL_STOPPED,
}
"""Removed commands, each with a message that names the replacement."""


class Commands(TyperGroup):
    """Command group that imports commands on demand and converts errors to exit codes."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the group's own options, which precede the command name."""
        return parameters_without_pydantic(super().get_params, ctx)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  # click's signature
        """Return all command names, ordered by section."""
        return [name for names in _by_section().values() for name in names]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands and their descriptions, grouped by section.

        To save time, a command is imported only if its description cannot be read from its source.
        """
        points = installed(COMMANDS)
        for section, names in _by_section().items():
            rows = []
            for name in names:
                text = _description(points[name])
                if text is None and (command := self.get_command(ctx, name)) is not None:
                    text = command.get_short_help_str(formatter.width - 6 - max(map(len, points)))
                rows.append((name, text or ""))
            with formatter.section(section):
                formatter.write_dl(rows, col_max=max(map(len, points)))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002  # click's signature
        """Import and return a command. If the import fails, return a command that raises the error."""
        if cmd_name not in installed(COMMANDS):
            return None
        try:
            return _build(cmd_name)
        except PluginError as error:
            return _unavailable(cmd_name, error)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the arguments name. If it does not exist, fail and suggest the nearest match."""
        for name in (args[0], " ".join(args[:2])):
            if name in _REPLACED:
                ctx.fail(f"No such command '{name}'. {_REPLACED[name]}")
        if self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command '{args[0]}'.{did_you_mean(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the options that precede the command."""
        with _escaped_usage_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. If it raises a `ProfdeckError`, print the message without a traceback."""
        try:
            with _escaped_usage_errors():
                return super().invoke(ctx)
        except ProfdeckError as error:
            typer.echo("error: " + "\n       ".join(terminal.error_lines(error)), err=True)
            ctx.exit(ExitCode(error.exit_code))
        except KeyboardInterrupt:
            terminal.print_stderr("interrupted")
            ctx.exit(ExitCode.INTERRUPTED)


@contextmanager
def _escaped_usage_errors() -> Iterator[None]:
    """Redact credentials and escape control characters in typer's usage errors, which quote command-line arguments.

    Also remove the prefix that pydantic adds to validation messages.
    """
    try:
        yield
    except _UsageError as error:
        from profdeck_traces.base.credentials import redact  # slow to import

        error.message = printable(redact(error.message.removeprefix("Value error, ")))
        raise


def is_built_in(point: metadata.EntryPoint) -> bool:
    """Return True if an entry point is a command that profdeck itself provides."""
    return point.group == COMMANDS and _package(point) in _SECTIONS


def _package(point: metadata.EntryPoint) -> str:
    return point.module.partition(".")[0]


def _by_section() -> dict[str, list[str]]:
    """Return the command names, grouped by section heading."""
    sections: dict[str, list[str]] = {heading: [] for heading in (*_SECTIONS.values(), "Plugins")}
    for name, point in installed(COMMANDS).items():
        sections[_SECTIONS.get(_package(point), "Plugins")].append(name)
    return {heading: names for heading, names in sections.items() if names}


def _description(point: metadata.EntryPoint) -> str | None:
    """Parse a command's one-line description from its source. Return ``None`` if it is not found."""
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
    text = next(filter(None, (_help_of(node, point.attr) for node in tree.body)), None)
    return text.partition("\n")[0] if text else None


def _help_of(node: ast.stmt, name: str) -> str | None:
    """Return the help of the command `name` if the statement defines the command; otherwise, ``None``.

    The statement can be the command's function, the callback of a group, or the assignment that creates a group.
    """
    match node:
        case ast.FunctionDef():
            is_callback = any(f"{name}.callback" in ast.unparse(decorator) for decorator in node.decorator_list)
            return ast.get_docstring(node) if node.name == name or is_callback else None
        case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call(keywords=keywords)) if target == name:
            texts = [keyword.value for keyword in keywords if keyword.arg == "help"]
            return str(texts[0].value) if texts and isinstance(texts[0], ast.Constant) else None
    return None


def _build(name: str) -> Any:
    from profdeck.cli._cluster_options import with_cluster_options

    command = load(COMMANDS, name)
    try:
        return _as_command(name, with_cluster_options(name, command))
    except Exception as error:
        raise BrokenPluginError(
            f"The entry point '{name}' in {COMMANDS} must be a function or a typer.Typer, got {command!r}: "
            f"{describe_error(error)}"
        ) from error


def _as_command(name: str, command: Any) -> Any:
    holder = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    if isinstance(command, typer.Typer):
        holder.add_typer(command, name=name)
    else:
        holder.command(name, context_settings=getattr(command, "context_settings", None))(command)
    built = get_group(holder).commands[name]
    convert_without_pydantic(built)
    return built


def _unavailable(name: str, error: PluginError) -> Any:
    def command(ctx: typer.Context) -> None:  # noqa: ARG001  # accepts any arguments
        raise error

    holder = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    any_arguments = {"ignore_unknown_options": True, "allow_extra_args": True}
    holder.command(
        name,
        help=f"Unavailable: {printable(str(error))}",
        add_help_option=False,
        context_settings=any_arguments,
    )(command)
    return get_group(holder).commands[name]
