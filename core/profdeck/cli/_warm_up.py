"""Requests that `profdeck capture` sends to the servers while they record, so that there is something to record.

A file of requests has one JSON object per line: the body for ``/v1/completions`` (if it has a ``prompt``) or for
``/v1/chat/completions`` (if it has ``messages``); or a mapping with ``url``, the path of any route, and ``body``, as in
OpenAI's batch files (https://platform.openai.com/docs/guides/batch), whose other keys are passed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import resource
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from profdeck.base.errors import CaptureError, ConfigError, describe
from profdeck.base.structuring import show
from profdeck.cli._checked_servers import CheckedServer
from profdeck.config.targets import WorkerType
from profdeck.engine.transport.http_client import HttpClient, HttpResponse
from profdeck.engine.transport.http_engine import TOKEN_VARIABLE

WARMUP_TOKENS = 32
"""What each request of a warm-up generates."""
MOST_AT_ONCE = 16
"""Of a file's requests, for one server."""

_MOST_IN_ALL = 512
_OTHER_FILES = 128
"""What a process has open besides."""
_AFTER_FAILURE_S = 1.0
_PATH = re.compile(r"/[!-~]*")
_BODIES = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}


@attrs.frozen
class Request:
    """One request; a model that it does not name is the first one that the server has."""

    path: str
    body: Mapping[str, Any]

    @property
    def lacks_model(self) -> bool:
        """Whether a model has to be named for it."""
        return self.path in _BODIES.values() and "model" not in self.body


@attrs.frozen
class WarmUp:
    """Some short completions for each server, one after the other."""

    count: int
    option: str = "--warmup-requests"

    def requests(self, share: int) -> Iterator[Request]:
        """Yield those of as many servers. Each prompt begins in its own way: no cache and no router knows it."""
        for _ in range(self.count * share):
            prompt = f"{secrets.token_hex(4)}: once upon a time"
            body = {"prompt": prompt, "max_tokens": WARMUP_TOKENS, "ignore_eos": True, "temperature": 0}
            yield Request("/v1/completions", body)

    def at_once(self, share: int) -> int:
        """Return how many are sent at the same time."""
        return share


@attrs.frozen
class Replay:
    """The requests of a file, over and over."""

    lines: Sequence[Request]
    option: str = "--load"

    def requests(self, share: int) -> Iterator[Request]:  # noqa: ARG002  # it never ends
        """Yield them."""
        return itertools.cycle(self.lines)

    def at_once(self, share: int) -> int:
        """Return how many are sent at the same time."""
        return share * min(len(self.lines), MOST_AT_ONCE)


Load = WarmUp | Replay


@attrs.define
class Sent:
    """What has come of the requests."""

    sent: int = 0
    answered: int = 0
    failed: int = 0
    first_error: str | None = None
    """Why the first of those failed."""

    def fail(self, reason: str) -> None:
        """Count a failure."""
        self.failed += 1
        self.first_error = self.first_error or reason

    @property
    def plain(self) -> dict[str, object]:
        """JSON data."""
        return attrs.asdict(self)

    def __str__(self) -> str:
        what = "1 request was" if self.sent == 1 else f"{self.sent} requests were"
        text = f"{what} sent: {self.answered} answered, {self.failed} failed"
        if left := self.sent - self.answered - self.failed:
            text += f", {left} given up when the capture was over"
        return f"{text}. The first failure: {self.first_error}" if self.first_error else f"{text}."


@attrs.frozen
class _Destination:
    url: str
    token: str | None = attrs.field(repr=False)
    share: int
    """How many servers it stands for."""


