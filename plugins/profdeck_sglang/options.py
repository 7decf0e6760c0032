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
    """Merge the complete traces of all ranks into one file in the same directory. Default: off. Only traces on
    this host are merged; `collect` downloads the others first."""

    start_step: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(1)))
    """First forward pass to record, counted from the launch of each scheduler (SGLang's `forward_ct`). Default: none;
    the role's `iterations.skip` counts from the start of the capture. Rejected after that pass, and together with
    `batch_kinds` or `profile_by_stage`, which count each batch kind separately."""

    stage_min_batch_size: int = attrs.field(default=0, validator=validators.ge(0))
    """Minimum number of requests in a decode batch. Smaller batches are neither recorded nor counted, as with SGLang's
    `SGLANG_PROFILE_BY_STAGE_DECODE_MIN_BS`. Default: 0, no batch is skipped. Requires `profile_by_stage` or the role's
    `batch_kinds`."""

    detailed_annotations: bool = False
    """Include the attention work of prefill and decode requests in each iteration's name, like SGLang's option of the
    same name, for roofline models. Default: off. Requires SGLang 0.5.19 or newer."""

    ignore_frontend: bool = True
    """Exclude the tokenizer and detokenizer processes. Default: on. Off records their CPU activity as the separate
    roles `<role>-tokenizer` and `<role>-detokenizer`."""

    def __attrs_post_init__(self) -> None:
        """Check combinations of options."""
        super().__attrs_post_init__()
        if self.start_step is not None and self.profile_by_stage:
            raise ValueError("start_step: profile_by_stage counts prefill and decode separately; use iterations.skip")

    def complete(self, request: CaptureRequest) -> CaptureRequest:
        """Return a copy of the request with these options, to be sent to the engine's processes."""
        completed = super().complete(request)
        return completed.by_kind() if self.profile_by_stage else completed

    @property
    def merges_ranks(self) -> bool:
        """True if the capture merges the traces of all ranks."""
        return self.merge_profiles

    def for_processes(self) -> Mapping[str, Any]:
        """Return the ``engine`` field of requests, for the schedulers and the frontends."""
        return {
            "start_step": self.start_step,
            "min_decode_batch": self.stage_min_batch_size,
            "detailed": self.detailed_annotations,
            "tokenizer": not self.ignore_frontend,
            "detokenizer": not self.ignore_frontend,
        }
