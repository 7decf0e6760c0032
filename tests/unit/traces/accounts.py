"""Writes traces, and returns their accounts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from profdeck_traces.account.model import Account
from profdeck_traces.analysis.summary import summarise_trace


def write(directory: Path, events: list[dict[str, Any]]) -> Path:
    """Write a trace with the given events. Return its path."""
    path = directory / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def account_of(path: Path) -> Account:
    """Return the account of a trace, which must have one."""
    account = summarise_trace(path).account
    assert account is not None
    return account
