"""Keeps requests to SGLang's own profiler from losing data or ending the server.

SGLang answers a call of ``/start_profile`` of a server that has loaded profdeck, unless the request is one
of those that were seen to end a server or to lose a trace (SGLang 0.5.23); then it is refused, with what to do.
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


_DEFAULT_DIRECTORY = "/tmp"  # noqa: S108  # SGLang's


def objection(owner: Any, request: ProfileReq, *, capturing: bool) -> str | None:
    """Say why a request must not reach SGLang's profiler; None if it may.

    A stop of what waits for its first batch, which SGLang refuses and keeps armed, cancels it here.

    Args:
        owner: what holds the profiler's state in the scheduler.
        request: the request.
        capturing: whether profdeck captures in this scheduler.
    """
    second = _is_second()
    if not protocol.starts(request):
        return _wrong_stop(owner, second=second)
    objections = {
        "A capture of profdeck is active in this engine; wait until it has ended, or stop it.": (capturing),
        "With SGLANG_PROFILE_V2 only profile_by_stage without start_step and merge_profiles is possible.": (
            second and (not request.profile_by_stage or request.start_step or request.merge_profiles)
        ),
        "Profiling is already in progress. Call /stop_profile first.": busy(owner),
        "profile_by_stage needs num_steps; without it the first batch ends the server.": (
            request.profile_by_stage and not request.num_steps
        ),
    }
    found = next((text for text, holds in objections.items() if holds), None)
    return found or _wrong_activities(request) or _wrong_directory(request)


def agreed(owner: Any, own: str | None) -> str | None:
    """Let all ranks that share batches refuse what one of them does: one that stops waits for the others, for ever.

    Args:
        owner: what holds the profiler's state in the scheduler.
        own: what this rank objects to, see `objection`.
    """
    from torch import distributed

    group = owner.dp_tp_cpu_group
    if not distributed.is_initialized() or distributed.get_world_size(group) == 1:
        return own
    answers: list[str | None] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(answers, own, group=group)
    return own or next(filter(None, answers), None)


def busy(owner: Any) -> bool:
    """Tell whether SGLang's profiler records, or waits for its first batch."""
    return bool(_records(owner) or _waits(owner))


def cancel(owner: Any) -> None:
    """Let SGLang's profiler not wait any more: its own stop leaves the other stage armed."""
    if _is_second():
        owner._profile_manager.stage_based_trigger.stage_configs = {}  # noqa: SLF001  # it has no other way
    else:
        owner.profile_by_stage = False
        owner.profiler_start_forward_ct = owner.profiler_target_forward_ct = None


def _is_second() -> bool:
    """Tell whether the engine has the second of SGLang's two profilers."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_PROFILE_V2.get())


def _records(owner: Any) -> bool:
    if _is_second():
        return owner._profile_manager.stage_based_trigger.running_state is not None  # noqa: SLF001  # as above
    return bool(owner.profile_in_progress)


def _waits(owner: Any) -> bool:
    """Tell whether a request waits for its first batch of a stage, or for its first forward pass."""
    if _is_second():
        return bool(owner._profile_manager.stage_based_trigger.stage_configs)  # noqa: SLF001  # as above
    by_stage = owner.profile_by_stage and 0 in {owner.profiler_prefill_ct, owner.profiler_decode_ct}
    return by_stage or owner.profiler_start_forward_ct is not None


def _wrong_stop(owner: Any, *, second: bool) -> str | None:
    if not _records(owner) and _waits(owner):
        cancel(owner)
        return "The capture that waited for its first batch is cancelled; nothing was recorded."
    if second:
        return "With SGLANG_PROFILE_V2 a stop ends the server; captures by stage end by themselves."
    return None


def _wrong_activities(request: ProfileReq) -> str | None:
    import torch

    asked = set(request.activities or ())
    for activity in ("MEM", "CUDA_PROFILER"):
        if activity in asked and not torch.cuda.is_available():
            return f"The activity {activity} needs CUDA, which this engine does not run on."
    if "RPD" in asked and importlib.util.find_spec("rpdTracerControl") is None:
        return "The activity RPD needs the package rpdTracerControl, which is not installed here."
    # Other names are passed over, and with none left torch's profiler raises.
    if asked and "CPU" not in asked and not torch.accelerator.is_available():
        return f"Only the activity CPU can be recorded here, and {', '.join(sorted(asked))} cannot."
    return None


def _wrong_directory(request: ProfileReq) -> str | None:
    """Try to create a file where the traces will go: SGLang tries at the stop, and ends when it cannot."""
    given = request.output_dir
    if given is None:
        given = os.environ.get("SGLANG_TORCH_PROFILER_DIR", _DEFAULT_DIRECTORY)
    directory = Path(given).expanduser()
    # A name like those of the traces, as long as they may become.
    prefix = f"{request.profile_prefix or ''}-{request.profile_id}-"
    suffix = "-TP-00-DP-00-PP-00-EP-00-EXTEND.trace.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=prefix, suffix=suffix):
            return None
    except (OSError, ValueError) as error:  # such as a slash or a null byte in a name
        return f"output_dir, profile_prefix and profile_id name no file that can be written here: {error}."
