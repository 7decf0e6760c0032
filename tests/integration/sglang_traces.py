"""What tests read from the traces of SGLang's processes."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any


def events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace."""
    found: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return found


def names(path: Path) -> list[str]:
    """Return the names of all that took time."""
    return [event["name"] for event in events(path) if event.get("ph") == "X"]


def spans(path: Path) -> list[str]:
    """Return what SGLang itself writes into a trace, once per forward pass: the kinds of batches."""
    return [found[1] for name in names(path) if (found := re.match(r"step\[(\w+) ", name))]


def steps(path: Path) -> list[int]:
    """Return the numbers of the iterations, which profdeck counts from the start of a capture."""
    return [int(found[1]) for name in names(path) if (found := re.fullmatch(r"ProfilerStep#(\d+)", name))]


def processes(path: Path) -> list[str]:
    """Return the names of the processes in a trace."""
    found = [event["args"]["name"] for event in events(path) if event["name"] == "process_name"]
    return [name for name in found if isinstance(name, str)]
