"""Records one capture with ``torch.profiler.profile`` and writes its traces."""

from __future__ import annotations

import contextlib
import functools
import resource
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import torch
from torch._C._profiler import _ExperimentalConfig
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
from profdeck_torch import open_scopes, other_profilers
from profdeck_torch.options import TorchOptions
from profdeck_traces import Compressed, compress_in_child, compress_trace

_recording_lock = OneAtATime("torch")

_ACTIVITIES = {Activity.CPU: ProfilerActivity.CPU, Activity.CUDA: ProfilerActivity.CUDA}


class TorchRecorder:
    """Records one capture with one profiler per window cycle, or one profiler for all global steps.

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
        options: options of the backend.
        activities: activities to record.
        capture: the capture to record.
        outputs: receives the artifacts, and the callable that writes the last one.
        """
        self.outputs = outputs
        self._options = options
        self._activities = [_ACTIVITIES[activity] for activity in activities]
        self._capture = capture
        self._cycles = CaptureCycles(capture, self._create_cycle, self._write, outputs)
        self._rivals = RivalWatch(other_profilers.START_FUNCTIONS, self._yield_to_rival)
        self.thread = threading.current_thread()
        self._stopped = False
        self._latest_cycle: _Cycle | None = None

    def start(self) -> None:
        """Start recording in this thread.

        Raises:
            CaptureError: another profiler is active in this process.
            LeaseError: this process is already recording another capture.
        """
        _recording_lock.acquire(self._capture)
        try:
            self.thread = threading.current_thread()
            self._capture.annotate = _annotate
            self._capture.end_step = self._end_step
            open_scopes.watch()
            with self._rivals.ours():
                self._cycles.start()
            self._rivals.__enter__()
        except BaseException:
            open_scopes.unwatch()
            _recording_lock.release(self._capture)
            raise

    def step(self) -> None:
        """Advance to the next global step or mini-batch."""
        if not self._stopped:
            with self._rivals.ours():
                self._cycles.step()

    def _end_step(self) -> None:
        if not self._stopped and self._latest_cycle is not None:
            self._latest_cycle.end_step()

    def stop(self) -> None:
        """Stop recording and write the unfinished cycle."""
        self._rivals.__exit__()
        try:
            self._stop_cycles()
        finally:
            open_scopes.unwatch()
            _recording_lock.release(self._capture)

    def _stop_cycles(self) -> None:
        if not self._stopped:
            self._stopped = True
            with self._rivals.ours():
                self._cycles.stop()

    def _yield_to_rival(self, _: str) -> None:
        """Stop recording before another profiler starts. Torch supports one recording at a time."""
        if self._stopped or self._latest_cycle is None or self._latest_cycle.lost:
            return
        name = threading.current_thread().name
        self._capture.report_problem(
            f"Another torch profiler started in this process (thread {name}) and stopped this recording. "
            "Remove it, or capture different steps."
        )
        if threading.current_thread() is self.thread:  # A thread can stop only its own profiler.
            self._stop_cycles()
            open_scopes.end_all()
        else:
            self._latest_cycle.lost = True

    def _create_cycle(self, position: int) -> _Cycle:
        other_profilers.ensure_inactive()
        metadata = recording_metadata(self._capture, self._options)
        self._latest_cycle = _Cycle(self._create_profile(), position, metadata)
        return self._latest_cycle

    def _create_profile(self) -> profile:
        # One profile per cycle: a reused profile warns at every cycle. If warnings are errors, it then crashes at stop.
        return profile(
            activities=self._activities,
            schedule=self._schedule,
            record_shapes=self._options.record_shapes,
            with_stack=self._options.with_stack,
            profile_memory=self._options.profile_memory,
            with_flops=self._options.with_flops,
            with_modules=self._options.with_modules,
            # Without this flag, torch 2.11 and 2.12 log a warning about cleared events.
            acc_events=True,
            experimental_config=_additional_records(),
        )

    def _schedule(self, step: int) -> ProfilerAction:
        # The constructor of profile() requests the action of step 0, even if the cycle starts at a later step.
        is_warmup = self._cycles.phase(max(step, self._cycles.position)) is WindowPhase.WARMUP
        return ProfilerAction.WARMUP if is_warmup else ProfilerAction.RECORD

    def _write(self, cycle: _Cycle, part: CyclePart) -> Artifact:
        path = self._capture.artifact_path(".trace.json.gz" if self._options.gzip else ".trace.json", part.name)
        iterations = part.iterations
        if cycle.lost:
            problem = "another torch profiler stopped this recording, and its events were lost"
            return Artifact(path=path, whole=False, problem=problem, iterations=iterations)
        try:
            # Use a new directory with a random name, so that it cannot contain other programs' files or links.
            with TemporaryDirectory(
                prefix=f".{path.name[:128]}.", suffix=".tmp", dir=path.parent, ignore_cleanup_errors=True
            ) as directory:
                # Torch writes the export path into the trace, so only the directory is temporary.
                compressed = self._export(cycle, Path(directory, path.name.removesuffix(".gz")), path)
        except (OSError, RuntimeError, TraceError) as error:
            problem = f"the trace could not be written: {type(error).__name__}: {error}"
            return Artifact(path=path, whole=False, problem=problem, iterations=iterations)
        return _create_artifact(path, compressed, cycle.clock_readings, iterations)

    def _export(self, cycle: _Cycle, raw: Path, path: Path) -> Compressed:
        """Write the trace to the temporary file `raw`, and its compressed copy to `path`."""
        cycle.export(raw)
        if not raw.exists():
            reason = f"{shutil.disk_usage(raw.parent).free:,} bytes are free on the disk"
            limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            if limit != resource.RLIM_INFINITY:
                reason += f", and files are limited to {limit:,} bytes (ulimit -f)"
            raise OSError(f"torch wrote no file; {reason}")
        # In an engine, this runs on a background thread. A child process avoids holding the GIL.
        compress = compress_in_child if self._capture.unit is Unit.ENGINE_ITERATION else compress_trace
        return compress(raw, path, gzip=self._options.gzip, anchor_name=CLOCK_ANCHOR)


