"""Drives ``torch_npu.profiler.profile`` for one capture, and checks what it left.

What is relied on here was read in the releases 2.6 to 2.14, and run with 2.13 over a stub of the driver:

- ``start``, ``step`` and ``stop`` swallow exceptions and print them; here the functions below are called.
- All is written inside of the ``step`` that ends a window. A profile that is stopped while it warms up deletes its
  directory and leaves the driver configured, so that the next capture records with the options of this one.
- The driver's failures are in its own logs and nowhere else: only the files tell.
- The directory to write to belongs to the process, not to the profile: the last handler that was built has set it.
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

_one = OneAtATime("torch_npu")
# Why a recording of this process could not be ended: torch_npu and the driver are still in it.
_unended: list[str] = []

_ACTIVITIES = {Activity.CPU: ProfilerActivity.CPU, Activity.NPU: ProfilerActivity.NPU}

_OF_TORCH_NPU = "torch_npu.profiler.profiler_interface"
_BEGINNINGS = {
    f"{_OF_TORCH_NPU}:_ProfInterface": ("init_trace",),  # of profiles that are built while a capture records
    _OF_TORCH_NPU: ("_init_profiler",),  # of all
    "torch.autograd.profiler": ("_prepare_profiler", "_enable_profiler"),
    "torch.autograd.profiler_legacy": ("_enable_profiler_legacy",),
}
"""What other profilers call to begin. torch's raise in a thread in which torch_npu records; torch_npu itself records
one thing per process, and the second and the first both lose what they have."""

# torch_npu's own limits (analysis/prof_common_func/_constant.py, utils/_path_manager.py).
_WORKER_LIMIT = 225
_NAME_LIMIT = 255
_TIME = "20260101000000000"
_DOMAIN = "default"  # of mstx
_LEGAL = re.compile(r"[./_\-\s~0-9a-zA-Z\u4e00-\u9fa5]+")


class NpuRecorder:
    """Records one capture: a cycle per window cycle, or one cycle for all of its global steps.

    Steps in the timeline are named ``ProfilerStep#<global step>``, or ``ProfilerStep#<mini-batch>`` in a window.
    """

    def __init__(self, options: NpuOptions, capture: Capture) -> None:
        """Args:
        options: what to record.
        capture: where to and which steps.
        """
        self.outputs: list[Output] = []
        """Artifacts as they are there, and what checks the last one."""
        self.directories: list[Path] = []
        """Where the artifacts' data are."""
        self._options = options
        self._capture = capture
        self._config = experimental.experimental_config(options, experimental_config, torch_npu.__version__)
        self._cycles = CaptureCycles(capture, self._make, self._check, self.outputs)
        self._rivals = RivalWatch(_BEGINNINGS, self._give_way)
        self._thread = threading.get_ident()
        self._ended = self._given_way = False
        self._cycle: _Cycle | None = None
        """The one that was made last."""

    def start(self) -> None:
        """Begin.

        Raises:
            CaptureError: another profiler is active in this process, or torch_npu did not start.
        """
        _one.acquire(self._capture)
        try:
            _require_free()
            self._thread = threading.get_ident()
            self._capture.annotate = _mstx_range if records_ranges(self._options) else _mark
            with self._rivals.ours():
                self._cycles.start()
            self._rivals.__enter__()
        except BaseException:
            _one.release(self._capture)
            raise

    def step(self) -> None:
        """Pass from one global step or mini-batch to the next."""
        if not self._ended:
            with self._rivals.ours():
                self._cycles.step()

    def stop(self) -> None:
        """End; all data are on the disk then."""
        self._rivals.__exit__()
        try:
            self._end()
        finally:
            _one.release(self._capture)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            with self._rivals.ours():
                self._cycles.stop()

    def _give_way(self, library: str) -> None:
        """End the recording, as another profiler begins, if it is of torch_npu, or of this thread, which records."""
        same = threading.get_ident() == self._thread
        records = self._cycle is not None and self._cycle.first is not None
        if self._ended or self._given_way or not (library == _OF_TORCH_NPU or (same and records)):
            return
        self._given_way = True
        self._capture.report_problem(
            f"Another profiler of {library.partition('.')[0]} began in this process (thread "
            f"{threading.current_thread().name}), which ends a recording. Remove it, or capture other steps than it "
            "does."
        )
        if same:  # only the thread that began can end it
            self._end()

    def _make(self, position: int) -> _Cycle:
        self._cycle = _Cycle(self._options, self._config, self._capture, position, self._cycles.phase)
        return self._cycle

    def _check(self, cycle: _Cycle, part: CyclePart) -> Artifact:
        assert cycle.directory is not None  # noqa: S101  # it has been started
        path = self._capture.directory / cycle.directory.name  # as core calls it, whatever links lead there
        problem = cycle.failure or missing(path, self._options)
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
    """One ``torch_npu.profiler.profile`` from its warm-up to its end."""

    def __init__(
        self, options: NpuOptions, config: Any, capture: Capture, position: int, phase: Callable[[int], WindowPhase]
    ) -> None:
        self.first: int | None = None
        self.failure: str | None = None
        """Why it could not be ended."""
        self.directory: Path | None = None
        """Where its data are, once it has been started."""
        self._options = options
        self._config = config
        self._capture = capture
        self._position = position
        self._phase = phase
        self._answer: ProfilerAction | None = None
        self._profile: Any = None

    def start(self) -> None:
        directory = self._capture.directory.resolve()
        worker = self._capture.artifact_path("", self._part()).name
        check_name(directory, worker)
        # Built last: it sets where all profiles of this process write.
        handler = inspect.unwrap(tensorboard_trace_handler)(str(directory), worker, analyse_flag=False)
        self._profile = profile(
            activities=[_ACTIVITIES[activity] for activity in self._options.activities],
            schedule=self._action,
            on_trace_ready=handler,
            record_shapes=self._options.record_shapes,
            profile_memory=self._options.profile_memory,
            with_stack=self._options.with_stack,
            with_modules=self._options.with_modules,
            experimental_config=self._config,
        )
        self._profile.add_metadata_json("profdeck", recording_metadata(self._capture, self._options))
        self._profile.step_num = self._position  # its marks say ProfilerStep#<step_num>
        try:
            self._call(profile.start)
        except Exception as error:
            self._abandon_start()
            raise CaptureError(f"The profiler of torch_npu did not start: {describe_error(error)}") from error
        self.directory = self._made()
        if self.directory is None:
            self._abandon_start()
            raise CaptureError(
                f"The profiler of torch_npu did not start: it made no directory in {directory}. It was switched off "
                "when this process began, or another thread has just built a handler of its own for it."
            )
        self._moved()

    def step(self) -> None:
        self._position += 1
        if self.first is None and self._phase(self._position) is not WindowPhase.WARMUP:
            self._require_start()
        self._profile.step_num = self._position - 1
        self._call(profile.step)
        self._moved()

    def stop(self) -> None:
        try:
            self._end()
        except Exception as error:  # noqa: BLE001  # what is on the disk is still worth to be kept
            self._profile.stopped = True  # its destructor would stop it, from any thread
            self.failure = f"the recording could not be stopped: {describe_error(error)}"
            _unended.append(f"capture {self._capture.id}: {self.failure}")
            if self.first is None:  # there will be no artifact to say it
                self._capture.report_problem(self.failure)

    def abandon(self) -> None:
        made = self._made()
        if made is not None and self.failure is None:
            shutil.rmtree(made, ignore_errors=True)

    def _end(self) -> None:
        if Activity.NPU in self._options.activities:
            torch_npu.npu.synchronize()  # up to 2.10 torch_npu does not: kernels that are still queued would be lost
        if self._profile.current_action is ProfilerAction.WARMUP:  # see above: it can only be ended by recording
            self._require_start()
            self._answer = ProfilerAction.RECORD
            self._call(profile.step)
        self._profile.current_action = ProfilerAction.RECORD_AND_SAVE  # as at the end of a scheduled window
        self._answer = ProfilerAction.NONE
        self._call(profile.step)
        self._call(profile.stop)  # says that it has been stopped

    def _action(self, number: int) -> ProfilerAction:
        if self._answer is not None:
            return self._answer
        # profile() asks for its number 0 when it is built, wherever the cycle begins.
        warming = self._phase(max(number, self._position)) is WindowPhase.WARMUP
        return ProfilerAction.WARMUP if warming else ProfilerAction.RECORD

    def _call(self, method: Callable[..., Any]) -> None:
        inspect.unwrap(method)(self._profile)  # without what swallows exceptions

    def _made(self) -> Path | None:
        """Return the directory that torch_npu has made for this recording, if it is where it should be."""
        made = Path(self._profile.prof_if.prof_path)  # "." before it is made
        wanted = self._capture.directory.resolve()
        return (
            made
            if made.parent == wanted and made.name.endswith(f"_{AscendDirectoryKind.name}") and made.is_dir()
            else None
        )

    def _moved(self) -> None:
        if self.first is None and self._profile.current_action is ProfilerAction.RECORD:
            self.first = self._profile.step_num
            # Releases up to 2.10.0 mark no steps by mstx, so that they cannot be asked.
            if records_ranges(self._options) and not getattr(self._profile, "_step_mstx_range_id", True):
                self._capture.report_problem(
                    "No mstx range is recorded: CANN's library of mstx (libms_tools_ext.so) cannot be used. Turn "
                    "options.mstx off, or install a later CANN."
                )

    def _part(self) -> str | None:
        # The last mini-batch is not known yet; the manifest has it.
        if self._capture.window is None:
            return None
        first = self._position
        while self._phase(first) is WindowPhase.WARMUP:
            first += 1
        return f"mb{first:04d}"

    def _require_start(self) -> None:
        """Refuse to begin when torch_npu would not, without a word: when the thread has another profiler by now."""
        if torch.autograd._profiler_enabled():  # noqa: SLF001  # the only way to ask
            raise CaptureError(
                "A torch profiler that is not profdeck's became active while this one warmed up, so that it cannot "
                "begin. Capture other steps than it does."
            )

    def _abandon_start(self) -> None:
        """Leave nothing behind of a start that failed."""
        try:
            if ProfPathCreator().is_prof_inited:  # else it failed before the driver heard of it
                self._end()
        except Exception as error:  # noqa: BLE001  # the start's own error is what is raised
            _unended.append(f"capture {self._capture.id}: {describe_error(error)}")
        self._profile.stopped = True
        self.abandon()


