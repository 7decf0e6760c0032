"""Servers: our routes, the command line against them, vLLM's own routes, and what ends in mid-capture."""

from __future__ import annotations

import gzip
import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import checkpoint
from servers import TOKEN, busy, call, command_line, finished, wait_for_group, wait_for_start

from profdeck.records.status import Status
from profdeck.verification.reading import read_run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root") / "profiles"


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any], root: Path) -> Any:
    # With vLLM's routes that put an engine to sleep and call its workers.
    return start_server(VLLM_PLUGINS="profdeck", VLLM_SERVER_DEV_MODE="1", PROFDECK__OUTPUT=str(root), **TOKEN)


@pytest.fixture
def load(server: Any) -> Iterator[None]:
    """Keep a server busy while a test runs."""
    with busy(server):
        yield


@pytest.mark.usefixtures("load")
def test_five_decode_iterations_from_the_command_line(server: Any, root: Path) -> None:
    process = command_line(server, "--stage", "decode", "--iterations", "5", "--run", "five")
    out, err = finished(process, server)
    assert process.returncode == 0, err
    assert re.search(r"^0 +server +decode +0 +complete", out, re.MULTILINE)
    assert "operator" in out
    report = read_run(root / "five")
    assert report.status is Status.COMPLETE
    assert sum(len(rank.artifacts) for capture in report.captures for rank in capture.ranks) == len(report.captures)
    (target,) = report.targets
    assert target.target == server.url


@pytest.mark.usefixtures("load")
def test_json_and_options(server: Any) -> None:
    process = command_line(
        server, "--iterations", "2", "--skip", "1", "--json", "--set", "server.options.record_shapes=true"
    )
    out, err = finished(process, server)
    assert process.returncode == 0, err
    document = json.loads(out)
    assert document["complete"] is True
    (capture,) = document["ls"]["captures"]
    assert capture["ranks"][0]["artifacts"][0]["iterations"] == [1, 2]


def test_too_little_traffic_is_partial_and_ends(server: Any) -> None:
    process = command_line(server, "--iterations", "5", "--timeout", "0.5")
    out, _ = finished(process, server)
    assert process.returncode == 1
    assert "Only 0 of 5 iterations ran before the stop." in out
    assert call(server, "GET", "status").json()["answer"]["ranks"][0]["state"] == "ended"


def test_ctrl_c_ends_the_recording_of_the_server(server: Any, root: Path) -> None:
    process = command_line(server, "--iterations", "1000", "--run", "interrupted")
    wait_for_start(process, server)
    process.send_signal(signal.SIGINT)
    finished(process, server)
    assert process.returncode == 130
    assert call(server, "GET", "status").json()["answer"]["ranks"][0]["state"] == "ended"
    (target,) = read_run(root / "interrupted").targets
    assert "Interrupted." in target.problems


def test_the_routes_start_stop_and_name_the_files(server: Any, root: Path) -> None:
    assert server.complete()
    started = call(server, "POST", "start", {"id": "step0", "run": "curl", "iterations": {"count": 3}})
    assert started.json()["answer"]["ranks"][0]["state"] == "armed"
    busy = call(server, "POST", "start", {"id": "second"})
    assert busy.status_code == 409
    assert "Capture step0 is armed" in busy.json()["answer"]["ranks"][0]["error"]
    # A start that is refused ends nothing, also under the same name.
    process = command_line(server, "--iterations", "5", "--run", "refused")
    _, err = finished(process, server)
    assert (process.returncode, "is armed in this engine" in err) == (1, True), err
    server.complete()
    stopped = call(server, "POST", "stop", {"request": "step0"}).json()
    (capture,) = stopped["answer"]["ranks"][0]["captures"]
    assert (capture["status"], capture["problems"]) == ("complete", [])
    (file,) = capture["files"]
    assert Path(file).is_relative_to(root / "curl")
    assert Path(file).stat().st_size == capture["size_bytes"]
    status = call(server, "GET", "status").json()
    assert (status["answer"], status["server"]) == (stopped["answer"], stopped["server"] | {"writable": True})
    # Who stops what is not his changes nothing.
    call(server, "POST", "start", {"id": "third", "run": "curl"})
    assert call(server, "POST", "stop", {"request": "step0"}).json()["answer"]["ranks"][0]["state"] == "armed"
    assert call(server, "POST", "stop", {"request": "third"}).json()["answer"]["ranks"][0]["state"] == "ended"


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"output": "/tmp"}, 400, "is not below"),
        ({"output": "../.."}, 400, "is not below"),
        ({"run": "../up"}, 400, "run"),
        ({"id": "a/b"}, 400, "id"),
        ({"role": "../x"}, 400, "role"),
        ({"stages": ["prefil"]}, 400, "Did you mean 'prefill'?"),
        ({"iteration": 5}, 400, "Did you mean 'iterations'?"),
        ({"ranks": "some"}, 400, "ranks"),
        ({"first_step": True}, 400, "first_step"),
        ({"iterations": {"first": 5, "count": 1}}, 400, "say skip"),
        ([1], 400, "not a JSON object"),
    ],
)
def test_bad_requests_are_refused(server: Any, body: Any, status: int, text: str) -> None:
    answer = call(server, "POST", "start", body)
    assert (answer.status_code, text in answer.json()["error"]) == (status, True), answer.text
    assert server.complete()


