"""Functions that read traces with the compiled and the Python parser and compare the results."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from profdeck_traces.reading.compiled import COLUMNS, CompiledParser, load_library
from profdeck_traces.reading.content import read_content
from profdeck_traces.reading.events import ARGS
from profdeck_traces.reading.fallback import PythonParser
from profdeck_traces.reading.stream import Chunk
from profdeck_traces.reading.walking import Parser, Walk, walk

MAX_JSON_BYTES = 1 << 40


def parsers() -> list[Parser]:
    """Return both parsers, or skip the test if the compiled library is missing."""
    library = load_library()
    if library is None:
        pytest.skip("the reader is not compiled; run python hatch_build.py")
    return [CompiledParser(library, ARGS), PythonParser(ARGS)]


def chunks(data: bytes, size: int = 1 << 20) -> Generator[Chunk, None, None]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def facts(parser: Parser, result: Walk) -> dict[str, Any]:
    """Return all data that a parser has read, with codes for args replaced by the texts."""
    texts = {key: parser.texts(key) for key, is_integer in ARGS.items() if not is_integer}
    pairs = {key: [values.tolist() for values in parser.pairs(key)] for key in ARGS}
    return {
        "rows": parser.rows,
        "whole": result.problem is None,
        "skipped": result.skipped,
        "columns": {name: parser.column(name).tolist() for name in COLUMNS},
        "strings": {name: parser.strings(name) for name in ("name", "category", "track")},
        "args": {
            key: (rows, [texts[key][value] for value in values] if key in texts else values)
            for key, (rows, values) in pairs.items()
        },
        "members": parser.members(),
    }


def read_both(content: bytes | Path, size: int = 1 << 20) -> dict[str, Any]:
    """Check that both parsers read the same data, and return it."""
    found = []
    for parser in parsers():
        source = read_content(content) if isinstance(content, Path) else chunks(content, size)
        found.append(facts(parser, walk(source, parser, max_json_bytes=MAX_JSON_BYTES)))
    assert found[0] == found[1]
    return found[0]


def pack(events: Iterable[str], before: str = "", after: str = "") -> bytes:
    """Return a trace that contains the given JSON events, and other members before and after them."""
    return f'{{{before}"traceEvents": [{", ".join(events)}]{after}}}'.encode("utf-8", "surrogatepass")
