"""Reads the content of a trace file as UTF-8, regardless of its compression and encoding."""

from __future__ import annotations

import bz2
import codecs
import io
import os
import zipfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from profdeck_traces.base.errors import TraceError
from profdeck_traces.reading.stream import CHUNK_BYTES, Chunk, DamagedStreamError, read_ahead, run_ahead

_BZIP2, _ZIP = b"BZh", b"PK\x03\x04"
_NOT_READ = {
    b"\x28\xb5\x2f\xfd": "zstd: decompress it with zstd -d",
    b"\xfd7zXZ\x00": "xz: decompress it with xz -d",
    b"7z\xbc\xaf\x27\x1c": "7-Zip: extract it first",
}
# UTF-32 is tested before UTF-16, because its little-endian mark starts with the UTF-16 mark.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_ZEROS = {
    b"\1\0\0\0": "utf-32-le",
    b"\0\0\0\1": "utf-32-be",
    b"\1\0\1\0": "utf-16-le",
    b"\0\1\0\1": "utf-16-be",
}
"""Encodings to assume without a byte-order mark. The keys show which of the first four bytes are nonzero."""
# Traces of real jobs expand to 8 to 30 times their compressed size.
_MOST_INFLATION, _SMALL_BYTES = 300, 128 << 20
_DAMAGE = (OSError, EOFError, ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError)


def read_content(path: Path, *, on_read: Callable[[int], None] | None = None) -> Generator[Chunk, None, None]:
    """Yield the decompressed contents of a file, converted to UTF-8.

    The file may be uncompressed, gzip, bzip2, or a zip archive that contains a single file. A chunk is valid only until
    the next chunk is requested. Decompression runs on a second thread. The contents may be up to 300 times as large as
    the file, or up to 128 MiB if that is more.

    Args:
        path: The file.
        on_read: Called with the number of bytes of the file read so far.

    Raises:
        DamagedStreamError: The compressed stream is truncated or corrupt. All readable content has been yielded.
        TraceError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            head, size_bytes = file.read(8), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise TraceError(f"Cannot read {path}: {error.strerror or error}.") from error
    for magic, name in _NOT_READ.items():
        if head.startswith(magic):
            raise TraceError(f"{path} is compressed with {name}.")
    if head.startswith(_BZIP2):
        chunks = run_ahead(_bzip2(path, on_read))
    elif head.startswith(_ZIP):
        chunks = run_ahead(_zip(path, on_read))
    else:
        chunks = read_ahead(path, on_read=on_read)
    return to_utf8(chunks, size_bytes)


def _bzip2(path: Path, on_read: Callable[[int], None] | None) -> Generator[Chunk, None, None]:
    inflater = bz2.BZ2Decompressor()
    with path.open("rb") as file:
        while True:
            try:
                data = file.read(CHUNK_BYTES) if inflater.needs_input else b""
                if inflater.needs_input and not data:
                    raise DamagedStreamError(
                        f"The bzip2 stream ends after {file.tell():,} bytes: the file was cut off."
                    )
                chunk = inflater.decompress(data, CHUNK_BYTES)
            except (OSError, EOFError) as error:
                raise DamagedStreamError(f"The bzip2 stream is corrupt: {error}.") from error
            if on_read is not None:
                on_read(file.tell())
            if chunk:
                yield chunk
            if inflater.eof:
                following = inflater.unused_data or file.read(CHUNK_BYTES)
                if not following:
                    return
                if not following.startswith(_BZIP2):
                    raise DamagedStreamError("Something else follows the bzip2 stream.")
                file.seek(-len(following), io.SEEK_CUR)
                inflater = bz2.BZ2Decompressor()


def _zip(path: Path, on_read: Callable[[int], None] | None) -> Generator[Chunk, None, None]:
    try:
        with zipfile.ZipFile(path) as archive:
            files = [info for info in archive.infolist() if not info.is_dir()]
            if len(files) != 1:
                names = ", ".join(info.filename for info in files[:3])
                raise TraceError(f"{path} is a zip archive of {len(files)} files ({names}, ...): extract it first.")
            with archive.open(files[0]) as content:
                while chunk := content.read(CHUNK_BYTES):
                    if on_read is not None and archive.fp is not None:
                        on_read(archive.fp.tell())
                    yield chunk
    except _DAMAGE as error:
        raise DamagedStreamError(f"The zip archive is damaged or not supported: {error}.") from error


def to_utf8(chunks: Generator[Chunk, None, None], size_bytes: int) -> Generator[Chunk, None, None]:
    """Convert uncompressed chunks to UTF-8 without a byte-order mark.

    Args:
        chunks: The content of a file.
        size_bytes: Size of the file on disk, which determines the size limit for the content.

    Raises:
        DamagedStreamError: The text cannot be decoded, or the content is implausibly large.
    """
    chunks = _limited(chunks, max(_SMALL_BYTES, size_bytes * _MOST_INFLATION))
    try:
        head = bytes(next(chunks, b""))
        encoding, skip = _encoding(head)
        if encoding == "utf-8":
            if head[skip:]:
                yield head[skip:]
            yield from chunks
        else:
            yield from _transcoded(head[skip:], chunks, encoding)
    finally:
        chunks.close()


def _limited(chunks: Generator[Chunk, None, None], max_bytes: int) -> Generator[Chunk, None, None]:
    inflated = 0
    try:
        for chunk in chunks:
            inflated += len(chunk)
            if inflated > max_bytes:
                raise DamagedStreamError(
                    f"The file inflates to more than {_MOST_INFLATION} times its size: the content after "
                    f"{max_bytes:,} bytes was not read."
                )
            yield chunk
    finally:
        chunks.close()


def _encoding(head: bytes) -> tuple[str, int]:
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding, len(mark)
    return _ZEROS.get(bytes(map(bool, head[:4])), "utf-8"), 0


def _transcoded(head: bytes, chunks: Iterator[Chunk], encoding: str) -> Generator[Chunk, None, None]:
    decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
    chunk: Chunk = head
    try:
        while chunk:
            if text := decoder.decode(chunk):
                yield text.encode("utf-8", "surrogatepass")
            chunk = next(chunks, b"")
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise DamagedStreamError(f"The text is not {encoding.upper()}: {error.reason}.") from error
