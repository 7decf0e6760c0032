"""What every backend of an engine understands, and what its options ask of the engine's workers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import attrs
from attrs import validators

from profdeck.config.options import COMMON_OPTIONS, CommonOptions
from profdeck.config.structuring import duration_validator, unstructure
from profdeck.records.request import CaptureRequest


class Auth(StrEnum):
    """Who may use the routes of a server."""

    TOKEN = "token"  # noqa: S105  # a word of the config
    NONE = "none"


@attrs.frozen(kw_only=True)
class EngineOptions(CommonOptions):
    """Options that all engine backends share. The options of `CommonOptions` apply to each worker."""

    collect: bool = True
    """At the stop, fetch what ranks have written where this host cannot see it into the run here, through the routes of
    their server. Default: on. Off, or without a server that has these routes, the files stay, and the capture says
    where. Nothing is fetched from a directory that the hosts share."""

    device_options: Mapping[str, Any] = attrs.field(factory=dict)
    """Options of the backend that records the device in each worker (`torch`, or `npu` on Ascend), such as
    `{gzip: false}`. Default: none."""

    native_directory: Path | None = None
    """Where the engine's own profiler writes its traces, as this host sees it. Only used with an engine whose
    processes have not loaded profdeck. Default: what the engine says or is told."""

    flush_timeout_s: float = attrs.field(default=1800.0, validator=duration_validator(validators.gt(0.0)))
    """How long a stop waits until the files of all ranks are whole, and those that it fetches are here, in seconds.
    Default: 1800. When it passes, the capture is partial and names the ranks."""

    rpc_timeout_s: float = attrs.field(default=120.0, validator=duration_validator(validators.gt(0.0)))
    """How long an engine may take for one answer, in seconds. Default: 120. Below 30 a stop may fail, since a server
    waits that long for its files. Engine objects whose calls cannot be given up have no limit."""

    auth: Auth = Auth.TOKEN
    """In the config of a server: `token` (default) lets only those use its routes who send what `PROFDECK_TOKEN` says;
    `none` lets everybody who reaches the port write traces below `output`."""

    def __attrs_post_init__(self) -> None:
        """Check the fields against each other."""
        if self.activities is not None and not self.activities:
            raise ValueError("activities: the list is empty, so nothing would be recorded; remove the key")
        if common := sorted(COMMON_OPTIONS.intersection(self.device_options)):
            raise ValueError(f"device_options: give {', '.join(common)} as options of their own, beside device_options")

    @property
    def merges_ranks(self) -> bool:
        """Whether the traces of all ranks are merged into one file beside them."""
        return False

    def for_processes(self) -> Mapping[str, Any]:
        """Return what only the engine's plugin reads in the processes of the engine."""
        return {}

    def complete(self, request: CaptureRequest) -> CaptureRequest:
        """Return a copy of the request with these options, to be sent to the engine's processes."""
        options = unstructure(self)
        common = {name: options[name] for name in COMMON_OPTIONS if options[name] is not None}
        return attrs.evolve(
            request,
            options=common | dict(self.device_options),
            engine=self.for_processes(),
        )
