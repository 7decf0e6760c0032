"""Lets verl ask for a capture in every step, so that profdeck's config alone decides."""

from __future__ import annotations

import sys
from collections.abc import Iterator

_current: list[int] = []
"""The global step of this process's trainer."""


def enter(step: int) -> None:
    """Say which global step this process's trainer begins."""
    _current[:] = [step]


def current() -> int | None:
    """Return the global step of this process's trainer; None if it has none."""
    return _current[0] if _current else None


class EveryStep:
    """What verl takes for ``global_profiler.steps``: every step is in it, and none is the last."""

    def __contains__(self, step: object) -> bool:
        return True

    def __iter__(self) -> Iterator[int]:
        """Yield a step that no job reaches: verl looks for the greatest, at which it runs its own finish hook."""
        yield sys.maxsize

    def __repr__(self) -> str:
        return "as profdeck's config says"


class AnyStep:
    """What a trainer takes for the step at which it is to do something: every one. It remembers the last."""

    __hash__ = None  # type: ignore[assignment]  # equal to all

    def __eq__(self, step: object) -> bool:
        if isinstance(step, int):
            enter(step)
        return True
