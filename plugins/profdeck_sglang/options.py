"""The options of the SGLang backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs import validators

from profdeck.engines import CaptureRequest, EngineOptions


@attrs.frozen(kw_only=True)
class SglangOptions(EngineOptions):
    """Options of the backend `sglang`."""

    profile_by_stage: bool = False
    """Record prefill, decode and mixed batches separately: each series of batches of one kind is a separate capture,
    and the role's `iterations` are counted for each kind. Default: off; one capture contains all batches. The role's
    `batch_kinds` selects the kinds."""

    merge_profiles: bool = False
    """Merge the traces of all ranks into one file beside them, once they are whole. Default: off. Takes those that are
    on this host, or that `collect` fetches."""

    start_step: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(1)))
    """The first forward pass to record, as SGLang counts them from the launch of each scheduler (its `forward_ct`).
    Default: none, the role's `iterations.skip` counts from the start of the capture. Refused once that pass is over,
    and with captures by stage, which count for each kind of batches."""

    stage_min_batch_size: int = attrs.field(default=0, validator=validators.ge(0))
    """Minimum number of requests in a decode batch. Smaller batches are neither recorded nor counted, as with SGLang's
    `SGLANG_PROFILE_BY_STAGE_DECODE_MIN_BS`. Default: 0, no batch is skipped. Requires `profile_by_stage` or the role's
    `batch_kinds`."""

    detailed_annotations: bool = False
    """Name each iteration in the trace with the attention work of its prefill and decode requests, as SGLang's option
    of this name does, for roofline models. Default: off. Needs SGLang 0.5.19 or newer."""

    ignore_frontend: bool = True
    """Leave out the processes that tokenise and detokenise. Default: on. Off records their CPU as roles of their own,
    `<role>-tokenizer` and `<role>-detokenizer`."""

    def __attrs_post_init__(self) -> None:
        """Check the fields against each other."""
        super().__attrs_post_init__()
        if self.start_step is not None and self.profile_by_stage:
            raise ValueError("start_step: profile_by_stage counts prefill and decode apart; use iterations.skip")

    def complete(self, request: CaptureRequest) -> CaptureRequest:
        """Return a copy of the request with these options, to be sent to the engine's processes."""
        completed = super().complete(request)
        return completed.by_kind() if self.profile_by_stage else completed

    @property
    def merges_ranks(self) -> bool:
        """Whether the traces of all ranks are merged."""
        return self.merge_profiles

    def for_processes(self) -> Mapping[str, Any]:
        """Return what the schedulers' side and the frontends' read."""
        return {
            "start_step": self.start_step,
            "min_decode_batch": self.stage_min_batch_size,
            "detailed": self.detailed_annotations,
            "tokenizer": not self.ignore_frontend,
            "detokenizer": not self.ignore_frontend,
        }
