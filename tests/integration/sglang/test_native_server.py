"""Tests for captures of servers that have not loaded profdeck, with SGLang's own profiler."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain_http
import pytest
from engine_contract import run_commands
from pages import ROOT, Shell
from servers import busy, command_line, wait_for_command
from sglang_traces import spans

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Any:
    # SGLang loads all plugins by default, so list only the required one.
    return start_server(SGLANG_PLUGINS="torchcpu")


def capture(server: Any, output: Path, *arguments: str) -> tuple[int, str]:
    """Capture the server. Return the exit code and all output, joined into one line."""
    process = command_line(server, "--output", str(output), "--set", "run=native", *arguments)
    out, err = wait_for_command(process, server)
    return process.returncode, " ".join((out + err).split())


def request_count(server: Any, request: str) -> int:
    """Return the number of requests with this method and path prefix in the server's log."""
    return int(server.log.read_text(errors="replace").count(f'"{request} '))


def profiler_requests(server: Any) -> tuple[int, int]:
    """Return the number of start and stop requests that SGLang's profiler has received."""
    return request_count(server, "POST /start_profile"), request_count(server, "POST /stop_profile")


def test_server_without_profdeck_generates(server: Any) -> None:
    text = server.complete("hello", tokens=20)
    assert text
    assert server.complete("hello", tokens=20) == text


def test_native_profiler_writes_the_requested_number_of_steps(server: Any, tmp_path: Path) -> None:
    body = {"output_dir": str(tmp_path / "own"), "profile_id": "plain", "activities": ["CPU"], "num_steps": 3}
    plain_http.post(f"{server.url}/start_profile", json=body).raise_for_status()
    server.complete(tokens=8)  # SGLang exports the trace before the fourth step
    with gzip.open(tmp_path / "own" / "plain-TP-0.trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    steps = [event["name"] for event in events if event["name"].startswith("step[")]
    assert [name.partition(" ")[0] for name in steps] == ["step[EXTEND", "step[DECODE", "step[DECODE"]


def test_window_is_complete_and_ends_automatically(server: Any, tmp_path: Path) -> None:
    starts, stops = profiler_requests(server)
    generated = request_count(server, "GET /health")
    with busy(server):
        code, text = capture(server, tmp_path, "--iterations", "3", "--timeout", "3")
    assert code == 0, text
    assert profiler_requests(server) == (starts + 1, stops)
    assert request_count(server, "GET /health") == generated  # each health check generates a token
    report = read_run(tmp_path / "native")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    ((rank,),) = (capture.ranks for capture in report.captures)
    (artifact,) = rank.artifacts
    assert len(spans(artifact.path)) == 3
    (target,) = report.targets
    assert target.notes == ("Recorded by SGLang's own profiler, on all ranks of the engine.",)
    # The temporary output directory is removed.
    assert sorted(path.name for path in (tmp_path / "native").iterdir()) == ["run.json", "step_000000"]


def test_capture_with_too_few_iterations_is_partial(server: Any, tmp_path: Path) -> None:
    starts, stops = profiler_requests(server)
    server.complete(tokens=2)
    code, text = capture(server, tmp_path, "--iterations", "5", "--timeout", "0.5")
    assert (code, "Fewer than 5 iterations ran before the stop." in text) == (1, True), text
    assert profiler_requests(server) == (starts + 1, stops + 1)
    assert server.complete()


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (["profile_memory=true", "ignore_frontend=false"], ["profile_memory", "ignore_frontend: false"]),
        (['activities=["cpu", "cuda"]', "start_step=5"], ["the activity cuda on the device cpu", "start_step"]),
        (["device_options.gzip=false"], ["device_options"]),
    ],
)
def test_unsupported_options_are_not_sent(server: Any, tmp_path: Path, options: list[str], texts: list[str]) -> None:
    before = profiler_requests(server)
    settings = [argument for option in options for argument in ("--set", f"server.options.{option}")]
    code, text = capture(server, tmp_path, "--iterations", "3", *settings)
    assert code == 1
    assert [expected for expected in texts if expected not in text] == []
    assert "SGLANG_PLUGINS" in text
    assert profiler_requests(server) == before


def test_windows_with_a_condition_are_not_sent(server: Any, tmp_path: Path) -> None:
    before = profiler_requests(server)
    code, text = capture(server, tmp_path, "--iterations", "3", "--skip", "1", "--batch-kind", "decode")
    assert (code, "batch_kinds and profile_by_stage" in text, "iterations.skip" in text) == (1, True, True), text
    assert profiler_requests(server) == before


@pytest.mark.parametrize("setting", ["output", "native_directory"])
def test_unwritable_output_is_refused_before_a_request(server: Any, tmp_path: Path, setting: str) -> None:
    before = profiler_requests(server)
    output = Path("/proc/profdeck") if setting == "output" else tmp_path
    arguments = ["--set", "server.options.native_directory=/proc/profdeck"] if setting == "native_directory" else []
    code, text = capture(server, output, "--iterations", "3", *arguments)
    assert (code, "/proc/profdeck" in text) == (1, True), text
    assert profiler_requests(server) == before
    assert server.complete()


def test_commands_of_the_guide_work(server: Any, tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    page, url = ROOT / "docs" / "how-to" / "sglang.md", "http://127.0.0.1:30000"
    run_commands(page, url, "needs a server with SGLang's own profiler", shell, server)
    assert read_run(shell.directory / "profiles" / "native").status is Status.COMPLETE
