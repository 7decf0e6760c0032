"""vLLM's HTTP server as a target. Uses profdeck's routes if the server has them, otherwise vLLM's profiling routes."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from packaging.version import InvalidVersion, Version

from profdeck.engines import HttpEngine, HttpResponse, Outcome
from profdeck.plugin import CaptureError, TargetError
from profdeck_vllm.engines import REMEDY, VllmEngine

_READS_ARGUMENTS_SINCE = Version("0.32.0")
"""First version whose /start_profile reads the request body. Older versions ignore it."""
_OMNI_ROUTE = "/v1/videos"
"""A route that only servers of vLLM-Omni have."""


class VllmServer(HttpEngine, VllmEngine):
    """A vLLM server, given by URL."""

    async def supports_trace_prefix(self) -> bool:
        """Return whether /start_profile reads a prefix; it does since vLLM 0.32.0, except in vLLM-Omni."""
        return await self._read_version() >= _READS_ARGUMENTS_SINCE and not await self.is_pipeline()

    async def is_pipeline(self) -> bool:
        """Return whether the server has a route that only vLLM-Omni has."""
        return (await self.request("GET", _OMNI_ROUTE)).status_code != HTTPStatus.NOT_FOUND

    async def start_profile(self, **arguments: Any) -> None:
        """Call /start_profile.

        Raises:
            TargetError: the server would ignore an argument, or its profiler is already active.
        """
        if arguments:
            is_old = await self._read_version() < _READS_ARGUMENTS_SINCE
            supported = {"stages"} if await self.is_pipeline() else set() if is_old else set(arguments)
            if ignored := arguments.keys() - supported:
                server = f"a vLLM older than {_READS_ARGUMENTS_SINCE}" if is_old else "vLLM-Omni"
                message = (
                    f"{self.name} runs {server}, whose /start_profile ignores {', '.join(sorted(ignored))}. {REMEDY}"
                )
                raise TargetError(message, Outcome.REFUSED, REMEDY)
        self._check_response(await self.request("POST", "/start_profile", arguments, starts=True))

    async def stop_profile(self, **arguments: Any) -> None:
        """Call /stop_profile."""
        self._check_response(await self.request("POST", "/stop_profile", arguments))

    async def read_launch_config(self) -> Mapping[str, Any] | None:
        """Return ``{}`` if the profiler is disabled, else None: the server has no route that returns the options."""
        response = await self.request("GET", "/start_profile")
        return {} if response.status_code == HTTPStatus.NOT_FOUND else None

    async def is_vllm(self) -> bool:
        """Return whether the server runs vLLM."""
        try:
            await self._read_version()
        except CaptureError:
            return False
        return True

    async def _read_version(self) -> Version:
        response = await self.request("GET", "/version")
        try:
            return Version(response.json()["version"])
        except (ValueError, KeyError, TypeError, InvalidVersion):
            message = f"{self.name}/version did not return a vLLM version. Check that the URL is that of a vLLM server."
            raise TargetError(message, Outcome.NOT_ENABLED) from None

    def _check_response(self, response: HttpResponse) -> None:
        if response.status_code == HTTPStatus.CONFLICT:
            message = f"{self.name}: another profile is already active. Stop it with /stop_profile."
            raise TargetError(message, Outcome.ALREADY_ACTIVE)
        self.expect_success(response)
