"""Engines controlled through profdeck's routes on an HTTP server; see `profdeck.engine.server.routes`."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, final
from urllib.parse import quote, urlencode

import attrs

from profdeck.base.errors import TargetError
from profdeck.base.outcome import Outcome
from profdeck.config.structuring import OMIT_IF_NONE, structure
from profdeck.engine.engine import Engine, FileHost, RemoteFiles
from profdeck.engine.transport.http_client import HttpClient, HttpResponse
from profdeck.engine.transport.token import own_token
from profdeck.records.host_clock import MessageTimes, better_clock, compare_clocks
from profdeck.records.request import Answer
from profdeck_traces.base.errors import ProfdeckError

_NO_SUCH_ROUTE = {HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED}
_MAX_HOST_LENGTH = 255
"""Maximum length of a host name (HOST_NAME_MAX of POSIX)."""
_OUTCOMES: dict[int, Outcome] = {
    **dict.fromkeys(_NO_SUCH_ROUTE, Outcome.NOT_ENABLED),
    HTTPStatus.GATEWAY_TIMEOUT: Outcome.TIMED_OUT,
}


@attrs.frozen(kw_only=True)
class ServerInfo:
    """Host, output directory and profdeck version of a server, from its replies."""

    host: str
    output: str
    """Output directory. The server writes only below it."""
    profdeck: str
    """Version of profdeck."""
    writable: bool | None = attrs.field(default=None, metadata=OMIT_IF_NONE)
    """True if the server's process has permission to write below `output`. ``None``, and omitted, if unchecked. Only
    ``/profdeck/status`` checks it, while no capture is active."""


class HttpEngine(Engine):
    """An engine that is controlled through its HTTP server."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Raises:
        ConfigError: the URL is invalid, or a file for TLS cannot be used.
        """
        self._client = HttpClient(url, timeout_s=timeout_s)
        self.url = self._client.url
        self.name = str(self.url)
        self._server_info: ServerInfo | None = None

    async def has_profdeck(self) -> bool:
        """Return whether the server has profdeck's routes."""
        response = await self.request("GET", "/profdeck/status")
        if response.status_code in _NO_SUCH_ROUTE:
            return False
        self._server_info = self._parse_info(response)
        return True

    async def command(self, command: str, payload: Mapping[str, Any]) -> Answer:
        """Send the command to profdeck's routes. A start waits for the gate immediately before it is sent."""
        if command == "status":
            query = f"?{urlencode(payload)}" if payload else ""
            response = await self.request("GET", f"/profdeck/status{query}")
        elif command == "start":
            if not await self.is_here():
                # Paths of this host are invalid on other hosts, so use the server's own output directory.
                payload = {key: value for key, value in payload.items() if key != "output"}
            response = await self.request("POST", "/profdeck/start", payload, starts=True)
        else:
            # wait_s is 0 because this process waits for the files itself. A second stop has no effect.
            response = await self.request("POST", f"/profdeck/{command}", {**payload, "wait_s": 0}, idempotent=True)
        try:
            return structure(self.parse_response(response)["answer"], Answer, where="answer")
        except (KeyError, TypeError, ProfdeckError) as error:
            raise self._version_mismatch(error) from None

    async def about(self) -> ServerInfo:
        """Request information about the server."""
        self._server_info = self._parse_info(await self.request("GET", "/profdeck/status"))
        return self._server_info

    @final
    async def is_here(self) -> bool:
        """Return whether the server is on this host: it reports this host's name, and its URL is local.

        The name alone is not trusted, because a remote server could then choose where this process writes.
        """
        if (await self.cached_info()).host != socket.gethostname():
            return False
        if self._client.socket is not None:
            return True
        host = self._client.url.host or ""
        if host not in _local_hosts:
            _local_hosts[host] = any(map(_is_local, await _addresses(host)))
        return _local_hosts[host]

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        starts: bool = False,
        idempotent: bool = False,
    ) -> HttpResponse:
        """Send a request.

        Args:
            method: HTTP method. ``GET`` is always idempotent.
            path: path relative to the server's URL.
            body: data to send as JSON.
            starts: the request starts a capture, so it waits for the gate.
            idempotent: sending the request twice has the same effect as sending it once.

        Raises:
            TargetError: the server cannot be reached, or the response takes too long.
        """
        return await self._client.request(
            method,
            path,
            body,
            token=own_token(),
            gate=self.gate if starts else None,
            idempotent=idempotent or method == "GET",
        )

    def files(self, output: Path) -> RemoteFiles:  # noqa: ARG002  # the server has its own output directory
        """Return access to the files on the server's host through profdeck's routes."""
        return _RemoteFiles(self, self._client)

    async def wait_for_gate(self) -> None:
        """Do nothing, because the start request itself waits for the gate."""

    async def close(self) -> None:
        """Release the open connections."""
        await self._client.close()

    async def cached_info(self) -> ServerInfo:
        """Return the last received information about the server. Request it only if there is none."""
        return self._server_info or await self.about()

    def parse_response(self, response: HttpResponse) -> dict[str, Any]:
        """Return the JSON object in a response, and update `clock` from its times.

        Raises:
            TargetError: the response is an error or not a JSON object.
        """
        self.expect_success(response)
        try:
            content = dict(response.json())
        except (ValueError, TypeError):
            raise TargetError(
                f"{self.name}: the response of {response.path} is not JSON.", Outcome.NOT_ENABLED
            ) from None
        self._update_clock(response, content)
        return content

    def _update_clock(self, response: HttpResponse, content: Mapping[str, Any]) -> None:
        with contextlib.suppress(KeyError, TypeError, ProfdeckError):  # another version, or implausible times
            times = structure(content["times"], MessageTimes, where="times")
            host = str(content["server"]["host"])[:_MAX_HOST_LENGTH]
            self.clock = better_clock(self.clock, compare_clocks(host, response.sent_ns, times, response.received_ns))

    def expect_success(self, response: HttpResponse) -> None:
        """Raise TargetError if the response is an error."""
        if response.is_success:
            return
        answer = None
        try:
            content = response.json()
            text, answer = str(content["error"]), content.get("answer")
        except (ValueError, KeyError, TypeError, AttributeError):
            text = response.text[:500] or response.reason_phrase
        outcome = _OUTCOMES.get(response.status_code) or _refusal(answer)
        text = f"{self.name}: {response.path} returned status {response.status_code}: {self._client.redact(text)}"
        raise TargetError(text, outcome)

    def _parse_info(self, response: HttpResponse) -> ServerInfo:
        content = self.parse_response(response)
        try:
            return structure(content["server"], ServerInfo, where="server")
        except (KeyError, ProfdeckError) as error:
            raise self._version_mismatch(error) from None

    def _version_mismatch(self, error: Exception) -> TargetError:
        if isinstance(error, TargetError):
            return error
        text = f"{self.name} has an incompatible version of profdeck: {error}"
        return TargetError(text, Outcome.REFUSED, "Install the same version of profdeck on both sides.")


