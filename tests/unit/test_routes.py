"""Tests of server routes that do not require a web framework."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from profdeck.base.errors import CaptureError, TargetError
from profdeck.base.outcome import Outcome
from profdeck.config.structuring import structure
from profdeck.engine.server import routes
from profdeck.engine.server.routes import Routes
from profdeck.engine.transport.http_engine import ServerInfo
from profdeck_traces.base.errors import ConfigError


def test_errors_have_an_http_status() -> None:
    timed_out = TargetError("The schedulers did not answer.", Outcome.TIMED_OUT)
    wrapped = CaptureError("The engine does not answer.")
    wrapped.__cause__ = TimeoutError()
    assert [routes._status(error) for error in (timed_out, wrapped)] == [504, 504]
    assert routes._status(TargetError("", Outcome.ALREADY_ACTIVE)) == 409
    assert routes._status(CaptureError("")) == 409
    assert routes._status(ConfigError("")) == 400


def test_writable_or_creatable_directory_is_detected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert routes._is_writable(tmp_path) is True
    assert routes._is_writable(tmp_path / "not" / "yet" / "there") is True
    assert routes._is_writable(tmp_path / "file") is False
    assert routes._is_writable(tmp_path / "file" / "below") is False
    assert routes._is_writable(tmp_path / "link") is False
    assert routes._is_writable(tmp_path / ("x" * 1000)) is None
    assert routes._is_writable(tmp_path / "\0") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_directory_without_permission_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_permission_error(path: Path) -> os.stat_result:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "lstat", raise_permission_error)  # the user who runs the tests may have all permissions
    assert routes._is_writable(tmp_path) is False


def test_hanging_write_check_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resumed, checked = threading.Event(), list[Path]()

    def check(output: Path) -> bool:
        checked.append(output)
        resumed.wait()
        return True

    monkeypatch.setattr(routes, "_is_writable", check)
    monkeypatch.setattr(routes, "_WRITE_CHECK_S", 0.05)

    async def main() -> None:
        server = Routes("unknown")
        try:
            assert [await server._check_writable(tmp_path), await server._check_writable(tmp_path)] == [None, None]
            assert checked == [tmp_path]
        finally:
            resumed.set()
        monkeypatch.setattr(routes, "_WRITE_CHECK_S", 10)
        assert await server._check_writable(tmp_path) is True
        assert await server._check_writable(tmp_path) is True

    asyncio.run(main())


def test_unknown_writability_is_omitted() -> None:
    info = ServerInfo(host="host1", output="/profiles", profdeck="0.1.0")
    assert set(routes.unstructure(info)) == {"host", "output", "profdeck"}
    unwritable = {"host": "host1", "output": "/profiles", "profdeck": "0.1.0", "writable": False}
    assert routes.unstructure(structure(unwritable, ServerInfo, where="server")) == unwritable