def test_bad_device_options_are_refused_by_the_workers(server: Any) -> None:
    answer = call(server, "POST", "start", {"options": {"recordshapes": True}})
    assert answer.status_code == 409
    answer = answer.json()
    assert "Did you mean 'record_shapes'?" in answer["answer"]["ranks"][0]["error"]


def test_without_the_token_nothing_is_said_or_done(server: Any) -> None:
    for token in (None, "wrong", ""):
        for method, command in (("GET", "status"), ("POST", "start"), ("POST", "stop")):
            answer = call(server, method, command, {}, token)
            assert answer.status_code == 401
            assert "PROFDECK_TOKEN" in answer.json()["error"]
    process = command_line(server, "--iterations", "1", PROFDECK_TOKEN="wrong")  # noqa: S106  # wrong indeed
    _, err = finished(process, server)
    assert (process.returncode, "401" in err) == (1, True)


def test_what_no_request_says_is_refused(server: Any) -> None:
    for body in ({"request": "x", "wait_s": 1e400}, {"request": "x", "wait_s": -1}):
        content, headers = json.dumps(body), {"Authorization": f"Bearer {TOKEN['PROFDECK_TOKEN']}"}
        answer = httpx.post(f"{server.url}/profdeck/stop", content=content, headers=headers, trust_env=False)
        assert (answer.status_code, "wait_s: expected seconds" in answer.json()["error"]) == (400, True)
    for body in ({"id": "a\0b"}, {"first_step": 10**400}, {"ranks": [10**400]}, {"output": "\0"}):
        assert call(server, "POST", "start", body).status_code == 400, body


