"""Records one capture with ``torch_npu.profiler.profile``, and checks the files that torch_npu wrote.

The recorder relies on the following behaviour of torch_npu. Sources: the code of the releases 2.6 to 2.14, and tests of
2.13 with a stub driver.

- ``start``, ``step`` and ``stop`` catch exceptions and print them. The recorder calls the unwrapped functions.
- The ``step`` call that ends a window writes all data. A profile that is stopped during its warm-up deletes its
  directory, but does not reset the driver. The next capture would then record with the options of this one.
- The driver only reports failures in its own logs. Only missing files reveal them.
- The output directory is a process-wide setting. The most recently constructed handler determines it.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch_npu
from torch.profiler import record_function
from torch_npu.profiler import ProfilerActivity, experimental_config, profile, tensorboard_trace_handler
from torch_npu.profiler._profiler_path_creator import ProfPathCreator
from torch_npu.profiler.scheduler import ProfilerAction

from profdeck import Activity, Artifact, Capture
from profdeck.plugin import (
    CaptureCycles,
    CaptureError,
    CyclePart,
    OneAtATime,
    Output,
    RivalWatch,
    WindowPhase,
    describe_error,
    directory_size,
    recording_metadata,
)
from profdeck_npu import experimental
from profdeck_npu.artifact_kinds import AscendDirectoryKind
from profdeck_npu.options import Level, NpuOptions

_process_lock = OneAtATime("torch_npu")
_stop_errors: list[str] = []
"""Errors of recordings that could not be stopped. torch_npu and the driver are then still recording."""

_ACTIVITIES = {Activity.CPU: ProfilerActivity.CPU, Activity.NPU: ProfilerActivity.NPU}

_TORCH_NPU_MODULE = "torch_npu.profiler.profiler_interface"
_START_FUNCTIONS = {
    f"{_TORCH_NPU_MODULE}:_ProfInterface": ("init_trace",),  # profiles constructed during a capture
    _TORCH_NPU_MODULE: ("_init_profiler",),  # all profiles
    "torch.autograd.profiler": ("_prepare_profiler", "_enable_profiler"),
    "torch.autograd.profiler_legacy": ("_enable_profiler_legacy",),
}
"""Functions that other profilers call to start, keyed by module or class.

