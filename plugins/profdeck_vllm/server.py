"""Engines behind vLLM's HTTP server: our own routes when it has them, else vLLM's."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import attrs
import httpx
from packaging.version import InvalidVersion, Version

from profdeck.errors import CaptureError, ConfigError, ProfdeckError
from profdeck.strict import structure
from profdeck_vllm.engines import REMEDY, Answer, Engine

TOKEN_VARIABLE = "PROFDECK_TOKEN"  # noqa: S105  # its name

_PER_SESSION = Version("0.32.0")
"""From here on /start_profile has a body; before, it is ignored."""


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


class Server(Engine):
    """A server of vLLM by URL."""

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
        response = await self._request("GET", "/profdeck/status")
        if response.status_code in {404, 405}:
            return False
        self._checked(response)
        return True

    async def command(self, command: str, payload: Mapping[str, Any]) -> Answer:
        """Send the command to our routes."""
        if command == "status":
            response = await self._request("GET", "/profdeck/status")
        else:
            if command == "start" and not (await self.about()).here:
                # Paths of this host mean nothing there: the server's own output directory counts.
                payload = {key: value for key, value in payload.items() if key != "output"}
            if command == "stop":
                payload = {**payload, "wait_s": 0}  # whoever asks here watches the files by himself
            response = await self._request("POST", f"/profdeck/{command}", payload)
        try:
            return structure(self._checked(response)["answer"], Answer, where="answer")
        except (KeyError, TypeError, ProfdeckError) as error:
            if isinstance(error, CaptureError):
                raise
            raise CaptureError(f"{self.name} has routes of another version of profdeck: {error}") from None

    async def about(self) -> About:
        """Return what the server says of itself."""
        return structure(self._checked(await self._request("GET", "/profdeck/status"))["server"], About, where="server")

    async def start_profile(self, **arguments: Any) -> None:
        """Call vLLM's route, which older releases read no arguments from."""
        if arguments and await self._version() < _PER_SESSION:
            arguments.pop("profile_prefix", None)  # it only tells files apart, which their times do as well
            if arguments:
                raise CaptureError(
                    f"{self.name} runs a vLLM older than {_PER_SESSION}, whose /start_profile passes over "
                    f"{', '.join(arguments)}. {REMEDY}"
                )
        self._native(await self._request("POST", "/start_profile", arguments))

    async def stop_profile(self, **arguments: Any) -> None:
        """Call vLLM's route."""
        self._native(await self._request("POST", "/stop_profile", arguments))

    async def launched_with(self) -> Mapping[str, Any] | None:
        """Say at least whether there was one: vLLM has its routes only then, and no route tells more."""
        response = await self._request("GET", "/start_profile")
        return {} if response.status_code == httpx.codes.NOT_FOUND else None

    async def is_vllm(self) -> bool:
        """Tell whether the server is vLLM's."""
        try:
            await self._version()
        except CaptureError:
            return False
        return True

    async def _version(self) -> Version:
        response = await self._request("GET", "/version")
        try:
            return Version(response.json()["version"])
        except (ValueError, KeyError, TypeError, InvalidVersion):
            raise CaptureError(f"{self.name}/version does not answer as a server of vLLM does.") from None

    def _native(self, response: httpx.Response) -> None:
        if response.status_code == httpx.codes.CONFLICT:
            raise CaptureError(f"{self.name}: somebody else's profile is active there; end it with /stop_profile.")
        self._expect_success(response)

    def _checked(self, response: httpx.Response) -> dict[str, Any]:
        self._expect_success(response)
        try:
            return dict(response.json())
        except (ValueError, TypeError):
            raise CaptureError(f"{self.name}: {response.request.url.path} did not answer in JSON.") from None

    def _expect_success(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        try:
            text = str(response.json()["error"])
        except (ValueError, KeyError, TypeError):
            text = response.text[:500] or response.reason_phrase
        raise CaptureError(f"{self.name}: {response.request.url.path} answered {response.status_code}: {text}")

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        token = os.environ.get(TOKEN_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            # trust_env would send loopback through a proxy.
            async with httpx.AsyncClient(timeout=self._timeout_s, trust_env=False) as client:
                return await client.request(method, self._url + path, json=body, headers=headers)
        except httpx.HTTPError as error:
            text = str(error) or type(error).__name__
            raise CaptureError(f"{self.name} cannot be reached: {text}. Is the server up?") from error
