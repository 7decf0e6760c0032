"""Scheduler side of the SGLang backend. Each rank of the engine is one process with one scheduler.

An exception in the scheduler loop terminates the whole server, so the code that runs inside the loop never raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs

from profdeck import Identity
from profdeck.engines import CaptureRequest, EngineRecorder, Reply, handle_command
from profdeck.plugin import CaptureError, describe_error
from profdeck_sglang import guard, protocol
from profdeck_sglang.iterations import classify, describe, is_iteration
from profdeck_sglang.library import LIBRARY

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import ProfileReq
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger("profdeck")


class SchedulerAgent:
    """Handles capture commands in one scheduler process.

    ``Scheduler.run_batch`` is patched only while a capture is active.
    """

    def __init__(self, scheduler: Scheduler, server_args: ServerArgs) -> None:
        """Args:
        scheduler: the scheduler of this process. Its parallel groups must be initialized.
        server_args: launch arguments of the engine.
        """
        self._scheduler = scheduler
        self.recorder = EngineRecorder(
            scheduler_identity(scheduler, server_args), str(server_args.device), _sglang_version()
        )
        self._detokenizer_started = False
        """True once a capture has included the detokenizer, which must then also receive later commands."""
        self._has_warned = False
        self._min_decode_batch = 0
        # With pipeline parallelism, messages between stages can still be in flight when an iteration ends. Gloo
        # completes them on its own thread, where torch 2.13 writes to the profiler record of each message. If the
        # profiler has stopped by then, the record is freed memory and the process can crash. Operators between
        # iterations are therefore not recorded.
        self._record_only_iterations = int(server_args.pp_size) > 1
        self._set_detailed_annotations: Callable[[bool], None] | None = None

    def handle(self, request: ProfileReq, command: str, payload: dict[str, Any], replies: Path | None) -> Reply:
        """Run a command and return the reply; a rejected command is reported in ``Reply.error``.

        The reply is also written to the directory `replies`, unless that is None. If the detokenizer participates in
        captures, the command is forwarded to it.
        """
        reply = handle_command(command, payload, self.recorder, self.start, self.stop)
        forward = self._detokenizer_started
        if command == "start":
            # Do not forward a rejected start: the detokenizer may still be recording an earlier capture.
            forward = reply.error is None and bool(payload.get("engine", {}).get(protocol.DETOKENIZER))
            self._detokenizer_started = self._detokenizer_started or forward
        # All data-parallel replicas share one detokenizer, so only replica 0 forwards.
        if forward and not self.recorder.identity.parallel.get("dp"):
            self._forward_to_detokenizer(request)
        if replies is not None:
            protocol.write_reply(replies, protocol.rank_reply_name(reply.rank), reply)
        return reply

    def start(self, request: CaptureRequest) -> None:
        """Start a capture and patch ``run_batch`` until the capture ends.

        Raises:
            ProfdeckError: the request is rejected.
        """
        # Torch allows a second profiler to start; the first one to stop then receives the events of both.
        # SGLang >= 0.5.13 keeps the profiler state in `profiler_manager`, older versions in the scheduler.
        if guard.is_active(getattr(self._scheduler, "profiler_manager", self._scheduler)):
            raise CaptureError(
                "SGLang's own profiler is active in this engine. Wait until it finishes, or stop it with /stop_profile."
            )
        start_step = request.engine.get("start_step")
        if start_step is not None:
            request = self._apply_start_step(request, int(start_step))
        min_decode_batch = int(request.engine.get("min_decode_batch", 0))
        if min_decode_batch and not request.batch_kinds:
            raise CaptureError("options.stage_min_batch_size requires profile_by_stage or the role's batch_kinds.")
        set_detailed_annotations = _load_detailed_annotations() if request.engine.get("detailed") else None
        self.recorder.start(request)
        if self.recorder.active:
            self._min_decode_batch = min_decode_batch
            self._set_detailed_annotations = set_detailed_annotations
            self._patch_run_batch()

    def stop(self, reason: str | None) -> None:
        """Stop the capture and restore ``run_batch``.

        If the recorder defers the stop to the scheduler thread, both happen at the next iteration.

        Args:
            reason: why the capture ends early; None for a regular stop.
        """
        self._enable_record_function(enabled=True)  # Stopping the profiler records a clock anchor.
        self.recorder.stop(reason)
        if not self.recorder.active:
            self._restore_run_batch()

    def _forward_to_detokenizer(self, request: ProfileReq) -> None:
        """Send a request to the detokenizer. On all but the first rank of a replica, the sender is a no-op."""
        # SGLang >= 0.5.13 keeps the senders in `ipc_channels`, older versions in the scheduler.
        channels = getattr(self._scheduler, "ipc_channels", self._scheduler)
        try:
            channels.send_to_detokenizer.send_output(request, request)
        except Exception as error:  # noqa: BLE001  # the scheduler can record without the detokenizer
            logger.warning("Could not forward a command to the detokenizer: %s", describe_error(error))

    def _apply_start_step(self, request: CaptureRequest, start_step: int) -> CaptureRequest:
        """Convert `start_step`, an absolute forward pass number, to ``iterations.skip``."""
        completed_passes = int(self._scheduler.forward_ct)
        if request.iterations is None or request.batch_kinds:
            raise CaptureError(
                "options.start_step requires the role's iterations.count. It cannot be combined with batch_kinds or "
                "profile_by_stage, which count iterations separately for each batch kind."
            )
        if request.iterations.skip:
            raise CaptureError("options.start_step and iterations.skip both set the start of the window; set only one.")
        if start_step <= completed_passes:
            raise CaptureError(
                f"options.start_step={start_step}: this scheduler has already run {completed_passes} forward passes. "
                "Set a later pass, or use iterations.skip, which counts from the start of the capture."
            )
        skip = start_step - completed_passes - 1
        return attrs.evolve(request, iterations=attrs.evolve(request.iterations, skip=skip))

    def _patch_run_batch(self) -> None:
        scheduler, original_run_batch = self._scheduler, type(self._scheduler).run_batch

        def run_batch(batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
            self._enable_record_function(enabled=True)
            iteration_began = self._begin_iteration(batch)
            try:
                return original_run_batch(scheduler, batch, *args, **kwargs)
            finally:
                if iteration_began:
                    self.recorder.end()
                self._enable_record_function(enabled=False)
                if not self.recorder.active:
                    self._restore_run_batch()

        original_on_idle = getattr(type(scheduler), "on_idle", None)

        def on_idle(*args: Any, **kwargs: Any) -> Any:
            if not scheduler.waiting_queue:
                self.recorder.report_idle()
            return original_on_idle(scheduler, *args, **kwargs)  # type: ignore[misc]  # patched only if not None

        scheduler.run_batch = run_batch
        if original_on_idle is not None:
            scheduler.on_idle = on_idle
        self._enable_record_function(enabled=False)
        if self._set_detailed_annotations is not None:
            self._set_detailed_annotations(True)  # noqa: FBT003  # SGLang's signature

    def _restore_run_batch(self) -> None:
        self._enable_record_function(enabled=True)
        for name in ("run_batch", "on_idle"):
            vars(self._scheduler).pop(name, None)
        set_detailed_annotations, self._set_detailed_annotations = self._set_detailed_annotations, None
        if set_detailed_annotations is not None:
            set_detailed_annotations(False)

    def _enable_record_function(self, *, enabled: bool) -> None:
        """Turn the recording of operators on this thread on or off. Does nothing without pipeline parallelism."""
        if self._record_only_iterations:
            import torch

            torch.autograd._enable_record_function(enabled)  # noqa: SLF001  # torch has no public API for this

    def _begin_iteration(self, batch: ScheduleBatch) -> bool:
        """Report the start of an iteration to the recorder. Return False if the batch is not an iteration."""
        try:
            if not is_iteration(batch):
                return False
            batch_kind = classify(batch)
            if self._min_decode_batch and batch_kind == "decode" and batch.batch_size() < self._min_decode_batch:
                batch_kind = None  # Batches without a kind are neither recorded nor counted.
        except Exception as error:  # noqa: BLE001  # batch attributes may differ in untested SGLang releases
            self.recorder.stop(f"Could not read the batch: {describe_error(error)}.")
            return False
        self.recorder.begin(batch_kind, "" if batch_kind is None else self._label(batch))
        return True

    def _label(self, batch: ScheduleBatch) -> str:
        """Return the name of an iteration, or an empty string if this SGLang release lacks an attribute."""
        try:
            return describe(batch, self._scheduler)
        except Exception as error:  # noqa: BLE001  # SGLang annotates each forward pass, so the capture is still useful
            if not self._has_warned:
                self._has_warned = True
                logger.warning("Could not record the queue and the KV cache of iterations: %s", describe_error(error))
            return ""


def scheduler_identity(scheduler: Scheduler, server_args: ServerArgs) -> Identity:
    """Return the rank, world size and parallel coordinates of a scheduler.

    Ranks are numbered across all data-parallel replicas. With data-parallel attention, replicas are subgroups of the
    tensor-parallel ranks and add no ranks. Dimensions of size 1 have no coordinate.
    """
    ranks, mode = _parallel_ranks(scheduler), getattr(server_args, "disaggregation_mode", None)
    tp, pp, dp = int(server_args.tp_size), int(server_args.pp_size), int(server_args.dp_size)
    replicas = 1 if getattr(server_args, "enable_dp_attention", False) else dp
    dp_rank = int(getattr(ranks, "dp_rank", None) or 0)
    coordinates = {
        "dp": (dp_rank, dp),
        "pp": (int(ranks.pp_rank), pp),
        "tp": (int(ranks.tp_rank), tp),
        "ep": (int(getattr(ranks, "moe_ep_rank", None) or 0), int(getattr(server_args, "ep_size", 1))),
    }
    return Identity(
        rank=((dp_rank if replicas > 1 else 0) * pp + int(ranks.pp_rank)) * tp + int(ranks.tp_rank),
        world_size=replicas * pp * tp,
        parallel={name: index for name, (index, size) in coordinates.items() if size > 1},
        worker_type=mode if mode in {"prefill", "decode"} else None,
    )


def _parallel_ranks(scheduler: Scheduler) -> Any:
    """Return the object with the attributes ``tp_rank``, ``pp_rank`` etc.

    SGLang stores them in the scheduler (up to 0.5.12), in ``scheduler.ps`` (up to 0.5.20) or in ``get_parallel()``.
    """
    for owner in (getattr(scheduler, "ps", None), scheduler):
        if hasattr(owner, "tp_rank"):
            return owner
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def _load_detailed_annotations() -> Callable[[bool], None]:
    """Import SGLang's switch for detailed annotations.

    Raises:
        CaptureError: SGLang is older than 0.5.19.
    """
    try:
        from sglang.srt.model_executor.step_span_utils import set_detailed_annotations_enabled
    except ImportError:
        raise CaptureError("options.detailed_annotations requires SGLang 0.5.19 or newer.") from None
    return cast("Callable[[bool], None]", set_detailed_annotations_enabled)


def _sglang_version() -> dict[str, str]:
    return dict(filter(None, [LIBRARY.installed()]))
