from __future__ import annotations

import gzip
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ascend_files
import pytest
from typer.testing import Result

from profdeck_traces.analysis.step_names import StepNames

Cli = Callable[..., Result]
Program = Callable[..., "subprocess.CompletedProcess[str]"]
Record = Callable[..., Path]


def complete_event(name: str, cat: str, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "pid": 1, "tid": 1, "ts": ts, "dur": dur}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write a trace of three one-second steps. Each has an operator, a kernel and an engine iteration."""
    events = []
    for step in range(3):
        start_us = 1e6 * step
        events += [
            complete_event(f"ProfilerStep#{step}", "user_annotation", start_us, 999_999),
            complete_event("execute", "user_annotation", start_us + 1, 20),
            complete_event("op", "cpu_op", start_us + 2, 3),
            complete_event("gemm", "kernel", start_us + 500_000, 100),
        ]
    path = tmp_path / "rank_0001.step0.trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def read_names(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]


def test_steps_option_keeps_the_events_of_steps(cli: Cli, trace: Path) -> None:
    result = cli("trim", trace, "--steps", "1..2")

    output = trace.parent / "rank_0001.step0.trim-steps1-2.trace.json.gz"
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{output.name}: 8 events kept, ")
    assert read_names(output) == ["ProfilerStep#1", "execute", "op", "gemm", "ProfilerStep#2", "execute", "op", "gemm"]


def test_json_document_describes_the_new_trace(cli: Cli, trace: Path) -> None:
    document = json.loads(cli("trim", trace, "--steps", 1, "--json").stdout)

    output = trace.parent / "rank_0001.step0.trim-steps1.trace.json.gz"
    assert document == {
        "path": output.name,
        "events": 4,
        "size_bytes": output.stat().st_size,
        "json_bytes": len(gzip.decompress(output.read_bytes())),
        "source_bytes": trace.stat().st_size,
        "whole": True,
        "problem": None,
    }


def test_iterations_have_the_names_of_plugins(cli: Cli, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepNames, "load", lambda: StepNames(["execute"]))
    assert cli("trim", trace, "--iterations", "1..1", "-o", "out.gz").exit_code == 0
    assert read_names(Path("out.gz")) == ["ProfilerStep#1", "execute", "op", "gemm"]
    result = cli("trim", trace, "--iterations", "3")
    assert result.exit_code == 4
    assert "does not have the iteration 3: it has 0..2." in result.stderr


@pytest.mark.parametrize(
    ("time_range", "kept_names", "suffix"),
    [
        ("1.5s..1.6s", ["ProfilerStep#1", "gemm"], "1.5s-1.6s"),
        ("2000ms ..", ["ProfilerStep#2", "execute", "op", "gemm"], "2000ms-end"),
        ("..2us", ["ProfilerStep#0", "execute"], "start-2us"),
        ("1500000000ns..1500000001ns", ["ProfilerStep#1", "gemm"], "1500000000ns-1500000001ns"),
    ],
)
def test_time_option_keeps_the_events_in_a_range(
    cli: Cli, trace: Path, time_range: str, kept_names: list[str], suffix: str
) -> None:
    assert cli("trim", trace, "--time", time_range).exit_code == 0
    assert read_names(trace.parent / f"rank_0001.step0.trim-{suffix}.trace.json.gz") == kept_names


def test_category_option_keeps_events_of_categories(cli: Cli, trace: Path) -> None:
    assert cli("trim", trace, "--category", "kernel", "--category", "a/b", "--steps", "0..1").exit_code == 0
    assert read_names(trace.parent / "rank_0001.step0.trim-steps0-1-kernel-a_b.trace.json.gz") == ["gemm", "gemm"]
    result = cli("trim", trace, "--category", "kernels")
    assert result.exit_code == 4
    assert "its categories are cpu_op, kernel, user_annotation." in result.stderr


@pytest.mark.parametrize("name", ["rank0.json", "rank0.json.gz", "rank0.trace.json.gz", "rank0.gz", "rank0"])
def test_default_name_is_derived_from_the_source(cli: Cli, trace: Path, name: str) -> None:
    assert cli("trim", trace.rename(trace.with_name(name)), "--steps", 0).exit_code == 0
    assert (trace.parent / "rank0.trim-steps0.trace.json.gz").exists()


def test_output_is_a_file_or_a_directory(cli: Cli, trace: Path) -> None:
    (trace.parent / "there").mkdir()
    assert cli("trim", trace, "--steps", 0, "-o", "there").exit_code == 0
    assert cli("trim", trace, "--steps", 0, "--output", "there/plain.json").exit_code == 0
    output = trace.parent / "there" / "rank_0001.step0.trim-steps0.trace.json.gz"
    assert gzip.decompress(output.read_bytes()) == (output.parent / "plain.json").read_bytes()


def test_output_inside_a_run_is_rejected(cli: Cli, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(3)
    (artifact,) = run.rglob("*.trace.json")
    assert cli("trim", artifact, "--steps", 3).exit_code == 0
    monkeypatch.chdir(artifact.parent)
    for arguments in ((), ("-o", run), ("-o", "../any.json")):
        result = cli("trim", artifact.name, "--steps", 3, *arguments)
        assert result.exit_code == 2
        assert f"is inside the run {run} and would be read as a trace of that run" in result.stderr
    assert cli("ls", run).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "No part is specified. Use --steps, --iterations, --time or --category."),
        (("--steps", "1", "--time", "1s.."), 2, "--steps and --time cannot be combined. Use only one of them."),
        (("--steps", "4..3"), 2, "'4..3' is not a valid range."),
        (("--steps", "every 2"), 2, "'every 2' is not a valid range."),
        (("--iterations", "-1"), 2, "'-1' is not a valid range."),
        (("--time", "1..2"), 2, "'1..2' is not a time range, such as 1.5s..2s, 800ms.. or ..2s. Units: s, ms, us, ns."),
        (("--time", ".."), 2, "'..' is not a time range"),
        (("--time", "2s..1500ms"), 2, "'2s..1500ms' is an empty range"),
        (("--time", "9s..10s"), 4, "is selected. It lasts 3 s from its first complete event to its last"),
        (("--steps", "2..5"), 4, "does not have the steps 2..5: it has 0..2."),
        (("--steps", "1", "-o", "taken"), 2, "taken already exists. Choose another path."),
        (("--steps", "1", "-o", "none/out"), 2, "none is not a directory. Create it, or choose another --output."),
    ],
)
def test_invalid_options_change_no_file(
    cli: Cli, trace: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    (trace.parent / "taken").write_text("precious")
    initial_files = sorted(trace.parent.iterdir())

    result = cli("trim", trace, *arguments)

    assert (result.exit_code, result.stdout) == (code, "")
    assert message in " ".join(result.stderr.split())
    assert sorted(trace.parent.iterdir()) == initial_files
    assert (trace.parent / "taken").read_text() == "precious"


def test_path_that_is_not_a_trace_is_reported(cli: Cli, trace: Path, tmp_path: Path) -> None:
    (tmp_path / "no.txt").write_text("not a trace")
    for file, message in (
        (tmp_path, f"is a directory. Specify one trace, such as {trace}."),
        (tmp_path / "absent", "Cannot read"),
        (tmp_path / "no.txt", "Malformed JSON at offset 0"),
    ):
        result = cli("trim", file, "--category", "kernel")
        assert result.exit_code == 4
        assert message in result.stderr


def test_missing_trace_is_reported_once(cli: Cli, tmp_path: Path) -> None:
    result = cli("trim", tmp_path / "absent", "--category", "kernel", "--critical-path")
    assert result.exit_code == 4
    assert result.stderr.count("Cannot read") == 1
    assert "warning" not in result.stderr


def test_output_without_write_access_is_reported(cli: Cli, trace: Path) -> None:
    result = cli("trim", trace, "--category", "kernel", "-o", "/proc/self/new.gz")
    assert result.exit_code == 2
    assert "/proc/self/new.gz cannot be written: " in result.stderr


def test_truncated_trace_is_trimmed_with_a_warning(cli: Cli, trace: Path) -> None:
    os.truncate(trace, trace.stat().st_size - 20)

    result = cli("trim", trace, "--steps", 0)

    assert result.exit_code == 0
    assert f"warning: {trace}: The JSON is not closed" in result.stderr
    assert result.stderr.endswith("Only the readable part was kept.\n")
    assert read_names(trace.parent / "rank_0001.step0.trim-steps0.trace.json.gz")[0] == "ProfilerStep#0"


def test_progress_is_on_stderr_and_only_on_a_terminal(python: Program, trace: Path) -> None:
    code = """
