"""Tests for the conversion of command-line values. Results and errors must match those of typer."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command

from profdeck.cli._values import convert_without_pydantic


class Color(StrEnum):
    RED = "red"
    DARK_BLUE = "dark-blue"


def even(text: str | int) -> int:
    if int(text) % 2:
        raise ValueError(f"{text} is odd")
    return int(text)


def below_root(text: str) -> Path:
    if text == "missing":
        raise typer.BadParameter("There is no such file.")
    return Path("root", text)


def return_values(  # one parameter for each type
    files: Annotated[list[Path], typer.Argument(parser=below_root)],
    *,
    color: Color = Color.RED,
    colors: Annotated[list[Color] | None, typer.Option()] = None,
    top: Annotated[int | None, typer.Option(min=0)] = None,
    count: Annotated[int, typer.Option(parser=even)] = 2,
    share: float = 0.5,
    name: str = "none",
    path: Path | None = None,
    cache: bool = True,
) -> list[object]:
    return [files, color, colors, top, count, share, name, path, cache]


def outcome(*arguments: str, direct: bool) -> object:
    """Run the command and return the values passed to the function, or the error message."""
    app = typer.Typer(rich_markup_mode=None)
    app.command()(return_values)
    command: Any = get_command(app)
    if direct:
        convert_without_pydantic(command)
    try:
        return command.main([*arguments], standalone_mode=False)
    except typer.BadParameter.__base__ as error:  # type: ignore[misc]  # click's base class for usage errors
        return error.format_message()


@pytest.mark.parametrize(
    "arguments",
    [
        ["a"],
        ["a", "b", "--color", "dark-blue", "--colors", "red", "--colors", "dark-blue"],
        ["a", "--top", "3", "--count", "4", "--share", "1.5", "--name", "x", "--path", "y", "--no-cache"],
        [],
        ["missing"],
        ["a", "--color", "green"],
        ["a", "--colors", "red", "--colors", "green"],
        ["a", "--top", "x"],
        ["a", "--top", "-1"],
        ["a", "--count", "3"],
        ["a", "--share", "x"],
    ],
)
def test_values_and_errors_equal_those_of_typer(arguments: list[str]) -> None:
    assert outcome(*arguments, direct=True) == outcome(*arguments, direct=False)
