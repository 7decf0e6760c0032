"""Tests of chunks of plain and gzip files, and of errors in corrupt files. The reference is zlib."""

from __future__ import annotations

import gzip
import random
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from profdeck_traces.base.errors import TraceError
from profdeck_traces.reading import stream
from profdeck_traces.reading.stream import DamagedStreamError, read_ahead, read_chunks

TEXT = b"".join(b'{"ph": "X", "n": %d},' % random.Random(number).randrange(10**6) for number in range(20_000))  # noqa: S311
LONGEST_MATCH_BYTES = 258  # of deflate, RFC 1951
GZIPPED = gzip.compress(TEXT)


def read(path: Path, chunk_bytes: int = 1 << 20) -> tuple[bytes, str | None]:
    content = bytearray()
    try:
        for chunk in read_chunks(path, chunk_bytes):
            assert 0 < len(chunk) <= chunk_bytes
            content += chunk
    except DamagedStreamError as error:
        return bytes(content), str(error)
    return bytes(content), None


def readable_by_zlib(data: bytes) -> bytes:
    inflater = zlib.decompressobj(31)
    content = bytearray()
    for offset in range(len(data)):
        try:
            content += inflater.decompress(data[offset : offset + 1])
        except zlib.error:
            break
    return bytes(content)


@pytest.mark.parametrize("chunk_bytes", [100, 4096, 1 << 20])
@pytest.mark.parametrize("data", [TEXT, GZIPPED, GZIPPED + GZIPPED, gzip.compress(b"") + GZIPPED + b"\0" * 99, b""])
def test_intact_file_is_read_completely(tmp_path: Path, data: bytes, chunk_bytes: int) -> None:
    path = tmp_path / "any.name"
    path.write_bytes(data)
    expected = TEXT * data.count(GZIPPED) or (TEXT if data else b"")

    assert read(path, chunk_bytes) == (expected, None)


@pytest.mark.parametrize("cut", [2, 5, 10, 11, 1000, len(GZIPPED) // 2, len(GZIPPED) - 8, len(GZIPPED) - 1])
def test_readable_part_of_a_truncated_file_is_read(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(GZIPPED[:cut])

    content, problem = read(path)

    expected = readable_by_zlib(GZIPPED[:cut])
    assert expected.startswith(content)
    assert len(expected) - len(content) <= LONGEST_MATCH_BYTES  # isal may hold the last symbol back
    assert problem == f"The gzip stream ends after {cut:,} bytes, before its trailer: the file was cut off."


@pytest.mark.parametrize("offset", [12, 3000, len(GZIPPED) // 2, len(GZIPPED) - 8, len(GZIPPED) - 1])
@pytest.mark.parametrize("before", [b"", GZIPPED])
def test_readable_part_of_a_corrupt_file_is_read(
    tmp_path: Path, offset: int, before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_BLOCK_BYTES", 5000)
    bad = bytearray(GZIPPED)
    bad[offset] ^= 0x55
    path = tmp_path / "trace.gz"
    path.write_bytes(before + bad)

    content, problem = read(path, 7000)

    assert content == (TEXT if before else b"") + readable_by_zlib(bytes(bad))
    assert problem is not None
    assert "corrupt" in problem


@pytest.mark.parametrize("trailing", [b"x", b"\x1f", b"\0\0garbage"])
def test_trailing_data_is_reported(tmp_path: Path, trailing: bytes) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(GZIPPED + trailing)

    content, problem = read(path)

    assert content == TEXT
    assert problem is not None
    assert problem.startswith("Something else follows the gzip stream:")


def test_read_ahead_has_the_same_chunks_and_errors(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(TEXT * 5, 1)[:-1])
    content = bytearray()

    with pytest.raises(DamagedStreamError):
        for chunk in read_ahead(path):
            content += chunk

    assert content == TEXT * 5


def test_reading_ahead_can_be_given_up(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"x" * (5 * stream.CHUNK_BYTES))
    chunks = read_ahead(path)

    assert len(next(chunks)) == stream.CHUNK_BYTES
    chunks.close()

    assert list(chunks) == []


def test_missing_file_is_a_trace_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="Cannot read"):
        next(read_ahead(tmp_path / "nowhere"))


def test_reading_during_interpreter_shutdown_starts_no_threads(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(b'[{"ph": "X"}]'))
    code = """
import atexit, sys
from pathlib import Path
from profdeck_traces.reading.integrity import check_trace
from profdeck_traces.writing.compression import compress_trace
path = Path(sys.argv[1])
atexit.register(lambda: print(compress_trace(path, path.with_name("copy"), gzip=True, anchor_name="x").check.whole))
atexit.register(lambda: print(check_trace(path).whole))
"""
    result = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    assert result.stdout == "True\nTrue\n", result.stderr
