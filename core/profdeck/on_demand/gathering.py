"""Brings the files of a capture from the hosts of a job into one run, through the job's store.

A process that runs still sends what it has, see `profdeck.on_demand.lookout`. Whole files come or none, and are checked
as those of servers are (`profdeck.engine.control.downloads`).
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TypeAlias

import attrs
import msgspec

from profdeck.base.blocking import run_in_thread
from profdeck.base.errors import CaptureError, ProfdeckError, TargetError, describe_error
from profdeck.base.files import write_new
from profdeck.base.json_files import JsonKind
from profdeck.base.outcome import Outcome
from profdeck.engine.control.downloads import Downloader
from profdeck.engine.engine import FileHost
from profdeck.engine.transport.file_parts import PART_BYTES, FilePart, PartedFiles
from profdeck.on_demand.lookout import FileCall, FileReply
from profdeck.on_demand.requests import JobProcess
from profdeck.on_demand.stores import Store
from profdeck.records.manifest import Manifest, is_manifest, read_manifest
from profdeck.records.run_directory import RUN_FILE

_ANSWER_S = 30.0
"""A process looks twice a second, and less often in a large job; it may be deep in work that holds the interpreter."""
_ENDED_ANSWER_S = 3.0
"""One that takes no requests any more may be at its end, or go on without its profiler."""
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.001, 0.05
_REPLY = JsonKind(FileReply)
_AT_ONCE = 8


@attrs.frozen
class Gathered:
    """What came of one process that writes elsewhere."""

    name: str
    """The process, in words."""
    fetched: int
    """How many artifacts have come."""
    problem: str | None
    """Why some of its files are not here."""


async def gather(
    store: Store, run: Path, processes: Sequence[JobProcess], *, limit_s: float, everything: bool = False
) -> list[Gathered]:
    """Bring the captures that processes have made into a run here; what is here is not fetched again.

    Args:
        store: that of the job.
        run: the run directory here.
        processes: those that have answered.
        limit_s: how long that may take.
        everything: whether to bring all that have ended, and not those of the last request alone.

    Returns:
        What came of each process whose captures are not written here.
    """
    until, slots = time.monotonic() + limit_s, asyncio.Semaphore(_AT_ONCE)

    async def bring(process: JobProcess) -> Gathered:
        async with slots:
            try:
                fetched, problems = await _bring(store, run, process, until, everything=everything)
            except (ProfdeckError, OSError) as error:
                fetched, problems = 0, [describe_error(error)]
        where = f"its files are on {process.at.host}, below {process.output}"
        return Gathered(process.name, fetched, f"{where}: {' '.join(problems)}" if problems else None)

    here = await run_in_thread(_written_here, run)
    if everything:
        writers = {who for who, _ in here}
        away = [process for process in processes if _who(process) not in writers]
    else:
        away = [process for process in processes if not {(_who(process), id_) for id_ in process.captures} <= here]
    return await asyncio.gather(*map(bring, away))


async def _bring(
    store: Store, run: Path, process: JobProcess, until: float, *, everything: bool
) -> tuple[int, list[str]]:
    """Bring the files of one process; returns how many came, and why some are not here."""
    files = StoreFiles(store, process)
    found = await files.about(everything=everything)
    await run_in_thread(_make_run, run, found.run_file)
    if not found.manifests and not everything:
        raise CaptureError("it has none of its captures any more")
    downloader = Downloader(files, FileHost(found.host, found.output), until, "there was no time left")
    is_it = JobProcess.made if everything else _is_of
    fetched, problems = 0, list[str]()
    for place in map(PurePosixPath, found.manifests):
        inside = PurePosixPath(*place.parts[1:])
        if place.parts[:1] != (run.name,) or ".." in place.parts or not is_manifest(Path(place.name)):
            problems.append(f"it names {str(place)!r}, which is no manifest of this run")
            continue
        try:
            brought = await downloader.bring(place, run / inside, functools.partial(is_it, process))
        except (ProfdeckError, OSError) as error:
            problems.append(f"{place.name}: {describe_error(error)}")
            continue
        if brought is None:
            problems.append(f"{place.name} is of another capture now")
        else:
            fetched += len(brought.sizes_bytes)
            problems += [f"{name}: {reason}" for name, reason in brought.left.items()]
    return fetched, problems


def _make_run(run: Path, run_file: str) -> None:
    """Make the run here, for who asks from a host that has none of it."""
    run.mkdir(parents=True, exist_ok=True)
    if run_file and not (run / RUN_FILE).exists():
        with suppress(FileExistsError):
            write_new(run / RUN_FILE, run_file.encode())


def _is_of(process: JobProcess, manifest: Manifest) -> bool:
    """Tell whether a manifest is of what a process captured."""
    return bool({manifest.capture, manifest.request} & set(process.captures))


_Who: TypeAlias = tuple[str, int | None, int, str, int]


def _who(one: JobProcess) -> _Who:
    return one.role, one.replica, one.rank, one.at.host, one.at.pid


def _written_here(run: Path) -> set[tuple[_Who, str]]:
    """Return whose captures are in this very directory, as its host shares it, and their ids."""
    found: set[tuple[_Who, str]] = set()
    for file in filter(is_manifest, run.glob("step_*/**/*.json")):
        with suppress(ProfdeckError):
            one = read_manifest(file)
            if one.collected_from is None:
                found.add(((one.role, one.replica, one.rank, one.host, one.pid), one.capture))
    return found


@attrs.define
class StoreFiles(PartedFiles):
    """The files of one process, through the store."""

    _store: Store
    _process: JobProcess
    _one_at_a_time: asyncio.Lock = attrs.field(factory=asyncio.Lock)

    async def about(self, *, everything: bool = False) -> FileReply:
        """Ask where its files are, and for the manifests of what it has captured, for the last request or in all."""
        reply, _ = await self._ask(captures=self._process.captures, everything=everything)
        return reply

    async def source(self) -> FileHost:
        """Return where they are."""
        reply = await self.about()
        return FileHost(reply.host, reply.output)

    async def part(self, place: str, offset: int) -> FilePart:
        """Ask for a part of a file, or for what is in a directory."""
        reply, content = await self._ask(place=place, offset=offset)
        return FilePart(
            sizes=reply.sizes,
            content=content,
            size_bytes=reply.size_bytes,
            tag=reply.tag,
            error=reply.error,
            pending=reply.pending,
        )

    async def _ask(
        self, *, place: str = "", offset: int = 0, captures: tuple[str, ...] = (), everything: bool = False
    ) -> tuple[FileReply, bytes]:
        call = FileCall(secrets.token_hex(8), place, offset, captures, everything)
        async with self._one_at_a_time:
            return await run_in_thread(self._answered, call)

    def _answered(self, call: FileCall) -> tuple[FileReply, bytes]:
        """Leave a call and wait for its answer.

        Raises:
            TargetError: there is none.
        """
        id_, poll_s = self._process.id, _SHORTEST_POLL_S
        answer_s = _ENDED_ANSWER_S if self._process.ended else _ANSWER_S
        until = time.monotonic() + answer_s
        try:
            self._store.put(f"call.{id_}", msgspec.json.encode(call))
            while time.monotonic() < until:
                head, _, content = (self._store.read(f"reply.{id_}") or b"").partition(b"\n")
                with suppress(ValueError):
                    reply = _REPLY.decode(head)
                    if reply.nonce == call.nonce and len(content) <= PART_BYTES:
                        self._store.put(f"reply.{id_}", b"")
                        return reply, content
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, _LONGEST_POLL_S)
        except OSError as error:
            raise TargetError(describe_error(error), Outcome.UNREACHABLE) from None
        raise TargetError(f"it has not answered for {answer_s:g} seconds", Outcome.TIMED_OUT)
