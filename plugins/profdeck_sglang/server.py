"""SGLang's HTTP server as a target. Uses profdeck's routes if the server has them, otherwise SGLang's."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from profdeck.engines import HttpEngine, HttpResponse, Outcome
from profdeck.plugin import CaptureError, TargetError
from profdeck_sglang.engines import SglangEngine


class SglangServer(HttpEngine, SglangEngine):
    """An SGLang server, given by URL."""

    async def start_profile(self, **arguments: Any) -> None:
        """Call /start_profile.

        Raises:
            TargetError: the route failed. Its response contains no reason.
        """
        self._check_response(await self.request("POST", "/start_profile", arguments, starts=True))

    async def stop_profile(self) -> None:
        """Call /stop_profile."""
        self._check_response(await self.request("POST", "/stop_profile"))

    async def read_launch_arguments(self) -> Mapping[str, Any]:
        """Return the contents of /server_info, which include the launch arguments."""
        info = await self._read_info()
        if info is None:
            message = (
                f"{self.name}/server_info did not return SGLang's info. Check that the URL is that of an SGLang server."
            )
            raise TargetError(message, Outcome.NOT_ENABLED)
        return info

    async def is_sglang(self) -> bool:
        """Return whether the server runs SGLang."""
        try:
            return await self._read_info() is not None
        except CaptureError:
            return False

    async def is_local(self) -> bool:
        """Return whether the URL has a loopback address. Other names of this host count as other hosts."""
        return self.url.host in {"127.0.0.1", "localhost", "::1"}

    async def _read_info(self) -> dict[str, Any] | None:
        response = await self.request("GET", "/server_info")
        try:
            info = response.json()
        except ValueError:
            return None
        return info if isinstance(info, dict) and {"tp_size", "version", "internal_states"} <= info.keys() else None

    def _check_response(self, response: HttpResponse) -> None:
        if response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR:
            raise TargetError(
                f"{self.name}: SGLang's {response.path} failed; the reason is only in the server's log. Is another "
                "profile active, or has this profile already ended?",
                Outcome.REFUSED,
                "See the server's log.",
            )
        self.expect_success(response)
