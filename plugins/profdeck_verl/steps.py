"""Makes verl request a capture in every step, so that only profdeck's config selects steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator

_current_step: list[int] = []
"""The global step of this process's trainer; empty before its first step."""


def set_current_step(step: int) -> None:
    """Set the global step of this process's trainer."""
    _current_step[:] = [step]


def current_step() -> int | None:
    """Return the global step of this process's trainer, or None if it has not started a step."""
    return _current_step[0] if _current_step else None


class EveryStep:
    """Value of ``global_profiler.steps`` that contains every step."""

    def __contains__(self, step: object) -> bool:
        return True

    def __iter__(self) -> Iterator[int]:
        """Yield one step beyond the end of any job, because verl runs its own finish hook at the last step."""
        yield sys.maxsize

    def __repr__(self) -> str:
        return "as profdeck's config says"


class AnyStep:
    """Value of a trainer's start and end step that equals every step. A comparison sets the current step."""

    __hash__ = None  # type: ignore[assignment]  # No hash is consistent with this equality.

    def __eq__(self, step: object) -> bool:
        if isinstance(step, int):
            set_current_step(step)
        return True
