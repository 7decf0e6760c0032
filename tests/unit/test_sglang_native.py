"""Captures by SGLang's own profiler that are rejected before a start request is sent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from profdeck.base.errors import CaptureError
from profdeck.base.identity import Identity
from profdeck.records.capture import CaptureRecord
from profdeck.records.request import CaptureRequest
from profdeck_sglang.options import SglangOptions
from profdeck_sglang.own_profiler import SglangCapture
from profdeck_sglang.server import SglangServer


@pytest.fixture
def native_capture(tmp_path: Path) -> SglangCapture:
    """A capture of a server that is not running."""
    identity = Identity(role="server")
    capture = CaptureRecord(id="target", directory=tmp_path, identity=identity, first_step=0, current_step=0)
    request = CaptureRequest(id="step0", output=tmp_path, run="run", role="server")
    return SglangCapture(SglangServer("http://127.0.0.1:1", timeout_s=1), SglangOptions(), capture, request)


@pytest.mark.parametrize(
    ("value", "is_rejected"), [("1", True), ("True", True), ("yes", True), ("0", False), ("", False)]
)
def test_sglang_profile_v2_is_rejected(native_capture: SglangCapture, value: str, is_rejected: bool) -> None:
    unsupported = native_capture._find_unsupported({"SGLANG_PROFILE_V2": value})
    assert any("SGLANG_PROFILE_V2" in text for text in unsupported) is is_rejected


@pytest.mark.parametrize(("device", "is_rejected"), [("npu", True), ("npu:1", True), ("cuda", False), ("cpu", False)])
def test_own_profiler_is_rejected_on_npu(native_capture: SglangCapture, device: str, is_rejected: bool) -> None:
    native_capture._launch_arguments = {"device": device}
    assert [
        text.startswith("the device npu, where the stop fails") for text in native_capture._find_unsupported({})
    ] == [True] * is_rejected


def test_rejection_recommends_loading_profdeck(native_capture: SglangCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read_launch_arguments(_: SglangServer) -> dict[str, Any]:
        return {"device": "npu", "version": "0.5.23"}

    monkeypatch.setattr(SglangServer, "read_launch_arguments", read_launch_arguments)
    with pytest.raises(CaptureError, match=r"the device npu, .* With profdeck in the engine's processes"):
        asyncio.run(native_capture.start())
