"""Options shared by the commands that take a config."""

from __future__ import annotations

from typing import Annotated

import typer

SETTINGS_SOURCE = "--set"
"""Name of the ``--set`` option, for error messages about its settings."""

SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        SETTINGS_SOURCE,
        metavar="KEY=VALUE",
        help="Override a config value from file or environment, such as trainer.options.with_stack=true. Repeatable.",
    ),
]
"""Type of the ``--set`` option."""
