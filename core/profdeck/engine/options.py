"""Options of all engine backends, and their conversion to request options for the engine's workers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import attrs
from attrs import validators

from profdeck.config.options import COMMON_OPTIONS, CommonOptions
from profdeck.config.structuring import duration_validator, expand_path, unstructure
from profdeck.records.request import CaptureRequest


class Auth(StrEnum):
    """Access control of a server's routes."""

    TOKEN = "token"  # noqa: S105  # a value in the config
    NONE = "none"


@attrs.frozen(kw_only=True)
class EngineOptions(CommonOptions):
    """Options that all engine backends share. The options of `CommonOptions` apply to each worker."""

    collect: bool = True
    """At the stop, download files that ranks wrote on other hosts into the local run, through their server's routes.
    Default: on. Without a download, because it is off or the server lacks these routes, the capture reports the files'
    location. Files in a directory that the hosts share are not downloaded."""

    device_options: Mapping[str, Any] = attrs.field(factory=dict)
    """Options of the backend that records the device in each worker (`torch`, or `npu` on Ascend), such as
    `{gzip: false}`. Default: none."""

    native_directory: Path | None = attrs.field(default=None, converter=expand_path)
    """Trace directory of the engine's own profiler, as a path on this host. Only used if the engine's processes have
    not loaded profdeck. Default: the directory that the engine reports or that profdeck requests."""

    flush_timeout_s: float = attrs.field(default=1800.0, validator=duration_validator(validators.gt(0.0)))
    """Time limit for a stop, in seconds: all ranks must write their files, and downloads must finish. Default: 1800.
    After a timeout, the capture is partial and lists the late ranks."""

    rpc_timeout_s: float = attrs.field(default=120.0, validator=duration_validator(validators.gt(0.0)))
    """Time limit for each reply of the engine, in seconds. Default: 120. With less than 30, a stop can time out while
    the server waits for its files. Engine objects whose calls cannot be cancelled have no limit."""

    auth: Auth = Auth.TOKEN
    """Access control, in the config of a server: with `token` (default), clients must send the token in
    `PROFDECK_TOKEN`. With `none`, every client that reaches the port can write traces below `output`."""

    def __attrs_post_init__(self) -> None:
        """Validate combinations of options."""
        if self.activities is not None and not self.activities:
            raise ValueError("activities: the list is empty, so nothing would be recorded; remove the key")
        if common := sorted(COMMON_OPTIONS.intersection(self.device_options)):
            raise ValueError(f"device_options: set {', '.join(common)} next to device_options, not inside it")

    @property
    def merges_ranks(self) -> bool:
        """True if the traces of all ranks are merged into an additional file."""
        return False

    def for_processes(self) -> Mapping[str, Any]:
        """Return the request options for the engine's plugin in the engine's processes."""
        return {}

    def complete(self, request: CaptureRequest) -> CaptureRequest:
        """Return a copy of the request that contains these options, for the engine's processes."""
        options = unstructure(self)
        common = {name: options[name] for name in COMMON_OPTIONS if options[name] is not None}
        return attrs.evolve(
            request,
            options=common | dict(self.device_options),
            engine=self.for_processes(),
        )
