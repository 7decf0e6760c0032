"""Rejects requests to SGLang's own profiler that would lose data or terminate the server.

Servers that have loaded profdeck still serve ``/start_profile``. The rejected requests terminated a server or lost a
trace in SGLang 0.5.23.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profdeck_sglang import protocol

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import ProfileReq


_DEFAULT_DIRECTORY = "/tmp"  # noqa: S108  # SGLang's default


def check_request(owner: Any, request: ProfileReq, *, capturing: bool) -> str | None:
    """Return the reason to reject a request, or None if it may reach SGLang's profiler.

    A stop cancels a capture that waits for its first batch. SGLang would reject that stop and keep the capture pending.

    Args:
        owner: the scheduler's object that holds the profiler state.
        request: the request.
        capturing: True if a capture of profdeck is active in this scheduler.
    """
    is_v2 = _is_v2()
    if not protocol.is_start(request):
        return _check_stop(owner, is_v2=is_v2)
    if capturing:
        return "A capture of profdeck is active in this engine. Wait until it finishes, or stop it."
    if is_v2 and (not request.profile_by_stage or request.start_step or request.merge_profiles):
        return "SGLANG_PROFILE_V2 supports only profile_by_stage, without start_step and merge_profiles."
    if is_active(owner):
        return "Profiling is already in progress. Call /stop_profile first."
    if request.profile_by_stage and not request.num_steps:
        return "profile_by_stage requires num_steps. Without num_steps, the first batch would terminate the server."
    return _check_activities(request) or _check_directory(request)


def share_rejection(owner: Any, rejection: str | None) -> str | None:
    """Return the rejection of any rank that shares batches with this rank, preferably of this rank.

    All of these ranks must call this. If only some of them profiled, their stop would wait for the others forever.

    Args:
        owner: the scheduler's object that holds the profiler state.
        rejection: the result of `check_request` in this rank.
    """
    from torch import distributed

    group = owner.dp_tp_cpu_group
    if not distributed.is_initialized() or distributed.get_world_size(group) == 1:
        return rejection
    rejections: list[str | None] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(rejections, rejection, group=group)
    return rejection or next(filter(None, rejections), None)


def is_active(owner: Any) -> bool:
    """Return whether SGLang's profiler is recording or waits for its first batch."""
    return bool(_is_recording(owner) or _is_pending(owner))


def cancel_pending(owner: Any) -> None:
    """Cancel pending captures of SGLang's profiler. After a stop, SGLang keeps the other stage pending."""
    if _is_v2():
        owner._profile_manager.stage_based_trigger.stage_configs = {}  # noqa: SLF001  # SGLang has no public API
    else:
        owner.profile_by_stage = False
        owner.profiler_start_forward_ct = owner.profiler_target_forward_ct = None


def _is_v2() -> bool:
    """Return whether the engine uses the second of SGLang's two profiler implementations."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_PROFILE_V2.get())


def _is_recording(owner: Any) -> bool:
    if _is_v2():
        return owner._profile_manager.stage_based_trigger.running_state is not None  # noqa: SLF001  # no public API
    return bool(owner.profile_in_progress)


def _is_pending(owner: Any) -> bool:
    """Return whether a capture waits for the first batch of a stage, or for its first forward pass."""
    if _is_v2():
        return bool(owner._profile_manager.stage_based_trigger.stage_configs)  # noqa: SLF001  # no public API
    by_stage = owner.profile_by_stage and 0 in {owner.profiler_prefill_ct, owner.profiler_decode_ct}
    return by_stage or owner.profiler_start_forward_ct is not None


def _check_stop(owner: Any, *, is_v2: bool) -> str | None:
    if not _is_recording(owner) and _is_pending(owner):
        cancel_pending(owner)
        return "The pending capture was cancelled before its first batch; nothing was recorded."
    if is_v2:
        return "With SGLANG_PROFILE_V2, a stop would terminate the server. Captures by stage end automatically."
    return None


def _check_activities(request: ProfileReq) -> str | None:
    import torch

    activities = set(request.activities or ())
    for activity in ("MEM", "CUDA_PROFILER"):
        if activity in activities and not torch.cuda.is_available():
            return f"The activity {activity} requires CUDA, which this engine does not use."
    if "RPD" in activities and importlib.util.find_spec("rpdTracerControl") is None:
        return "The activity RPD requires the package rpdTracerControl, which is not installed."
    # SGLang ignores unknown activities. If none remain, torch's profiler raises.
    if activities and "CPU" not in activities and not torch.accelerator.is_available():
        return f"This engine can record only the activity CPU, not {', '.join(sorted(activities))}."
    return None


def _check_directory(request: ProfileReq) -> str | None:
    """Create and remove a file in the trace directory. If SGLang cannot write there at the stop, it terminates."""
    output_dir = request.output_dir
    if output_dir is None:
        output_dir = os.environ.get("SGLANG_TORCH_PROFILER_DIR", _DEFAULT_DIRECTORY)
    directory = Path(output_dir).expanduser()
    # Use a name of the same form as the traces' names, with the maximum length.
    prefix = f"{request.profile_prefix or ''}-{request.profile_id}-"
    suffix = "-TP-00-DP-00-PP-00-EP-00-EXTEND.trace.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=prefix, suffix=suffix):
            return None
    except (OSError, ValueError) as error:  # ValueError: a slash or null byte in a name
        return f"Cannot write a file with this output_dir, profile_prefix and profile_id: {error}."
