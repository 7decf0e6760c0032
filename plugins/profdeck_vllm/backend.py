"""The backend `vllm`, in the process that controls the engine."""

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
    """Captures a vLLM engine, given as an engine object of this process or as the URL of a server."""

    name: ClassVar[str] = "vllm"
    Options: ClassVar[type[VllmOptions]] = VllmOptions
    libraries: ClassVar[tuple[Library, ...]] = (LIBRARY,)

    def connect(self, target: object) -> Engine:
        """Return the engine of an `LLM`, `AsyncLLM`, `Omni` or `AsyncOmni` object, or of a server's URL."""
        if isinstance(target, str):
            from profdeck_vllm.server import VllmServer

            return VllmServer(target, timeout_s=self.options.rpc_timeout_s)
        from profdeck_vllm.omni import wrap_engine

        self.libraries[0].require(self.name)
        return wrap_engine(target)

    @classmethod
    async def recognises(cls, url: str) -> bool:
        """Return whether the server runs vLLM, according to its ``/version``."""
        from profdeck_vllm.server import VllmServer

        return await VllmServer(url, timeout_s=10).is_vllm()

    def native(self, engine: Engine, capture: EngineCapture, request: CaptureRequest) -> EngineProfiler:
        """Return a capture by vLLM's own profiler."""
        from profdeck_vllm.own_profiler import VllmCapture

        return VllmCapture(cast("VllmEngine", engine), self.options, capture, request)
