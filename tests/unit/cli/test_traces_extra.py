"""Tests for commands in an environment without the extra `traces`."""

from __future__ import annotations

import gzip
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

Program = Callable[..., "subprocess.CompletedProcess[str]"]
Record = Callable[..., Path]
LIBRARIES = ("jinja2", "markupsafe")
COMMANDS = """
import json, sys
from typer.testing import CliRunner
from profdeck.cli import app

for command in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, command, prog_name="profdeck")
    print(json.dumps([result.exit_code, result.stdout, result.stderr]))
"""
CAPTURE = """
import sys
from pathlib import Path
from profdeck import Profiler
from profdeck_traces import compress_in_child

settings = {"output": ".", "run": "run", "steps": [1], "trainer.backend": "paper", "on_error": "raise"}
with Profiler.from_config(settings=settings) as profiler, profiler.capture(1):
    pass
compressed = compress_in_child(Path(sys.argv[1]), Path("packed.json.gz"), gzip=True, anchor_name="clock")
print(compressed.check.whole, len(compressed.anchors_ns))
"""


def run_without(python: Program, modules: tuple[str, ...], *commands: tuple[object, ...]) -> list[tuple[int, str, str]]:
    """Run commands in one process that cannot import `modules`. Return each command's exit code, stdout and stderr."""
    completed = python(modules, "-c", COMMANDS, json.dumps([[*map(str, command)] for command in commands]))
    assert completed.returncode == 0, completed.stderr
    return [tuple(json.loads(line)) for line in completed.stdout.splitlines()]


def test_only_reports_need_the_extra(python_without: Program, record: Record) -> None:
    run = record(3)
    commands = (
        ("summary", run),
        ("diff", run, run),
        ("trend", run),
        ("baseline", "save", "good", run),
        ("report", run, "-o", "page.html"),
    )
    results = run_without(python_without, LIBRARIES, *commands)
    error = "error: Pages need jinja2, which is not installed. Install it with: pip install 'profdeck[traces]'\n"
    assert [result[0] for result in results] == [0, 6, 6, 0, 3], results
    assert results[-1][1:] == ("", error)


def test_captures_are_compressed_and_verified_without_the_extra(python_without: Program, tmp_path: Path) -> None:
    events = [{"ph": "X", "name": "clock", "ts": 1.5, "dur": 1}, {"ph": "X", "name": "op", "ts": 3, "dur": 1}]
    (tmp_path / "raw.json").write_text(json.dumps({"traceEvents": events}))
    captured = python_without(LIBRARIES, "-c", CAPTURE, "raw.json")
    assert captured.stdout == "True 1\n", captured.stderr
    assert json.loads(gzip.decompress((tmp_path / "packed.json.gz").read_bytes()))["traceEvents"] == events
    other_commands = ("--help",), ("summary", "--help"), ("plugins",), ("config", "show")
    ls_result, *results = run_without(python_without, LIBRARIES, ("ls", "run", "--json"), *other_commands)
    assert (ls_result[0], json.loads(ls_result[1])["status"]) == (0, "complete"), ls_result
    assert [result[0] for result in results] == [0, 0, 0, 0], results
