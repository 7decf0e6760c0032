"""Engines behind an HTTP server that has our routes; see `profdeck.engine.server.routes`."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, final
from urllib.parse import quote

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
_MOST_NAME = 255
"""No host has a longer name."""
_OUTCOMES: dict[int, Outcome] = {
    **dict.fromkeys(_NO_SUCH_ROUTE, Outcome.NOT_ENABLED),
    HTTPStatus.GATEWAY_TIMEOUT: Outcome.TIMED_OUT,
}


@attrs.frozen(kw_only=True)
class About:
    """What a server with our routes says of itself."""

    host: str
    output: str
    """Its output directory; it writes nowhere else."""
    profdeck: str
    """The version of profdeck."""
    writable: bool | None = attrs.field(default=None, metadata=OMIT_IF_NONE)
    """Whether the server's process can write below `output`, as far as permissions tell. None, and left out, where it
    did not look: only ``/profdeck/status`` does, while no capture is active."""


class HttpEngine(Engine):
    """An engine that is controlled through its HTTP server."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Raises:
        ConfigError: it is no URL of HTTP.
        """
        self._client = HttpClient(url, timeout_s=timeout_s)
        self.url = self._client.url
        self.name = str(self.url)
        self._about: About | None = None

    async def has_profdeck(self) -> bool:
        """Ask whether our routes are there."""
        response = await self.request("GET", "/profdeck/status")
        if response.status_code in _NO_SUCH_ROUTE:
            return False
        self._about = self._read_about(response)
        return True

    async def command(self, command: str, payload: Mapping[str, Any]) -> Answer:
        """Send the command to our routes; a start is made ready to be sent and then waits for the gate."""
        if command == "status":
            response = await self.request("GET", "/profdeck/status")
        elif command == "start":
            if not await self.is_here():
                # Paths of this host mean nothing there: the server's own output directory counts.
                payload = {key: value for key, value in payload.items() if key != "output"}
            response = await self.request("POST", "/profdeck/start", payload, starts=True)
        else:
            # The asking process watches the files by itself. A second stop changes nothing.
            response = await self.request("POST", f"/profdeck/{command}", {**payload, "wait_s": 0}, idempotent=True)
        try:
            return structure(self.checked(response)["answer"], Answer, where="answer")
        except (KeyError, TypeError, ProfdeckError) as error:
            raise self._other_version(error) from None

    async def about(self) -> About:
        """Return what the server says of itself."""
        self._about = self._read_about(await self.request("GET", "/profdeck/status"))
        return self._about

    @final
    async def is_here(self) -> bool:
        """Tell whether the server is on this host: it says so, and its URL has an address or a socket of this host.

        Its word alone does not count, since then any server could choose where this process writes.
        """
        if (await self.known()).host != socket.gethostname():
            return False
        if self._client.socket is not None:
            return True
        host = self._client.url.host or ""
        if host not in _of_this_host:
            _of_this_host[host] = any(map(_is_local, await _addresses(host)))
        return _of_this_host[host]

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
            method: such as ``GET``, which is idempotent.
            path: below the URL.
            body: sent as JSON.
            starts: whether it starts a capture, and so waits for the gate.
            idempotent: whether it does no harm if it comes twice.

        Raises:
            TargetError: the server cannot be reached, or does not answer in time.
        """
        return await self._client.request(
            method,
            path,
            body,
            token=own_token(),
            gate=self.gate if starts else None,
            idempotent=idempotent or method == "GET",
        )

    def files(self, output: Path) -> RemoteFiles:  # noqa: ARG002  # its own counts
        """Return what fetches files of its ranks, by our routes."""
        return _RemoteFiles(self, self._client)

    async def arrive(self) -> None:
        """Do nothing: the request that starts waits for the gate."""

    async def close(self) -> None:
        """Close the connection that is kept open."""
        await self._client.close()

    async def known(self) -> About:
        """Return what the server said of itself when it was last asked; asks it if it never was."""
        return self._about or await self.about()

    def checked(self, response: HttpResponse) -> dict[str, Any]:
        """Return the JSON object that a route answered with.

        Raises:
            TargetError: it answered with an error, or with something else.
        """
        self.expect_success(response)
        try:
            content = dict(response.json())
        except (ValueError, TypeError):
            raise TargetError(f"{self.name}: {response.path} did not answer in JSON.", Outcome.NOT_ENABLED) from None
        self._compare_clocks(response, content)
        return content

    def _compare_clocks(self, response: HttpResponse, content: Mapping[str, Any]) -> None:
        with contextlib.suppress(KeyError, TypeError, ProfdeckError):  # of another version, or none that can be true
            there = structure(content["times"], MessageTimes, where="times")
            host = str(content["server"]["host"])[:_MOST_NAME]
            self.clock = better_clock(self.clock, compare_clocks(host, response.sent_ns, there, response.received_ns))

    def expect_success(self, response: HttpResponse) -> None:
        """Raise TargetError for an answer that is an error."""
        if response.is_success:
            return
        answer = None
        try:
            content = response.json()
            text, answer = str(content["error"]), content.get("answer")
        except (ValueError, KeyError, TypeError, AttributeError):
            text = response.text[:500] or response.reason_phrase
        outcome = _OUTCOMES.get(response.status_code) or _refusal(answer)
        raise TargetError(f"{self.name}: {response.path} answered {response.status_code}: {text}", outcome)

    def _read_about(self, response: HttpResponse) -> About:
        content = self.checked(response)
        try:
            return structure(content["server"], About, where="server")
        except (KeyError, ProfdeckError) as error:
            raise self._other_version(error) from None

    def _other_version(self, error: Exception) -> TargetError:
        if isinstance(error, TargetError):
            return error
        text = f"{self.name} has routes of another version of profdeck: {error}"
        return TargetError(text, Outcome.REFUSED, "Install the same version of profdeck on both sides.")


