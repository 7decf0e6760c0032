"""Progress bar for a server capture, based on the states that the servers report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from profdeck.backends.api import TargetState
from profdeck_traces.base.text import plural

_REFRESH_EVERY_S = 0.5
_MAX_NAMED = 2

States = Mapping[str, TargetState]


class ProgressDisplay:
    """Progress bar on stderr.

    Args:
        states: Returns the current states of the servers that report progress, by name.
        count: Number of servers that record.
        iterations: Number of iterations that each server records, or ``None`` if unknown.
    """

    stopping = False
    """True while the servers write their files."""

    def __init__(self, states: Callable[[], States], count: int, iterations: int | None) -> None:
        self._states, self._count, self._iterations = states, count, iterations
        text = TextColumn("{task.description}", markup=False)
        console = Console(stderr=True)
        columns = (text, BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, auto_refresh=False)
        self._bar.start()
        self._task = asyncio.get_running_loop().create_task(self._refresh())

    @classmethod
    def start(cls, states: Callable[[], States], count: int, iterations: int | None) -> Self | None:
        """Show a progress bar if stderr is a terminal; otherwise, return ``None``. Requires a running event loop."""
        return cls(states, count, iterations) if Console(stderr=True).is_terminal else None

    def close(self) -> None:
        """Remove the progress bar."""
        self._task.cancel()
        self._bar.stop()

    async def _refresh(self) -> None:
        row = self._bar.add_task("", total=None)
        while True:
            states = self._states()
            text = (
                describe_files(states) if self.stopping else describe_recording(states, self._iterations, self._count)
            )
            done, total = completed_and_total(states, self._iterations, stopping=self.stopping)
            self._bar.update(row, description=text, completed=done, total=total, refresh=True)
            await asyncio.sleep(_REFRESH_EVERY_S)


def describe_recording(states: States, iterations: int | None, count: int) -> str:
    """Describe the progress of the recording.

    Args:
        states: States of the servers that report progress, by name.
        iterations: Number of iterations that each server records, or ``None`` if unknown.
        count: Number of servers that record.
    """
    target = "their windows" if iterations is None else plural(iterations, "iteration")
    if count > 1:
        text = f"{sum(state.ended for state in states.values())} of {count} targets have recorded {target}"
    else:
        text = "Recording" if iterations is None else f"Recording {target}"
    waiting = (f" ({name} waits for {state.waits_for})" for name, state in states.items() if state.waits_for)
    return text + next(waiting, "")


def describe_files(states: States) -> str:
    """Describe which servers are still writing files."""
    writing = [name for name, state in states.items() if state.writing]
    if not writing:
        return "Collecting the files"
    more = len(writing) - _MAX_NAMED
    return f"Waiting for the files of {', '.join(writing[:_MAX_NAMED])}" + (f" and {more} more" if more > 0 else "")


def completed_and_total(states: States, iterations: int | None, *, stopping: bool) -> tuple[int, int | None]:
    """Return the number of completed iterations and the total, which is ``None`` if unknown.

    If `stopping`, count the servers that have written their files instead of iterations.
    """
    if stopping:
        return sum(not state.writing for state in states.values()), len(states) or None
    if iterations is None or not states:
        return 0, None
    done = sum(iterations if state.ended else min(state.iterations, iterations) for state in states.values())
    return done, iterations * len(states)
