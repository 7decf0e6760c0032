"""Engines behind vLLM's HTTP server: our own routes when it has them, else vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from packaging.version import InvalidVersion, Version

from profdeck.engines import HttpEngine, HttpResponse, Outcome
from profdeck.plugin import CaptureError, TargetError
from profdeck_vllm.engines import REMEDY, VllmEngine

_PER_SESSION = Version("0.32.0")
"""From here on /start_profile has a body; before, it is ignored."""
_OF_OMNI = "/v1/videos"
"""A route of vLLM-Omni's servers."""


class VllmServer(HttpEngine, VllmEngine):
    """A server of vLLM by URL."""

    async def names_traces(self) -> bool:
        """Tell it by the release, whose route reads a prefix; that of vLLM-Omni reads none."""
        return await self._version() >= _PER_SESSION and not await self.is_pipeline()

    async def is_pipeline(self) -> bool:
        """Tell it by a route that vLLM itself has not."""
        return (await self.request("GET", _OF_OMNI)).status_code != HTTPStatus.NOT_FOUND

    async def start_profile(self, **arguments: Any) -> None:
        """Call vLLM's route, which older releases read no arguments from."""
        if arguments:
            old = await self._version() < _PER_SESSION
            reads = {"stages"} if await self.is_pipeline() else set() if old else set(arguments)
            if unread := arguments.keys() - reads:
                what = f"a vLLM older than {_PER_SESSION}" if old else "vLLM-Omni"
                text = (
                    f"{self.name} runs {what}, whose /start_profile passes over {', '.join(sorted(unread))}. {REMEDY}"
                )
                raise TargetError(text, Outcome.REFUSED, REMEDY)
        self._native(await self.request("POST", "/start_profile", arguments, starts=True))

    async def stop_profile(self, **arguments: Any) -> None:
        """Call vLLM's route."""
        self._native(await self.request("POST", "/stop_profile", arguments))

    async def launched_with(self) -> Mapping[str, Any] | None:
        """Say at least whether there was one: vLLM has its routes only then, and no route tells more."""
        response = await self.request("GET", "/start_profile")
        return {} if response.status_code == HTTPStatus.NOT_FOUND else None

    async def is_vllm(self) -> bool:
        """Tell whether the server is vLLM's."""
        try:
            await self._version()
        except CaptureError:
            return False
        return True

    async def _version(self) -> Version:
        response = await self.request("GET", "/version")
        try:
            return Version(response.json()["version"])
        except (ValueError, KeyError, TypeError, InvalidVersion):
            text = f"{self.name}/version does not answer as a server of vLLM does."
            raise TargetError(text, Outcome.NOT_ENABLED) from None

    def _native(self, response: HttpResponse) -> None:
        if response.status_code == HTTPStatus.CONFLICT:
            text = f"{self.name}: somebody else's profile is active there; end it with /stop_profile."
            raise TargetError(text, Outcome.ALREADY_ACTIVE)
        self.expect_success(response)