def read(path: Path) -> Replay:
    """Read a file of requests.

    Raises:
        ConfigError: it cannot be read, has no request, or a line is none.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--load {path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--load {path}: not UTF-8: {error}.") from None
    numbered = enumerate(text.split("\n"), 1)
    lines = [_request(line, f"--load {path}, line {number}") for number, line in numbered if line.strip()]
    if not lines:
        raise ConfigError(f"--load {path}: there is no request in it; expected one JSON object per line.")
    return Replay(lines)


def _request(line: str, where: str) -> Request:
    try:
        entry = json.loads(line)
        json.dumps(entry, allow_nan=False)  # infinite numbers are read, and could not be sent
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {describe(error)}.") from None
    if isinstance(entry, dict) and "body" in entry:
        path, body, method = entry.get("url"), entry["body"], entry.get("method", "POST")
        if method != "POST":
            raise ConfigError(f"{where}: method: expected 'POST', got {show(method)}.")
        if not isinstance(path, str) or not _PATH.fullmatch(path):
            raise ConfigError(f"{where}: url: expected a path such as /v1/completions, got {show(path)}.")
    else:
        body = entry
        path = next((path for key, path in _BODIES.items() if isinstance(body, dict) and key in body), "")
    if not isinstance(body, dict) or not path:
        raise ConfigError(
            f"{where}: expected an object with prompt or messages, or one with url and body; got {show(entry)[:200]}."
        )
    return Request(path, body)


def check(load: Load, servers: Iterable[CheckedServer]) -> None:
    """Refuse servers that could be sent nothing.

    Raises:
        ConfigError: there is such a server.
    """
    for server in servers:
        if not server.is_server:
            raise ConfigError(f"{load.option}: {server.name} has no URL that requests could be sent to.")
        if not _serves_alone(server) and server.router is None:
            raise ConfigError(
                f"{load.option}: {server.name} does only {server.worker_type}, so it cannot serve a request alone, and "
                "there is no --router to send it through."
            )


@contextlib.asynccontextmanager
async def sending(load: Load | None, servers: Sequence[CheckedServer], timeout_s: float) -> AsyncIterator[Sent]:
    """Send requests to servers until the block ends; those that are not answered then are given up.

    Args:
        load: what to send; None for nothing.
        servers: where to.
        timeout_s: how long an answer may take, in seconds.

    Yields:
        What has come of them so far.
    """
    sent = Sent()
    clients = _clients(load, servers, timeout_s) if load is not None else []
    slots = asyncio.Semaphore(_slots(len(servers)))
    keep = len(clients) <= _slots(len(servers))
    tasks = [asyncio.create_task(client.send_all(sent, slots, keep=keep)) for client in clients]
    try:
        yield sent
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                sent.fail(describe(result))


def _serves_alone(server: CheckedServer) -> bool:
    return server.worker_type in {None, WorkerType.REGULAR}


def _destinations(servers: Iterable[CheckedServer]) -> list[_Destination]:
    """Send to each server itself, and to those that cannot serve alone through their router."""
    token, shares = os.environ.get(TOKEN_VARIABLE), dict[Any, int]()
    found = []
    for server in servers:
        if _serves_alone(server) or server.router is None:
            found.append(_Destination(server.url, token, 1))
        else:
            shares[server.router] = shares.get(server.router, 0) + 1
    return found + [_Destination(router.url, router.key, share) for router, share in shares.items()]


def _clients(load: Load, servers: Sequence[CheckedServer], timeout_s: float) -> list[_Client]:
    """Make those that send: some for each destination, which take its requests in turn."""
    clients = []
    for to in _destinations(servers):
        requests = load.requests(to.share)
        count = max(1, min(load.at_once(to.share), _MOST_IN_ALL // len(servers)))
        clients += [_Client(to, requests, timeout_s) for _ in range(count)]
    return clients


def _slots(servers: int) -> int:
    """Return how many requests there may be at once: what records, and what watches it, needs connections first."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = _MOST_IN_ALL if limit == resource.RLIM_INFINITY else limit - 2 * servers - _OTHER_FILES
    return max(1, min(left, _MOST_IN_ALL))


class _Client:
    """Sends one request after the other to a destination."""

    def __init__(self, to: _Destination, requests: Iterator[Request], timeout_s: float) -> None:
        self._client = HttpClient(to.url, timeout_s=timeout_s)
        self._token = to.token
        self._requests = requests
        self._model: str | None = None

    async def send_all(self, sent: Sent, slots: asyncio.Semaphore, *, keep: bool) -> None:
        """Send what the other clients of the destination leave of its requests.

        Args:
            sent: counts them.
            slots: one is taken for each request.
            keep: whether the connection is kept between requests.
        """
        try:
            for request in self._requests:
                async with slots:
                    sent.sent += 1
                    failed = await self._failed(request)
                    if not keep:
                        self._client.close()
                if failed is None:
                    sent.answered += 1
                else:
                    sent.fail(failed)
                    await asyncio.sleep(_AFTER_FAILURE_S)  # a server that refuses everything is not flooded
        finally:
            self._client.close()

    async def _failed(self, request: Request) -> str | None:
        """Send a request, and say why it failed, if it did."""
        try:
            body = request.body
            if request.lacks_model:
                self._model = self._model or await self._first_model()
                body = {"model": self._model, **body}
            await self._carried("POST", request.path, body)
        except CaptureError as error:
            return str(error)
        return None

    async def _first_model(self) -> str:
        response = await self._carried("GET", "/v1/models")
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise CaptureError(f"{self._client.url}: /v1/models names no model.") from None

    async def _carried(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> HttpResponse:
        """Send a request, and return its answer if it was carried out.

        Raises:
            CaptureError: it was not.
        """
        response = await self._client.request(method, path, body, token=self._token, idempotent=method == "GET")
        if response.is_success:
            return response
        said = " ".join(response.text.split())[:300] or response.reason_phrase
        raise CaptureError(f"{self._client.url}: {path} answered {response.status_code}: {said}")
