"""Drives one ``torch.profiler.profile`` for one capture and writes what it recorded."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import attrs
import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from profdeck import Activity, Artifact, Capture, ClockAnchor, Unit
from profdeck.plugin import (
    CLOCK_ANCHOR,
    CaptureCycles,
    CyclePart,
    OneAtATime,
    Output,
    RivalWatch,
    TraceError,
    WindowPhase,
    recording_metadata,
)
from profdeck_torch import other_profilers
from profdeck_torch.options import TorchOptions
from profdeck_traces import Compressed, compress_in_child, compress_trace

_one = OneAtATime("torch")

_ACTIVITIES = {Activity.CPU: ProfilerActivity.CPU, Activity.CUDA: ProfilerActivity.CUDA}


class TorchRecorder:
    """Records one capture: a cycle per window cycle, or one cycle for all of its global steps.

    Steps in the trace are named ``ProfilerStep#<global step>``, or ``ProfilerStep#<mini-batch>`` in a window.
    """

    def __init__(
        self,
        options: TorchOptions,
        activities: Sequence[Activity],
        capture: Capture,
        outputs: list[Output],
    ) -> None:
        """Args:
        options: what to record.
        activities: what to observe.
        capture: where to and which steps.
        outputs: where artifacts are added as they are written, and what writes the last one.
        """
        self.outputs = outputs
        self._options = options
        self._activities = [_ACTIVITIES[activity] for activity in activities]
        self._capture = capture
        self._cycles = CaptureCycles(capture, self._make, self._write, outputs)
        self._others = RivalWatch(other_profilers.BEGINNINGS, self._give_way)
        self._thread = threading.get_ident()
        self._ended = False
        self._cycle: _Cycle | None = None
        """The one that was made last."""

    def start(self) -> None:
        """Begin.

        Raises:
            CaptureError: another profiler is active in this process.
            LeaseError: another capture is recorded in this process.
        """
        _one.acquire(self._capture)
        try:
            self._thread = threading.get_ident()
            self._capture.annotate = _annotate
            with self._others.ours():
                self._cycles.start()
            self._others.__enter__()
        except BaseException:
            _one.release(self._capture)
            raise

    def step(self) -> None:
        """Pass from one global step or mini-batch to the next."""
        if not self._ended:
            with self._others.ours():
                self._cycles.step()

    def stop(self) -> None:
        """End, and write what was recorded since the last cycle ended."""
        self._others.__exit__()
        try:
            self._end()
        finally:
            _one.release(self._capture)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            with self._others.ours():
                self._cycles.stop()

    def _give_way(self, _: str) -> None:
        """End the recording, as another profiler begins: torch can record one thing at a time."""
        if self._ended or self._cycle is None or self._cycle.lost:
            return
        name = threading.current_thread().name
        self._capture.report_problem(
            f"Another profiler of torch began in this process (thread {name}), which ends a recording. "
            "Remove it, or capture other steps than it does."
        )
        if threading.get_ident() == self._thread:  # torch's profilers are of a thread
            self._end()
        else:
            self._cycle.lost = True

    def _make(self, position: int) -> _Cycle:
        other_profilers.ensure_none()
        self._cycle = _Cycle(self._profile(), position, recording_metadata(self._capture, self._options))
        return self._cycle

    def _profile(self) -> profile:
        # A new one per cycle: used again it warns at every cycle and, where warnings are errors, crashes at stop.
        return profile(
            activities=self._activities,
            schedule=self._action,
            record_shapes=self._options.record_shapes,
            with_stack=self._options.with_stack,
            profile_memory=self._options.profile_memory,
            with_flops=self._options.with_flops,
            with_modules=self._options.with_modules,
            # Without this flag, torch 2.11 and 2.12 log a warning about cleared events.
            acc_events=True,
        )

    def _action(self, number: int) -> ProfilerAction:
        # profile() asks for its number 0 when it is built, wherever the cycle begins.
        warming = self._cycles.phase(max(number, self._cycles.position)) is WindowPhase.WARMUP
        return ProfilerAction.WARMUP if warming else ProfilerAction.RECORD

    def _write(self, cycle: _Cycle, part: CyclePart) -> Artifact:
        path = self._capture.artifact_path(".trace.json.gz" if self._options.gzip else ".trace.json", part.name)
        iterations = part.iterations
        # The trace repeats the path it is exported to: only the directory is a temporary one.
        raw = path.with_name(f".{path.name}.tmp") / path.name.removesuffix(".gz")
        if cycle.lost:
            text = "another profiler of torch ended the recording, and nothing is left of it"
            return Artifact(path=path, whole=False, problem=text, iterations=iterations)
        try:
            raw.parent.mkdir()
            cycle.export(raw)
            if not raw.exists():
                free = shutil.disk_usage(raw.parent).free
                raise OSError(f"torch left no file; {free:,} bytes are free on that disk")  # noqa: TRY301  # as others
            # In an engine this is a thread beside the one that serves, and both need the interpreter.
            pack = compress_in_child if self._capture.unit is Unit.ENGINE_ITERATION else compress_trace
            packed = pack(raw, path, gzip=self._options.gzip, anchor_name=CLOCK_ANCHOR)
        except (OSError, RuntimeError, TraceError) as error:
            text = f"the trace could not be written: {type(error).__name__}: {error}"
            return Artifact(path=path, whole=False, problem=text, iterations=iterations)
        finally:
            shutil.rmtree(raw.parent, ignore_errors=True)
        return _artifact(path, packed, cycle.clock, iterations)


class _Cycle:
    """One ``torch.profiler.profile`` from its warm-up to its end."""

    def __init__(self, prof: profile, position: int, about: str) -> None:
        self.clock: list[ClockAnchor] = []
        self.first: int | None = None
        """The first position that was recorded."""
        self.lost = False
        """Whether the recording was ended by others, which leaves nothing that could be exported."""
        self._profile = prof
        self._began_ns = 0
        prof.preset_metadata_json("profdeck", about)
        prof.step_num = position  # its marks say ProfilerStep#<step_num>

    def start(self) -> None:
        self._profile.start()
        # torch has already checked the flag. If the flag remains set, `stop` parses every event in Python.
        self._profile.profiler.acc_events = False
        self._moved()

    def step(self) -> None:
        self._profile.step()
        self._moved()

    def stop(self) -> None:
        if self.lost:
            other_profilers.leave_open()
            return
        if self.first is not None:
            self._mark_clock()
        if not torch.cuda.is_initialized():
            # `stop` synchronizes `use_device`, and that call would create a CUDA context in this process.
            self._profile.profiler.use_device = None
        self._profile.stop()
        result = self._profile.profiler and self._profile.profiler.kineto_results
        # Kineto says when its session began. Where there was none the result is empty: its export ends the process.
        self.lost = result is None or not 0 < result.trace_start_ns() <= self._began_ns

    def abandon(self) -> None:
        """Nothing is left unless it is exported."""

    def export(self, path: Path) -> None:
        self._profile.export_chrome_trace(str(path))

    def _moved(self) -> None:
        if self.first is None and self._profile.current_action is ProfilerAction.RECORD:
            self.first = self._profile.step_num
            self._began_ns = time.time_ns()
            self._mark_clock()

    def _mark_clock(self) -> None:
        before = time.time_ns()
        mark = record_function(CLOCK_ANCHOR)
        mark.__enter__()
        after = time.time_ns()
        mark.__exit__(None, None, None)
        self.clock.append(ClockAnchor((before + after) // 2, (after - before + 1) // 2, ""))


def _artifact(
    path: Path, packed: Compressed, clock: Sequence[ClockAnchor], iterations: tuple[int, int] | None
) -> Artifact:
    check = packed.check
    anchors = tuple(
        attrs.evolve(reading, trace_us=str(event.ts_us)) for reading, event in zip(clock, packed.anchors, strict=False)
    )
    return Artifact(
        path=path,
        size_bytes=check.size_bytes,
        whole=check.whole,
        events=check.events,
        problem=check.problem,
        iterations=iterations,
        sha256=packed.sha256,
        base_time_ns=packed.base_time_ns,
        anchors=anchors if len(packed.anchors) == len(clock) else (),
    )


def _annotate(name: str) -> AbstractContextManager[object]:
    mark: AbstractContextManager[object] = record_function(name)
    return mark
