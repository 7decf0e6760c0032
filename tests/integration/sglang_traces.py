"""Helpers for reading the traces of SGLang processes."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any


def events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace."""
    trace_events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return trace_events


def names(path: Path) -> list[str]:
    """Return the names of all complete events."""
    return [event["name"] for event in events(path) if event.get("ph") == "X"]


def spans(path: Path) -> list[str]:
    """Return the batch kinds in SGLang's own annotations, one per forward pass."""
    return [match[1] for name in names(path) if (match := re.match(r"step\[(\w+) ", name))]


def steps(path: Path) -> list[int]:
    """Return profdeck's iteration numbers, which start at 0 in each capture."""
    return [int(match[1]) for name in names(path) if (match := re.fullmatch(r"ProfilerStep#(\d+)", name))]


def processes(path: Path) -> list[str]:
    """Return the names of the processes in a trace."""
    process_names = [event["args"]["name"] for event in events(path) if event["name"] == "process_name"]
    return [name for name in process_names if isinstance(name, str)]
