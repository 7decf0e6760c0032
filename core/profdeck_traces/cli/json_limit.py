"""Option ``--max-bytes``, which limits the size of JSON documents by shortening the least important lists."""

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
        typer.BadParameter: ``--json`` is missing.
    """
    if max_bytes is not None and not as_json:
        raise typer.BadParameter("--max-bytes requires --json. Specify --json as well.")


def print_limited(document: dict[str, Any], max_bytes: int | None, important: Sequence[str]) -> None:
    """Print a JSON document, shortened if necessary to fit a limit.

    Args:
        document: JSON data.
        max_bytes: Maximum size of the output in bytes, or ``None`` for no limit.
        important: Paths of lists, most important first, as in `fit`.

    Raises:
        ConfigError: The document cannot be shortened enough.
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
    """Encode a document as JSON in at most `max_bytes` bytes, and add the key ``truncated``.

    Items are removed from the ends of lists, one path at a time. Lists that are not in `important` are shortened first,
    starting with the largest. Lists in `important` follow, starting with the least important. ``truncated`` maps each
    shortened path to the number of omitted items.

    Args:
        document: JSON data. Each list starts with its most important item.
        max_bytes: Maximum size, including the final newline.
        important: Paths of lists, most important first, such as ``ranks[].kernels``.

    Raises:
        ConfigError: The document exceeds the limit even if all lists are empty.
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
    raise ConfigError(f"--max-bytes {max_bytes} is too small: the shortest result has {len(_encode(shortened))} bytes.")


def _lists(value: Any, path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield each list in a value with its path. The path of a list's items ends with ``[]``."""
    if isinstance(value, list):
        yield path, value
        for item in value:
            yield from _lists(item, f"{path}[]")
    elif isinstance(value, dict):
        for key, member in value.items():
            yield from _lists(member, f"{path}.{key}" if path else key)


def _encode(value: Any) -> str:
    """Encode a value as compact ASCII JSON with a final newline."""
    return terminal.escape_commands(json.dumps(value, separators=(",", ":"))) + "\n"
