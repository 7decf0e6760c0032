"""Beside the steps of a process: looks for requests in a store of the job, and sends files of captures through it.

::

    demand.beat       changes every second while somebody waits for a capture
    alive.<id>        changes with every look of that process while a request is pending
    call.<id>         what that process is asked for: a part of a file, or what is in a directory
    reply.<id>        its answer

A process looks twice a second, which costs its steps nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from profdeck.base.errors import ProfdeckError, describe_error
from profdeck.base.json_files import JsonKind
from profdeck.engine.transport.file_parts import part_of
from profdeck.on_demand import requests
from profdeck.on_demand.requests import BEAT, LOST_S, REQUEST, JobProcess, OnDemandRequest, decode
from profdeck.on_demand.stores import Store
from profdeck.records.manifest import Manifest, is_manifest, read_manifest
from profdeck.records.run_directory import RUN_FILE, step_directories
from profdeck.records.status import Status

logger = logging.getLogger("profdeck")

_POLL_S = 0.5
_RETRY_S = 5.0
_PROCESSES_PER_S = 2000
"""So many look in a second at most: large jobs look less often."""
_SERVING_S, _SERVED_S = 0.002, 1.0
"""How often a process looks for calls, and for how long after one."""
_STEP = re.compile(r"step(\d{1,9})(?!\d)")


class FileCall(msgspec.Struct):
    """What a process is asked for."""

    nonce: str
    place: str = ""
    """A path below the process's output directory, with slashes; none to ask where its files are."""
    offset: int = 0
    captures: tuple[str, ...] = ()
    """With no place: of which captures the manifests are wanted."""
    everything: bool = False
    """With no place: whether those of all its captures are wanted that have ended."""


_CALL = JsonKind(FileCall)


class FileReply(msgspec.Struct, omit_defaults=True):
    """The head of an answer; a line feed and the content of a file follow."""

    nonce: str
    host: str = ""
    output: str = ""
    run_file: str = ""
    """What the process's ``run.json`` says."""
    manifests: tuple[str, ...] = ()
    """Where the manifests of its captures are, below its output directory."""
    sizes: dict[str, int] | None = None
    """What is in a directory."""
    size_bytes: int = 0
    """Of the whole file."""
    tag: str = ""
    """Names the version of the file."""
    error: str = ""
    pending: bool = False
    """Whether to ask again later."""


class Entry(Protocol):
    """What a process says of itself."""

    process: JobProcess

    def join(self) -> None:
        """Say that it takes requests."""

    def say(self, **changes: object) -> None:
        """Change what it says."""

    def leave(self) -> None:
        """Say that it takes none any more."""


