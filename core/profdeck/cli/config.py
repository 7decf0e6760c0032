"""`profdeck config`: prints the resolved config and the sources of its values."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from profdeck.backends.backend_setup import build_backend
from profdeck.cli.options import SETTINGS_SOURCE, SettingsOption
from profdeck.config.sources import Loaded, load_config, parse_setting
from profdeck.config.structuring import unstructure
from profdeck_traces.base.credentials import redact_values
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.base.files import user_path
from profdeck_traces.cli import terminal

command = typer.Typer(help="Print the resolved config.", no_args_is_help=True)


@attrs.frozen
class Row:
    """A config value and its source."""

    key: str
    value: Any
    source: str


@command.command()
def show(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", parser=user_path, help="The config. Default: the file in PROFDECK_CONFIG."),
    ] = None,
    *,
    settings: SettingsOption = None,
    json: terminal.JsonOption = False,
) -> None:
    """Print all config values and their sources."""
    loaded = load_config(file, settings=dict(map(parse_setting, settings or ())), settings_source=SETTINGS_SOURCE)
    notes: list[str] = []
    rows = [attrs.evolve(row, value=redact_values(row.value, row.key)) for row in _rows(loaded, notes)]
    if json:
        terminal.print_json({"values": [attrs.asdict(row) for row in rows], "notes": notes})
        return
    table = terminal.make_table("key", "value", "source")
    for row in rows:
        value = row.value if isinstance(row.value, str) else jsonlib.dumps(row.value)
        table.add_row(row.key, value, row.source, style="dim" if row.source == "default" else None)
    terminal.stdout_console().print(table)
    for note in notes:
        terminal.warn(note)


def _rows(loaded: Loaded, notes: list[str]) -> Iterator[Row]:
    """Yield all values. If a backend can be loaded, its options include the defaults.

    Args:
        loaded: The config.
        notes: Receives a message for each backend that cannot be loaded.
    """
    expanded_roles: set[str] = set()
    for key, value, source in loaded.rows():
        match key.split("."):
            case ["roles", role, "options", *_]:
                if role not in expanded_roles:
                    expanded_roles.add(role)
                    yield from _options(loaded, role, notes)
            case _:
                yield Row(key, value, source)


def _options(loaded: Loaded, role: str, notes: list[str]) -> Iterator[Row]:
    configured = loaded.config.roles[role].options
    try:
        values = unstructure(build_backend(loaded.config, role).options)
    except ProfdeckError as error:
        notes.append(f"roles.{role}.options are shown without defaults: {error}")
        values = dict(configured)
    for name, value in values.items():
        key = ("roles", role, "options", name)
        yield Row(".".join(key), value, loaded.source(key) if name in configured else "default")
