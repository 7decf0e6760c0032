"""How traces are compressed."""

from __future__ import annotations

import os
import struct
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from isal import isal_zlib

# isal's level 1 writes Kineto JSON at 1.3 GB/s and a tenth of its size; 0 and 2 are no faster, 3 is no smaller.
_LEVEL = 1
# What a capture leaves is kept and moved: zlib's level 5 makes it 1.1 to 1.3 times as large as level 9, which torch
# uses, in a sixth of the time; isal's level 1 makes it 1.3 to 1.9 times as large.
_SMALL_LEVEL = 5
_MOST_THREADS = 4
# zlib's ways to ask for a gzip header and trailer, and for none (RFC 1951, RFC 1952).
_GZIP_WINDOW_BITS, _RAW_WINDOW_BITS = 31, -15
_WINDOW_BYTES = 1 << 15
"""How far back deflate refers (RFC 1951)."""
GZIP_HEADER = b"\x1f\x8b\x08" + bytes(6) + b"\xff"
"""Of a deflated member without name and time, from an unknown system (RFC 1952)."""


def gzip_trailer(crc32: int, length: int) -> bytes:
    """Return the end of a gzip member, by the CRC-32 of its text and its length in bytes."""
    return struct.pack("<II", crc32, length & 0xFFFF_FFFF)


def gzip_deflater() -> isal_zlib.Compress:
    """Return what writes one gzip member, fast."""
    return isal_zlib.compressobj(_LEVEL, isal_zlib.DEFLATED, _GZIP_WINDOW_BITS)


def raw_deflater() -> isal_zlib.Compress:
    """Return what writes a deflate stream without header and trailer, fast."""
    return isal_zlib.compressobj(_LEVEL, isal_zlib.DEFLATED, _RAW_WINDOW_BITS)


class SmallGzip:
    """Writes one gzip member that is small, on several threads: a chunk on each, in the order of the chunks."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        """Args:
        write: takes what is ready, in order, on the threads that call `compress` and `finish`.
        """
        self._write = write
        self._threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="profdeck-deflate")
        self._under_way: deque[Future[bytes]] = deque()
        self._before = b""
        self._crc32 = self._length = 0
        write(GZIP_HEADER)

    def compress(self, chunk: bytes | bytearray) -> None:
        """Compress a chunk, which may change as soon as this returns; best of about a megabyte."""
        text = bytes(chunk)
        self._crc32 = isal_zlib.crc32(text, self._crc32)
        self._length += len(text)
        self._under_way.append(self._deflated(text, self._before))
        self._before = text[-_WINDOW_BYTES:]
        if len(self._under_way) > 2 * self._threads:
            self._write(self._under_way.popleft().result())

    def finish(self) -> None:
        """Write what is left, and the trailer."""
        while self._under_way:
            self._write(self._under_way.popleft().result())
        last = zlib.compressobj(_SMALL_LEVEL, zlib.DEFLATED, _RAW_WINDOW_BITS).flush()
        self._write(last + gzip_trailer(self._crc32, self._length))

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown()

    def _deflated(self, text: bytes, before: bytes) -> Future[bytes]:
        try:
            return self._executor.submit(_deflate, text, before)
        except RuntimeError:  # the interpreter is ending and starts no more threads: a capture is being saved at exit
            done: Future[bytes] = Future()
            done.set_result(_deflate(text, before))
            return done


def _deflate(text: bytes, before: bytes) -> bytes:
    """Return whole blocks of a stream, which ends at a byte and may refer to what came before."""
    deflater = zlib.compressobj(_SMALL_LEVEL, zlib.DEFLATED, _RAW_WINDOW_BITS, zdict=before)
    return deflater.compress(text) + deflater.flush(zlib.Z_SYNC_FLUSH)
