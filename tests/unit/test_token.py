"""Tokens of a server's routes, read from the environment or from a file that can change while servers run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from profdeck.engine.server.routes import Routes
from profdeck.engine.transport.token import FILE_VARIABLE, TOKEN_VARIABLE, accepted_tokens, own_token
from profdeck_traces.base.errors import ConfigError, ProfdeckError


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(TOKEN_VARIABLE, "from-environment")
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "token"))
    return tmp_path / "token"


def test_token_file_overrides_the_environment(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token_file.write_text("new\n\n  old \n")
    assert (accepted_tokens(), own_token()) == (("new", "old"), "new")
    monkeypatch.delenv(FILE_VARIABLE)
    assert (accepted_tokens(), own_token()) == (("from-environment",), "from-environment")
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert (accepted_tokens(), own_token()) == ((), None)


@pytest.mark.parametrize("content", [None, b"\xffxx"])
def test_unreadable_file_is_reported_without_its_contents(token_file: Path, content: bytes | None) -> None:
    if content is not None:
        token_file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{FILE_VARIABLE}: {token_file} cannot be read: ") as caught:
        own_token()
    assert "xx" not in str(caught.value)


def response_status(routes: Routes, token: str) -> int:
    """Return the status of the response to a token. If the token is accepted, it is 503, because no engine exists."""
    request: Any = SimpleNamespace(headers={"authorization": f"Bearer {token}"})
    with pytest.raises(ProfdeckError) as caught:
        routes._authorize(request)
    status: int = caught.value.status  # type: ignore[attr-defined]
    return status


def test_server_accepts_a_new_token_without_a_restart(token_file: Path) -> None:
    token_file.write_text("first")
    routes = Routes("vllm")
    assert [response_status(routes, token) for token in ("first", "second", "from-environment", "")] == [
        503,
        401,
        401,
        401,
    ]
    token_file.write_text("second\nfirst")
    assert [response_status(routes, token) for token in ("first", "second", "third")] == [503, 503, 401]
    token_file.write_text("second")
    assert [response_status(routes, token) for token in ("first", "second")] == [401, 503]
    token_file.write_text("")
    assert response_status(routes, "") == 403
    token_file.unlink()
    assert response_status(routes, "second") == 503
