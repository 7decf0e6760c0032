"""Tests that commands print no traceback, whatever a manifest, ``run.json`` or other record of a run contains."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from captured_runs import write_run
from gpu_job import GpuJob

Cli = Callable[..., Result]

COMMANDS = (
    "ls run",
    "ls .",
    "summary run",
    "trend run",
    "merge run -o out/merged.pftrace --align anchors",
    "prune run --steps 1 --dry-run",
    "finish run",
)
FORGED = "a\n::error::forged\x1b[2J"

CHANGES: dict[str, list[tuple[tuple[Any, ...], Any]]] = {
    "run.json": [
        *((("created_ns",), value) for value in (2**63, 10**30, -(10**30), "x", True)),
        *((("roles",), value) for value in (5, [5], [FORGED])),
        *(
            (("config",), value)
            for value in (5, [], {"finish": 5}, {"steps": 5, "mode": []}, {"finish": {"command": 5}})
        ),
    ],
    "rank": [
        *(
            (("artifacts", 0, "anchors", 0, "trace_us"), value)
            for value in ("NaN", "sNaN", "Infinity", "text", "", "1e999999999", "9" * 5000, 5)
        ),
        *((("artifacts", 0, "anchors", 0, "unix_ns"), value) for value in (2**62, 2**63, -(2**63), 2**64)),
        *((("artifacts", 0, "anchors", 0, "uncertainty_ns"), value) for value in (2**63, -1)),
        *((("artifacts", 0, "base_time_ns"), value) for value in (2**62, 2**63, -(2**63))),
        *((("artifacts", 0, "size_bytes"), value) for value in (2**63, -1)),
        *((("clock", "offset_ns"), value) for value in (2**63, 10**17)),
        *(((key,), FORGED) for key in ("stage", "host", "backend", "waits_for")),
        *(((key,), [FORGED]) for key in ("notes", "problems")),
        (("started_ns",), 2**63),
        (("stall_s",), 1e308),
    ],
    "recording": [(("pid",), value) for value in (2**31, 2**40, 2**53, 0, -1)],
    "pruned": [(("size_bytes",), 10**30), (("role",), FORGED), (("first_step",), -1)],
    "finish": [
        (("by", "pid"), 2**40),
        (("by", "host"), FORGED),
        (("waits_for",), [FORGED]),
        (("timeout_s",), 1e308),
    ],
}
"""Values to change in each record, with the keys that lead to them."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two ranks, a record of a finish task and a record of a pruned step."""
    run = write_run(tmp_path / "run", 2, lambda _: GpuJob(ranks=2, steps=3, products=2))
    shutil.copytree(run, tmp_path / "other")
    (tmp_path / "out").mkdir()
    config = {"mode": "continuous", "steps": [0, 50], "finish": {"command": "true"}, "listeners": []}
    about = {"schema": 1, "created_ns": 1, "roles": ["trainer"], "config": config, "host": "here"}
    (run / "run.json").write_text(json.dumps(about))
    directory = run / "step_000000" / "trainer"
    for rank in range(2):
        file = next(directory.glob(f"rank_{rank:04d}*.step0.json"))
        manifest = json.loads(file.read_text())
        manifest |= {
            "stall_s": 0.5, "waited_s": 0.5, "waits_for": "GPU 0", "notes": ["a note"], "versions": {"torch": "2"},
            "window": {"first": 0, "count": 1}, "clock": {"host": "b", "reference": "a", "offset_ns": 5, "error_ns": 1},
        }  # fmt: skip
        manifest["host"] = f"host{rank}"
        for artifact in manifest["artifacts"]:
            anchor = {"unix_ns": 10**18, "uncertainty_ns": 10, "trace_us": "1000.5"}
            artifact |= {"anchors": [anchor], "base_time_ns": 10**18, "iterations": [0, 1], "sha256": "0" * 64}
        file.write_text(json.dumps(manifest))
    (run / "pruned").mkdir()
    (run / "pruned" / "step_000010.json").write_text(
        json.dumps(
            {"first_step": 10, "last_step": 10, "role": None, "captures": ["a"], "size_bytes": 3, "pruned_ns": 1}
        )
    )
    record = {
        "schema": 1,
        "capture": "step0",
        "first_step": 0,
        "command": "true",
        "listeners": [],
        "timeout_s": 1.0,
        "wait_s": 1.0,
        "by": {"host": os.uname().nodename, "pid": 1, "process_started": "1", "pid_namespace": None},
        "claimed_ns": 1,
        "state": "waiting",
        "status": None,
        "waits_for": ["a"],
        "parts": [],
        "problem": None,
        "ended_ns": None,
    }
    (run / "step_000000" / "finish.step0.json").write_text(json.dumps(record))
    return run


def with_value(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a JSON document in which the value at a path is replaced."""
    if not path:
        return value
    changed = document.copy()
    changed[path[0]] = with_value(document[path[0]], path[1:], value)
    return changed


def run_commands(cli: Cli, run: Path) -> None:
    for command in COMMANDS:
        for file in (run.parent / "out").iterdir():
            file.unlink()
        result = cli(*command.split())
        assert result.exception is None or isinstance(result.exception, SystemExit), (command, result.exception)
        assert "\x1b" not in result.output, command
        assert not any(line.lstrip().startswith("::") for line in result.output.splitlines()), command


@pytest.mark.parametrize("record", CHANGES)
def test_wrong_values_do_not_end_a_command(cli: Cli, run: Path, record: str) -> None:
    is_manifest = record in {"rank", "recording"}
    pattern = (
        "**/rank_0000*.step0.json"
        if is_manifest
        else {"pruned": "pruned/*", "finish": "**/finish.*"}.get(record, record)
    )
    (file,) = run.glob(pattern)
    document = json.loads(file.read_text())
    if record == "recording":
        document |= {"status": "recording", "host": os.uname().nodename}
    for path, value in CHANGES[record]:
        file.write_text(json.dumps(with_value(document, path, value)))
        run_commands(cli, run)


@pytest.mark.parametrize("trace_us", ["NaN", "Infinity", "text"])
def test_trace_with_an_invalid_anchor_is_merged_without_alignment(cli: Cli, run: Path, trace_us: str) -> None:
    (file,) = run.glob("**/rank_0000*.step0.json")
    document = json.loads(file.read_text())
    file.write_text(json.dumps(with_value(document, ("artifacts", 0, "anchors", 0, "trace_us"), trace_us)))
    result = cli("merge", run, "-o", "out/merged.pftrace", "--align", "anchors")
    assert result.exit_code == 0, result.output
    assert "no clock data for --align anchors" in result.stderr


@pytest.mark.parametrize("content", [b"", b"\0\xff" * 100, b"[" * 1000 + b"]" * 1000, None])
@pytest.mark.parametrize("pattern", ["run.json", "**/rank_0000*.step0.json", "pruned/*", "**/finish.*", "**/*.gz"])
def test_other_contents_do_not_end_a_command(cli: Cli, run: Path, pattern: str, content: bytes | None) -> None:
    file = min(run.glob(pattern))
    file.unlink()
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    run_commands(cli, run)
