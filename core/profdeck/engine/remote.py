"""Engines behind an HTTP server that has our routes; see `profdeck.engine.routes`."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import attrs
import httpx

from profdeck.engine.control import Engine
from profdeck.engine.request import Answer
from profdeck.errors import CaptureError, ConfigError, ProfdeckError
from profdeck.strict import structure

TOKEN_VARIABLE = "PROFDECK_TOKEN"  # noqa: S105  # its name


@attrs.frozen(kw_only=True)
class About:
    """What a server with our routes says of itself."""

    host: str
    output: str
    """Its output directory; it writes nowhere else."""
    profdeck: str
    """The version of profdeck."""

    @property
    def here(self) -> bool:
        """Whether the server is on this host."""
        return self.host == socket.gethostname()


class RemoteEngine(Engine):
    """An engine by the URL of its server."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Raises:
        ConfigError: it is no URL of HTTP.
        """
        parsed = httpx.URL(url) if "://" in url else None
        if parsed is None or parsed.scheme not in {"http", "https"} or not parsed.host:
            raise ConfigError(f"target: {url!r} is no URL of a server; expected a form such as http://127.0.0.1:8000.")
        self.name = str(parsed.copy_with(userinfo=b"")).rstrip("/")
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s

    async def has_profdeck(self) -> bool:
        """Ask whether our routes are there."""
        response = await self.request("GET", "/profdeck/status")
        if response.status_code in {404, 405}:
            return False
        self.checked(response)
        return True

    async def command(self, command: str, payload: Mapping[str, Any]) -> Answer:
        """Send the command to our routes."""
        if command == "status":
            response = await self.request("GET", "/profdeck/status")
        else:
            if command == "start" and not (await self.about()).here:
                # Paths of this host mean nothing there: the server's own output directory counts.
                payload = {key: value for key, value in payload.items() if key != "output"}
            if command == "stop":
                payload = {**payload, "wait_s": 0}  # whoever asks here watches the files by himself
            response = await self.request("POST", f"/profdeck/{command}", payload)
        try:
            return structure(self.checked(response)["answer"], Answer, where="answer")
        except (KeyError, TypeError, ProfdeckError) as error:
            if isinstance(error, CaptureError):
                raise
            raise CaptureError(f"{self.name} has routes of another version of profdeck: {error}") from None

    async def about(self) -> About:
        """Return what the server says of itself."""
        return structure(self.checked(await self.request("GET", "/profdeck/status"))["server"], About, where="server")

    async def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        """Send a request.

        Raises:
            CaptureError: the server cannot be reached, or does not answer in time.
        """
        token = os.environ.get(TOKEN_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            # trust_env would send loopback through a proxy.
            async with httpx.AsyncClient(timeout=self._timeout_s, trust_env=False) as client:
                return await client.request(method, self._url + path, json=body, headers=headers)
        except httpx.HTTPError as error:
            text = str(error) or type(error).__name__
            raise CaptureError(f"{self.name} cannot be reached: {text}. Is the server up?") from error

    def checked(self, response: httpx.Response) -> dict[str, Any]:
        """Return the JSON object that a route answered with.

        Raises:
            CaptureError: it answered with an error, or with something else.
        """
        self.expect_success(response)
        try:
            return dict(response.json())
        except (ValueError, TypeError):
            raise CaptureError(f"{self.name}: {response.request.url.path} did not answer in JSON.") from None

    def expect_success(self, response: httpx.Response) -> None:
        """Raise CaptureError for an answer that is an error."""
        if response.is_success:
            return
        try:
            text = str(response.json()["error"])
        except (ValueError, KeyError, TypeError):
            text = response.text[:500] or response.reason_phrase
        raise CaptureError(f"{self.name}: {response.request.url.path} answered {response.status_code}: {text}")
