"""Shows, while a capture runs, how far the servers are and whose files are awaited.

The capture itself asks the servers; this shows what they answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import attrs
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from profdeck.backends.api import TargetState
from profdeck.profiler import Profiler
from profdeck_traces.base.text import plural

_EVERY_S = 0.5
_MOST_NAMED = 2

States = Mapping[str, TargetState]


@attrs.define
class CapturePhase:
    """Phase of a capture: recording or stopping."""

    stopping: bool = False
    """Whether the windows are no longer waited for, but the files."""


@contextlib.asynccontextmanager
async def watching(profiler: Profiler, count: int, wanted: int | None) -> AsyncIterator[CapturePhase]:
    """Show the progress of servers on stderr while the block runs, if stderr is a terminal.

    Args:
        profiler: the profiler that captures the servers.
        count: the number of servers that record. Servers without profdeck's routes do not report progress.
        wanted: the number of iterations to record on each server, if known.

    Yields:
        The phase of the capture, which the caller updates.
    """
    console, phase = Console(stderr=True), CapturePhase()
    if not console.is_terminal:
        yield phase
        return
    text = TextColumn("{task.description}", markup=False)
    bar = Progress(text, BarColumn(), TimeElapsedColumn(), console=console, transient=True, auto_refresh=False)
    with bar:
        task = asyncio.create_task(_show(bar, profiler, count, wanted, phase))
        try:
            yield phase
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _show(bar: Progress, profiler: Profiler, count: int, wanted: int | None, phase: CapturePhase) -> None:
    row = bar.add_task("", total=None)
    while True:
        states = profiler.states
        text = say_files(states) if phase.stopping else say_windows(states, wanted, count)
        done, total = amount(states, wanted, stopping=phase.stopping)
        bar.update(row, description=text, completed=done, total=total, refresh=True)
        await asyncio.sleep(_EVERY_S)


def say_windows(states: States, wanted: int | None, count: int) -> str:
    """Say how many servers have recorded their windows.

    Args:
        states: of those that tell, by name.
        wanted: how many iterations each is to record.
        count: how many servers there are.
    """
    what = "their windows" if wanted is None else plural(wanted, "iteration")
    if count > 1:
        text = f"{sum(state.ended for state in states.values())} of {count} targets have recorded {what}"
    else:
        text = "Recording" if wanted is None else f"Recording {what}"
    waiting = (f" ({name} waits for {state.waits_for})" for name, state in states.items() if state.waits_for)
    return text + next(waiting, "")


def say_files(states: States) -> str:
    """Say whose files are awaited."""
    writing = [name for name, state in states.items() if state.writing]
    if not writing:
        return "Collecting the files"
    more = len(writing) - _MOST_NAMED
    return f"Waiting for the files of {', '.join(writing[:_MOST_NAMED])}" + (f" and {more} more" if more > 0 else "")


def amount(states: States, wanted: int | None, *, stopping: bool) -> tuple[int, int | None]:
    """Return what is done and what there is to do; None if nobody knows."""
    if stopping:
        return sum(not state.writing for state in states.values()), len(states) or None
    if wanted is None or not states:
        return 0, None
    done = sum(wanted if state.ended else min(state.iterations, wanted) for state in states.values())
    return done, wanted * len(states)
