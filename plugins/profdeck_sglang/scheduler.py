"""The side of the backend that runs in each scheduler of an engine: one process per rank.

An exception in a scheduler's loop ends the whole server: nothing here raises into it.
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
from profdeck_sglang.iterations import kind, runs
from profdeck_sglang.library import LIBRARY

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import ProfileReq
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger("profdeck")


class SchedulerAgent:
    """Records in one scheduler."""

    def __init__(self, scheduler: Scheduler, server_args: ServerArgs) -> None:
        """Args:
        scheduler: the scheduler of this process, whose parallel groups exist.
        server_args: what the engine was launched with.
        """
        self._scheduler = scheduler
        self.recorder = EngineRecorder(place(scheduler, server_args), str(server_args.device), _versions())
        self._detokenizer = False
        """Whether the detokenizer was ever asked to record, and so may have something to end."""
        self._min_decode_batch = 0
        # Pipeline stages leave messages under way when an iteration ends. Gloo finishes them on a thread of its own,
        # and torch (2.13) then writes to the record of each that it marked, also when the profiler has stopped and
        # freed it: processes died of that. So what is between the iterations is not marked there.
        self._only_iterations = int(server_args.pp_size) > 1
        self._annotate: Callable[[bool], None] | None = None

    def handle(self, request: ProfileReq, command: str, payload: dict[str, Any], replies: Path | None) -> Reply:
        """Carry out a command, leave the reply where all do, and pass the command on to the detokenizer."""
        reply = handle_command(command, payload, self.recorder, self.start, self.stop)
        concerned = self._detokenizer
        if command == "start":  # a start that is refused here must not reach what records there
            concerned = reply.error is None and bool(payload.get("engine", {}).get(protocol.DETOKENIZER))
            self._detokenizer = self._detokenizer or concerned
        if concerned and not self.recorder.identity.parallel.get("dp"):  # one detokenizer for all replicas
            self._pass_on(request)
        if replies is not None:
            protocol.leave_reply(replies, protocol.rank_name(reply.rank), reply)
        return reply

    def start(self, request: CaptureRequest) -> None:
        """Take a request and watch the iterations until it has ended.

        Raises:
            ProfdeckError: it is refused.
        """
        # Torch lets a second profiler begin, and the one that ends first gets what both have recorded.
        if guard.busy(getattr(self._scheduler, "profiler_manager", self._scheduler)):  # its own since 0.5.13
            raise CaptureError(
                "SGLang's own profiler is active in this engine; wait until it has ended, or stop it by /stop_profile."
            )
        start_step = request.engine.get("start_step")
        if start_step is not None:
            request = self._from_forward_pass(request, int(start_step))
        min_decode_batch = int(request.engine.get("min_decode_batch", 0))
        if min_decode_batch and not request.batch_kinds:
            raise CaptureError("options.stage_min_batch_size needs profile_by_stage, or the role's batch_kinds.")
        annotate = _detailed_annotations() if request.engine.get("detailed") else None
        self.recorder.start(request)
        if self.recorder.active:
            self._min_decode_batch = min_decode_batch
            self._annotate = annotate
            self._wrap()

    def stop(self, reason: str | None) -> None:
        """End the request and leave the scheduler as it was, now or, if that must wait, at its next iteration."""
        self._mark(on=True)  # the end of a recording is marked
        self.recorder.stop(reason)
        if not self.recorder.active:
            self._unwrap()

    def _pass_on(self, request: ProfileReq) -> None:
        """Send a command to the detokenizer, which the first ranks write to; the senders of the others are dummies."""
        channels = getattr(self._scheduler, "ipc_channels", self._scheduler)  # an object of its own since 0.5.13
        try:
            channels.send_to_detokenizer.send_output(request, request)
        except Exception as error:  # noqa: BLE001  # the detokenizer stays silent
            logger.warning("The detokenizer cannot be reached: %s", describe_error(error))

    def _from_forward_pass(self, request: CaptureRequest, first: int) -> CaptureRequest:
        done = int(self._scheduler.forward_ct)
        if request.iterations is None or request.batch_kinds:
            raise CaptureError(
                "options.start_step needs the role's iterations.count, and cannot be combined with batch_kinds or "
                "profile_by_stage, which count for each kind of batches."
            )
        if request.iterations.skip:
            raise CaptureError("options.start_step and iterations.skip both say where the window begins; give one.")
        if first <= done:
            raise CaptureError(
                f"options.start_step={first}: this scheduler has done {done} forward passes already. Name a later one, "
                "or use iterations.skip, which counts from the start of the capture."
            )
        return attrs.evolve(request, iterations=attrs.evolve(request.iterations, skip=first - done - 1))

    def _wrap(self) -> None:
        scheduler, run = self._scheduler, type(self._scheduler).run_batch

        def run_batch(batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
            self._mark(on=True)
            begun = self._begin(batch)
            try:
                return run(scheduler, batch, *args, **kwargs)
            finally:
                if begun:
                    self.recorder.end()
                self._mark(on=False)
                if not self.recorder.active:
                    self._unwrap()

        scheduler.run_batch = run_batch
        self._mark(on=False)
        if self._annotate is not None:
            self._annotate(True)  # noqa: FBT003  # SGLang's

    def _mark(self, *, on: bool) -> None:
        """Let torch mark operations on this thread, or not."""
        if self._only_iterations:
            import torch

            torch.autograd._enable_record_function(on)  # noqa: SLF001  # it has no other way

    def _unwrap(self) -> None:
        self._mark(on=True)
        vars(self._scheduler).pop("run_batch", None)
        annotate, self._annotate = self._annotate, None
        if annotate is not None:
            annotate(False)  # noqa: FBT003  # as above

    def _begin(self, batch: ScheduleBatch) -> bool:
        try:
            if not runs(batch):
                return False
            batch_kind = kind(batch)
            if self._min_decode_batch and batch_kind == "decode" and batch.batch_size() < self._min_decode_batch:
                batch_kind = None
        except Exception as error:  # noqa: BLE001  # an SGLang of which we know too little
            self.recorder.stop(f"The batch cannot be read: {describe_error(error)}.")
            return False
        # SGLang marks every forward pass in the trace by itself, as step[DECODE bs=2].
        self.recorder.begin(batch_kind, "")
        return True


def place(scheduler: Scheduler, server_args: ServerArgs) -> Identity:
    """Return the place of a scheduler in its engine.

    Ranks count over all data-parallel replicas, except with data-parallel attention, whose replicas share the ranks
    of tensor parallelism.
    """
    ranks = _ranks(scheduler)
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
    )


def _ranks(scheduler: Scheduler) -> Any:
    """Return what knows the ranks of a process: the scheduler up to 0.5.12, its ``ps`` up to 0.5.20."""
    for owner in (getattr(scheduler, "ps", None), scheduler):
        if hasattr(owner, "tp_rank"):
            return owner
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def _detailed_annotations() -> Callable[[bool], None]:
    try:
        from sglang.srt.model_executor.step_span_utils import set_detailed_annotations_enabled
    except ImportError:
        text = "options.detailed_annotations: this release of SGLang has none; use 0.5.19 or newer."
        raise CaptureError(text) from None
    return cast("Callable[[bool], None]", set_detailed_annotations_enabled)


def _versions() -> dict[str, str]:
    return dict(filter(None, [LIBRARY.installed()]))
