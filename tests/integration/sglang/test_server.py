"""Tests of SGLang servers: the tests shared by all engines, SGLang's options, and unresponsive ranks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import httpx
import plain_http
import pytest
from checkpoints import write_checkpoint
from pages import ROOT
from server_contract import EndContract, ServerContract, status, stop
from servers import TOKEN, busy, call, command_line, wait_for_command
from sglang_traces import names, spans

from profdeck.records.manifest import read_manifest
from profdeck.records.status import Status
from profdeck.verification.run_report import read_run

PLUGINS = {"SGLANG_PLUGINS": "profdeck,torchcpu"}


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any], root: Path) -> Any:
    return start_server("--enable-metrics", **PLUGINS, PROFDECK__OUTPUT=str(root), **TOKEN)


def steps(path: str) -> list[str]:
    """Return SGLang's names of the forward passes in a trace, such as ``step[DECODE bs=2]``."""
    return [name for name in names(Path(path)) if name.startswith("step[")]


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """Mount a small file system. Skip the test if this is not permitted."""
    path.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield path
    finally:
        # Torch keeps a file open after a failed write, until Python deletes the profile.
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path) -> None:
    """Fill a file system."""
    with contextlib.suppress(OSError), (disk / "full").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


class TestServer(ServerContract):
    libraries: ClassVar[set[str]] = {"sglang", "torch"}
    page = ROOT / "docs" / "how-to" / "sglang.md"
    url = "http://127.0.0.1:30000"
    skipped = "needs an SGLang server"
    runs: ClassVar[dict[str, set[str]]] = {
        "first": {"server"},
        "shapes": {"server"},
        "merged": {"server"},
        "whole": {"server", "server-tokenizer", "server-detokenizer"},
    }

    @staticmethod
    def kinds(path: Path) -> list[str]:
        return [{"EXTEND": "prefill", "DECODE": "decode"}.get(kind, kind) for kind in spans(path)]


def test_window_of_all_batch_kinds_is_exact(server: Any) -> None:
    assert call(server, "POST", "start", {"id": "all", "run": "all", "iterations": {"count": 4, "skip": 2}}).is_success
    server.complete(tokens=3)  # one prefill and two decode iterations
    server.complete(tokens=4)
    (capture,) = stop(server, "all")["captures"]
    assert spans(Path(capture["files"][0])) == ["DECODE", "EXTEND", "DECODE", "DECODE"]


def test_refusal_by_the_scheduler_is_in_the_reply(server: Any) -> None:
    body = {"id": "refused", "run": "refused", "engine": {"start_step": 1 << 40}}
    answer = call(server, "POST", "start", body)
    text = "options.start_step requires the role's iterations.count"
    assert (answer.status_code, text in answer.json()["error"]) == (409, True), answer.text


def test_capture_continues_after_a_weight_update(server: Any, model: Path, tmp_path: Path) -> None:
    """A trainer that shares the engine's devices sends these requests between its steps."""

    def send(route: str, **body: Any) -> None:
        answer = plain_http.post(f"{server.url}/{route}", json=body)
        assert answer.is_success, answer.text

    before = server.complete(tokens=8)
    assert call(server, "POST", "start", {"id": "new", "run": "new", "iterations": {"count": 30}}).is_success
    assert server.complete(tokens=8) == before
    recorded = status(server)["iterations"]
    assert 8 <= recorded < 20
    send("pause_generation", mode="retract")
    send("flush_cache")
    send("release_memory_occupation")
    send("resume_memory_occupation")
    send("update_weights_from_disk", model_path=str(write_checkpoint(model, tmp_path, 1)), load_format="safetensors")
    send("continue_generation")
    assert (status(server)["state"], status(server)["iterations"]) == ("recording", recorded)
    after = server.complete(tokens=8)
    assert after != before
    while status(server)["state"] == "recording":
        assert server.complete(tokens=8) == after
    reply = stop(server, "new")
    assert (reply["iterations"], reply["problems"]) == (30, [])
    (file,) = reply["captures"][0]["files"]
    assert len(spans(Path(file))) == 30
    assert read_run(Path(file).parents[2]).status is Status.COMPLETE


