"""Bring a trace that a profiler wrote to its final place: compressed, checked in the same pass, never over another."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import attrs
import msgspec

from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.files import new_file, write_all
from profdeck_traces.reading.integrity import CountingHandler, TraceCheck, TraceChecker, feed_chunks, file_size
from profdeck_traces.reading.stream import AHEAD, Chunk, read_chunks, run_ahead
from profdeck_traces.writing.deflate import SmallGzip

_ANCHOR_NAME = re.compile(r"[A-Za-z0-9_.:-]+")


@attrs.frozen
class AnchorEvent:
    """A complete event that marks a moment which the process also read from another clock."""

    ts_us: Decimal
    """Start in microseconds, exactly as in the file."""
    dur_us: Decimal
    """Duration in microseconds, exactly as in the file; 0 if it is missing."""


@attrs.frozen
class Compressed:
    """The result of `compress_trace`."""

    check: TraceCheck
    anchors: tuple[AnchorEvent, ...]
    """The clock anchors, in the order of the file."""
    base_time_ns: int | None
    """``baseTimeNanoseconds`` of the file: what to add to a ``ts`` to get Unix time; ``None`` if it has none."""
    sha256: str
    """The SHA-256 of the new file, in hexadecimal digits."""


class _AnchorHandler(CountingHandler):
    wants_text = True
    keys = frozenset({"baseTimeNanoseconds"})

    def __init__(self, anchor_name: str) -> None:
        self._name = anchor_name
        self._needle = f'"{anchor_name}"'.encode()
        self.anchors: list[AnchorEvent] = []
        self.base_time_ns: int | None = None

    def batch(self, text: memoryview) -> int | None:
        count = super().batch(text)
        # Search a copy with `in`, because stringzilla might not be installed in the recording process.
        if count is not None and self._needle in (array := bytes(text)):
            self._take(array)
        return count

    def event(self, text: bytes) -> None:
        if self._needle in text:
            self._take(b"[%b]" % text)

    def member(self, key: str, text: bytes) -> None:
        del key  # there is only one
        with contextlib.suppress(ValueError):
            self.base_time_ns = int(text)

    def _take(self, array: bytes) -> None:
        try:
            events = json.loads(array, parse_float=Decimal, parse_int=Decimal)
        except (ValueError, RecursionError):
            return  # the checker says what is wrong with the text
        for event in events:
            if isinstance(event, dict) and event.get("ph") == "X" and event.get("name") == self._name:
                ts_us, dur_us = _microseconds(event.get("ts")), _microseconds(event.get("dur", 0))
                if ts_us is not None and dur_us is not None:
                    self.anchors.append(AnchorEvent(ts_us, dur_us))


def _microseconds(value: Any) -> Decimal | None:
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def compress_trace(source: Path, destination: Path, *, gzip: bool, anchor_name: str) -> Compressed:
    """Copy a Chrome trace to its final name, checking it and collecting its clock anchors in the same pass.

    The copy appears under ``destination`` when it is complete and on disk (fsync), or not at all; a trace that is
    not whole is copied as well, and the result says so. ``source`` stays.

    Args:
        source: The trace as the profiler wrote it, plain or gzip.
        destination: The new file, in a directory that exists.
        gzip: Write one gzip member rather than plain JSON.
        anchor_name: The name of the events to return as anchors: letters, digits and ``_.:-``, which JSON never
            writes in another way.

    Raises:
        FileExistsError: There is something at ``destination``; it was left as it is.
        TraceError: ``source`` cannot be read.
        OSError: The copy cannot be written.
        ValueError: ``anchor_name`` has other characters.
    """
    if not _ANCHOR_NAME.fullmatch(anchor_name):
        raise ValueError(f"anchor_name is {anchor_name!r}; letters, digits and any of _.:- are allowed.")
    handler = _AnchorHandler(anchor_name)
    checker, digest = TraceChecker(handler), hashlib.sha256()
    with new_file(destination) as out:

        def write(data: Chunk) -> None:
            write_all(out, data)
            digest.update(data)

        damage = _copy(source, write, checker.feed, gzip=gzip)
        size_bytes = out.tell()
    check = checker.finish(size_bytes, damage=damage)
    return Compressed(check, tuple(handler.anchors), handler.base_time_ns, digest.hexdigest())


def compress_in_child(source: Path, destination: Path, *, gzip: bool, anchor_name: str) -> Compressed:
    """Call `compress_trace` in a child process, so that this process's interpreter is not blocked.

    Raises:
        TraceError: The child process failed. The message includes its error message.
    """
    command = [
        sys.executable,
        "-m",
        "profdeck_traces.writing.compression",
        str(source),
        str(destination),
        str(int(gzip)),
        anchor_name,
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # Engines preload OpenMP, which would bind the child to the very core on which its parent spins.
    environment.pop("LD_PRELOAD", None)
    # A group of its own makes it deaf to the engine's Ctrl-C, which the engine survives long enough to have it done. No
    # session of its own: kernels share cores between sessions first, and where ranks spin on all of them, calling
    # sched_yield, one more session waited for seconds.
    child = subprocess.run(
        command, check=False, capture_output=True, stdin=subprocess.DEVNULL, process_group=0, env=environment
    )
    if child.returncode:
        last = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise TraceError(f"{source} could not be packed: {last or f'exit code {child.returncode}'}")
    return _packed_from(msgspec.json.decode(child.stdout))


def _packed_from(plain: dict[str, Any]) -> Compressed:
    anchors = tuple(AnchorEvent(*map(Decimal, anchor)) for anchor in plain["anchors"])
    return Compressed(TraceCheck(**plain["check"]), anchors, plain["base_time_ns"], plain["sha256"])


def _main(source: str, destination: str, gzip: str, anchor_name: str) -> None:
    os.nice(5)
    packed = compress_trace(Path(source), Path(destination), gzip=bool(int(gzip)), anchor_name=anchor_name)
    anchors = [[str(anchor.ts_us), str(anchor.dur_us)] for anchor in packed.anchors]
    sys.stdout.buffer.write(msgspec.json.encode(attrs.asdict(packed) | {"anchors": anchors}))


def _copy(source: Path, write: Callable[[Chunk], None], check: Callable[[Chunk], None], *, gzip: bool) -> str | None:
    """Write ``source`` and pass it to ``check``, at the same time; return what is wrong with its stream."""
    with contextlib.closing(SmallGzip(write)) if gzip else contextlib.nullcontext() as packer:

        def written() -> Generator[Chunk, None, None]:
            for chunk in read_chunks(source, buffers=AHEAD + 2):
                packer.compress(chunk) if packer else write(chunk)
                yield chunk

        damage = feed_chunks(check, run_ahead(written()), file_size(source))
        if packer:
            packer.finish()
    return damage


if __name__ == "__main__":
    _main(*sys.argv[1:])