@attrs.frozen
class _RemoteFiles:
    """The files below the output directory of a server; see `profdeck.engine.transport.served_files`."""

    _engine: HttpEngine
    _client: HttpClient

    async def source(self) -> FileHost:
        """Return where they are."""
        about = await self._engine.known()
        return FileHost(about.host, about.output)

    async def listed(self, place: str) -> dict[str, int] | None:
        """Ask for the files in a directory."""
        response = await self._engine.request("GET", _path(place))
        if response.status_code == HTTPStatus.CONFLICT:
            return None
        try:
            files = (await self._checked(response)).json()["files"]
            return {str(file["name"]): int(file["size_bytes"]) for file in files}
        except (ValueError, KeyError, TypeError):
            raise TargetError(f"{self._engine.name}: {response.path} is no directory.", Outcome.REFUSED) from None

    async def read(self, place: str) -> bytes:
        """Ask for a small file."""
        return (await self._checked(await self._engine.request("GET", _path(place)))).content

    async def fetch(self, place: str, file: BinaryIO, size_bytes: int) -> None:
        """Ask for a file."""
        token = own_token()
        response = await self._client.download(_path(place), file, most_bytes=size_bytes, token=token)
        if (await self._checked(response)).content:
            raise TargetError(f"{self._engine.name}: {response.path} is no file.", Outcome.REFUSED)

    async def _checked(self, response: HttpResponse) -> HttpResponse:
        """Raise TargetError for an answer that is an error."""
        if response.status_code in _NO_SUCH_ROUTE and not _is_ours(response):
            version = (await self._engine.known()).profdeck
            text = f"the profdeck of {self._engine.name} ({version}) has no route that sends files"
            raise TargetError(text, Outcome.NOT_ENABLED, "Install the same version of profdeck on both sides.")
        self._engine.expect_success(response)
        return response


_of_this_host: dict[str, bool] = {}
"""Hosts of URLs: a thousand servers of one host need not be looked up each."""


async def _addresses(host: str) -> list[str]:
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    with contextlib.suppress(OSError):
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_DGRAM)
        return [str(address[0]) for *_, address in found]
    return []


def _is_local(address: str) -> bool:
    """Tell whether an interface of this host has the address: no other can be bound to."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _path(place: str) -> str:
    return f"/profdeck/files/{quote(place)}"


def _is_ours(response: HttpResponse) -> bool:
    try:
        return "error" in response.json()
    except (ValueError, TypeError):
        return False


def _refusal(answer: Any) -> Outcome:
    """Return the code that the processes of an engine gave for their refusal."""
    replies: list[Any] = []
    if isinstance(answer, dict):
        ranks, frontends = answer.get("ranks"), answer.get("frontends")
        replies += ranks if isinstance(ranks, list) else ()
        replies += frontends.values() if isinstance(frontends, dict) else ()
    return Outcome.from_refusals(reply.get("refusal") for reply in replies if isinstance(reply, dict))
