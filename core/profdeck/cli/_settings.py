"""The option ``--set`` of the commands that read a config."""

from __future__ import annotations

from typing import Annotated

import typer

SOURCE = "--set"

Settings = Annotated[
    list[str] | None,
    typer.Option(
        SOURCE,
        metavar="KEY=VALUE",
        help="Set a config value over file and environment, such as trainer.options.with_stack=true. Repeatable.",
    ),
]
