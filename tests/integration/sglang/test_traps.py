"""Tests of SGLang's own profiler routes with profdeck loaded.

Without profdeck, some of these requests crash the server or lose a trace. With profdeck, they are refused or work.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain_http
import pytest
from servers import TOKEN, busy, call
from sglang_traces import spans

pytestmark = pytest.mark.long

PLUGINS = {"SGLANG_PLUGINS": "profdeck,torchcpu"}


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any], root: Path) -> Any:
    return start_server(**PLUGINS, PROFDECK__OUTPUT=str(root), **TOKEN)


@pytest.fixture(scope="module")
def v2_server(start_server: Callable[..., Any], root: Path) -> Any:
    """A server that uses SGLang's profiler V2."""
    return start_server(**PLUGINS, PROFDECK__OUTPUT=str(root), SGLANG_PROFILE_V2="1", **TOKEN)


def start(server: Any, directory: Path | str, name: str = "own", **fields: Any) -> int:
    """Start SGLang's own profiler and return the status code. The reply has no other information."""
    # By default, SGLang records shapes. After captures by stage, torch then sometimes crashes, also without profdeck.
    body = {"output_dir": str(directory), "profile_id": name, "activities": ["CPU"], "with_stack": False}
    body |= {"record_shapes": False, **fields}
    return plain_http.post(f"{server.url}/start_profile", json=body).status_code


def stop(server: Any) -> int:
    return plain_http.post(f"{server.url}/stop_profile").status_code


def read_log(server: Any, before: str = "") -> str:
    """Return a server's log without the text `before` at its start."""
    return str(server.log.read_text(errors="replace")).removeprefix(before)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*")) if directory.is_dir() else []


def test_second_manual_start_is_refused_and_the_first_trace_is_complete(server: Any, tmp_path: Path) -> None:
    assert start(server, tmp_path / "first", "first") == 200
    server.complete(tokens=8)
    assert start(server, tmp_path / "second", "second") == 500
    server.complete(tokens=4)
    assert stop(server) == 200
    assert files(tmp_path / "second") == []
    assert files(tmp_path / "first") == ["first-TP-0.trace.json.gz"]
    recorded = spans(tmp_path / "first" / "first-TP-0.trace.json.gz")
    assert recorded == ["EXTEND", *["DECODE"] * 7, "EXTEND", *["DECODE"] * 3]


def test_stop_without_a_recording_is_refused(server: Any, tmp_path: Path) -> None:
    assert stop(server) == 500
    assert start(server, tmp_path, num_steps=3) == 200
    server.complete(tokens=8)
    assert files(tmp_path) == ["own-TP-0.trace.json.gz"]
    assert stop(server) == 500
    assert server.complete()
    assert files(tmp_path) == ["own-TP-0.trace.json.gz"]


@pytest.mark.parametrize("waiting", [{"profile_by_stage": True}, {"start_step": 1}, {"start_step": 1 << 40}])
def test_stop_cancels_a_recording_before_its_first_batch(server: Any, tmp_path: Path, waiting: dict[str, Any]) -> None:
    assert start(server, tmp_path / "cancelled", num_steps=2, **waiting) == 200
    assert start(server, tmp_path / "refused", num_steps=2) == 500
    before = read_log(server)
    assert stop(server) == 500  # no trace exists
    assert "was cancelled before its first batch; nothing was recorded" in read_log(server, before)
    server.complete(tokens=8)
    assert files(tmp_path / "cancelled") == []
    assert start(server, tmp_path / "next", "next", num_steps=2) == 200
    server.complete(tokens=8)
    assert spans(tmp_path / "next" / "next-TP-0.trace.json.gz") == ["EXTEND", "DECODE"]


def test_stop_between_two_stages_ends_both(server: Any, tmp_path: Path) -> None:
    assert start(server, tmp_path, num_steps=5, profile_by_stage=True) == 200
    server.complete(tokens=1)
    assert stop(server) == 200
    server.complete(tokens=12)
    assert files(tmp_path) == [
        "own-TP-0.trace.json.gz"
    ]  # the file name has the stage only if the recording stops automatically
    assert spans(tmp_path / "own-TP-0.trace.json.gz") == ["EXTEND"]


def test_stages_are_recorded_separately(server: Any, tmp_path: Path) -> None:
    assert start(server, tmp_path, num_steps=2, profile_by_stage=True) == 200
    server.complete(tokens=8)
    assert files(tmp_path) == ["own-TP-0-DECODE.trace.json.gz", "own-TP-0-EXTEND.trace.json.gz"]
    assert spans(tmp_path / "own-TP-0-DECODE.trace.json.gz") == ["DECODE"] * 2


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"profile_by_stage": True}, "profile_by_stage requires num_steps"),
        ({"activities": ["CUDA_PROFILER"]}, "CUDA_PROFILER requires CUDA"),
        ({"activities": ["CPU", "MEM"]}, "MEM requires CUDA"),
        ({"activities": ["GPU"]}, "GPU"),
        ({"activities": ["XPU"]}, "XPU"),
        ({"activities": ["RPD"]}, "RPD"),
        ({"directory": "/proc/profdeck"}, "Cannot write a file with this output_dir"),
        ({"name": "a/b"}, "a/b"),
        ({"profile_prefix": "a/b"}, "a/b"),
        ({"name": "x" * 250}, "File name too long"),
        ({"name": "x\0y"}, "null"),
    ],
)
def test_request_that_would_crash_the_server_is_refused(
    server: Any, tmp_path: Path, fields: dict[str, Any], text: str
) -> None:
    before = read_log(server)
    assert start(server, **{"directory": tmp_path, **fields}) == 500
    assert text in read_log(server, before)
    assert server.complete(tokens=8)
    assert files(tmp_path) == []


