"""Times that count from 1970 are made small enough for the doubles of Perfetto, and stay the same instants."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from profdeck.cli import app

UNIX_US = 1_712_195_495_528_029


def merged(directory: Path, *sources: Path) -> dict[str, Any]:
    file = directory / "all.json"
    result = CliRunner().invoke(app, ["merge", *map(str, sources), "-o", str(file)])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(file.read_text(), parse_float=Decimal, parse_int=Decimal)
    return document


def trace(path: Path, base_ns: int | None, first_us: int) -> Path:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": f"TS{offset}", "dur": 0.4}
        for name, offset in (("a", 0), ("b", 1), ("c", 2))
    ]
    text = json.dumps({"traceEvents": events} | ({} if base_ns is None else {"baseTimeNanoseconds": base_ns}))
    for offset in range(3):
        text = text.replace(f'"TS{offset}"', f"{first_us}.{offset * 4 + 1:03d}")
    path.write_text(text)
    return path


def unix_ns(document: dict[str, Any]) -> list[int]:
    base_ns = int(document.get("baseTimeNanoseconds", 0))
    return [base_ns + int(event["ts"] * 1000) for event in document["traceEvents"] if event["ph"] == "X"]


def test_large_times_become_small_and_stay_the_same_instants(tmp_path: Path) -> None:
    sources = [trace(tmp_path / "a.json", None, UNIX_US), trace(tmp_path / "b.json", None, UNIX_US + 5_000_000)]
    document = merged(tmp_path, *sources)
    times_us = [event["ts"] for event in document["traceEvents"] if event["ph"] == "X"]
    assert all(0 < time_us < 2**53 / 1000 for time_us in times_us)
    first_ns = UNIX_US * 1000
    assert unix_ns(document) == [
        first_ns + source_ns + offset_ns for source_ns in (0, 5_000_000_000) for offset_ns in (1, 5, 9)
    ]


@pytest.mark.parametrize("times", [(UNIX_US, 5_000), (5_000, 6_000)], ids=["one of them", "none"])
def test_other_times_stay(tmp_path: Path, times: tuple[int, int]) -> None:
    sources = [trace(tmp_path / f"{number}.json", 10**18, first) for number, first in enumerate(times)]
    document = merged(tmp_path, *sources)
    starts = [int(event["ts"]) for event in document["traceEvents"] if event["ph"] == "X"]
    assert starts == [first for first in times for _ in range(3)]
    assert document["baseTimeNanoseconds"] == 10**18
