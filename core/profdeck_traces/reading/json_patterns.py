"""Regular expressions for JSON: tokens, and whole elements of limited depth."""

from __future__ import annotations

import json
import re
from typing import Any

_SPACE = rb"[ \t\n\r]*+"
_TEXT = rb'[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+'
_NUMBER = rb"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][-+]?[0-9]++)?+"
_SCALAR = rb"(?:%b|true|false|null|NaN|-?Infinity)" % _NUMBER


def _containers_of(value: bytes) -> bytes:
    """Return a pattern for ``value`` and for arrays and objects of it."""
    array = rb"\[%b(?:%b%b(?:,%b(?!\])|(?=\])))*+\]" % (_SPACE, value, _SPACE, _SPACE)
    member = rb'"%b"%b:%b%b' % (_TEXT, _SPACE, _SPACE, value)
    return rb"(?:%b|%b|\{%b(?:%b%b(?:,%b(?=\")|(?=\})))*+\})" % (value, array, _SPACE, member, _SPACE, _SPACE)


# One level takes "grid": [1, 1, 1] in one step; each more would triple the pattern, and the time of this import.
_SHALLOW = _containers_of(rb'(?:%b|"%b")' % (_SCALAR, _TEXT))
_ELEMENT = rb"%b%b%b," % (_SPACE, _SHALLOW, _SPACE)

match_space = re.compile(_SPACE).match
match_text = re.compile(_TEXT).match
match_number = re.compile(_NUMBER).match
match_scalar = re.compile(_SCALAR).match
match_token = re.compile(rb"[-+.0-9A-Za-z]*+").match
match_partial_escape = re.compile(rb"\\(?:u[0-9a-fA-F]{0,3})?").fullmatch
# Runs that end behind a comma, so that they leave the depth and the state as they were.
match_elements = re.compile(rb"(?:%b)*+" % _ELEMENT).match
match_elements_but_objects = re.compile(rb"(?:%b(?!\{)%b)*+" % (_SPACE, _ELEMENT)).match
match_members = re.compile(rb'(?:%b"%b"%b:%b)*+' % (_SPACE, _TEXT, _SPACE, _ELEMENT)).match
match_members_but_ph = re.compile(rb'(?:%b"(?!ph"|[^"\\]*+\\)%b"%b:%b)*+' % (_SPACE, _TEXT, _SPACE, _ELEMENT)).match
match_separator = re.compile(rb'\}%b,%b\{%b"[^"\\]*+"' % (_SPACE, _SPACE, _SPACE)).match
squeeze_digits = re.compile(rb"([0-9])[0-9]+").sub


def decode_leniently(text: memoryview | bytes) -> list[Any] | None:
    """Decode a JSON array with the standard library, which takes all that the scanner takes; ``None``: not JSON.

    Numbers with a fraction or an exponent come as text, with all their digits.
    """
    try:
        decoded = json.loads(bytes(text), parse_float=str)
    except (ValueError, RecursionError):
        return None
    return decoded if isinstance(decoded, list) else None
