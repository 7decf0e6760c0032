"""The backend `sglang`: what core builds and calls, in the process that controls the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

import attrs

from profdeck import Library
from profdeck.engines import CaptureRequest, ControlBackend, Engine, EngineCapture, EngineProfiler
from profdeck.plugin import ConfigError, RoleConfig
from profdeck_sglang.library import LIBRARY
from profdeck_sglang.options import SglangOptions

if TYPE_CHECKING:
    from profdeck_sglang.engines import SglangEngine


@attrs.define
class SglangBackend(ControlBackend[SglangOptions]):
    """Asks the schedulers of an SGLang engine to record: an engine object of this process, or a server."""

    name: ClassVar[str] = "sglang"
    Options: ClassVar[type[SglangOptions]] = SglangOptions
    health: ClassVar[str] = "/server_info"  # which the schedulers answer; its /health generates a token
    libraries: ClassVar[tuple[Library, ...]] = (LIBRARY,)

    def connect(self, target: object) -> Engine:
        """Take an `Engine` or its tokenizer manager, or the URL of a server."""
        if isinstance(target, str):
            from profdeck_sglang.server import SglangServer

            return SglangServer(target, timeout_s=self.options.rpc_timeout_s)
        from profdeck_sglang.engines import SglangObject

        self.libraries[0].require(self.name)
        return SglangObject(target, timeout_s=self.options.rpc_timeout_s)

    @classmethod
    async def recognises(cls, url: str) -> bool:
        """Tell whether a server is SGLang's, by its ``/server_info``."""
        from profdeck_sglang.server import SglangServer

        return await SglangServer(url, timeout_s=10).is_sglang()

    def check_role(self, role: RoleConfig) -> None:
        """Refuse what the schedulers would refuse or pass over."""
        super().check_role(role)
        kinds = self.options.profile_by_stage or role.batch_kinds
        if self.options.start_step is not None:
            if role.iterations is None:
                raise ConfigError("options.start_step: it needs the role's iterations.count, which ends the window")
            if role.batch_kinds:
                raise ConfigError("options.start_step: batch_kinds are counted separately; use iterations.skip")
            if role.iterations.skip:
                raise ConfigError("options.start_step: iterations.skip says as well where the window begins; give one")
        if self.options.stage_min_batch_size and not kinds:
            raise ConfigError("options.stage_min_batch_size: it needs profile_by_stage, or the role's batch_kinds")

    def native(self, engine: Engine, capture: EngineCapture, request: CaptureRequest) -> EngineProfiler:
        """Use SGLang's own profiler."""
        from profdeck_sglang.own_profiler import SglangCapture

        return SglangCapture(cast("SglangEngine", engine), self.options, capture, request)
