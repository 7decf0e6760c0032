"""Result files: the analysis of a trace, stored next to the trace.

A capture writes ``rank_0000.step1.trace.json.gz.result`` for ``rank_0000.step1.trace.json.gz``. A reader uses the file
only if the SHA-256 of the complete trace and the hash of profdeck's code are unchanged. Comparing only the size
and the end of a trace would miss a change in the middle of a plain or compressed file. File times are not compared
because they differ in copies of a run.

The content is decoded as plain data with fixed types. A file is ignored if it is corrupt, too large, not regular, or
owned by a different user than the trace.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from pathlib import Path
from typing import Any

import msgspec

from profdeck_traces.base.files import replace_file, sha256_of
from profdeck_traces.base.result_cache import content_of, framed
from profdeck_traces.base.version import __version__
from profdeck_traces.inputs.artifact_kinds import FileCheck, kind_of
from profdeck_traces.inputs.result_keys import code_files

SUFFIX = ".result"
_MAX_BYTES = 1 << 26


class ResultFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a result file."""

    check: FileCheck
    """Result of checking the complete trace, with its SHA-256."""
    question: str
    """Parameters of the analysis, as returned by `question_text`."""
    reading: bytes
    """The encoded reading, without pictures."""
    pictures: bytes
    """The reading's encoded pictures."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ResultFile).decode


def result_path(trace: Path) -> Path:
    """Return the path of a trace's result file."""
    return trace.with_name(trace.name + SUFFIX)


def trace_of(result: Path) -> Path:
    """Return the path of the trace to which a result file belongs."""
    return result.with_name(result.name.removesuffix(SUFFIX))


def is_result(file: Path) -> bool:
    """Return whether a path has the name of a result file."""
    return file.name.endswith((f".json{SUFFIX}", f".json.gz{SUFFIX}"))


def question_text(*question: Any) -> str:
    """Return the parameters of an analysis as text, for comparison with those of a stored result."""
    return repr(question)


def read_result(trace: Path) -> ResultFile | None:
    """Return a trace's stored result, or ``None`` if it is missing or corrupt, or the trace or profdeck changed."""
    if kind_of(trace) is not None or (data := _read(trace)) is None:
        return None
    sha256 = sha256_of(trace)
    content = None if sha256 is None else content_of(_key(sha256), data)
    try:
        result = None if content is None else _decode(content)
    except (msgspec.MsgspecError, UnicodeError):
        return None
    return result if result is not None and result.check.whole and result.check.sha256 == sha256 else None


def store_result(trace: Path, sha256: str, result: ResultFile) -> None:
    """Write a trace's result file, replacing an existing one.

    Args:
        trace: The trace.
        sha256: SHA-256 of the trace, which must not have changed during the analysis.
        result: The result.

    Raises:
        OSError: The file cannot be written.
    """
    replace_file(result_path(trace), framed(_key(sha256), _encode(result)), durable=False)


def _read(trace: Path) -> bytes | None:
    try:
        # O_NOFOLLOW: a symbolic link could point to another user's file. O_NONBLOCK: a pipe would block.
        descriptor = os.open(result_path(trace), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            about, about_trace = os.fstat(descriptor), trace.stat()
            is_regular = stat.S_ISREG(about.st_mode) and stat.S_ISREG(about_trace.st_mode)
            if not is_regular or about.st_uid != about_trace.st_uid or about.st_size > _MAX_BYTES:
                return None
            data = file.read(_MAX_BYTES + 1)
    except OSError:
        return None
    return data if len(data) <= _MAX_BYTES else None


def _key(sha256: str) -> str:
    return f"{sha256} {__version__} {_code_hash(code_files())}"


@functools.cache
def _code_hash(files: tuple[Path, ...]) -> str:
    """Return a hash of this package's code. File times are not used because they differ between installations."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in files:
        digest.update(f"\0{os.path.relpath(path, root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