torch's profilers raise an exception in a thread that records with torch_npu. torch_npu supports one recording per
process: if a second recording starts, both lose their data.
"""

# Limits of torch_npu (analysis/prof_common_func/_constant.py, utils/_path_manager.py).
_MAX_WORKER_LENGTH = 225
_MAX_NAME_LENGTH = 255
_EXAMPLE_TIME = "20260101000000000"
_DEFAULT_MSTX_DOMAIN = "default"
_ALLOWED_PATH = re.compile(r"[./_\-\s~0-9a-zA-Z\u4e00-\u9fa5]+")


class NpuRecorder:
    """Records one capture: one cycle for all of its global steps, or one cycle for each cycle of its window.

    Steps in the timeline are named ``ProfilerStep#<global step>``, or ``ProfilerStep#<mini-batch>`` in a window.
    """

    def __init__(self, options: NpuOptions, capture: Capture) -> None:
        """Args:
        options: options of the backend.
        capture: the capture to record.
        """
        self.outputs: list[Output] = []
        """Artifacts of finished cycles. The last item is a function that checks the files of the last cycle."""
        self.directories: list[Path] = []
        """Directories of the checked artifacts."""
        self._options = options
        self._capture = capture
        self._config = experimental.experimental_config(options, experimental_config, torch_npu.__version__)
        self._cycles = CaptureCycles(capture, self._make_cycle, self._check_cycle, self.outputs)
        self._rivals = RivalWatch(_START_FUNCTIONS, self._handle_rival)
        self._thread_id = threading.get_ident()
        self._is_stopped = self._rival_reported = False
        self._last_cycle: _Cycle | None = None

    def start(self) -> None:
        """Start recording.

        Raises:
            CaptureError: another profiler is active in this process, or torch_npu did not start.
        """
        _process_lock.acquire(self._capture)
        try:
            _require_no_profiler()
            self._thread_id = threading.get_ident()
            self._capture.annotate = _mstx_range if records_ranges(self._options) else _host_annotation
            with self._rivals.ours():
                self._cycles.start()
            self._rivals.__enter__()
        except BaseException:
            _process_lock.release(self._capture)
            raise

    def step(self) -> None:
        """Advance to the next global step or mini-batch."""
        if not self._is_stopped:
            with self._rivals.ours():
                self._cycles.step()

    def stop(self) -> None:
        """Stop recording. When this method returns, all data is on disk."""
        self._rivals.__exit__()
        try:
            self._stop_cycles()
        finally:
            _process_lock.release(self._capture)

    def _stop_cycles(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            with self._rivals.ours():
                self._cycles.stop()

    def _handle_rival(self, module: str) -> None:
        """Report a conflict with another profiler that is starting. If possible, stop this recording first.

        Any torch_npu profiler conflicts. A torch profiler only conflicts if it starts in the recording thread.
        """
        is_same_thread = threading.get_ident() == self._thread_id
        is_recording = self._last_cycle is not None and self._last_cycle.first is not None
        conflicts = module == _TORCH_NPU_MODULE or (is_same_thread and is_recording)
        if self._is_stopped or self._rival_reported or not conflicts:
            return
        self._rival_reported = True
        self._capture.report_problem(
            f"Another {module.partition('.')[0]} profiler started in this process (thread "
            f"{threading.current_thread().name}) and stopped this recording. Remove it, or capture different steps."
        )
        if is_same_thread:  # torch_npu must stop in the thread that started it
            self._stop_cycles()

    def _make_cycle(self, position: int) -> _Cycle:
        self._last_cycle = _Cycle(self._options, self._config, self._capture, position, self._cycles.phase)
        return self._last_cycle

    def _check_cycle(self, cycle: _Cycle, part: CyclePart) -> Artifact:
        assert cycle.directory is not None  # noqa: S101  # the cycle has started
        path = self._capture.directory / cycle.directory.name  # unlike cycle.directory, does not resolve links
        problem = cycle.failure or missing_files(path, self._options)
        self.directories.append(path)
        return Artifact(
            path=path,
            kind=AscendDirectoryKind.name,
            size_bytes=directory_size(path),
            whole=problem is None,
            problem=problem,
            iterations=part.iterations,
        )


class _Cycle:
    """One recording with ``torch_npu.profiler.profile``, from the warm-up to the stop."""

    def __init__(
        self, options: NpuOptions, config: Any, capture: Capture, position: int, phase: Callable[[int], WindowPhase]
    ) -> None:
        self.first: int | None = None
        self.failure: str | None = None
        """The error, if the recording could not be stopped."""
        self.directory: Path | None = None
        """Directory of the recording; ``None`` before the start."""
        self._options = options
        self._config = config
        self._capture = capture
        self._position = position
        self._phase = phase
        self._forced_action: ProfilerAction | None = None
        self._profile: Any = None

    def start(self) -> None:
        directory = self._capture.directory.resolve()
        worker = self._capture.artifact_path("", self._name_part()).name
        check_name(directory, worker)
        # Construct last: the constructor sets the process-wide output directory.
        handler = inspect.unwrap(tensorboard_trace_handler)(str(directory), worker, analyse_flag=False)
        self._profile = profile(
            activities=[_ACTIVITIES[activity] for activity in self._options.activities],
            schedule=self._scheduled_action,
            on_trace_ready=handler,
            record_shapes=self._options.record_shapes,
            profile_memory=self._options.profile_memory,
            with_stack=self._options.with_stack,
            with_modules=self._options.with_modules,
            experimental_config=self._config,
        )
        self._profile.add_metadata_json("profdeck", recording_metadata(self._capture, self._options))
        self._profile.step_num = self._position  # torch_npu annotates steps as ProfilerStep#<step_num>
        try:
            self._call(profile.start)
        except Exception as error:
            self._clean_up_failed_start()
            raise CaptureError(f"torch_npu's profiler did not start: {describe_error(error)}") from error
        self.directory = self._created_directory()
        if self.directory is None:
            self._clean_up_failed_start()
            raise CaptureError(
                f"torch_npu's profiler did not start: it did not create a directory in {directory}. The profiler was "
                "disabled when this process started, or another thread has constructed a trace handler."
            )
        self._update_first()

    def step(self) -> None:
        self._position += 1
        if self.first is None and self._phase(self._position) is not WindowPhase.WARMUP:
            self._require_recordable()
        self._profile.step_num = self._position - 1
        self._call(profile.step)
        self._update_first()

    def stop(self) -> None:
        try:
            self._stop_profile()
        except Exception as error:  # noqa: BLE001  # the files on disk must be kept
            self._profile.stopped = True  # otherwise its destructor stops it, from any thread
            self.failure = f"the recording could not be stopped: {describe_error(error)}"
            _stop_errors.append(f"capture {self._capture.id}: {self.failure}")
            if self.first is None:  # without an artifact, nothing else reports the failure
                self._capture.report_problem(self.failure)

    def abandon(self) -> None:
        directory = self._created_directory()
        if directory is not None and self.failure is None:
            shutil.rmtree(directory, ignore_errors=True)

    def _stop_profile(self) -> None:
        if Activity.NPU in self._options.activities:
            torch_npu.npu.synchronize()  # torch_npu up to 2.10 does not synchronise and would lose queued kernels
        if self._profile.current_action is ProfilerAction.WARMUP:  # only a stop after recording resets the driver
            self._require_recordable()
            self._forced_action = ProfilerAction.RECORD
            self._call(profile.step)
        self._profile.current_action = ProfilerAction.RECORD_AND_SAVE  # as at the end of a scheduled window
        self._forced_action = ProfilerAction.NONE
        self._call(profile.step)
        self._call(profile.stop)  # marks the profile as stopped

    def _scheduled_action(self, step: int) -> ProfilerAction:
        if self._forced_action is not None:
            return self._forced_action
        # The constructor of profile requests the action of step 0, even if the cycle starts at a later position.
        is_warmup = self._phase(max(step, self._position)) is WindowPhase.WARMUP
        return ProfilerAction.WARMUP if is_warmup else ProfilerAction.RECORD

    def _call(self, method: Callable[..., Any]) -> None:
        inspect.unwrap(method)(self._profile)  # the wrapper would catch exceptions

    def _created_directory(self) -> Path | None:
        """Return the directory that torch_npu created in the capture's directory, or ``None``."""
        directory = Path(self._profile.prof_if.prof_path)  # "." before torch_npu creates a directory
        is_created = (
            directory.parent == self._capture.directory.resolve()
            and directory.name.endswith(f"_{AscendDirectoryKind.name}")
            and directory.is_dir()
        )
        return directory if is_created else None

    def _update_first(self) -> None:
        """Set `first` when the warm-up has ended, and report a problem if torch_npu records no mstx ranges."""
        if self.first is None and self._profile.current_action is ProfilerAction.RECORD:
            self.first = self._profile.step_num
            # Releases up to 2.10.0 do not create mstx ranges for steps, so this attribute is missing.
            if records_ranges(self._options) and not getattr(self._profile, "_step_mstx_range_id", True):
                self._capture.report_problem(
                    "No mstx ranges are recorded: CANN's mstx library (libms_tools_ext.so) cannot be used. Turn off "
                    "options.mstx, or install a newer CANN."
                )

    def _name_part(self) -> str | None:
        """Return the first recorded mini-batch. It distinguishes the cycles of a window. Manifests store the last."""
        if self._capture.window is None:
            return None
        first = self._position
        while self._phase(first) is WindowPhase.WARMUP:
            first += 1
        return f"mb{first:04d}"

    def _require_recordable(self) -> None:
        """Check that the end of the warm-up can start the recording. torch_npu would skip it without a message.

        Raises:
            CaptureError: a torch profiler has started in this thread.
        """
        if torch.autograd._profiler_enabled():  # noqa: SLF001  # no public API
            raise CaptureError(
                "Cannot start recording: another torch profiler started during the warm-up. Capture different steps."
            )

    def _clean_up_failed_start(self) -> None:
        try:
            if ProfPathCreator().is_prof_inited:  # otherwise, the driver was not started
                self._stop_profile()
        except Exception as error:  # noqa: BLE001  # the caller raises the error of the start
            _stop_errors.append(f"capture {self._capture.id}: {describe_error(error)}")
        self._profile.stopped = True
        self.abandon()


