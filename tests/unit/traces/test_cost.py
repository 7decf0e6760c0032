"""Tests of malicious traces. Time and memory must be bounded, and exceeded limits must be reported."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

COUNT = 60_000


def kernel(number: int, **members: Any) -> dict[str, Any]:
    event = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": float(number), "dur": 1.0}
    return event | members


def stairs() -> Iterator[dict[str, Any]]:
    """Yield events that begin during the previous event and end after it."""
    return (kernel(number, dur=float(COUNT)) for number in range(COUNT))


def streams() -> Iterator[dict[str, Any]]:
    return (kernel(number, tid=number) for number in range(2 * COUNT))


def processes() -> Iterator[dict[str, Any]]:
    return (kernel(number, pid=number, cat="cpu_op") for number in range(COUNT))


def names() -> Iterator[dict[str, Any]]:
    return (kernel(number, name=f"k{number}_{'x' * 4000}") for number in range(COUNT // 3))


def annotations() -> Iterator[dict[str, Any]]:
    return (kernel(number, cat="user_annotation", name=f"stage {number}") for number in range(COUNT))


def one_of_40_mib() -> Iterator[dict[str, Any]]:
    return iter([kernel(0), kernel(1, args={"a": "x" * (40 << 20)}), kernel(2)])


def profdeck(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command for at most 60 s of CPU time, with 300 MiB of memory in addition to the interpreter's memory."""

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (500 << 20, 500 << 20))
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))

    command = [sys.executable, "-m", "profdeck", *arguments]
    return subprocess.run(
        command, cwd=directory, preexec_fn=bounded, timeout=280, text=True, capture_output=True, check=False
    )


@pytest.mark.parametrize(
    ("make", "command", "code", "message"),
    [
        (stairs, "merge a.trace.json b.trace.json -o c.trace.json.gz", 4, "more than 256 events overlap on one track"),
        (stairs, "merge a.trace.json b.trace.json -o c.pftrace", 4, "more than 256 events overlap on one track"),
        (streams, "merge a.trace.json b.trace.json -o c.trace.json.gz", 0, ""),
        (streams, "report a.trace.json -o a.html", 0, ""),
        (processes, "merge a.trace.json b.trace.json -o c.trace.json.gz", 4, "too many to merge"),
        (processes, "report a.trace.json -o a.html", 0, ""),
        (names, "summary a.trace.json", 0, ""),
        (annotations, "summary a.trace.json", 0, ""),
        (one_of_40_mib, "summary a.trace.json", 0, ""),
        (one_of_40_mib, "merge a.trace.json b.trace.json -o c.trace.json.gz", 0, ""),
        (one_of_40_mib, "trim a.trace.json --time 0s..1s -o c.trace.json.gz", 0, ""),
    ],
)
def test_time_and_memory_are_bounded(
    tmp_path: Path, make: Callable[[], Iterator[dict[str, Any]]], command: str, code: int, message: str
) -> None:
    with (tmp_path / "a.trace.json").open("w") as file:
        file.write('{"traceEvents": [')
        file.write(",\n".join(map(json.dumps, make())))
        file.write("]}")
    (tmp_path / "b.trace.json").write_text(json.dumps({"traceEvents": [kernel(1)]}))
    result = profdeck(tmp_path, *command.split())
    assert (result.returncode, "Traceback" in result.stderr) == (code, False), result.stderr[-2000:]
    assert message in " ".join(result.stderr.split())


def test_zip_bomb_is_rejected(tmp_path: Path) -> None:
    """The file has one event with an array of small values: 160 MiB of JSON in 160 kB."""
    deflater = zlib.compressobj(9, zlib.DEFLATED, 31)
    with (tmp_path / "a.trace.json.gz").open("wb") as file:
        file.write(deflater.compress(b'{"traceEvents": [{"ph": "X", "ts": 1, "args": {"a": ['))
        block = b"1," * (1 << 20)
        for _ in range(80):
            file.write(deflater.compress(block))
        file.write(deflater.compress(b"1]}}]}") + deflater.flush())
    result = profdeck(tmp_path, "summary", "a.trace.json.gz")
    assert "Traceback" not in result.stderr
    assert "inflates to more than 300 times its size" in " ".join((result.stdout + result.stderr).split())
