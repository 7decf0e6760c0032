"""Engines behind SGLang's HTTP server: our own routes when it has them, else SGLang's."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from profdeck.engines import HttpEngine, HttpResponse, Outcome
from profdeck.plugin import CaptureError, TargetError
from profdeck_sglang.engines import SglangEngine


class SglangServer(HttpEngine, SglangEngine):
    """A server of SGLang by URL."""

    async def start_profile(self, **arguments: Any) -> None:
        """Call SGLang's route, which says no more than that it failed."""
        self._native(await self.request("POST", "/start_profile", arguments, starts=True))

    async def stop_profile(self) -> None:
        """Call SGLang's route."""
        self._native(await self.request("POST", "/stop_profile"))

    async def launched_with(self) -> Mapping[str, Any]:
        """Ask the server, which answers with its arguments."""
        info = await self._info()
        if info is None:
            text = f"{self.name}/server_info does not answer as a server of SGLang does."
            raise TargetError(text, Outcome.NOT_ENABLED)
        return info

    async def is_sglang(self) -> bool:
        """Tell whether the server is SGLang's."""
        try:
            return await self._info() is not None
        except CaptureError:
            return False

    async def is_local(self) -> bool:
        """Tell by the address: other names of this host count as other hosts."""
        return self.url.host in {"127.0.0.1", "localhost", "::1"}

    async def _info(self) -> dict[str, Any] | None:
        response = await self.request("GET", "/server_info")
        try:
            info = response.json()
        except ValueError:
            return None
        return info if isinstance(info, dict) and {"tp_size", "version", "internal_states"} <= info.keys() else None

    def _native(self, response: HttpResponse) -> None:
        if response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR:
            raise TargetError(
                f"{self.name}: SGLang's {response.path} failed; why is only in the server's log. Is another profile "
                "active, or did this one end by itself?",
                Outcome.REFUSED,
                "See the server's log.",
            )
        self.expect_success(response)
