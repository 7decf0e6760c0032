"""Shows, while a capture runs, how far the servers are and whose files are awaited."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import attrs
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from profdeck.cli._checked_servers import CheckedServer
from profdeck.records.request import Answer, RequestState
from profdeck.replicas.fan_out import fan_out

_EVERY_S = 1.0
_ANSWER_S = 5.0
_MOST_NAMED = 2
_TO_RECORD = {RequestState.ARMED, RequestState.RECORDING}


@attrs.frozen
class Progressed:
    """How far a server is, as its ranks say."""

    name: str
    recorded: bool
    """Whether all of its ranks have recorded their windows."""
    writing: bool
    iterations: int
    waits_for: str | None
    """Who holds the device that a rank needs."""

    @classmethod
    def of(cls, name: str, answer: Answer) -> Progressed:
        """Read an answer to a status request."""
        return cls(
            name=name,
            recorded=not any(reply.state in _TO_RECORD for reply in answer.ranks),
            writing=any(reply.state is RequestState.WRITING for reply in answer.all),
            iterations=min(
                (reply.iterations for reply in answer.ranks if reply.state is not RequestState.IDLE), default=0
            ),
            waits_for=next((reply.waits_for for reply in answer.ranks if reply.waits_for), None),
        )


@attrs.define
class Phase:
    """Where the capture is."""

    stopping: bool = False
    """Whether the windows are no longer waited for, but the files."""


@contextlib.asynccontextmanager
async def watching(servers: Sequence[CheckedServer], wanted: int | None) -> AsyncIterator[Phase]:
    """Show how far servers are on stderr, if that is a terminal, until the block ends.

    Args:
        servers: those that record; the ones without routes of profdeck do not tell.
        wanted: how many iterations each is to record, if that is known.

    Yields:
        What is to be told where the capture is.
    """
    console, phase = Console(stderr=True), Phase()
    if not console.is_terminal:
        yield phase
        return
    text = TextColumn("{task.description}", markup=False)
    bar = Progress(text, BarColumn(), TimeElapsedColumn(), console=console, transient=True, auto_refresh=False)
    with bar:
        task = asyncio.create_task(_show(bar, servers, wanted, phase))
        try:
            yield phase
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _show(bar: Progress, servers: Sequence[CheckedServer], wanted: int | None, phase: Phase) -> None:
    asked = [server for server in servers if server.about is not None]
    row = bar.add_task("", total=None)
    try:
        while True:
            answers = await fan_out(_ask, asked, timeout_s=_ANSWER_S, each_timeout_s=_ANSWER_S)
            far = [
                Progressed.of(server.name, answer)
                for server, answer in zip(asked, answers, strict=True)
                if isinstance(answer, Answer)  # the capture itself finds out about one that does not answer
            ]
            text = say_files(far) if phase.stopping else say_windows(far, wanted, len(servers))
            done, total = amount(far, wanted, stopping=phase.stopping)
            bar.update(row, description=text, completed=done, total=total, refresh=True)
            await asyncio.sleep(_EVERY_S)
    finally:
        for server in asked:
            if server.engine is not None:
                server.engine.close()


async def _ask(server: CheckedServer) -> Answer:
    assert server.engine is not None  # noqa: S101  # it has told about itself
    return await server.engine.command("status", {})


def say_windows(far: Sequence[Progressed], wanted: int | None, count: int) -> str:
    """Say how many servers have recorded their windows.

    Args:
        far: those that tell.
        wanted: how many iterations each is to record.
        count: how many servers there are.
    """
    what = "their windows" if wanted is None else f"{wanted} iteration{'' if wanted == 1 else 's'}"
    if count > 1:
        text = f"{sum(one.recorded for one in far)} of {count} targets have recorded {what}"
    else:
        text = "Recording" if wanted is None else f"Recording {what}"
    waiting = next((f" ({one.name} waits for {one.waits_for})" for one in far if one.waits_for), "")
    return text + waiting


def say_files(far: Sequence[Progressed]) -> str:
    """Say whose files are awaited."""
    writing = [one.name for one in far if one.writing]
    if not writing:
        return "Collecting the files"
    more = len(writing) - _MOST_NAMED
    return f"Waiting for the files of {', '.join(writing[:_MOST_NAMED])}" + (f" and {more} more" if more > 0 else "")


def amount(far: Sequence[Progressed], wanted: int | None, *, stopping: bool) -> tuple[int, int | None]:
    """Return what is done and what there is to do; None if nobody knows."""
    if stopping:
        return sum(not one.writing for one in far), len(far) or None
    if wanted is None or not far:
        return 0, None
    return sum(wanted if one.recorded else min(one.iterations, wanted) for one in far), wanted * len(far)
