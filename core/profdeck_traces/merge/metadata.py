"""JSON encoding of metadata events."""

from __future__ import annotations

import json
from typing import Any

import msgspec


def metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> bytes:
    """Return a metadata event as JSON."""
    return encoded({"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args})


def encoded(value: Any) -> bytes:
    """Encode a value as JSON."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # lone surrogates, which json.dumps escapes
        return json.dumps(value).encode()