def test_sglangs_merge_does_not_find_traces_with_a_prefix(server: Any, tmp_path: Path) -> None:
    before = read_log(server)
    assert start(server, tmp_path, num_steps=2, merge_profiles=True, profile_prefix="pre") == 200
    server.complete(tokens=8)
    assert files(tmp_path) == ["pre-own-TP-0.trace.json.gz"]
    assert "Merge failed: No trace files found" in read_log(server, before)


def test_native_profiler_is_refused_while_profdeck_records(server: Any, root: Path, tmp_path: Path) -> None:
    assert call(server, "POST", "start", {"id": "ours", "run": "ours", "iterations": {"count": 100}}).is_success
    assert start(server, tmp_path) == 500
    server.complete(tokens=8)
    assert start(server, tmp_path) == 500
    assert stop(server) == 500
    answer = call(server, "POST", "stop", {"request": "ours"}).json()["answer"]["ranks"][0]
    assert answer["iterations"] == 8
    (file,) = answer["captures"][0]["files"]
    assert len(spans(Path(file))) == 8


def test_native_profiler_starts_while_profdeck_writes(server: Any, tmp_path: Path) -> None:
    assert call(server, "POST", "start", {"id": "ours", "run": "before", "iterations": {"count": 4}}).is_success
    with busy(server):
        while call(server, "GET", "status").json()["answer"]["ranks"][0]["state"] in {"armed", "recording"}:
            pass  # wait for the last iteration
        assert start(server, tmp_path, num_steps=3) == 200
    (capture,) = call(server, "POST", "stop", {"request": "ours"}).json()["answer"]["ranks"][0]["captures"]
    assert (capture["status"], len(spans(Path(capture["files"][0])))) == ("complete", 4)
    server.complete(tokens=8)
    assert len(spans(tmp_path / "own-TP-0.trace.json.gz")) == 3


@pytest.mark.parametrize("fields", [{}, {"num_steps": 2, "start_step": 1}, {"num_steps": 2, "profile_by_stage": True}])
def test_profdeck_is_refused_while_the_native_profiler_is_active(
    server: Any, tmp_path: Path, fields: dict[str, Any]
) -> None:
    assert start(server, tmp_path, **fields) == 200
    answer = call(server, "POST", "start", {"id": "ours"})
    assert answer.status_code == 409, answer.text
    assert "SGLang's own profiler" in answer.json()["error"]
    server.complete(tokens=8)
    stop(server)
    assert files(tmp_path)
    started = call(server, "POST", "start", {"id": "ours", "run": "after", "iterations": {"count": 2}})
    assert started.is_success, started.text
    server.complete(tokens=8)
    answer = call(server, "POST", "stop", {"request": "ours"}).json()["answer"]["ranks"][0]
    assert (answer["captures"][0]["status"], answer["iterations"]) == ("complete", 2)


def test_profiler_v2_refuses_unsupported_requests(v2_server: Any, tmp_path: Path) -> None:
    assert start(v2_server, tmp_path) == 500
    assert start(v2_server, tmp_path, num_steps=2) == 500
    assert start(v2_server, tmp_path, num_steps=2, profile_by_stage=True, start_step=5) == 500
    assert start(v2_server, tmp_path, num_steps=2, profile_by_stage=True, merge_profiles=True) == 500
    assert start(v2_server, tmp_path, profile_by_stage=True) == 500
    assert stop(v2_server) == 500
    assert v2_server.complete(tokens=8)
    assert files(tmp_path) == []


def test_profiler_v2_continues_after_refused_requests(v2_server: Any, tmp_path: Path) -> None:
    assert start(v2_server, tmp_path, num_steps=4, profile_by_stage=True) == 200
    v2_server.complete(tokens=3)
    assert start(v2_server, tmp_path, "again", num_steps=4, profile_by_stage=True) == 500
    assert call(v2_server, "POST", "start", {"id": "ours"}).status_code == 409
    assert stop(v2_server) == 500
    v2_server.complete(tokens=8)  # the prefill ends the decode stage
    assert files(tmp_path) == ["own-TP-0-decode.trace.json.gz", "own-TP-0-prefill.trace.json.gz"]
    assert spans(tmp_path / "own-TP-0-prefill.trace.json.gz") == ["EXTEND"]
    assert spans(tmp_path / "own-TP-0-decode.trace.json.gz") == ["DECODE", "DECODE"]


def test_stop_cancels_a_profiler_v2_recording_before_its_first_batch(v2_server: Any, tmp_path: Path) -> None:
    assert start(v2_server, tmp_path, num_steps=4, profile_by_stage=True) == 200
    before = read_log(v2_server)
    assert stop(v2_server) == 500
    assert "was cancelled before its first batch; nothing was recorded" in read_log(v2_server, before)
    v2_server.complete(tokens=8)
    assert files(tmp_path) == []


def test_profdeck_records_in_a_server_with_profiler_v2(v2_server: Any, root: Path) -> None:
    assert call(v2_server, "POST", "start", {"id": "v2", "run": "v2", "iterations": {"count": 4}}).is_success
    assert v2_server.complete(tokens=8)
    (capture,) = call(v2_server, "POST", "stop", {"request": "v2"}).json()["answer"]["ranks"][0]["captures"]
    assert capture["status"] == "complete"
    assert spans(Path(capture["files"][0])) == ["EXTEND", "DECODE", "DECODE", "DECODE"]
