"""The backend `sglang`, in the process that controls the engine."""

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
    """Captures an SGLang engine, given as an engine object of this process or as the URL of a server."""

    name: ClassVar[str] = "sglang"
    Options: ClassVar[type[SglangOptions]] = SglangOptions
    health: ClassVar[str] = (
        "/server_info"  # Includes a reply of the schedulers, unlike /health, which generates a token.
    )
    libraries: ClassVar[tuple[Library, ...]] = (LIBRARY,)

    def connect(self, target: object) -> Engine:
        """Return the target for an `Engine`, a tokenizer manager, or the URL of a server."""
        if isinstance(target, str):
            from profdeck_sglang.server import SglangServer

            return SglangServer(target, timeout_s=self.options.rpc_timeout_s)
        from profdeck_sglang.engines import SglangObject

        self.libraries[0].require(self.name)
        return SglangObject(target, timeout_s=self.options.rpc_timeout_s)

    @classmethod
    async def recognises(cls, url: str) -> bool:
        """Return whether the server runs SGLang, according to its ``/server_info``."""
        from profdeck_sglang.server import SglangServer

        return await SglangServer(url, timeout_s=10).is_sglang()

    def check_role(self, role: RoleConfig) -> None:
        """Check combinations of options that the schedulers would reject or ignore."""
        super().check_role(role)
        if self.options.start_step is not None:
            if role.iterations is None:
                raise ConfigError("options.start_step: requires the role's iterations.count, which ends the window")
            if role.batch_kinds:
                raise ConfigError(
                    "options.start_step: cannot be combined with batch_kinds, whose iterations are counted separately; "
                    "use iterations.skip"
                )
            if role.iterations.skip:
                raise ConfigError("options.start_step: iterations.skip also sets the start of the window; set only one")
        if self.options.stage_min_batch_size and not (self.options.profile_by_stage or role.batch_kinds):
            raise ConfigError("options.stage_min_batch_size: requires profile_by_stage or the role's batch_kinds")

    def native(self, engine: Engine, capture: EngineCapture, request: CaptureRequest) -> EngineProfiler:
        """Return a capture by SGLang's own profiler."""
        from profdeck_sglang.own_profiler import SglangCapture

        return SglangCapture(cast("SglangEngine", engine), self.options, capture, request)
