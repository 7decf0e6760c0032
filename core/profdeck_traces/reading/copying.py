"""Copies the text of a trace's events, with a few changes, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np

from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.progress import Progress
from profdeck_traces.reading.content import read_content
from profdeck_traces.reading.integrity import MAX_JSON_BYTES, file_size
from profdeck_traces.reading.parsers import new_parser
from profdeck_traces.reading.stream import Chunk
from profdeck_traces.reading.walking import Changes, Mark, walk

# Like Python's json, the parsers accept encoded surrogates, NaN and Infinity, but viewers reject such a file.
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_STRING_OR_CONSTANT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|NaN|-?Infinity', re.DOTALL)

Rewrite = Callable[[int, bytes], bytes]
"""Returns the new text of an event, given its position in the file and its text with all other changes made."""


def copy_events(  # noqa: PLR0913 - all but three have defaults
    path: Path,
    changes: Changes,
    write: Callable[[bytes], None],
    *,
    rewrite: Rewrite | None = None,
    on_progress: Progress | None = None,
    in_python: bool = False,
) -> int:
    """Copy events of a Chrome trace in file order, and return the number of events copied.

    The copied text is valid JSON; see `strict_json`. In `changes`, the row of an event is its position in the file.

    Args:
        path: As for `read_events`.
        changes: The events to copy, and the changes to make.
        write: Called repeatedly with the text of copied events, including the separators.
        rewrite: Called for each marked event.
        on_progress: Called from another thread with the number of bytes read so far and the file size.
        in_python: Use the Python parser.

    Raises:
        TraceError: The file cannot be read, or its events no longer match `changes`.
    """
    size_bytes = file_size(path)
    parser = new_parser({}, in_python=in_python)
    parser.copy_events(changes)

    def write_copied() -> None:
        text, marks = parser.take_copied()
        if text:
            write(strict_json(text if rewrite is None else _rewritten(text, marks, rewrite)))

    def chunks() -> Generator[Chunk, None, None]:
        content = read_content(
            path, on_read=None if on_progress is None else lambda read: on_progress(read, size_bytes)
        )
        try:
            for chunk in content:
                yield chunk
                write_copied()  # the parser has now read the chunk
        finally:
            content.close()

    walk(chunks(), parser, max_json_bytes=MAX_JSON_BYTES)
    write_copied()
    if changes.keep is not None and parser.copied != np.count_nonzero(changes.keep):
        raise TraceError(f"{path} changed while it was being read.")
    return parser.copied


def strict_json(text: bytes) -> bytes:
    """Return JSON text that every reader accepts. Encoded surrogates become escapes; NaN and infinities become null.

    Args:
        text: Complete JSON values that a parser has accepted.
    """
    if b"\xed" in text:
        text = _SURROGATE.sub(lambda match: b"\\u%04x" % ord(match[0].decode("utf-8", "surrogatepass")), text)
    if b"NaN" in text or b"Infinity" in text:
        text = _STRING_OR_CONSTANT.sub(lambda match: match[0] if match[0].startswith(b'"') else b"null", text)
    return text


def _rewritten(text: bytes, marks: list[Mark], rewrite: Rewrite) -> bytes:
    pieces, at = [], 0
    for mark in marks:
        pieces += [text[at : mark.begin], rewrite(mark.row, text[mark.begin : mark.end])]
        at = mark.end
    return b"".join([*pieces, text[at:]])