def missing_files(directory: Path, options: NpuOptions) -> str | None:
    """Return a message about files that torch_npu has not written, or ``None`` if all files exist.

    Source: the layout that torch_npu's analysis expects (analysis/prof_common_func/_path_manager.py).
    """
    expected = {"profiler_info*.json": "information about the recording"}
    if Activity.CPU in options.activities:
        expected["FRAMEWORK/torch.op_range"] = "host operators"
    if Activity.NPU in options.activities:
        # With level_none, device data only exists if the program used mstx ranges on the device.
        expected["PROF_*" if options.level is Level.NONE else "PROF_*/device_*"] = "device data"
    missing = [f"{pattern} ({content})" for pattern, content in expected.items() if not any(directory.glob(pattern))]
    if not missing:
        return None
    return (
        f"torch_npu did not write {', '.join(missing)}; check CANN's logs for the reason (~/ascend/log or "
        "ASCEND_PROCESS_LOG_PATH)"
    )


def check_name(directory: Path, worker: str) -> None:
    """Check that torch_npu supports the output path. Depending on the release, it would raise, warn or rename.

    Args:
        directory: output directory.
        worker: first part of the name that torch_npu creates in the directory.

    Raises:
        CaptureError: the path has characters that torch_npu does not support, or is too long.
    """
    path = f"{directory}/{worker}"
    if not _ALLOWED_PATH.fullmatch(path):
        unsupported = "".join(dict.fromkeys(_ALLOWED_PATH.sub("", path)))
        raise CaptureError(
            f"The path {path} contains {unsupported!r}, which torch_npu does not support. Change output, run or role. "
            "Allowed characters: letters, digits, spaces and . _ - ~"
        )
    max_length = min(_MAX_WORKER_LENGTH, _MAX_NAME_LENGTH - len(f"_{os.getpid()}_{_EXAMPLE_TIME}_ascend_pt"))
    if len(worker) > max_length:
        raise CaptureError(
            f"The name {worker} has {len(worker)} characters, but torch_npu supports at most {max_length}. Use a "
            "shorter stage name or shorter parallel coordinates."
        )