def missing(directory: Path, options: NpuOptions) -> str | None:
    """Say what torch_npu should have left in a directory and did not; None if all is there.

    Source: the layout that torch_npu's analysis looks for (analysis/prof_common_func/_path_manager.py).
    """
    expected = {"profiler_info*.json": "how the capture was made"}
    if Activity.CPU in options.activities:
        expected["FRAMEWORK/torch.op_range"] = "the operators of the host"
    if Activity.NPU in options.activities:
        # With level_none the driver may have had no range of the device to record.
        expected["PROF_*" if options.level is Level.NONE else "PROF_*/device_*"] = "the data of the device"
    absent = [f"{pattern} ({what})" for pattern, what in expected.items() if not any(directory.glob(pattern))]
    if not absent:
        return None
    return (
        f"torch_npu left no {', no '.join(absent)}; CANN's logs may say why (~/ascend/log or ASCEND_PROCESS_LOG_PATH)"
    )


def check_name(directory: Path, worker: str) -> None:
    """Check that torch_npu takes a directory and a name in it, for which its releases raise, warn or choose another.

    Raises:
        CaptureError: it does not.
    """
    if not _LEGAL.fullmatch(f"{directory}/{worker}"):
        wrong = "".join(dict.fromkeys(_LEGAL.sub("", f"{directory}/{worker}")))
        raise CaptureError(
            f"The path {directory}/{worker} has {wrong!r} in it, which torch_npu does not take. It takes letters, "
            "digits, spaces and . _ - ~ only: choose such an output, run and role."
        )
    room = min(_WORKER_LIMIT, _NAME_LIMIT - len(f"_{os.getpid()}_{_TIME}_ascend_pt"))
    if len(worker) > room:
        raise CaptureError(
            f"The name {worker} has {len(worker)} characters, and torch_npu has room for {room} beside what it adds. "
            "Choose a shorter stage, or shorter parallel coordinates."
        )