def test_sleep_and_new_weights_in_mid_capture(server: Any, root: Path, model: Path, tmp_path: Path) -> None:
    """As between the steps of a trainer that shares the engine's devices. On a CPU, sleep frees no memory."""

    def do(route: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{server.url}/{route}", json=body, timeout=60, trust_env=False).raise_for_status()

    def rpc(method: str, *arguments: object, **keywords: object) -> None:
        do("collective_rpc", method=method, args=arguments, kwargs=keywords)

    before = server.complete(tokens=8)
    assert call(server, "POST", "start", {"id": "asleep", "run": "asleep", "iterations": {"count": 40}}).is_success
    assert server.complete(tokens=8) == before
    recorded = call(server, "GET", "status").json()["answer"]["ranks"][0]["iterations"]
    assert 8 <= recorded < 20
    do("sleep?level=1")
    rpc("update_config", {"load_config": {"load_format": "safetensors"}})
    rpc("reload_weights", weights_path=str(checkpoint(model, tmp_path, 1)))
    do("reset_prefix_cache")
    reply = call(server, "GET", "status").json()["answer"]["ranks"][0]
    assert (reply["state"], reply["iterations"]) == ("recording", recorded)  # it sleeps
    do("wake_up")
    after = server.complete(tokens=8)
    assert after != before
    do("pause?mode=keep")
    do("resume")
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


def test_an_oversized_body_is_refused(server: Any) -> None:
    assert call(server, "POST", "start", {"id": "x" * (1 << 20)}).status_code == 413


def test_a_server_that_is_ended_in_mid_capture_leaves_its_trace(
    start_server: Callable[..., Any], tmp_path: Path
) -> None:
    # Without a token, as its config says.
    config = tmp_path / "profdeck.yaml"
    config.write_text(f"output: {tmp_path / 'profiles'}\nroles: {{chat: {{backend: vllm, options: {{auth: none}}}}}}\n")
    server = start_server(VLLM_PLUGINS="profdeck", PROFDECK_CONFIG=str(config))
    assert call(server, "POST", "start", {"id": "last", "run": "ended"}, token=None).is_success
    server.complete()
    server.process.send_signal(signal.SIGTERM)
    wait_for_group(server.process)
    report = read_run(tmp_path / "profiles" / "ended")
    (capture,) = report.captures
    (rank,) = capture.ranks
    assert (capture.role, rank.status) == ("chat", Status.PARTIAL)
    assert rank.artifacts[0].whole
    assert rank.events


def test_a_server_without_a_token_lets_nobody_in_and_has_no_other_routes(start_server: Callable[..., Any]) -> None:
    server = start_server(VLLM_PLUGINS="profdeck")
    answer = call(server, "GET", "status", token="anything")  # noqa: S106  # there is none
    assert answer.status_code == 403
    assert "auth: none" in answer.json()["error"]


@pytest.fixture(scope="module")
def native(start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("native")
    # With stacks, vLLM's table of key averages fails at times on names that torch cannot decode.
    own = {"profiler": "torch", "torch_profiler_dir": str(directory), "ignore_frontend": True}
    own |= {"torch_profiler_with_stack": False}
    return start_server("--profiler-config", json.dumps(own), VLLM_PLUGINS=""), directory


def capture_natively(server: Any, directory: Path, output: Path) -> tuple[int, str]:
    known = ["--set", f"server.options.native_directory={directory}", "--output", str(output), "--run", "native"]
    with busy(server):
        process = command_line(server, "--iterations", "3", "--timeout", "3", *known)
        out, err = finished(process, server)
    return process.returncode, out + err


def test_without_profdeck_the_native_profiler_is_used(native: Any, tmp_path: Path) -> None:
    code, text = capture_natively(*native, tmp_path)
    assert code == 0, text
    (capture,) = read_run(tmp_path / "native").captures
    assert capture.status is Status.COMPLETE


def test_what_vllm_fails_to_write_is_told_soon(native: Any, tmp_path: Path) -> None:
    server, directory = native
    kept = directory.rename(directory.with_name("kept"))
    directory.symlink_to("/proc")  # where nobody can create a file
    try:
        code, text = capture_natively(server, directory, tmp_path)
    finally:
        directory.unlink()
        kept.rename(directory)
    assert (code, f"Rank 0 left no whole file in {directory}." in " ".join(text.split())) == (1, True), text
    assert server.complete()


def test_what_the_native_profiler_cannot_do_is_refused(native: Any, tmp_path: Path) -> None:
    server, _ = native
    arguments = ["--stage", "decode", "--set", "server.options.with_stack=true", "--output", str(tmp_path)]
    process = command_line(server, "--iterations", "3", *arguments)
    _, err = finished(process, server)
    assert process.returncode == 1
    assert "for one capture: stages; with_stack." in err
    assert "VLLM_PLUGINS=profdeck" in err


def test_a_server_without_a_profiler_says_what_to_add(start_server: Callable[..., Any], tmp_path: Path) -> None:
    server = start_server(VLLM_PLUGINS="")
    process = command_line(server, "--iterations", "3", "--output", str(tmp_path))
    _, err = finished(process, server)
    assert process.returncode == 1
    assert "was launched without a profiler" in err
    assert "VLLM_PLUGINS=profdeck" in err
    assert "--profiler-config.profiler=torch" in err
