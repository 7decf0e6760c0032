"""The short completions that `profdeck capture --warmup-requests` sends, so that an idle server has iterations."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import attrs

from profdeck.base.errors import CaptureError, ConfigError, describe_error
from profdeck.cli._checked_servers import CheckedServer
from profdeck.config.targets import WorkerType
from profdeck.engine.transport.http_client import HttpClient, HttpResponse
from profdeck.engine.transport.token import own_token

WARMUP_TOKENS = 32
"""What each request generates."""
_AT_ONCE = 64
"""Requests under way at any time; captures and their progress need connections too."""
_OPTION = "--warmup-requests"


@attrs.define
class Sent:
    """How the requests came out."""

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


def check(servers: Iterable[CheckedServer]) -> None:
    """Refuse servers that could be sent nothing.

    Raises:
        ConfigError: there is such a server.
    """
    for server in servers:
        if not server.is_server:
            raise ConfigError(f"{_OPTION}: {server.name} has no URL that requests could be sent to.")
        if not _serves_alone(server) and server.router is None:
            raise ConfigError(
                f"{_OPTION}: {server.name} does only {server.worker_type}, so it cannot serve a request alone, and "
                "there is no --router to send it through."
            )


@contextlib.asynccontextmanager
async def sending(count: int | None, servers: Sequence[CheckedServer], timeout_s: float) -> AsyncIterator[Sent]:
    """Send each server some completions, one after the other; those not answered when the block ends are given up.

    Args:
        count: how many for each server; None for none.
        servers: where to; those that cannot serve a request alone get theirs through their router.
        timeout_s: how long an answer may take, in seconds.

    Yields:
        How they have come out so far.
    """
    sent, slots = Sent(), asyncio.Semaphore(_AT_ONCE)
    tasks = [
        asyncio.create_task(_send(count, _Destination.of(server), timeout_s, sent, slots))
        for server in servers
        if count is not None
    ]
    try:
        yield sent
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                sent.fail(describe_error(result))


@attrs.frozen
class _Destination:
    url: str
    token: str | None = attrs.field(repr=False)

    @classmethod
    def of(cls, server: CheckedServer) -> _Destination:
        if _serves_alone(server) or server.router is None:
            return cls(server.url, own_token())
        return cls(server.router.url, server.router.key)


def _serves_alone(server: CheckedServer) -> bool:
    return server.worker_type in {None, WorkerType.REGULAR}


async def _send(count: int, to: _Destination, timeout_s: float, sent: Sent, slots: asyncio.Semaphore) -> None:
    client, model = HttpClient(to.url, timeout_s=timeout_s), None
    try:
        for _ in range(count):
            async with slots:
                sent.sent += 1
                try:
                    model = model or await _first_model(client, to)
                    # No cache and no router knows a prompt that begins in its own way.
                    prompt = f"{secrets.token_hex(4)}: once upon a time"
                    body = {"prompt": prompt, "max_tokens": WARMUP_TOKENS, "ignore_eos": True, "temperature": 0}
                    await _carried(client, to, "POST", "/v1/completions", {"model": model, **body})
                except CaptureError as error:
                    sent.fail(str(error))
                else:
                    sent.answered += 1
    finally:
        await client.close()


async def _first_model(client: HttpClient, to: _Destination) -> str:
    response = await _carried(client, to, "GET", "/v1/models")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise CaptureError(f"{client.url}: /v1/models names no model.") from None


async def _carried(
    client: HttpClient, to: _Destination, method: str, path: str, body: Mapping[str, Any] | None = None
) -> HttpResponse:
    """Send a request, and return its answer if it was carried out.

    Raises:
        CaptureError: it was not.
    """
    response = await client.request(method, path, body, token=to.token, idempotent=method == "GET")
    if response.is_success:
        return response
    said = " ".join(response.text.split())[:300] or response.reason_phrase
    raise CaptureError(f"{client.url}: {path} answered {response.status_code}: {said}")