class Lookout:
    """Looks for requests until it is told to leave."""

    def __init__(self, store: Store, run: Path, entry: Entry) -> None:
        """Args:
        store: where requests are.
        run: the run directory, whose captures are sent when somebody asks for them.
        entry: what the process says of itself.
        """
        self.is_asked = False
        """Whether a request waits for this process, so that each boundary has to look."""
        self.is_reached = False
        """Whether the store answered when it was last asked."""
        self._store = store
        self._entry = entry
        self._run = run
        self._left = threading.Event()
        self._beat: bytes | None = None
        self._beat_s = 0.0
        self._served_s = 0.0
        self._looks = 0
        self._interval_s = max(_POLL_S, entry.process.world_size / _PROCESSES_PER_S)
        self._thread = threading.Thread(target=self._watch, name="profdeck requests", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Look no more. Never raises."""
        if self._entry.process.at.pid != os.getpid():  # a forked child, in which another thread may hold the store
            return
        self._left.set()
        self._entry.leave()
        self._store.close()

    def _watch(self) -> None:
        joined, wait_s, told = False, 0.0, False
        while not self._left.wait(wait_s):
            try:
                if not joined:
                    self._entry.join()
                    joined = True
                self._look()
                self.is_reached = True
                serving = time.monotonic() - self._served_s < _SERVED_S
                wait_s = _SERVING_S if serving else self._interval_s
            except OSError as error:
                level = logging.DEBUG if told else logging.INFO
                logger.log(level, "No capture can be asked for now: %s", describe_error(error))
                # A store that comes back may be another one, which knows nothing of this process.
                self.is_reached, joined, wait_s, told = False, False, _RETRY_S, True

    def _look(self) -> None:
        if self._serve():
            self._served_s = time.monotonic()
            return
        text = self._store.read(REQUEST)
        request = None if text is None else decode(text, OnDemandRequest)
        if request is None:
            self.is_asked, self._beat = False, None
            return
        self._looks += 1
        self._store.put(f"alive.{self._entry.process.id}", str(self._looks).encode())
        process = self._entry.process
        if process.ended or (process.token == request.token and process.done):
            self.is_asked = False
        else:
            self.is_asked = self.is_reached = True  # first, so that what is said next is true
            if process.looks_for != request.token:
                self._entry.say(looks_for=request.token)
        self._end_abandoned(request)

    def _end_abandoned(self, request: OnDemandRequest) -> None:
        """Take a request back for which nobody waits any more."""
        beat, now_s = self._store.read(BEAT) or b"", time.monotonic()
        if beat != self._beat:
            self._beat, self._beat_s = beat, now_s
        elif now_s - self._beat_s > LOST_S:
            logger.warning("The request of %s is taken back: that process does not wait for it any more.", request.by)
            if not requests.withdraw(self._store, request, f"its processes, as {request.by} was gone"):
                requests.forget(self._store, request)

    def _serve(self) -> bool:
        """Answer what somebody asks for of this process's files; return whether somebody did."""
        name = f"call.{self._entry.process.id}"
        text = self._store.read(name)
        if text is None:
            return False
        self._store.remove(name, text)
        try:
            call = _CALL.decode(text)
        except ValueError:
            return True
        reply, content = answer(call, self._run, self._entry.process)
        self._store.put(f"reply.{self._entry.process.id}", msgspec.json.encode(reply) + b"\n" + content)
        return True


def answer(call: FileCall, run: Path, process: JobProcess) -> tuple[FileReply, bytes]:
    """Answer a call with what a run directory has; files that belong to no capture are not sent."""
    reply = FileReply(call.nonce)
    if not call.place:
        reply.host, reply.output = socket.gethostname(), str(run.parent)
        files = _ended(run, process) if call.everything else _manifests(run, process, set(call.captures))
        reply.manifests = tuple(file.relative_to(run.parent).as_posix() for file in files)
        with contextlib.suppress(OSError):
            reply.run_file = (run / RUN_FILE).read_text(encoding="utf-8")
        return reply, b""
    if call.place.split("/")[0] != run.name:
        reply.error = f"{call.place} is of another run"
        return reply, b""
    part = part_of(run.parent, call.place, call.offset)
    reply.sizes, reply.size_bytes, reply.tag = part.sizes, part.size_bytes, part.tag
    reply.error, reply.pending = part.error, part.pending
    return reply, part.content


def _manifests(run: Path, process: JobProcess, captures: set[str]) -> Iterator[Path]:
    """Yield the manifests of some captures of a process."""
    for step in {f"step_{int(found[1]):06d}" for id_ in captures if (found := _STEP.match(id_))}:
        for file, one in _of_process(run / step, process):
            if {one.capture, one.request} & captures:
                yield file


def _ended(run: Path, process: JobProcess) -> Iterator[Path]:
    """Yield the manifests of all captures of a process that have ended."""
    for step in step_directories(run):
        for file, one in _of_process(step, process):
            if one.status is not Status.RECORDING:
                yield file


def _of_process(directory: Path, process: JobProcess) -> Iterator[tuple[Path, Manifest]]:
    """Yield the manifests of a process: its own, or those of the engines that it drives."""
    for file in filter(is_manifest, directory.glob("**/*.json")):
        with contextlib.suppress(ProfdeckError):  # its reader reports it
            one = read_manifest(file)
            if process.made(one):
                yield file, one
