"""The options of the vLLM backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from profdeck.engines import CaptureRequest, EngineOptions


@attrs.frozen(kw_only=True)
class VllmOptions(EngineOptions):
    """Options of the backend `vllm`."""

    profile_by_stage: bool = False
    """Record prefill, decode and mixed batches separately: each series of batches of one kind is a separate capture,
    and the role's `iterations` are counted for each kind. Default: off; one capture contains all batches. The role's
    `batch_kinds` selects the kinds."""

    merge_profiles: bool = False
    """Merge the traces of all ranks into one file beside them, once they are whole. Default: off. Takes those that are
    on this host, or that `collect` fetches."""

    detailed_trace_annotation: bool = False
    """Name each iteration in the trace with the attention work of its prefill and decode requests, as vLLM's option of
    this name does, for roofline models. Default: off, requests and tokens only."""

    ignore_frontend: bool = True
    """Leave out the process that holds the engine's frontend: tokenising, scheduling of requests, HTTP. Default: on.
    Off records its CPU as a role of its own, `<role>-frontend`."""

    stages: tuple[int, ...] | None = None
    """Stages of a vLLM-Omni pipeline to record, of each of which `ranks` are chosen. Default: all. Other engines have
    none."""

    def complete(self, request: CaptureRequest) -> CaptureRequest:
        """Return a copy of the request with these options, to be sent to the engine's processes."""
        completed = super().complete(request)
        return completed.by_kind() if self.profile_by_stage else completed

    @property
    def merges_ranks(self) -> bool:
        """Whether the traces of all ranks are merged."""
        return self.merge_profiles

    def for_processes(self) -> Mapping[str, Any]:
        """Return what the workers' side and the frontend's read."""
        asked = {"detailed": self.detailed_trace_annotation, "frontend": not self.ignore_frontend}
        return asked if self.stages is None else {**asked, "stages": list(self.stages)}
