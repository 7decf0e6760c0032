"""vLLM's own profiler on devices whose recordings cannot be brought into a run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from profdeck import Capture
from profdeck.base.errors import CaptureError, TargetError
from profdeck.base.identity import Identity
from profdeck.base.outcome import Outcome
from profdeck.records.request import CaptureRequest
from profdeck_vllm.engines import VllmObject
from profdeck_vllm.options import VllmOptions
from profdeck_vllm.own_profiler import VllmCapture


class Engine:
    """An engine of vLLM, as far as it is asked before it records."""

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


def native(engine: Engine, path: Path) -> VllmCapture:
    identity = Identity(role="rollout")
    capture = Capture(id="target", directory=path, identity=identity, first_step=1, current_step=1)
    request = CaptureRequest(id="step1", output=path, run="run", role="rollout")
    return VllmCapture(VllmObject(engine), VllmOptions(), capture, request)


def test_on_an_npu_it_is_refused_with_what_to_do(tmp_path: Path) -> None:
    engine = Engine("npu", tmp_path)
    with pytest.raises(CaptureError, match=r"leaves directories of torch_npu .* With profdeck in the engine's workers"):
        asyncio.run(native(engine, tmp_path).start())
    assert engine.calls == []


def test_on_other_devices_it_starts(tmp_path: Path) -> None:
    engine = Engine("cuda", tmp_path)
    asyncio.run(native(engine, tmp_path).start())
    assert engine.calls == ["start"]


def test_an_engine_without_a_profiler_is_not_enabled(tmp_path: Path) -> None:
    engine = Engine("cuda", tmp_path)
    engine.vllm_config.profiler_config.profiler = None
    with pytest.raises(TargetError, match=r"was launched without a profiler, .* Or launch it with") as caught:
        asyncio.run(native(engine, tmp_path).start())
    assert (caught.value.outcome, engine.calls) == (Outcome.NOT_ENABLED, [])


def test_what_a_server_on_an_npu_leaves_is_told(tmp_path: Path) -> None:
    """A server does not tell on what it runs."""
    capture = native(Engine("cuda", tmp_path), tmp_path)
    capture.watch(tmp_path)
    assert "in its log" in capture.remedy
    (tmp_path / "rank0_4711_20260101000000000_ascend_pt").mkdir()
    assert (
        f"leaves directories of torch_npu and no traces that can be brought into the run. They are in {tmp_path}."
        in (capture.remedy)
    )