def _require_no_profiler() -> None:
    """Check that no other profiler is recording in this process.

    Raises:
        CaptureError: a profiler is recording, or an earlier recording could not be stopped.
    """
    if _stop_errors:
        raise CaptureError(
            "Cannot start recording, because an earlier recording of this process could not be stopped "
            f"({_stop_errors[0]}). Restart the process to capture again."
        )
    # The first check finds profilers of torch and torch_npu in this thread. The second check finds profilers of
    # torch_npu in any thread, as soon as they have created their directory.
    if torch.autograd._profiler_enabled() or ProfPathCreator().is_prof_inited:  # noqa: SLF001  # no public API
        raise CaptureError(
            "Another torch or torch_npu profiler is already active in this process and would lose its data. Remove it, "
            "or capture different steps."
        )


def records_ranges(options: NpuOptions) -> bool:
    """Return whether mstx ranges in the default domain are recorded."""
    include, exclude = options.mstx_domain_include, options.mstx_domain_exclude
    return options.mstx and (not include or _DEFAULT_MSTX_DOMAIN in include) and _DEFAULT_MSTX_DOMAIN not in exclude


def _host_annotation(name: str) -> AbstractContextManager[object]:
    annotation: AbstractContextManager[object] = record_function(name)
    return annotation


@contextmanager
def _mstx_range(name: str) -> Iterator[None]:
    range_id = torch_npu.npu.mstx.range_start(name, torch_npu.npu.current_stream())
    try:
        yield
    finally:
        if range_id:  # 0 if CANN's mstx library cannot be used
            torch_npu.npu.mstx.range_end(range_id)
