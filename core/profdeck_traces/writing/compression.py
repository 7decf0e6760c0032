"""Bring a trace that a profiler wrote to its final place: compressed, checked in the same pass, never over another."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import attrs
import msgspec

from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.files import new_file, write_all
from profdeck_traces.reading.content import to_utf8
from profdeck_traces.reading.integrity import TraceCheck, TraceChecker, file_size
from profdeck_traces.reading.stream import AHEAD, Chunk, read_chunks, run_ahead
from profdeck_traces.reading.walking import NO_TIME, Parser
from profdeck_traces.writing.deflate import SmallGzip

_ANCHOR_NAME = re.compile(r"[A-Za-z0-9_.:-]+")


@attrs.frozen
class Compressed:
    """The result of `compress_trace`."""

    check: TraceCheck
    anchors_ns: tuple[int, ...]
    """Start of each clock anchor, in file order, on the clock of the trace."""
    base_time_ns: int | None
    """The file's ``baseTimeNanoseconds``, which converts its times to Unix time; ``None`` if missing."""
    sha256: str
    """The SHA-256 of the new file, in hexadecimal digits."""


_decode_result = msgspec.json.Decoder(Compressed).decode


def compress_trace(source: Path, destination: Path, *, gzip: bool, anchor_name: str) -> Compressed:
    """Copy a Chrome trace to its final name, checking it and collecting its clock anchors in the same pass.

    The copy appears at ``destination`` only when it is complete and on disk (fsync). A damaged trace is also
    copied, and the result describes the problem. ``source`` is not removed.

    Args:
        source: The trace as the profiler wrote it, plain or gzip.
        destination: The new file, in an existing directory.
        gzip: Write one gzip member rather than plain JSON.
        anchor_name: Name of the events whose times are returned as anchors. Only letters, digits and ``_.:-`` are
            allowed, because JSON does not escape them.

    Raises:
        FileExistsError: ``destination`` exists. It is not changed.
        TraceError: ``source`` cannot be read.
        OSError: The copy cannot be written.
        ValueError: ``anchor_name`` contains characters that are not allowed.
    """
    if not _ANCHOR_NAME.fullmatch(anchor_name):
        raise ValueError(f"anchor_name is {anchor_name!r}; letters, digits and any of _.:- are allowed.")
    checker, digest = TraceChecker(anchor_name), hashlib.sha256()
    with new_file(destination) as out:

        def write(data: Chunk) -> None:
            write_all(out, data)
            digest.update(data)

        _copy(source, write, checker, gzip=gzip)
        size_bytes = out.tell()
    check = checker.finish(size_bytes)
    return Compressed(check, _anchors_ns(checker.parser), _base_time_ns(checker.parser), digest.hexdigest())


def _anchors_ns(parser: Parser) -> tuple[int, ...]:
    start_ns = parser.column("start_ns")
    is_anchor = (parser.column("phase") == ord("X")) & (start_ns != NO_TIME)
    return tuple(start_ns[is_anchor].tolist())


def _base_time_ns(parser: Parser) -> int | None:
    base_time_ns = None
    for key, text in parser.members():
        if key == b'"baseTimeNanoseconds"':
            with contextlib.suppress(ValueError):
                base_time_ns = int(text)
    return base_time_ns


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
    return _decode_result(child.stdout)


def _main(source: str, destination: str, gzip: str, anchor_name: str) -> None:
    os.nice(5)
    compressed = compress_trace(Path(source), Path(destination), gzip=bool(int(gzip)), anchor_name=anchor_name)
    sys.stdout.buffer.write(msgspec.json.encode(compressed))


def _copy(source: Path, write: Callable[[Chunk], None], checker: TraceChecker, *, gzip: bool) -> None:
    """Write the contents of ``source``, and check them in the same pass."""
    with contextlib.closing(SmallGzip(write)) if gzip else contextlib.nullcontext() as packer:

        def written() -> Generator[Chunk, None, None]:
            for chunk in read_chunks(source, buffers=AHEAD + 2):
                packer.compress(chunk) if packer else write(chunk)
                yield chunk

        checker.read(to_utf8(run_ahead(written()), file_size(source)))
        if packer:
            packer.finish()


if __name__ == "__main__":
    _main(*sys.argv[1:])
