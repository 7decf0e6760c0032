"""The backend `vllm`: what core builds and calls, in the process that controls the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

import attrs

from profdeck import Library
from profdeck.engines import CaptureRequest, ControlBackend, Engine, EngineCapture, EngineProfiler
from profdeck_vllm.library import LIBRARY
from profdeck_vllm.options import VllmOptions

if TYPE_CHECKING:
    from profdeck_vllm.engines import VllmEngine


@attrs.define
class VllmBackend(ControlBackend[VllmOptions]):
    """Asks the workers of a vLLM engine to record: an engine object of this process, or a server."""

    name: ClassVar[str] = "vllm"
    Options: ClassVar[type[VllmOptions]] = VllmOptions
    libraries: ClassVar[tuple[Library, ...]] = (LIBRARY,)

    def connect(self, target: object) -> Engine:
        """Take an `LLM`, `AsyncLLM`, `Omni` or `AsyncOmni` object, or the URL of a server."""
        if isinstance(target, str):
            from profdeck_vllm.server import VllmServer

            return VllmServer(target, timeout_s=self.options.rpc_timeout_s)
        from profdeck_vllm.omni import engine_of

        self.libraries[0].require(self.name)
        return engine_of(target)

    @classmethod
    async def recognises(cls, url: str) -> bool:
        """Tell whether a server is vLLM's, by its ``/version``."""
        from profdeck_vllm.server import VllmServer

        return await VllmServer(url, timeout_s=10).is_vllm()

    def native(self, engine: Engine, capture: EngineCapture, request: CaptureRequest) -> EngineProfiler:
        """Use vLLM's own profiler."""
        from profdeck_vllm.own_profiler import VllmCapture

        return VllmCapture(cast("VllmEngine", engine), self.options, capture, request)
