"""Text of messages."""

from __future__ import annotations

from pathlib import Path


def plural(count: int, noun: str) -> str:
    """Write a count with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def short_path(path: Path) -> str:
    """Return a path relative to the current directory if possible."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
