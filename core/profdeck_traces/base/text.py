"""Formatting for messages."""

from __future__ import annotations

from pathlib import Path


def plural(count: int, noun: str) -> str:
    """Format a count with its noun, such as ``1 trace`` or ``1,000 traces``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def short_path(path: Path) -> str:
    """Return a path relative to the current directory, or unchanged if it is outside that directory."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
