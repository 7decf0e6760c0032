"""Limits on the size and duration of downloads, because servers are not trusted."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

from fsspec.callbacks import Callback

MAX_RESPONSE_BYTES = 64 << 20
"""Maximum size of a response that is held in memory, such as a directory listing or ``run.json``."""
MAX_UNKNOWN_BYTES = 2 << 30
"""Maximum size of a file if the server does not report its size."""
RESPONSE_S = 30.0
"""Maximum time to receive headers, to receive a response that is held in memory, and between two chunks of a file."""
_MIN_BYTES_PER_S = 10_000
"""Minimum transfer rate of a file once `RESPONSE_S` has passed."""
_CONNECT_S = 10.0
_HTTP = re.compile(r"(?:^|::)(https?)://")


def http_options(url: str) -> dict[str, Any]:
    """Return options for `fsspec.core.url_to_fs` that limit HTTP responses, by protocol.

    Raises:
        ImportError: aiohttp is not installed.
    """
    protocols = _HTTP.findall(url)
    if not protocols:
        return {}
    import aiohttp

    class LimitedResponse(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> Any:
            async with asyncio.timeout(RESPONSE_S):
                return await super().start(connection)

        async def read(self) -> bytes:
            if self._body is None:
                body = bytearray()
                async with asyncio.timeout(RESPONSE_S):
                    async for chunk in self.content.iter_any():
                        body += chunk
                        if len(body) > MAX_RESPONSE_BYTES:
                            self.close()
                            raise aiohttp.ClientPayloadError(f"more than {MAX_RESPONSE_BYTES >> 20} MiB")
                self._body = bytes(body)
            return self._body

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=RESPONSE_S)
    return {
        protocol: {"client_kwargs": {"response_class": LimitedResponse, "timeout": timeout}} for protocol in protocols
    }


class LimitedCallback(Callback):  # type: ignore[misc]  # fsspec has no type annotations
    """fsspec callback that aborts the transfer of a file that is too large or too slow."""

    def __init__(self, sizes: dict[str, int | None]) -> None:
        """Args:
        sizes: Expected size of each remote path, or None if it is unknown.
        """
        super().__init__()
        self._sizes = sizes

    def branched(self, path_1: Any, path_2: Any, **_: Any) -> Callback:
        """Return the callback for one file."""
        size = self._sizes.get(path_1, self._sizes.get(path_2))
        return _LimitedFile(MAX_UNKNOWN_BYTES if size is None else size)


class _LimitedFile(Callback):  # type: ignore[misc]  # as above
    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit, self._started_s = limit, time.monotonic()

    def call(self, *_: Any, **__: Any) -> None:
        """Check how many bytes were received.

        Raises:
            OSError: The file is too large, or it arrives too slowly.
        """
        if self.value > self._limit:
            raise OSError(f"the server sent more than {self._limit:,} bytes")
        elapsed_s = time.monotonic() - self._started_s
        if elapsed_s > RESPONSE_S and self.value < (elapsed_s - RESPONSE_S) * _MIN_BYTES_PER_S:
            raise OSError(f"the server sent only {self.value:,} bytes in {elapsed_s:.0f} seconds")
