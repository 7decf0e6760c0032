"""Wrapper for the compiled trace parser, which is a C++ library called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from profdeck_traces.reading.walking import Changes, Mark, Parser, ParseState, ParseStatus

FORMAT = 1
LIBRARY = Path(__file__).with_name("_reader.so")
SOURCES = Path(__file__).parents[3] / "native"
"""Source directory in a checkout; installed packages do not contain it."""
MAX_NAMES = 1 << 20
"""Maximum number of distinct names. Additional names are read as ``(other)``."""
COLUMNS: dict[str, tuple[int, type[np.generic]]] = {
    "start_ns": (0, np.int64),
    "duration_ns": (1, np.int64),
    "name": (2, np.int32),
    "track": (3, np.int32),
    "phase": (4, np.uint8),
    "category": (5, np.uint8),
}
_MEMBERS, _COPIED, _MARKS, _FIRST_PAIRS = 6, 7, 8, 16
_TABLES = {"name": 0, "category": 1, "track": 2}
_OUT_OF_MEMORY = 2
_WRITTEN = 5
_DEMANGLED_BYTES = 1 << 16
_BFLOAT16 = ("DF16b", "Dd", "decimal64")

_pointer, _i64, _size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "reader_format": (ctypes.c_int, []),
    "reader_source": (ctypes.c_char_p, []),
    "reader_instructions": (ctypes.c_char_p, [ctypes.c_int]),
    "reader_new": (_pointer, [_pointer, _pointer, ctypes.c_int, _size]),
    "reader_free": (None, [_pointer]),
    "reader_map": (None, [_pointer, ctypes.c_int, ctypes.c_int]),
    "reader_copy": (
        ctypes.c_int,
        [_pointer, _pointer, _pointer, _pointer, _size, _pointer, _size, _i64, ctypes.c_char_p],
    ),
    "reader_count": (ctypes.c_int, [_pointer, ctypes.c_char_p]),
    "reader_feed": (ctypes.c_int, [_pointer, _pointer, _size, _i64, ctypes.c_int, _pointer]),
    "reader_resume": (None, [_pointer]),
    "reader_number": (_i64, [_pointer, ctypes.c_int]),
    "reader_error": (ctypes.c_char_p, [_pointer]),
    "reader_column": (_i64, [_pointer, ctypes.c_int, _pointer, ctypes.c_int]),
    "reader_table": (None, [_pointer, ctypes.c_int, _pointer, _pointer, _pointer, _pointer]),
    "reader_nest": (ctypes.c_int, [_pointer, _pointer, _pointer, _size, _pointer]),
    "reader_flatten": (_i64, [_pointer, _pointer, _size, _pointer, _pointer]),
    "reader_longest_paths": (_i64, [_pointer, _pointer, _pointer, _size, _i64, _pointer, _pointer, _pointer]),
    "reader_demangle": (_i64, [ctypes.c_char_p, _pointer, _size]),
}


class UnusableLibraryError(Exception):
    """The library is missing, cannot be loaded, or was built from different sources."""


def source_hash(directory: Path) -> str:
    """Return the hash of the library's source files."""
    files = sorted(path for path in directory.iterdir() if path.suffix in {".cpp", ".h"})
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def open_library(path: Path, sources: Path) -> ctypes.CDLL:
    """Load the library.

    Raises:
        UnusableLibraryError: The library is missing, cannot be loaded, or does not match this version.
    """
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            if name == "reader_format" and function() != FORMAT:
                raise UnusableLibraryError(f"{path} has format {function()}, not {FORMAT}")
    except (OSError, AttributeError) as error:
        raise UnusableLibraryError(str(error)) from error
    if sources.is_dir() and library.reader_source().decode() != source_hash(sources):
        raise UnusableLibraryError(f"{path} was built from different sources")
    return library


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Return the library, or None if it cannot be used."""
    try:
        return open_library(LIBRARY, SOURCES)
    except UnusableLibraryError:
        return None


class CompiledParser(Parser):
    """A `Parser` implemented in C++.

    Args:
        library: The library returned by `open_library`.
        args: The args to collect, with the `Kind` of each. A key such as ``@id`` selects a member of the event itself.
        max_names: Maximum number of distinct names, of distinct tracks, and of distinct texts per arg.
        in_files: Keep columns in temporary files, for traces that are larger than memory.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        args: Mapping[str, int],
        *,
        max_names: int = MAX_NAMES,
        in_files: bool = False,
    ) -> None:
        self._library = library
        self._handle = None
        self._numbers = {key: _FIRST_PAIRS + 2 * number for number, key in enumerate(args)}
        keys = (ctypes.c_char_p * len(args))(*(key.encode() for key in args))
        kinds = (ctypes.c_uint8 * len(args))(*args.values())
        self._handle = library.reader_new(keys, kinds, len(args), max_names)
        if not self._handle:
            raise MemoryError
        self._update()
        self._taken = ctypes.c_size_t()
        self._arrays: list[NDArray[Any] | None] = []
        if in_files:
            for number in [number for number, _ in COLUMNS.values()] + [
                number + which for number in self._numbers.values() for which in (0, 1)
            ]:
                with tempfile.TemporaryFile() as file:
                    library.reader_map(self._handle, number, os.dup(file.fileno()))

    def __del__(self) -> None:
        if self._handle:
            self._library.reader_free(self._handle)

    @override
    def feed(self, buffer: bytearray, length: int, base: int, *, is_last: bool) -> tuple[ParseStatus, int]:
        if len(buffer) < length + 64:
            raise ValueError("The buffer must have room for 64 bytes after the content.")
        view = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        status = self._library.reader_feed(self._handle, view, length, base, is_last, ctypes.byref(self._taken))
        if status == _OUT_OF_MEMORY:
            raise MemoryError
        self._update()
        return ParseStatus(status), self._taken.value

    @override
    def count_events(self, name: bytes = b"") -> None:
        if self._library.reader_count(self._handle, name):
            raise MemoryError

    @override
    def resume(self) -> None:
        self._library.reader_resume(self._handle)
        self._update()

    @override
    def column(self, name: str) -> NDArray[Any]:
        number, dtype = COLUMNS[name]
        return self._array(number, dtype)

    @override
    def pairs(self, key: str) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        return self._array(self._numbers[key], np.uint32), self._array(self._numbers[key] + 1, np.int64)

    @override
    def drop(self, name: str) -> None:
        self._drop(COLUMNS[name][0])

    @override
    def drop_pairs(self, key: str) -> None:
        self._drop(self._numbers[key])
        self._drop(self._numbers[key] + 1)

    @override
    def strings(self, name: str) -> list[bytes]:
        return self._table(_TABLES[name])

    @override
    def texts(self, key: str) -> list[bytes]:
        return self._table(_FIRST_PAIRS + (self._numbers[key] - _FIRST_PAIRS) // 2)

    @override
    def members(self) -> list[tuple[bytes, bytes]]:
        texts = bytes(self._array(_MEMBERS, np.uint8)).split(b"\n")
        return list(zip(texts[:-1:2], texts[1::2], strict=True))

    @override
    def copy_events(self, changes: Changes) -> None:
        typed = ((changes.keep, np.uint8), (changes.lane, np.int32), (changes.ids, np.int64))
        # Keep the arrays alive: the library reads them in later calls to `feed`.
        self._arrays = [None if array is None else np.ascontiguousarray(array, dtype) for array, dtype in typed]
        texts = (ctypes.c_char_p * (2 * len(changes.lanes)))(*itertools.chain.from_iterable(changes.lanes))
        if self._library.reader_copy(
            self._handle,
            *(None if array is None else array.ctypes.data for array in self._arrays),
            changes.rows,
            texts,
            len(changes.lanes),
            changes.shift_ns,
            changes.separator,
        ):
            raise MemoryError

    @override
    def take_copied(self) -> tuple[bytes, list[Mark]]:
        copied, marks = bytes(self._array(_COPIED, np.uint8)), self._array(_MARKS, np.int64).reshape(-1, 3).tolist()
        self._drop(_COPIED)
        self._drop(_MARKS)
        return copied, [Mark(*mark) for mark in marks]

    def _update(self) -> None:
        self.error = self._library.reader_error(self._handle).decode()
        self.rows, self.error_at, state, has_events = (
            int(self._library.reader_number(self._handle, number)) for number in range(4)
        )
        self.state, self.has_events = ParseState(state), bool(has_events)
        self.copied = int(self._library.reader_number(self._handle, _WRITTEN))

    def _drop(self, number: int) -> None:
        self._library.reader_column(self._handle, number, ctypes.byref(_pointer()), 1)

    def _table(self, number: int) -> list[bytes]:
        count, size = _i64(), _i64()
        sizes = ctypes.byref(count), ctypes.byref(size)
        self._library.reader_table(self._handle, number, None, None, *sizes)
        lengths = np.empty(count.value, np.uint32)
        data = ctypes.create_string_buffer(size.value + 1)
        self._library.reader_table(self._handle, number, lengths.ctypes.data, data, *sizes)
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        raw = data.raw
        return [raw[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]

    def _array(self, number: int, dtype: type[np.generic]) -> NDArray[Any]:
        """Return a view of a column in the library's memory. It is valid until the next `feed` or `drop`."""
        at = ctypes.c_void_p()
        size = self._library.reader_column(self._handle, number, ctypes.byref(at), 0)
        if not size or not at.value:
            return np.empty(0, dtype)
        memory = (ctypes.c_char * size).from_address(at.value)
        memory._parser = self  # noqa: SLF001 - keeps the memory alive
        return np.frombuffer(memory, dtype)


def nest(
    library: ctypes.CDLL, track: NDArray[np.generic], start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return, for each event, the innermost event open on its track when it starts, or -1.

    Events must be sorted by track, then by start, longest first.
    """
    if not len(track) == len(start_ns) == len(end_ns):
        raise ValueError("The columns have different lengths.")
    arrays: list[NDArray[Any]] = [np.ascontiguousarray(track, np.int32)]
    arrays += [np.ascontiguousarray(times, np.int64) for times in (start_ns, end_ns)]
    parent = np.empty(len(track), np.int32)
    if library.reader_nest(*(array.ctypes.data for array in arrays), len(parent), parent.ctypes.data):
        raise MemoryError
    return parent


def flatten(
    library: ctypes.CDLL, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Compiled version of `profdeck_traces.reading.intervals.segments`."""
    if len(start_ns) != len(end_ns):
        raise ValueError("The columns have different lengths.")
    arrays = [np.ascontiguousarray(times, np.int64) for times in (start_ns, end_ns)]
    begin, row = np.empty(2 * len(start_ns), np.int64), np.empty(2 * len(start_ns), np.int32)
    count = library.reader_flatten(
        *(array.ctypes.data for array in arrays), len(start_ns), begin.ctypes.data, row.ctypes.data
    )
    if count < 0:
        raise MemoryError
    return begin[:count].copy(), row[:count].copy()


def longest_paths(
    library: ctypes.CDLL,
    first: NDArray[np.int64],
    source: NDArray[np.int64],
    weight: NDArray[np.int64],
    target: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the length of the longest path to each node of a DAG, and the edges of the path to `target`.

    Args:
        library: The library.
        first: The incoming edges of node *i* are ``first[i]`` to ``first[i + 1] - 1``. Only the first node has none.
        source: Start node of each edge. It precedes the end node.
        weight: Length of each edge.
        target: Node to which the path is returned, last edge first.
    """
    if not len(source) == len(weight) == first[-1]:
        raise ValueError("The columns have different lengths.")
    arrays = [np.ascontiguousarray(column, np.int64) for column in (first, source, weight)]
    length, edge, path = (np.empty(len(first) - 1, np.int64) for _ in range(3))
    count = library.reader_longest_paths(
        *(array.ctypes.data for array in arrays),
        len(length),
        target,
        *(array.ctypes.data for array in (length, edge, path)),
    )
    return length, path[:count].copy()


def demangle(library: ctypes.CDLL, names: Iterable[str]) -> list[str]:
    """Demangle C++ names. Names that cannot be demangled are returned unchanged."""
    room = ctypes.create_string_buffer(_DEMANGLED_BYTES)
    found = []
    for name in names:
        is_mangled = name.startswith("_Z") and name.isascii() and "\0" not in name
        # Before GCC 13, GNU's demangler does not support bfloat16. If it fails, substitute another built-in type.
        for code, stand_in, readable in (("", "", ""), (*_BFLOAT16,)) if is_mangled else ():
            length = library.reader_demangle(name.replace(code, stand_in).encode(), room, len(room))
            if length >= 0:
                text = room.raw[:length].decode("utf-8", "replace")
                found.append(text.replace(readable, "std::bfloat16_t") if readable else text)
                break
        else:
            found.append(name)
    return found
