"""`profdeck config`: what the config is, and where its values come from."""

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
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.cli import terminal

command = typer.Typer(help="Show the config.", no_args_is_help=True)


@attrs.frozen
class Row:
    """One value of the config."""

    key: str
    value: Any
    source: str


@command.command()
def show(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="The config; without it, the file that PROFDECK_CONFIG names."),
    ] = None,
    *,
    settings: SettingsOption = None,
    json: terminal.JsonOption = False,
) -> None:
    """Show every value of the config and where it comes from."""
    loaded = load_config(file, settings=dict(map(parse_setting, settings or ())), settings_source=SETTINGS_SOURCE)
    notes: list[str] = []
    rows = list(_rows(loaded, notes))
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
    """Yield all values; options of backends that can be loaded with the defaults that the backend gives them."""
    explained: set[str] = set()
    for key, value, source in loaded.rows():
        match key.split("."):
            case ["roles", role, "options", *_]:
                if role not in explained:
                    explained.add(role)
                    yield from _options(loaded, role, notes)
            case _:
                yield Row(key, value, source)


def _options(loaded: Loaded, role: str, notes: list[str]) -> Iterator[Row]:
    given = loaded.config.roles[role].options
    try:
        values = unstructure(build_backend(loaded.config, role).options)
    except ProfdeckError as error:
        notes.append(f"roles.{role}.options are shown as they were given: {error}")
        values = dict(given)
    for name, value in values.items():
        key = ("roles", role, "options", name)
        yield Row(".".join(key), value, loaded.source(key) if name in given else "default")