def test_start_step_selects_a_forward_pass(server: Any) -> None:
    def start(first: int) -> httpx.Response:
        body = {"id": "at", "run": f"at-{first}", "iterations": {"count": 2}, "engine": {"start_step": first}}
        return call(server, "POST", "start", body)

    refused = start(1)
    assert refused.status_code == 409
    finished_passes = int(re.findall(r"has already run (\d+) forward passes", refused.json()["error"])[0])
    assert start(finished_passes).status_code == 409
    assert start(finished_passes + 4).is_success
    server.complete(tokens=3)
    server.complete(tokens=8)
    (capture,) = stop(server, "at")["captures"]
    assert (capture["status"], spans(Path(capture["files"][0]))) == ("complete", ["EXTEND", "DECODE"])
    assert read_manifest(Path(capture["manifest"])).artifacts[0].iterations == (3, 4)


def test_small_decode_batches_are_skipped(server: Any) -> None:
    body = {"id": "wide", "run": "wide", "batch_kinds": ["decode"], "iterations": {"count": 3}}
    assert call(server, "POST", "start", {**body, "engine": {"min_decode_batch": 2}}).is_success
    server.complete(tokens=20)
    assert status(server)["iterations"] == 0
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda index: server.complete(f"{index}", tokens=60), range(3)))
    reply = stop(server, "wide")
    assert (reply["iterations"], reply["problems"]) == (3, [])
    step_names = [name for capture in reply["captures"] for file in capture["files"] for name in steps(file)]
    assert len(step_names) == 3
    assert all(int(re.findall(r"bs=(\d+)", name)[0]) >= 2 for name in step_names)


def test_detailed_annotations_contain_the_attention_work(server: Any) -> None:
    for detailed in (True, False):
        body = {"id": "named", "run": f"named-{detailed}", "iterations": {"count": 2}, "engine": {"detailed": detailed}}
        assert call(server, "POST", "start", body).is_success
        server.complete(tokens=4)
        (capture,) = stop(server, "named")["captures"]
        extend, decode = steps(capture["files"][0])
        assert ("sq" in extend, "sk" in decode) == (detailed, detailed), (extend, decode)


def test_frontends_record_as_separate_roles(server: Any, root: Path) -> None:
    with busy(server):
        process = command_line(
            server, "--iterations", "3", "--set", "run=fronts", "--set", "server.options.ignore_frontend=false"
        )
        out, err = wait_for_command(process, server)
    assert process.returncode == 0, out + err
    report = read_run(root / "fronts")
    assert {capture.role for capture in report.captures} == {"server", "server-tokenizer", "server-detokenizer"}
    for capture in report.captures:
        (rank,) = capture.ranks
        assert (rank.status, rank.artifacts[0].whole) == (Status.COMPLETE, True)
        assert rank.events
    # The next capture does not include the frontends.
    assert call(server, "POST", "start", {"id": "alone", "run": "fronts", "first_step": 1}).is_success
    answer = call(server, "POST", "stop", {"request": "alone"}).json()["answer"]
    assert answer["frontends"] == {}


def test_unwritable_output_is_refused_without_affecting_the_server(server: Any, root: Path) -> None:
    root.mkdir(exist_ok=True)
    (root / "blocked").write_text("no directory")
    answer = call(server, "POST", "start", {"id": "blocked", "run": "blocked"})
    assert (answer.status_code, "blocked" in answer.json()["error"]) == (409, True), answer.text
    assert server.complete()


def test_captures_do_not_change_the_output(server: Any) -> None:
    prompts = [f"{'tell me more ' * index}{index}" for index in range(6)]

    def generate() -> list[str]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: server.complete(prompt, tokens=40), prompts))

    expected = generate()
    stop_event = threading.Event()

    def capture() -> int:
        count = 0
        while not stop_event.is_set():
            body = {"id": f"capture{count}", "run": "same", "iterations": {"count": 5}, "first_step": count}
            assert call(server, "POST", "start", body).is_success
            while status(server)["state"] in {"armed", "recording"} and not stop_event.is_set():
                pass
            assert stop(server, f"capture{count}")["state"] == "ended"
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        captures = pool.submit(capture)
        try:
            outputs = [generate() for _ in range(4)]
        finally:
            stop_event.set()
        assert captures.result() > 1
    assert outputs == [expected] * 4
    assert len(set(expected)) > 1


