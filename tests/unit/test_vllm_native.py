"""Captures by vLLM's own profiler: rejected requests, missing traces and shared directories."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

from profdeck.base.errors import CaptureError, TargetError
from profdeck.base.identity import Identity
from profdeck.base.outcome import Outcome
from profdeck.records.capture import CaptureRecord
from profdeck.records.request import CaptureRequest
from profdeck_vllm.engines import VllmObject
from profdeck_vllm.options import VllmOptions
from profdeck_vllm.own_profiler import VllmCapture


class Engine:
    """A simulated vLLM engine that records its profiler calls."""

    def __init__(self, device_type: str, directory: Path) -> None:
        profiler = SimpleNamespace(profiler="torch", torch_profiler_dir=str(directory), ignore_frontend=True)
        parallel = SimpleNamespace(world_size=1, data_parallel_size=1)
        device = SimpleNamespace(device_type=device_type)
        self.vllm_config = SimpleNamespace(profiler_config=profiler, parallel_config=parallel, device_config=device)
        self.calls: list[str] = []

    def start_profile(self) -> None:
        self.calls.append("start")

    def stop_profile(self) -> None:
        self.calls.append("stop")


def create_native_capture(engine: Engine, path: Path) -> VllmCapture:
    identity = Identity(role="rollout")
    capture = CaptureRecord(id="target", directory=path, identity=identity, first_step=1, current_step=1)
    request = CaptureRequest(id="step1", output=path, run="run", role="rollout")
    return VllmCapture(VllmObject(engine), VllmOptions(), capture, request)


def test_npu_is_rejected_with_a_recommendation(tmp_path: Path) -> None:
    engine = Engine("npu", tmp_path)
    with pytest.raises(CaptureError, match=r"writes torch_npu directories, .* With profdeck in the engine's workers"):
        asyncio.run(create_native_capture(engine, tmp_path).start())
    assert engine.calls == []


def test_capture_starts_on_other_devices(tmp_path: Path) -> None:
    engine = Engine("cuda", tmp_path)
    asyncio.run(create_native_capture(engine, tmp_path).start())
    assert engine.calls == ["start"]


def test_engine_without_profiler_is_not_enabled(tmp_path: Path) -> None:
    engine = Engine("cuda", tmp_path)
    engine.vllm_config.profiler_config.profiler = None
    with pytest.raises(TargetError, match=r"was launched without a profiler, .* Or launch it with") as caught:
        asyncio.run(create_native_capture(engine, tmp_path).start())
    assert (caught.value.outcome, engine.calls) == (Outcome.NOT_ENABLED, [])


def test_remedy_mentions_torch_npu_directories(tmp_path: Path) -> None:
    """Servers do not report their device type, so the remedy depends on the files."""
    capture = create_native_capture(Engine("cuda", tmp_path), tmp_path)
    capture.watch(tmp_path)
    assert "in its log" in capture.remedy
    (tmp_path / "rank0_4711_20260101000000000_ascend_pt").mkdir()
    assert "On NPUs, vLLM's own profiler writes torch_npu directories" in capture.remedy
    assert f"The directories are in {tmp_path}." in capture.remedy


class SharedDirectoryEngine(Engine):
    """An engine that shares its trace directory with another engine. It writes a trace if `writes` is True."""

    def __init__(self, directory: Path, *, writes: bool) -> None:
        super().__init__("cpu", directory)
        self.directory, self.writes = directory, writes

    def stop_profile(self) -> None:
        if self.writes:
            (self.directory / f"{self.prefix}rank0.{id(self)}.pt.trace.json").write_text(TRACE)

    prefix = ""


class PrefixEngine(SharedDirectoryEngine):
    """A `SharedDirectoryEngine` of a release that supports trace prefixes."""

    def start_profile(self, profile_prefix: str | None = None) -> None:
        self.prefix = f"{profile_prefix}_" if profile_prefix else ""


TRACE = '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "x", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]}'


def test_captures_in_a_shared_directory_use_only_their_own_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("profdeck.engine.control.engine_profiler._QUIET_S", 0.2)
    (shared := tmp_path / "native").mkdir()
    engines = [PrefixEngine(shared, writes=True), PrefixEngine(shared, writes=False)]
    captures = []
    for replica, engine in enumerate(engines):
        capture = create_native_capture(engine, tmp_path)
        capture._request = attrs.evolve(capture._request, replica=replica)
        captures.append(capture)

    async def main() -> None:
        for capture in captures:
            await capture.start()
        for capture in captures:
            await capture.stop()

    asyncio.run(main())
    assert [capture.outcome for capture in captures] == [Outcome.FLUSHED, Outcome.FILES_MISSING]
    assert "wrote no complete trace" in captures[1]._capture.problems[0]


def test_concurrent_directory_changes_are_ignored(tmp_path: Path) -> None:
    (shared := tmp_path / "native").mkdir()
    stopped = threading.Event()

    def change_directory() -> None:
        while not stopped.is_set():
            for number in range(20):
                (shared / f"other{number}").mkdir()
            for number in range(20):
                (shared / f"other{number}").rmdir()

    capture = create_native_capture(SharedDirectoryEngine(shared, writes=True), tmp_path)
    thread = threading.Thread(target=change_directory)
    thread.start()
    try:
        asyncio.run(capture.start())
        for _ in range(300):
            capture.has_all_traces()
        asyncio.run(capture.stop())
    finally:
        stopped.set()
        thread.join()
    assert capture.outcome is Outcome.FLUSHED


@pytest.mark.parametrize(
    ("name", "rank", "stage"),
    [
        ("20261123-163437_stage_0_rep_0_diffusion_1795453429/trace_rank1.json.gz", 1, 0),
        ("20261123-163437_stage2_rank0_1795453429/trace_rank0.json.gz", 0, 2),
        ("stage_1_diffusion_1795453429_rank3.json.gz", 3, 1),
    ],
)
def test_pipeline_trace_names_contain_stage_and_rank(tmp_path: Path, name: str, rank: int, stage: int) -> None:
    origin = create_native_capture(SharedDirectoryEngine(tmp_path, writes=True), tmp_path).parse_name(tmp_path / name)
    assert origin is not None
    assert (origin.rank, origin.parallel) == (rank, {"stage": stage})


def test_ambiguous_shared_directory_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profdeck.engine.control.engine_profiler._QUIET_S", 0.2)
    (shared := tmp_path / "native").mkdir()
    first, second = (create_native_capture(SharedDirectoryEngine(shared, writes=True), tmp_path) for _ in range(2))

    async def main() -> None:
        await first.start()
        with pytest.raises(CaptureError, match="Start each engine with its own trace directory"):
            await second.start()
        await first.stop()
        assert first.outcome is Outcome.FLUSHED
        await second.start()

    asyncio.run(main())
    second._unwatch()
