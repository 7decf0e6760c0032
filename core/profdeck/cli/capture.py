"""`profdeck capture`: captures running servers or a running job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from profdeck.cli import capture_job, capture_servers


class _Group(TyperGroup):
    """Command group that rejects options, because only the subcommands have options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the subcommand. Fail if the first argument is an option."""
        if args[0].startswith("--run"):
            ctx.fail(f"{args[0]} was replaced by an argument: 'profdeck capture job RUN'.")
        if args[0].startswith("-"):
            ctx.fail(
                f"{args[0]} is an option of the subcommands. For servers: 'profdeck capture servers {' '.join(args)}'. "
                "For a running job: 'profdeck capture job RUN'."
            )
        return super().resolve_command(ctx, args)


def _rejecting(removed: Mapping[str, str]) -> type[TyperCommand]:
    """Return a command class that rejects removed options.

    Args:
        removed: Removed options, each with a message that names the replacement.
    """

    class Command(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            for name in (arg.partition("=")[0] for arg in args):
                if name in removed:
                    ctx.fail(f"The option {name} was removed. {removed[name]}")
            return super().parse_args(ctx, args)

    return Command


command = typer.Typer(
    cls=_Group,
    help="Capture running servers or a running job; exit with 1 if incomplete.",
    no_args_is_help=True,
    context_settings={"ignore_unknown_options": True},
)
command.command("servers", cls=_rejecting(capture_servers.REMOVED))(capture_servers.command)
command.command("job", cls=_rejecting(capture_job.REMOVED))(capture_job.command)