def _require_free() -> None:
    """Check that no other profiler records in this process.

    Raises:
        CaptureError: one does, or an earlier recording could not be ended.
    """
    if _unended:
        raise CaptureError(
            f"An earlier recording of this process could not be ended, and torch_npu is still in it ({_unended[0]}). "
            "Restart the process to capture again."
        )
    # The first is about torch's and torch_npu's profilers of this thread, the second about torch_npu's of any, which
    # it has since it made its directory.
    if torch.autograd._profiler_enabled() or ProfPathCreator().is_prof_inited:  # noqa: SLF001  # the only way to ask
        raise CaptureError(
            "A profiler of torch or torch_npu that is not profdeck's is already active in this process; its data would "
            "be lost. Remove it, or capture other steps than it does."
        )


def records_ranges(options: NpuOptions) -> bool:
    """Tell whether mstx ranges without a domain of their own are recorded."""
    include, exclude = options.mstx_domain_include, options.mstx_domain_exclude
    return options.mstx and (not include or _DOMAIN in include) and _DOMAIN not in exclude


def _mark(name: str) -> AbstractContextManager[object]:
    mark: AbstractContextManager[object] = record_function(name)
    return mark


@contextmanager
def _mstx_range(name: str) -> Iterator[None]:
    number = torch_npu.npu.mstx.range_start(name, torch_npu.npu.current_stream())
    try:
        yield
    finally:
        if number:
            torch_npu.npu.mstx.range_end(number)
