"""Progress bar for capturing servers, based on the states that they report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from profdeck.backends.api import TargetState
from profdeck_traces.base.text import plural

_EVERY_S = 0.5
_MOST_NAMED = 2

States = Mapping[str, TargetState]


class ProgressDisplay:
    """Progress bar on stderr.

    Args:
        states: Returns the current states of the servers that report progress, by name.
        count: Number of servers that record.
        wanted: Number of iterations that each server records, if known.
    """

    stopping = False
    """True while the servers write their files."""

    def __init__(self, states: Callable[[], States], count: int, wanted: int | None) -> None:
        self._states, self._count, self._wanted = states, count, wanted
        text = TextColumn("{task.description}", markup=False)
        console = Console(stderr=True)
        columns = (text, BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, auto_refresh=False)
        self._bar.start()
        self._task = asyncio.get_running_loop().create_task(self._refresh())

    @classmethod
    def start(cls, states: Callable[[], States], count: int, wanted: int | None) -> Self | None:
        """Show a progress bar if stderr is a terminal; otherwise, return ``None``. Requires a running event loop."""
        return cls(states, count, wanted) if Console(stderr=True).is_terminal else None

    def close(self) -> None:
        """Remove the progress bar."""
        self._task.cancel()
        self._bar.stop()

    async def _refresh(self) -> None:
        row = self._bar.add_task("", total=None)
        while True:
            states = self._states()
            text = say_files(states) if self.stopping else say_windows(states, self._wanted, self._count)
            done, total = amount(states, self._wanted, stopping=self.stopping)
            self._bar.update(row, description=text, completed=done, total=total, refresh=True)
            await asyncio.sleep(_EVERY_S)


def say_windows(states: States, wanted: int | None, count: int) -> str:
    """Describe the progress of the recording.

    Args:
        states: States of the servers that report progress, by name.
        wanted: Number of iterations that each server records, if known.
        count: Number of servers that record.
    """
    what = "their windows" if wanted is None else plural(wanted, "iteration")
    if count > 1:
        text = f"{sum(state.ended for state in states.values())} of {count} targets have recorded {what}"
    else:
        text = "Recording" if wanted is None else f"Recording {what}"
    waiting = (f" ({name} waits for {state.waits_for})" for name, state in states.items() if state.waits_for)
    return text + next(waiting, "")


def say_files(states: States) -> str:
    """Describe which servers are still writing files."""
    writing = [name for name, state in states.items() if state.writing]
    if not writing:
        return "Collecting the files"
    more = len(writing) - _MOST_NAMED
    return f"Waiting for the files of {', '.join(writing[:_MOST_NAMED])}" + (f" and {more} more" if more > 0 else "")


def amount(states: States, wanted: int | None, *, stopping: bool) -> tuple[int, int | None]:
    """Return the number of completed iterations and the total, which is ``None`` if unknown.

    If `stopping`, count the servers that have written their files instead of iterations.
    """
    if stopping:
        return sum(not state.writing for state in states.values()), len(states) or None
    if wanted is None or not states:
        return 0, None
    done = sum(wanted if state.ended else min(state.iterations, wanted) for state in states.values())
    return done, wanted * len(states)
