"""Fuzz test of the trace reader. A mutated trace must not hang or crash the reader, or exceed the memory limit.

``PROFDECK_FUZZ_FILES`` sets the number of files. ``PROFDECK_TEST_SEED`` sets the seed of the first file.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import resource
import time
from decimal import Decimal
from pathlib import Path

import oracle
import pytest

from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.analysis.summary import summarise_trace
from profdeck_traces.reading.integrity import check_trace
from seeds import FIRST_SEED

FILES = int(os.environ.get("PROFDECK_FUZZ_FILES", "60"))
PARTS = 4
FAR_US = 10**12
MAX_S = 10.0  # for a file of a few kilobytes on a busy machine
MAX_GROWTH_MIB = 200

WORDS = [b'"ph"', b'"X"', b'"kernel"', b'"cat"', b'"ts"', b'"dur"', b'"args"', b'"traceEvents"', b'"process_name"']
VALUES = [
    b"NaN", b"-Infinity", b"1e999", b"1e-999", b"-0", b"9" * 400, b"0." + b"3" * 400, b"null", b"true", b'""', b"[]",
    b"{}", b'"\\ud800"', b'"\\u0000"', b'"' + b"x" * 70_000 + b'"', b"[" * 3000, b'{"a":' * 3000, b"-1",
    b"1712195495519123.456", b'"1712195495519123.456"', b"18446744073709551616",
    b'{"ph": "X", "cat": "kernel", "ts": 1, "args": {}}',
]  # fmt: skip


def base(chance: random.Random) -> bytes:
    events = []
    for number in range(chance.randint(1, 60)):
        category = chance.choice(["kernel", "cpu_op", "cuda_runtime", "gpu_memcpy", "user_annotation", "ac2g"])
        event: dict[str, object] = {"ph": "s" if category == "ac2g" else "X", "cat": category, "name": f"n{number % 5}"}
        event |= {"pid": chance.choice([0, 7, -1]), "tid": 7, "ts": 1000 + number / 8, "dur": chance.random() * 5}
        if chance.random() < 0.8:
            event["args"] = {"bytes": number, "External id": number, "Input Dims": [[1, 2], []]}
        events.append(event)
    events.append({"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "GPU 0"}})
    document = {"distributedInfo": {"rank": 1}, "traceEvents": events, "baseTimeNanoseconds": 1_000}
    return json.dumps(document, indent=chance.choice([None, 0, 2])).encode()


def delete(data: bytearray, offset: int, chance: random.Random) -> None:
    del data[offset : offset + chance.randint(1, 200)]


def cut(data: bytearray, offset: int, _: random.Random) -> None:
    del data[offset:]


def insert(data: bytearray, offset: int, chance: random.Random) -> None:
    data[offset:offset] = chance.choice([*WORDS, *VALUES])


def scribble(data: bytearray, offset: int, chance: random.Random) -> None:
    data[offset : offset + 1] = chance.randbytes(chance.randint(1, 3))


def repeat(data: bytearray, offset: int, chance: random.Random) -> None:
    source = chance.randrange(len(data) + 1)
    data[offset:offset] = data[source : source + chance.randint(1, 2000)]


def rename(data: bytearray, offset: int, chance: random.Random) -> None:
    token = chance.choice(WORDS)
    position = data.find(token, offset)
    if position >= 0:
        data[position : position + len(token)] = chance.choice([*WORDS, *VALUES])


def revalue(data: bytearray, offset: int, chance: random.Random) -> None:
    position = data.find(b":", offset)
    if position >= 0:
        data[position + 1 : max(position + 1, data.find(b",", position))] = chance.choice(VALUES)


MUTATIONS = (delete, cut, insert, insert, scribble, repeat, rename, revalue)


def mutated(text: bytes, chance: random.Random) -> bytes:
    data = bytearray(text)
    for _ in range(chance.randint(1, 6)):
        chance.choice(MUTATIONS)(data, chance.randrange(len(data) + 1), chance)
        if not data:
            break
    return bytes(data)


def zipped(data: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.6:
        return data
    packed = bytearray(gzip.compress(data, 1))
    if chance.random() < 0.3:
        packed[chance.randrange(len(packed))] ^= 1 << chance.randrange(8)
    elif chance.random() < 0.3:
        del packed[chance.randrange(len(packed)) :]
    elif chance.random() < 0.2:
        packed += gzip.compress(chance.randbytes(20))
    return bytes(packed)


@pytest.mark.parametrize("part", range(PARTS))
def test_mutated_traces_are_read_in_bounded_time_and_memory(tmp_path: Path, part: int) -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = tmp_path / "trace.json"
    for seed in range(FIRST_SEED + part, FIRST_SEED + FILES, PARTS):
        chance = random.Random(seed)  # noqa: S311 - reproducible input
        path.write_bytes(zipped(mutated(base(chance), chance), chance))
        try:
            began_s = time.process_time()
            summary = summarise_trace(path)
            assert time.process_time() - began_s < MAX_S
            check(summary)
            compare(path, summary)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after_kib - before_kib < MAX_GROWTH_MIB * 1024


def check(summary: RankSummary) -> None:
    """Check that the times of devices are finite and consistent."""
    for device in summary.devices:
        assert math.isfinite(device.span_us)
        assert 0 <= device.busy_us <= device.span_us
        assert device.busy_us + device.idle_us <= device.span_us * (1 + 1e-12) + 0.001


def compare(path: Path, summary: RankSummary) -> None:
    """Compare the summary with `check_trace` and, if the trace is intact, with the standard library and the oracle."""
    found = check_trace(path)
    assert (found.whole, found.problem, found.events) == (summary.whole, summary.problem, summary.events)
    if not summary.whole:
        return
    document = json.loads(content(path))
    events = document["traceEvents"] if isinstance(document, dict) else document
    assert summary.events == sum("ph" in event for event in events if isinstance(event, dict))
    try:
        expected = oracle.facts(path, {(kernel.kind, kernel.name): kernel.category for kernel in summary.kernels})
        times = [Decimal(event.get("ts", 0)) for event in oracle.events_of(path) if event.get("ph") == "X"]
        is_near = all(abs(time) < FAR_US for time in times)
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError):
        return  # the oracle does not support fields of other types
    if is_near:
        kernels = {(kernel.kind, kernel.name): kernel.count for kernel in summary.kernels}
        assert kernels == {key: count for key, (count, _, _) in expected["kernels"].items()}


def content(path: Path) -> bytes:
    """Return the decompressed content of a file."""
    data = path.read_bytes()
    return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
