"""JSON of metadata events."""

from __future__ import annotations

import json
from typing import Any

import msgspec


def metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> bytes:
    """Return the JSON of a metadata event."""
    return encoded({"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args})


def encoded(value: Any) -> bytes:
    """Return JSON text."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # lone surrogates: JSON has escapes for them
        return json.dumps(value).encode()
