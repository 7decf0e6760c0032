"""Records a process of an engine that runs no batches, such as its frontend: its CPU, as a role of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from profdeck.backends.backend_setup import supported_options
from profdeck.base.identity import Identity
from profdeck.engine.worker.device import device_backend
from profdeck.engine.worker.recorder import EngineRecorder, handle_command
from profdeck.records.request import CaptureRequest, Reply

_DEVICE = "cpu"


class FrontendRecorder:
    """Recorder for an engine process that runs no batches. It records from start to stop, without iteration windows."""

    def __init__(self, name: str) -> None:
        """Args:
        name: what the process is in the engine; its role is the capture's, a hyphen and this. Requests whose
            ``engine`` says so under this name record it.
        """
        self._name = name
        self._recorder = EngineRecorder(Identity(), _DEVICE, {})
        self._asked = False

    def command(self, command: str, payload: Mapping[str, Any]) -> Reply | None:
        """Execute a command that no worker has refused; see `profdeck.engine.worker.recorder.handle_command`.

        Returns:
            The reply, or None if the current request does not record this process.
        """
        if command == "start":
            self._asked = bool(payload.get("engine", {}).get(self._name))
        if not self._asked:
            return None
        return handle_command(command, payload, self._recorder, self._start, self._recorder.stop)

    def _start(self, request: CaptureRequest) -> None:
        # The options are those of the workers' device, of which this process may have another one.
        supported = supported_options(device_backend(_DEVICE))
        options = {**request.options, "activities": [_DEVICE]}
        own = attrs.evolve(
            request,
            role=f"{request.role}-{self._name}",
            ranks="all",
            iterations=None,
            batch_kinds=(),
            options={name: value for name, value in options.items() if name in supported},
        )
        self._recorder.start(own, at_once=True)