@pytest.fixture(scope="module")
def pair(start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server with two ranks, a short RPC timeout and no authentication."""
    output = tmp_path_factory.mktemp("pair") / "profiles"
    config = output.with_name("profdeck.yaml")
    config.write_text(
        f"output: {output}\nroles: {{chat: {{backend: sglang, options: {{rpc_timeout_s: 3, auth: none}}}}}}\n"
    )
    return start_server("--tp", "2", **PLUGINS, PROFDECK_CONFIG=str(config))


@contextlib.contextmanager
def suspended(pid: int) -> Iterator[None]:
    """Suspend a process of a server."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def record_both(server: Any) -> int:
    """Start a capture on both ranks. Return the PID of the second rank."""
    started = call(server, "POST", "start", {"id": "both", "run": "both", "ranks": "all"}, token=None)
    assert started.is_success, started.text
    server.complete(tokens=4)
    return int(started.json()["answer"]["ranks"][1]["pid"])


def check_both(server: Any) -> None:
    """Check that both ranks have recorded, and that the server responds."""
    ranks = call(server, "POST", "stop", {"request": "both"}).json()["answer"]["ranks"]
    for rank in ranks:
        (capture,) = rank["captures"]
        assert (rank["state"], capture["status"], capture["problems"]) == ("ended", "complete", [])
        assert spans(Path(capture["files"][0])) == ["EXTEND", "DECODE", "DECODE", "DECODE"]
    assert len(ranks) == 2
    assert server.complete()


@pytest.mark.parametrize("rank", [0, 1])
def test_native_profiler_is_refused_if_one_rank_is_recording(pair: Any, tmp_path: Path, rank: int) -> None:
    def native_status(command: str) -> int:
        body = {"output_dir": str(tmp_path), "activities": ["CPU"]} if command == "start" else None
        url = f"{pair.url}/{command}_profile"
        return plain_http.post(url, json=body, timeout=20).status_code

    assert call(pair, "POST", "start", {"id": "one", "run": f"one-{rank}", "ranks": [rank]}).is_success
    assert native_status("start") == 500
    assert native_status("stop") == 500  # otherwise, one rank would wait for the other forever
    pair.complete(tokens=4)
    reply = call(pair, "POST", "stop", {"request": "one"}).json()["answer"]["ranks"][rank]
    assert (reply["rank"], reply["iterations"], reply["captures"][0]["status"]) == (rank, 4, "complete")
    assert list(tmp_path.iterdir()) == []


def test_suspended_rank_does_not_block_the_reply(pair: Any) -> None:
    # With tensor or pipeline parallelism, the first rank waits for the other rank before it replies.
    with suspended(record_both(pair)):
        answer = call(pair, "POST", "stop", {"request": "both"})
        assert answer.status_code == 504
        assert "did not reply within rpc_timeout_s=3 seconds" in answer.json()["error"]
    check_both(pair)  # the suspended rank executes the stop when it continues


def test_missing_reply_of_a_rank_is_reported(pair: Any) -> None:
    """SGLang forwards only replies of the first ranks. Others write files, and here the file system is full."""
    output = Path(call(pair, "GET", "status").json()["server"]["output"])
    with small_disk(output / "small") as disk:
        body = {"id": "full", "run": "run", "ranks": "all", "output": str(disk)}
        assert call(pair, "POST", "start", body).is_success
        pair.complete(tokens=4)
        fill(disk)
        first, second = call(pair, "POST", "stop", {"request": "full"}).json()["answer"]["ranks"]
        assert (first["pid"] > 0, first["iterations"]) == (True, 4)
        assert (second["rank"], second["problems"]) == (1, ["No reply within 3 seconds."])
        assert pair.complete()


class TestEnd(EndContract):
    engine: ClassVar[dict[str, Any]] = {"tokenizer": True, "detokenizer": True}
    roles: ClassVar[set[str]] = {"chat", "chat-tokenizer", "chat-detokenizer"}
