"""Text of messages."""

from __future__ import annotations

from pathlib import Path


def plural(count: int, noun: str) -> str:
    """Return a count and its noun, with a plural ``s`` unless the count is 1."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def short_path(path: Path) -> str:
    """Return a path relative to the current directory. Paths outside of it are returned unchanged."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
