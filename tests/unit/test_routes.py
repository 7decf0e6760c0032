"""What our routes answer, as far as that needs no web framework."""

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
from profdeck.engine.transport.http_engine import About
from profdeck_traces.base.errors import ConfigError


def test_a_failure_has_the_status_of_its_code() -> None:
    late = TargetError("The schedulers did not answer.", Outcome.TIMED_OUT)
    wrapped = CaptureError("The engine does not answer.")
    wrapped.__cause__ = TimeoutError()
    assert [routes._status(error) for error in (late, wrapped)] == [504, 504]
    assert routes._status(TargetError("", Outcome.ALREADY_ACTIVE)) == 409
    assert routes._status(CaptureError("")) == 409
    assert routes._status(ConfigError("")) == 400


def test_a_directory_that_can_be_written_or_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert routes._may_write(tmp_path) is True
    assert routes._may_write(tmp_path / "not" / "yet" / "there") is True
    assert routes._may_write(tmp_path / "file") is False
    assert routes._may_write(tmp_path / "file" / "below") is False
    assert routes._may_write(tmp_path / "link") is False
    assert routes._may_write(tmp_path / ("x" * 1000)) is None
    assert routes._may_write(tmp_path / "\0") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_directory_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> os.stat_result:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "lstat", refuse)  # whoever runs the tests may be allowed everything
    assert routes._may_write(tmp_path) is False


def test_a_file_system_that_hangs_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, looks = threading.Event(), list[Path]()

    def look(output: Path) -> bool:
        looks.append(output)
        free.wait()
        return True

    monkeypatch.setattr(routes, "_may_write", look)
    monkeypatch.setattr(routes, "_LOOK_S", 0.05)

    async def main() -> None:
        server = Routes("unheard-of")
        try:
            assert [await server._writable(tmp_path), await server._writable(tmp_path)] == [None, None]
            assert looks == [tmp_path]
        finally:
            free.set()
        monkeypatch.setattr(routes, "_LOOK_S", 10)
        assert await server._writable(tmp_path) is True
        assert await server._writable(tmp_path) is True

    asyncio.run(main())


def test_what_is_unknown_is_left_out() -> None:
    about = About(host="here", output="/profiles", profdeck="0.1.0")
    assert set(routes.unstructure(about)) == {"host", "output", "profdeck"}
    unwritable = {"host": "here", "output": "/profiles", "profdeck": "0.1.0", "writable": False}
    assert routes.unstructure(structure(unwritable, About, where="server")) == unwritable
