"""Recorder for engine processes that run no batches, such as the frontend. It records the CPU, as a separate role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from profdeck.backends.backend_setup import supported_options
from profdeck.base.identity import Identity
from profdeck.config.options import COMMON_OPTIONS
from profdeck.engine.worker.device import device_backend
from profdeck.engine.worker.recorder import EngineRecorder, handle_command
from profdeck.records.request import CaptureRequest, Reply

_DEVICE = "cpu"


class FrontendRecorder:
    """Recorder for an engine process that runs no batches. It records from start to stop, without iteration windows."""

    def __init__(self, name: str) -> None:
        """Args:
        name: kind of the process. Its role is ``ROLE-NAME``, and it records if ``engine`` in the request has a true
            value for this name.
        """
        self._name = name
        self._recorder = EngineRecorder(Identity(), _DEVICE, {})
        self._is_selected = False

    def command(self, command: str, payload: Mapping[str, Any]) -> Reply | None:
        """Execute a command; see `profdeck.engines.handle_command`. Send a start only after all workers accepted it.

        Returns:
            The reply, or None if the request does not record this process.
        """
        if command == "start":
            self._is_selected = bool(payload.get("engine", {}).get(self._name))
        if not (self._is_selected or self._recorder.result(payload.get("request", ""), payload.get("token"))):
            return None
        return handle_command(command, payload, self._recorder, self._start, self._recorder.stop)

    def _start(self, request: CaptureRequest) -> None:
        # Other options are for the workers' device. Some, such as memory snapshots, would access this device.
        supported = COMMON_OPTIONS & supported_options(device_backend(_DEVICE))
        options = {**request.options, "activities": [_DEVICE]}
        frontend_request = attrs.evolve(
            request,
            role=f"{request.role}-{self._name}",
            ranks="all",
            iterations=None,
            batch_kinds=(),
            options={name: value for name, value in options.items() if name in supported},
        )
        self._recorder.start(frontend_request, at_once=True)
