"""Positions of the member values in the text of a JSON object."""

from __future__ import annotations

import json
import re
from typing import Any

# Skip converting the digits: only positions are needed, and int() rejects strings of more than 4,300 digits.
scan: Any = json.JSONDecoder(parse_int=len, parse_float=len).scan_once  # type: ignore[attr-defined]
_match_space = re.compile(r"[ \t\n\r]*").match


def member_spans(text: str, at: int = 0) -> dict[str, tuple[int, int]]:
    """Return the start and end of each value in an object. If a key is repeated, its last value is used.

    Args:
        text: Valid JSON, decoded as Latin-1 so that character positions equal byte positions.
        at: Position of the object.
    """
    spans: dict[str, tuple[int, int]] = {}
    at = _skip_space(text, at + 1)
    while text[at] == '"':
        key, end = scan(text, at)
        begin = _skip_space(text, _skip_space(text, end) + 1)
        _, end = scan(text, begin)
        spans[key] = begin, end
        at = _skip_space(text, end)
        if text[at] == ",":
            at = _skip_space(text, at + 1)
    return spans


def _skip_space(text: str, at: int) -> int:
    match = _match_space(text, at)
    return match.end() if match else at