@functools.cache
def _additional_records() -> _ExperimentalConfig:
    """Enable recording of CUDA event waits and garbage collections in torch releases that support it.

    Torch records garbage collections only if stacks are recorded.
    """
    flags: dict[str, Any] = {}
    for name in ("enable_cuda_sync_events", "record_python_gc_info"):
        with contextlib.suppress(TypeError):
            _ExperimentalConfig(**{name: True})  # type: ignore[arg-type]
            flags[name] = True
    return _ExperimentalConfig(**flags)


class _Cycle:
    """One use of ``torch.profiler.profile``, from warm-up to export."""

    def __init__(self, prof: profile, position: int, metadata: str) -> None:
        self.clock_readings: list[ClockAnchor] = []
        self.first: int | None = None
        """First recorded position."""
        self.lost = False
        """True if another profiler stopped the recording. No events can be exported then."""
        self._profile = prof
        self._record_start_ns = 0
        prof.preset_metadata_json("profdeck", metadata)
        prof.step_num = position  # Torch annotates steps as ProfilerStep#<step_num>.

    def start(self) -> None:
        open_scopes.end_all()
        self._profile.start()
        # torch has already checked the flag. If the flag remains set, `stop` parses every event in Python.
        self._profile.profiler.acc_events = False
        self._on_position_changed()

    def step(self) -> None:
        self._profile.step()
        self._on_position_changed()

    def end_step(self) -> None:
        """End the annotation of the current step. The next call to `step` starts a new annotation."""
        annotation, self._profile.step_rec_fn = self._profile.step_rec_fn, None
        if annotation is not None:
            annotation.__exit__(None, None, None)

    def stop(self) -> None:
        if self.lost:
            other_profilers.abandon_recording()
            return
        self.end_step()
        if self.first is not None:
            self._record_clock_anchor()
        if not torch.cuda.is_initialized():
            # `stop` synchronizes `use_device`, which would create a CUDA context in this process.
            self._profile.profiler.use_device = None
        self._profile.stop()
        result = self._profile.profiler and self._profile.profiler.kineto_results
        # An empty result has no session start within this cycle. Exporting an empty result crashes the process.
        self.lost = result is None or not 0 < result.trace_start_ns() <= self._record_start_ns

    def abandon(self) -> None:
        """Do nothing: without an export, there are no files."""

    def export(self, path: Path) -> None:
        try:
            self._profile.export_chrome_trace(str(path))
        finally:
            # The profile is part of a reference cycle. Release its events and the file of a failed export immediately.
            self._profile.profiler = None

    def _on_position_changed(self) -> None:
        if self.first is None and self._profile.current_action is ProfilerAction.RECORD:
            self.first = self._profile.step_num
            self._record_start_ns = time.time_ns()
            self._record_clock_anchor()

    def _record_clock_anchor(self) -> None:
        before = time.time_ns()
        annotation = record_function(CLOCK_ANCHOR)
        annotation.__enter__()
        after = time.time_ns()
        annotation.__exit__(None, None, None)
        self.clock_readings.append(ClockAnchor((before + after) // 2, (after - before + 1) // 2, ""))


def _create_artifact(
    path: Path, compressed: Compressed, clock_readings: Sequence[ClockAnchor], iterations: tuple[int, int] | None
) -> Artifact:
    check = compressed.check
    anchors = tuple(
        attrs.evolve(reading, trace_us=str(Decimal(anchor_ns) / 1000))
        for reading, anchor_ns in zip(clock_readings, compressed.anchors_ns, strict=False)
    )
    return Artifact(
        path=path,
        size_bytes=check.size_bytes,
        whole=check.whole,
        events=check.events,
        problem=check.problem,
        iterations=iterations,
        sha256=compressed.sha256,
        base_time_ns=compressed.base_time_ns,
        anchors=anchors if len(compressed.anchors_ns) == len(clock_readings) else (),
    )


def _annotate(name: str) -> AbstractContextManager[object]:
    annotation: AbstractContextManager[object] = record_function(name)
    return annotation
