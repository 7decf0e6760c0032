"""Times that count from 1970 are made small enough for the doubles of Perfetto, and stay the same instants."""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from profdeck.cli import app

DATA = Path(os.environ.get("PROFDECK_TEST_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data")
UNIX_US = 1_712_195_495_528_029


def merged(directory: Path, *sources: Path) -> dict[str, Any]:
    file = directory / "all.json"
    done = CliRunner().invoke(app, ["merge", *map(str, sources), "-o", str(file)])
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(file.read_text(), parse_float=Decimal, parse_int=Decimal)
    return document


def dropped(events: list[dict[str, Any]], as_ns: Callable[[Any], int]) -> int:
    """Count what Perfetto's SliceTracker drops: slices that end behind one that is open on their thread."""
    threads: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            start_ns = as_ns(event["ts"])
            threads[event["pid"], event["tid"]].append((start_ns, start_ns + as_ns(event["dur"])))
    count = 0
    for slices in threads.values():
        open_ends: list[int] = []
        for start_ns, end_ns in sorted(slices, key=lambda one: (one[0], -one[1])):
            while open_ends and open_ends[-1] <= start_ns:
                open_ends.pop()
            if open_ends and end_ns > open_ends[-1]:
                count += 1
            else:
                open_ends.append(end_ns)
    return count


def by_doubles(time_us: Any) -> int:
    return int(float(time_us) * 1000)


def trace(path: Path, base_ns: int | None, first_us: int) -> Path:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": f"TS{at}", "dur": 0.4}
        for name, at in (("a", 0), ("b", 1), ("c", 2))
    ]
    text = json.dumps({"traceEvents": events} | ({} if base_ns is None else {"baseTimeNanoseconds": base_ns}))
    for at in range(3):
        text = text.replace(f'"TS{at}"', f"{first_us}.{at * 4 + 1:03d}")
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
    assert unix_ns(document) == [first_ns + of_source + at for of_source in (0, 5_000_000_000) for at in (1, 5, 9)]


@pytest.mark.parametrize("times", [(UNIX_US, 5_000), (5_000, 6_000)], ids=["one of them", "none"])
def test_other_times_stay(tmp_path: Path, times: tuple[int, int]) -> None:
    sources = [trace(tmp_path / f"{number}.json", 10**18, first) for number, first in enumerate(times)]
    document = merged(tmp_path, *sources)
    starts = [int(event["ts"]) for event in document["traceEvents"] if event["ph"] == "X"]
    assert starts == [first for first in times for _ in range(3)]
    assert document["baseTimeNanoseconds"] == 10**18


@pytest.mark.shared_data
def test_no_slice_of_a_real_trace_is_lost(tmp_path: Path) -> None:
    path = DATA / "gpu" / "ns_resolution_rank0.pt.trace.json.gz"
    if not path.exists():
        pytest.skip(f"no traces in {DATA}: set PROFDECK_TEST_DATA")
    original = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal, parse_int=Decimal)
    assert dropped(original["traceEvents"], lambda time_us: int(time_us * 1000)) == 0
    assert dropped(original["traceEvents"], by_doubles) > 700
    document = merged(tmp_path, path)
    assert dropped(document["traceEvents"], by_doubles) == 0
    assert sorted(unix_ns(document)) == sorted(
        int(event["ts"] * 1000) for event in original["traceEvents"] if event["ph"] == "X"
    )
