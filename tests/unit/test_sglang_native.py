"""What is known of a server of SGLang before anything is sent to it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from profdeck import Capture
from profdeck.base.errors import CaptureError
from profdeck.base.identity import Identity
from profdeck.records.request import CaptureRequest
from profdeck_sglang.options import SglangOptions
from profdeck_sglang.own_profiler import SglangCapture
from profdeck_sglang.server import SglangServer

LISTEN = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
input()
"""


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a process that listens, with a variable in its environment."""
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN],
        env=os.environ | {"SGLANG_PROFILE_V2": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.communicate("\n")


def environment(url: str) -> dict[str, str]:
    return dict(asyncio.run(SglangServer(url, timeout_s=1).environment()))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which process listens at a port")
def test_the_environment_of_a_server_on_this_host_is_that_of_the_process_that_listens(port: int) -> None:
    assert "SGLANG_PROFILE_V2" not in os.environ
    assert environment(f"http://127.0.0.1:{port}")["SGLANG_PROFILE_V2"] == "1"
    assert environment(f"http://localhost:{port}/")["SGLANG_PROFILE_V2"] == "1"


def test_the_environment_of_others_is_not_known(port: int) -> None:
    assert environment(f"http://192.0.2.1:{port}") == {}  # an address of the documentation's
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and nobody listens
        assert environment(f"http://127.0.0.1:{bound.getsockname()[1]}") == {}


@pytest.fixture
def native(tmp_path: Path) -> SglangCapture:
    """A capture of a server that has not been asked for anything."""
    identity = Identity(role="server")
    capture = Capture(id="target", directory=tmp_path, identity=identity, first_step=0, current_step=0)
    request = CaptureRequest(id="step0", output=tmp_path, run="run", role="server")
    return SglangCapture(SglangServer("http://127.0.0.1:1", timeout_s=1), SglangOptions(), capture, request)


@pytest.mark.parametrize(("value", "refused"), [("1", True), ("True", True), ("yes", True), ("0", False), ("", False)])
def test_the_second_profiler_of_sglang_is_not_trusted(native: SglangCapture, value: str, refused: bool) -> None:
    assert any("SGLANG_PROFILE_V2" in text for text in native._refusals({"SGLANG_PROFILE_V2": value})) is refused


@pytest.mark.parametrize(("device", "refused"), [("npu", True), ("npu:1", True), ("cuda", False), ("cpu", False)])
def test_its_profiler_is_not_trusted_on_an_npu(native: SglangCapture, device: str, refused: bool) -> None:
    native._launched = {"device": device}
    assert [text.startswith("the device npu, where it fails") for text in native._refusals({})] == [True] * refused


def test_who_is_refused_is_told_to_load_profdeck(native: SglangCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    async def told(_: SglangServer) -> dict[str, Any]:
        return {"device": "npu", "version": "0.5.23"}

    monkeypatch.setattr(SglangServer, "launched_with", told)
    with pytest.raises(CaptureError, match=r"the device npu, .* With profdeck in the engine's processes"):
        asyncio.run(native.start())
