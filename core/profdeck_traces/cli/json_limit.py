"""Option ``--max-bytes``: JSON documents of limited size, with the most important items first."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from profdeck_traces.base.errors import ConfigError
from profdeck_traces.cli import terminal

MaxBytes = Annotated[
    int | None,
    typer.Option(
        "--max-bytes",
        min=1,
        metavar="N",
        help="With --json, print at most N bytes: shorten the least important lists, and count the omitted items under "
        "`truncated`.",
    ),
]


def check_option(max_bytes: int | None, *, as_json: bool) -> None:
    """Raise an error if ``--max-bytes`` is used without ``--json``.

    Raises:
        typer.BadParameter: The option has no effect.
    """
    if max_bytes is not None and not as_json:
        raise typer.BadParameter("--max-bytes requires --json. Specify --json as well.")


def print_limited(document: dict[str, Any], max_bytes: int | None, important: Sequence[str]) -> None:
    """Print a JSON document, shortened if there is a limit.

    Args:
        document: The document.
        max_bytes: Maximum size of the output in bytes, or ``None``.
        important: Paths of lists, most important first, as in `fit`.

    Raises:
        ConfigError: The document does not fit.
    """
    if max_bytes is None:
        terminal.print_json(document)
        return
    try:
        sys.stdout.write(fit(document, max_bytes, important))
        sys.stdout.flush()
    except BrokenPipeError:
        terminal.exit_quietly()


def fit(document: dict[str, Any], max_bytes: int, important: Sequence[str]) -> str:
    """Return a document as JSON of at most `max_bytes` bytes, with a key ``truncated``.

    Lists are shortened from their end, one path after the other: first those that are not in `important`, largest
    first, then those in `important`, last first. ``truncated`` maps each path to the number of omitted items.

    Args:
        document: JSON data. Lists start with their most important item.
        max_bytes: Maximum size, including the line break at the end.
        important: Paths of lists, most important first, such as ``ranks[].kernels``.

    Raises:
        ConfigError: The document is larger than the limit even with empty lists.
    """
    shortened = json.loads(json.dumps(document))
    truncated: dict[str, int] = {}
    shortened["truncated"] = truncated
    if len(text := _encode(shortened)) <= max_bytes:
        return text
    sizes: dict[str, int] = {}
    for path, items in _lists(shortened):
        sizes[path] = sizes.get(path, 0) + len(_encode(items))
    ranking = {path: place for place, path in enumerate(important)}
    for path in sorted(sizes, key=lambda path: (-ranking.get(path, len(ranking)), -sizes[path])):
        complete = [(items, [*items]) for place, items in _lists(shortened) if place == path and items]
        if not complete:
            continue

        def keep(count: int, path: str = path, complete: list[tuple[list[Any], list[Any]]] = complete) -> str:
            for items, every in complete:
                items[:] = every[:count]
            truncated[path] = sum(max(0, len(every) - count) for _, every in complete)
            return _encode(shortened)

        if len(keep(0)) > max_bytes:
            continue
        kept, omitted = 0, max(len(every) for _, every in complete)
        while omitted - kept > 1:
            middle = (kept + omitted) // 2
            kept, omitted = (middle, omitted) if len(keep(middle)) <= max_bytes else (kept, middle)
        return keep(kept)
    raise ConfigError(
        f"--max-bytes {max_bytes} is too small: the shortest result has {len(_encode(shortened))} bytes."
    )


def _lists(value: Any, path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield all lists inside a value with their paths. Items of a list have the path of the list and ``[]``."""
    if isinstance(value, list):
        yield path, value
        for item in value:
            yield from _lists(item, f"{path}[]")
    elif isinstance(value, dict):
        for key, member in value.items():
            yield from _lists(member, f"{path}.{key}" if path else key)


def _encode(value: Any) -> str:
    """Return compact JSON in ASCII with a line break."""
    return terminal.escape_commands(json.dumps(value, separators=(",", ":"))) + "\n"