@attrs.frozen
class _RemoteFiles:
    """The files below the output directory of a server; see `profdeck.engine.transport.served_files`."""

    _engine: HttpEngine
    _client: HttpClient

    async def source(self) -> FileHost:
        """Return the server's host and output directory."""
        info = await self._engine.cached_info()
        return FileHost(info.host, info.output)

    async def list_files(self, path: str) -> dict[str, int] | None:
        """List the files in a directory."""
        response = await self._engine.request("GET", _route(path))
        if response.status_code == HTTPStatus.CONFLICT:
            return None
        try:
            files = (await self._require_success(response)).json()["files"]
            return {str(file["name"]): int(file["size_bytes"]) for file in files}
        except (ValueError, KeyError, TypeError):
            raise TargetError(f"{self._engine.name}: {response.path} is not a directory.", Outcome.REFUSED) from None

    async def read(self, path: str) -> bytes:
        """Return the contents of a small file."""
        return (await self._require_success(await self._engine.request("GET", _route(path)))).content

    async def fetch(self, path: str, file: BinaryIO, size_bytes: int) -> None:
        """Download a file."""
        token = own_token()
        response = await self._client.download(_route(path), file, most_bytes=size_bytes, token=token)
        if (await self._require_success(response)).content:
            raise TargetError(f"{self._engine.name}: {response.path} is not a file.", Outcome.REFUSED)

    async def _require_success(self, response: HttpResponse) -> HttpResponse:
        """Return the response. Raise TargetError if it is an error."""
        if response.status_code in _NO_SUCH_ROUTE and not _is_from_profdeck(response):
            version = (await self._engine.cached_info()).profdeck
            text = f"profdeck {version} of {self._engine.name} has no route for files"
            raise TargetError(text, Outcome.NOT_ENABLED, "Install the same version of profdeck on both sides.")
        self._engine.expect_success(response)
        return response


_local_hosts: dict[str, bool] = {}
"""Cache: True for each host of a URL that is this host. Many servers can have the same host."""


async def _addresses(host: str) -> list[str]:
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    with contextlib.suppress(OSError):
        infos = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_DGRAM)
        return [str(address[0]) for *_, address in infos]
    return []


def _is_local(address: str) -> bool:
    """Return whether an interface of this host has the address. A socket can only bind to such addresses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _route(path: str) -> str:
    return f"/profdeck/files/{quote(path)}"


def _is_from_profdeck(response: HttpResponse) -> bool:
    """Return whether profdeck's route sent an error, as opposed to the server's handler for unknown routes."""
    try:
        return "error" in response.json()
    except (ValueError, TypeError):
        return False


def _refusal(answer: Any) -> Outcome:
    """Return the reason code of a command that the engine's processes refused."""
    replies: list[Any] = []
    if isinstance(answer, dict):
        ranks, frontends = answer.get("ranks"), answer.get("frontends")
        replies += ranks if isinstance(ranks, list) else ()
        replies += frontends.values() if isinstance(frontends, dict) else ()
    return Outcome.from_refusals(reply.get("refusal") for reply in replies if isinstance(reply, dict))
