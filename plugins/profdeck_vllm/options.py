"""The options of the vLLM backend, and what they ask of an engine's workers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import attrs
from attrs import validators

from profdeck import CommonOptions
from profdeck.engine.request import Batch, CaptureRequest
from profdeck.strict import unstructure


class Auth(StrEnum):
    """Who may use the routes of a server."""

    TOKEN = "token"  # noqa: S105  # a word of the config
    NONE = "none"


@attrs.frozen(kw_only=True)
class VllmOptions(CommonOptions):
    """Options of the backend `vllm`. Those of `CommonOptions` hold for each worker."""

    profile_by_stage: bool = False
    """Record prefill, decode and mixed batches apart: each series of one kind is a capture of its own, and the role's
    `iterations` count for each kind by itself. Default: off, one capture of all. The role's `stages` chooses kinds."""

    detailed_trace_annotation: bool = False
    """Name each iteration in the trace with the attention work of its prefill and decode requests, as vLLM's option of
    this name does, for roofline models. Default: off, requests and tokens only."""

    ignore_frontend: bool = True
    """Leave out the process that holds the engine's frontend: tokenising, scheduling of requests, HTTP. Default: on.
    Off records its CPU as a role of its own, `<role>-frontend`."""

    merge_profiles: bool = False
    """Merge the traces of all ranks into one file beside them, once they are whole. Default: off. Needs the files on
    this host."""

    stages: tuple[int, ...] | None = None
    """Stages of a vLLM-Omni pipeline to record. Default: all. Other engines have none."""

    device_options: Mapping[str, Any] = attrs.field(factory=dict)
    """Options of the backend that records the device in each worker (`torch`, or `npu` on Ascend), such as
    `{gzip: false}`. Default: none."""

    native_directory: Path | None = None
    """Where a server's own profiler writes its traces (its `torch_profiler_dir`), as this host sees it. Only used with
    a server that was launched with a profiler and without profdeck. Default: unknown."""

    flush_timeout_s: float = attrs.field(default=1800.0, validator=validators.gt(0.0))
    """How long a stop waits until the files of all ranks are whole, in seconds. Default: 1800. When it passes, the
    capture is partial and names the ranks."""

    rpc_timeout_s: float = attrs.field(default=120.0, validator=validators.gt(0.0))
    """How long a server may take for one answer, in seconds. Default: 120. Below 30 a stop may fail, since a server
    waits that long for its files. Engine objects have no limit."""

    auth: Auth = Auth.TOKEN
    """In the config of a server: `token` (default) lets only those use its routes who send what `PROFDECK_TOKEN` says;
    `none` lets everybody who reaches the port write traces below `output`."""

    def __attrs_post_init__(self) -> None:
        """Check the fields against each other."""
        if self.activities is not None and not self.activities:
            raise ValueError("activities: the list is empty, so nothing would be recorded; remove the key")
        if common := sorted(_COMMON.intersection(self.device_options)):
            raise ValueError(f"device_options: give {', '.join(common)} as options of their own, beside device_options")


_COMMON = frozenset(field.name for field in attrs.fields(CommonOptions))


def complete(request: CaptureRequest, options: VllmOptions) -> CaptureRequest:
    """Add what the options ask of the workers to a request."""
    by_stage = tuple(Batch) if options.profile_by_stage else ()
    common = {name: value for name, value in unstructure(options).items() if name in _COMMON and value is not None}
    return attrs.evolve(
        request,
        stages=request.stages or by_stage,
        options=common | dict(options.device_options),
        engine={"detailed": options.detailed_trace_annotation, "frontend": not options.ignore_frontend},
    )
