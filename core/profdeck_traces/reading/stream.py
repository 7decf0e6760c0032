"""The uncompressed bytes of a trace file, chunk by chunk, and word of any damage to its gzip stream.

Formats: gzip is RFC 1952, told by its magic bytes and never by the file's name.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from queue import SimpleQueue

from isal import igzip, igzip_lib

from profdeck_traces.base.errors import TraceError
from profdeck_traces.inputs.file_formats import GZIP_MAGIC

CHUNK_BYTES = 1 << 20
"""Small enough that a chunk stays in the cache until it is decoded, large enough that handing it over is cheap."""
# Compressed bytes per read where damage is looked for; the bad block is then fed byte by byte.
_RESERVED_FLAGS, _LENGTH_MODULUS = 0xE0, 1 << 32  # RFC 1952
_BLOCK_BYTES = 1 << 16

# isal's stubs declare the class as an instance.
_InflateError: type[Exception] = igzip_lib.IsalError  # type: ignore[assignment]

Chunk = bytes | bytearray


class DamagedStreamError(TraceError):
    """The gzip stream is cut off, corrupt or followed by something else; raised after the last good byte."""


def read_chunks(
    path: Path, chunk_bytes: int = CHUNK_BYTES, *, buffers: int = 1, on_read: Callable[[int], None] | None = None
) -> Generator[Chunk, None, None]:
    """Yield the uncompressed content of ``path`` in chunks of at most ``chunk_bytes``.

    The memory of a chunk is used again ``buffers`` chunks later: with 1, it is valid until the next is taken.

    A gzip file counts as read to its end only when the CRC-32 and the length in the trailer of each of its
    members have been checked; only zeros (padding, which gzip ignores as well) may follow. Memory is bounded
    by ``chunk_bytes`` times ``buffers`` whatever the compression ratio.

    Args:
        path: A plain or gzip file; members may be concatenated.
        chunk_bytes: The most bytes in one chunk.
        buffers: How many chunks are valid at the same time.
        on_read: Called with the bytes of the file (as on disk) consumed so far, once per chunk.

    Raises:
        DamagedStreamError: After everything that could be inflated has been yielded.
        TraceError: The file cannot be opened or read.
    """
    ring = _ring(chunk_bytes, buffers)
    try:
        with path.open("rb", buffering=0) as file:
            is_gzip = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            file.seek(0)
            for chunk in _inflated(file, ring, chunk_bytes) if is_gzip else _filled(file, ring):
                if on_read is not None:
                    on_read(file.tell())
                yield chunk
    except OSError as error:
        raise TraceError(f"Cannot read {path}: {error.strerror or error}.") from error


AHEAD = 2
"""How many chunks `run_ahead` is ahead of its consumer."""


def read_ahead(path: Path, *, on_read: Callable[[int], None] | None = None) -> Generator[Chunk, None, None]:
    """Yield the chunks of :func:`read_chunks`, inflated on a second thread, on which ``on_read`` is called as well.

    A chunk is valid until the next is taken. In a process that another one started to read a trace of its own, there
    is no second thread: the other cores have traces of theirs.

    Raises:
        DamagedStreamError, TraceError: As there, in their place behind the last chunk.
    """
    if multiprocessing.parent_process() is not None:
        return read_chunks(path, on_read=on_read)
    return run_ahead(read_chunks(path, buffers=AHEAD + 2, on_read=on_read))


def run_ahead(chunks: Generator[Chunk, None, None]) -> Generator[Chunk, None, None]:
    """Run a generator on a second thread, `AHEAD` chunks ahead of the consumer; what it raises is raised here.

    isal inflates and deflates without the GIL, so that its work overlaps with the consumer's.
    """
    # Two C queues instead of an executor: a hand-over costs a tenth of the decoding of a chunk otherwise.
    ready: SimpleQueue[Chunk | BaseException] = SimpleQueue()
    slots: SimpleQueue[bool] = SimpleQueue()

    def produce() -> None:
        try:
            while slots.get():
                chunk = next(chunks, b"")
                ready.put(chunk)
                if not chunk:
                    return
        except BaseException as error:  # noqa: BLE001 - it is raised in the consumer
            ready.put(error)

    for _ in range(AHEAD):
        slots.put(True)  # noqa: FBT003 - a queue's put
    producer = threading.Thread(target=produce, name="profdeck-ahead", daemon=True)
    try:
        producer.start()
    except RuntimeError:  # the interpreter is ending and starts no more threads: a capture is being saved at exit
        yield from chunks
        return
    try:
        while chunk := ready.get():
            if isinstance(chunk, BaseException):
                raise chunk
            slots.put(True)  # noqa: FBT003 - a queue's put
            yield chunk
    finally:
        slots.put(False)  # noqa: FBT003 - a queue's put
        producer.join()
        chunks.close()


def _ring(chunk_bytes: int, count: int) -> Generator[bytearray, None, None]:
    """Yield the same buffers again and again: memory that is fresh each time costs as much as inflating into it."""
    buffers: list[bytearray] = []
    for _ in range(count):
        buffers.append(bytearray(chunk_bytes))
        yield buffers[-1]
    yield from itertools.cycle(buffers)


def _filled(source: io.RawIOBase | io.BufferedIOBase, ring: Iterator[bytearray]) -> Generator[Chunk, None, None]:
    for buffer in ring:
        while (count := source.readinto(buffer)) != len(buffer):
            if not count:
                return
            yield bytes(memoryview(buffer)[:count])
        yield buffer


def _inflated(file: io.FileIO, ring: Iterator[bytearray], chunk_bytes: int) -> Generator[Chunk, None, None]:
    yielded = 0
    try:
        with igzip.IGzipFile(fileobj=file, mode="rb") as inflater:  # type: ignore[no-untyped-call]
            for chunk in _filled(inflater, ring):
                yielded += len(chunk)
                yield chunk
        _check_flags(file, 0)
        if _last_length(file) != yielded % _LENGTH_MODULUS:  # the inflater does not tell where other members begin
            for _ in _members(file, chunk_bytes):
                pass
    except (EOFError, OSError, _InflateError):
        # What was inflated in the failing call is lost: start again, carefully, and say what is wrong and where.
        for chunk in _members(file, chunk_bytes):
            if yielded < len(chunk):
                yield chunk[yielded:]
            yielded = max(0, yielded - len(chunk))


def _members(file: io.FileIO, chunk_bytes: int) -> Generator[bytes, None, None]:
    member_at = 0
    while True:
        _check_flags(file, member_at)
        end = yield from _member(file, member_at, chunk_bytes)
        member_at = _skip_zeros(file, end)
        file.seek(member_at)
        following = file.read(len(GZIP_MAGIC))
        if not following:
            return
        if following != GZIP_MAGIC:
            size = file.seek(0, io.SEEK_END)
            raise DamagedStreamError(
                f"Something else follows the gzip stream: {size - end:,} bytes at byte {end:,} of the file."
            )


def _check_flags(file: io.FileIO, member_at: int) -> None:
    """Refuse a member with reserved flags, as RFC 1952 (2.3.1.2) demands: what they announce cannot be read."""
    file.seek(member_at + 3)
    flags = file.read(1)
    if flags and flags[0] & _RESERVED_FLAGS:
        raise DamagedStreamError(f"The gzip header at byte {member_at:,} has flags that no version of gzip knows.")


def _last_length(file: io.FileIO) -> int:
    """Return the uncompressed length of the last member, by its trailer."""
    file.seek(-4, io.SEEK_END)
    return int.from_bytes(file.read(4), "little")


def _skip_zeros(file: io.FileIO, at: int) -> int:
    file.seek(at)
    while block := file.read(_BLOCK_BYTES):
        rest = len(block.lstrip(b"\0"))
        if rest:
            return file.tell() - rest
    return file.tell()


def _member(file: io.FileIO, member_at: int, chunk_bytes: int) -> Generator[bytes, None, int]:
    """Yield one gzip member and return the offset of the byte behind its trailer."""
    file.seek(member_at)
    inflater = igzip_lib.IgzipDecompressor(igzip_lib.DECOMP_GZIP)
    block_at = member_at
    output_at_block = output = 0
    while not inflater.eof:
        block = b""
        if inflater.needs_input:
            block_at, output_at_block = file.tell(), output
            block = file.read(_BLOCK_BYTES)
            if not block:
                raise DamagedStreamError(
                    f"The gzip stream ends after {block_at:,} bytes, before its trailer: the file was cut off."
                )
        try:
            chunk = inflater.decompress(block, chunk_bytes)
        except _InflateError as error:
            damage = _damage(error, block_at, file.tell())
            yield from _rest_before_damage(file, member_at, block_at, output - output_at_block)
            raise DamagedStreamError(damage) from error
        if chunk:
            output += len(chunk)
            yield chunk
    return file.tell() - len(inflater.unused_data)


def _damage(error: Exception, block_at: int, block_end: int) -> str:
    if "checksum" in str(error):
        return "The checksum or the length in the gzip trailer does not fit: the content is corrupt."
    return f"The gzip stream is corrupt in bytes {block_at:,} to {block_end:,} of the file ({error})."


def _rest_before_damage(file: io.FileIO, member_at: int, block_at: int, skip: int) -> Generator[bytes, None, None]:
    """Yield what the block at ``block_at`` inflates to up to its damage, without its first ``skip`` bytes."""
    file.seek(member_at)
    inflater = igzip_lib.IgzipDecompressor(igzip_lib.DECOMP_GZIP)
    while file.tell() < block_at:
        inflater.decompress(file.read(min(_BLOCK_BYTES, block_at - file.tell())), 0)
        while not inflater.needs_input:
            inflater.decompress(b"", CHUNK_BYTES)
    bad_block = file.read(_BLOCK_BYTES)
    for at in range(len(bad_block)):
        try:
            chunk = inflater.decompress(bad_block[at : at + 1])
        except _InflateError:
            return
        fresh = chunk[skip:]
        skip -= len(chunk) - len(fresh)
        if fresh:
            yield fresh
