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
    """Merge the complete traces of all ranks into one file in the same directory. Default: off. Only traces on
    this host are merged; `collect` downloads the others first."""

    detailed_trace_annotation: bool = False
    """Include the attention work of prefill and decode requests in each iteration's name, like vLLM's option of the
    same name, for roofline models. Default: off; names contain the numbers of requests and tokens."""

    ignore_frontend: bool = True
    """Exclude the engine's frontend process, which handles HTTP, tokenization and request scheduling. Default: on. Off
    records its CPU activity as the separate role `<role>-frontend`."""

    stages: tuple[int, ...] | None = None
    """Stages of a vLLM-Omni pipeline to record. `ranks` selects ranks in each stage. Default: all stages. Engines
    without stages reject this option."""

    def complete(self, request: CaptureRequest) -> CaptureRequest:
        """Return a copy of the request with these options, to be sent to the engine's processes."""
        completed = super().complete(request)
        return completed.by_kind() if self.profile_by_stage else completed

    @property
    def merges_ranks(self) -> bool:
        """True if the capture merges the traces of all ranks."""
        return self.merge_profiles

    def for_processes(self) -> Mapping[str, Any]:
        """Return the ``engine`` field of requests, for the workers and the frontend."""
        fields = {"detailed": self.detailed_trace_annotation, "frontend": not self.ignore_frontend}
        return fields if self.stages is None else {**fields, "stages": list(self.stages)}
