"""Keeps requests to SGLang's own profiler from losing data or ending the server.

Whoever calls ``/start_profile`` of a server that has loaded profdeck is answered by SGLang, unless the request is one
of those that were seen to end a server or to lose a trace (SGLang 0.5.23); then it is refused, with what to do.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import ProfileReq

    from profdeck_sglang.scheduler import Agent

_DEFAULT_DIRECTORY = "/tmp"  # noqa: S108  # SGLang's


def objection(owner: Any, request: ProfileReq, agent: Agent | None) -> str | None:
    """Say why a request must not reach SGLang's profiler; None if it may.

    A stop of what waits for its first batch, which SGLang refuses and keeps armed, cancels it here.

    Args:
        owner: what holds the profiler's state in the scheduler.
        request: the request.
        agent: our side in this scheduler.
    """
    from sglang.srt.environ import envs
    from sglang.srt.managers.io_struct import ProfileReqType

    second = bool(envs.SGLANG_PROFILE_V2.get())
    if request.req_type != ProfileReqType.START_PROFILE:
        return _wrong_stop(owner, second=second)
    objections = {
        "A capture of profdeck is active in this engine; wait until it has ended, or stop it.": (
            agent is not None and agent.recorder.active
        ),
        "With SGLANG_PROFILE_V2 only profile_by_stage without start_step and merge_profiles is possible.": (
            second and (not request.profile_by_stage or request.start_step or request.merge_profiles)
        ),
        "Profiling is already in progress. Call /stop_profile first.": (
            not second and (owner.profile_in_progress or _pending(owner))
        ),
        "profile_by_stage needs num_steps; without it the first batch ends the server.": (
            request.profile_by_stage and not request.num_steps
        ),
    }
    found = next((text for text, holds in objections.items() if holds), None)
    return found or _wrong_activities(request) or _wrong_directory(request)


def _wrong_stop(owner: Any, *, second: bool) -> str | None:
    if second:
        return "With SGLANG_PROFILE_V2 a stop ends the server; captures by stage end by themselves."
    if not owner.profile_in_progress and _pending(owner):
        _cancel(owner)
        return "The capture that waited for its first batch is cancelled; nothing was recorded."
    return None


def _wrong_activities(request: ProfileReq) -> str | None:
    import torch

    for activity in ("MEM", "CUDA_PROFILER"):
        if activity in (request.activities or ()) and not torch.cuda.is_available():
            return f"The activity {activity} needs CUDA, which this engine does not run on."
    return None


def _wrong_directory(request: ProfileReq) -> str | None:
    """Try to create a file where the traces will go: SGLang tries at the stop, and ends when it cannot."""
    directory = Path(request.output_dir or os.environ.get("SGLANG_TORCH_PROFILER_DIR", _DEFAULT_DIRECTORY)).expanduser()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return f"output_dir: nothing can be written to {directory} on this host: {error.strerror}."


def _pending(owner: Any) -> bool:
    """Tell whether a request waits for its first batch of a stage, or for its first forward pass."""
    by_stage = owner.profile_by_stage and 0 in {owner.profiler_prefill_ct, owner.profiler_decode_ct}
    return by_stage or owner.profiler_start_forward_ct is not None


def _cancel(owner: Any) -> None:
    owner.profile_by_stage = False
    owner.profiler_start_forward_ct = owner.profiler_target_forward_ct = None