import os, pty, subprocess, sys
terminal, program = pty.openpty()
command = [sys.executable, "-m", "profdeck", "trim", sys.argv[1], "--steps", "1", "--json"]
document = subprocess.run(command, stdout=subprocess.PIPE, stderr=program, check=True).stdout
sys.stderr.buffer.write(os.read(terminal, 65536))
sys.stdout.buffer.write(document)
"""
    result = python("-c", code, trace)
    assert json.loads(result.stdout)["events"] == 4
    assert "Finding the events to keep" in result.stderr


def test_directory_of_torch_npu_is_trimmed(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = ascend_files.raw(tmp_path)
    trace = ascend_files.analysed(directory) / "trace_view.json"
    output = f"{directory.name}.trim-steps10.trace.json.gz"

    result = cli("trim", directory, "--steps", 10, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert (document["path"], document["source_bytes"]) == (output, trace.stat().st_size)
    events = json.loads(gzip.decompress(Path(output).read_bytes()))
    assert "ProfilerStep#10" in [event["name"] for event in events]

    monkeypatch.chdir(directory)
    assert cli("trim", ".", "--steps", 10, "-o", tmp_path / "new").exit_code == 0
    trace.unlink()
    result = cli("trim", directory, "--steps", 10)
    assert result.exit_code == 4
    assert "has no Chrome trace (trace_view.json), only a kernel table." in " ".join(result.stderr.split())


def test_directory_of_raw_torch_npu_data_is_rejected(cli: Cli, tmp_path: Path) -> None:
    result = cli("trim", ascend_files.raw(tmp_path), "--steps", 10)
    assert result.exit_code == 4
    assert "has no timeline, only raw data. Generate text files with torch_npu" in " ".join(result.stderr.split())
