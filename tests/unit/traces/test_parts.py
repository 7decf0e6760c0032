"""Tests of reading a trace with several processes. The result must be identical to that of one process."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import test_fuzz
import test_oracle
from hypothesis import given, strategies as st
from real_traces import each

from gpu_job import GpuJob
from profdeck_traces.reading.all_events import AllEvents
from profdeck_traces.reading.chrome import DEVICE_LANES
from profdeck_traces.reading.device_events import DeviceEvents
from profdeck_traces.reading.integrity import MAX_JSON_BYTES
from profdeck_traces.reading.parallel_read import HowToRead, read_in_parts
from profdeck_traces.reading.reader import read_trace
from profdeck_traces.reading.trace import Trace
from seeds import FIRST_SEED


def is_step(name: str) -> bool:
    return name.startswith("ProfilerStep#")


def in_parts(path: Path, *, devices_only: bool = False, **how: Any) -> Trace | None:
    """Read all parts sequentially in this process."""
    small: dict[str, Any] = {"parts": 3, "chunk_bytes": 3000, "group_batches": 2, "slice_events": 100}
    return read_in_parts(
        HowToRead(
            path=path,
            kind=DeviceEvents if devices_only else AllEvents,
            categories=DEVICE_LANES if devices_only else None,
            is_step=is_step,
            max_json_bytes=MAX_JSON_BYTES,
            **(small | how),
        ),
        None,
        1,
    )


def is_same(actual: Trace, expected: Trace) -> None:
    assert actual.tables == expected.tables
    actual_columns, expected_columns = actual.columns(), expected.columns()
    for name in ("name", "track", "start_ns", "end_ns"):
        assert np.array_equal(getattr(actual_columns, name), getattr(expected_columns, name)), name
        assert np.array_equal(getattr(actual.marks, name), getattr(expected.marks, name)), name
    for name in ("members", "process_names", "thread_names", "copied", "searched", "devices_only"):
        assert getattr(actual, name) == getattr(expected, name), name
    assert list(actual.process_names.items()) == list(expected.process_names.items())
    assert actual.collectives.stated == expected.collectives.stated
    assert np.array_equal(actual.collectives.of(actual_columns), expected.collectives.of(expected_columns))
    assert np.array_equal(actual.annotations.of(actual_columns), expected.annotations.of(expected_columns))
    assert actual.shapes.times == expected.shapes.times
    for (device, rows), (device_too, rows_too) in zip(actual.memory.devices(), expected.memory.devices(), strict=True):
        assert device == device_too
        assert np.array_equal(rows, rows_too)
    # Searched traces have no event count.
    checks = [actual.check, expected.check]
    if actual.searched:
        checks = [attrs.evolve(check, events=1) for check in checks]
    assert checks[0] == checks[1]


@pytest.mark.shared_data
@pytest.mark.parametrize("devices_only", [False, True], ids=["all", "devices"])
@each("gpu/*.json.gz", "npu/*.json")
def test_real_traces(path: Path, *, devices_only: bool) -> None:
    expected = read_trace(path, devices_only=devices_only, is_step=is_step)
    for how in ({"parts": 2, "chunk_bytes": 1 << 16, "group_batches": 1}, {"parts": 5, "chunk_bytes": 30_000}):
        trace = in_parts(path, devices_only=devices_only, **how)
        if devices_only and not expected.searched:
            continue
        assert trace is not None
        is_same(trace, expected)


@given(
    events=st.lists(
        test_oracle.with_args(test_oracle.host_events() | test_oracle.device_events() | test_oracle.OTHERS),
        min_size=1,
        max_size=60,
    ),
    marks=test_oracle.steps(),
    layout=test_oracle.LAYOUTS,
    parts=st.integers(1, 4),
    chunk_bytes=st.sampled_from([64, 300, 1000, 5000]),
    group_batches=st.integers(1, 3),
)
def test_any_trace(
    events: list[dict[str, Any]],
    marks: list[dict[str, Any]],
    layout: Any,
    parts: int,
    chunk_bytes: int,
    group_batches: int,
) -> None:
    document = {"schemaVersion": 1, "traceEvents": [*events, *marks], "baseTimeNanoseconds": 7}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        path.write_text(json.dumps(document, **layout))
        expected = read_trace(path, is_step=is_step)
        trace = in_parts(path, parts=parts, chunk_bytes=chunk_bytes, group_batches=group_batches, slice_events=7)
        if trace is not None:
            is_same(trace, expected)
        # Of a sound trace of Kineto's form each batch decodes.
        assert trace is not None or not expected.check.whole or any("ph" not in event for event in events)


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + 30))
def test_mutated_traces(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - reproducible input
    path = tmp_path / "trace.json"
    path.write_bytes(test_fuzz.zipped(test_fuzz.mutated(test_fuzz.base(chance), chance), chance))
    trace = in_parts(path, chunk_bytes=chance.choice([100, 1000, 4000]), parts=chance.choice([1, 2, 3]))
    if trace is not None:
        is_same(trace, read_trace(path, is_step=is_step))
        assert trace.check.whole


def test_corrupt_trace_is_read_by_one_process(tmp_path: Path) -> None:
    (path,) = GpuJob(steps=40).write(tmp_path / "job").iterdir()
    text = gzip.decompress(path.read_bytes())
    for broken in (text[:-20], text.replace(b'"cpu_op"', b'"cpu_op', 1), text[:3000] + text[9000:]):
        path.write_bytes(gzip.compress(broken))
        assert in_parts(path) is None
    path.write_bytes(gzip.compress(text)[:-9])
    assert in_parts(path) is None
    path.write_bytes(gzip.compress(text))
    assert in_parts(path) is not None


@pytest.mark.slow
def test_commands_read_a_large_trace_on_all_cores(tmp_path: Path) -> None:
    """The output with one and with several processes must be equal, also for a corrupt file."""
    (packed,) = GpuJob(steps=150, products=400, launch_us=40, product_us=30, items=3).write(tmp_path / "job").iterdir()
    path = tmp_path / "large.json"
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    assert path.stat().st_size > 20 << 20

    def summary(*options: str) -> str:
        command = [sys.executable, "-m", "profdeck", "summary", str(path), "--json", "--no-cache", *options]
        return subprocess.run(command, check=False, capture_output=True, text=True).stdout

    for options in ((), ("--devices-only",)):
        assert len({summary("--processes", count, *options) for count in "13"}) == 1
    path.write_bytes(path.read_bytes()[:-100])
    (damaged,) = {summary("--processes", count) for count in "12"}
    assert '"whole": false' in damaged
    assert [*Path(tempfile.gettempdir()).glob("profdeck-*/0")] == []
