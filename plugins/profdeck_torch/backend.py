"""The backend `torch`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, ClassVar

import attrs

from profdeck import Activity, Backend, Capture, Identity, Library, Step, hookimpl
from profdeck.plugin import CaptureError, ConfigError, Output
from profdeck_torch.launchers import distributed_identity
from profdeck_torch.options import TorchOptions

if TYPE_CHECKING:
    from profdeck_torch.recorder import TorchRecorder


@attrs.define
class TorchBackend(Backend[TorchOptions]):
    """Records this process with ``torch.profiler``: the CPU, and CUDA if a device is available."""

    name: ClassVar[str] = "torch"
    Options: ClassVar[type[TorchOptions]] = TorchOptions
    libraries: ClassVar[tuple[Library, ...]] = (Library(("torch",), ">=2.6,<3"),)
    device_types: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    cold_first_step: ClassVar[bool] = True
    common_options: ClassVar[tuple[str, ...]] = (
        "activities", "record_shapes", "with_stack", "profile_memory", "with_flops", "with_modules",
    )  # fmt: skip

    _recorder: TorchRecorder | None = attrs.field(default=None, init=False)
    _recording: ExitStack = attrs.field(factory=ExitStack, init=False)

    def preflight(self) -> None:
        """Prepare torch for recording and check that it supports the options.

        Raises:
            ConfigError: an option requires CUDA or CUPTI, and torch provides neither.
        """
        import torch
        from torch.profiler import supported_activities

        # From torch 2.13 on, Kineto prints two lines per recording to stderr. It reads the level once, at the first
        # recording.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        # Import the compiler now. Otherwise, torch imports it in the first captured step, which takes seconds.
        import profdeck_torch.cuda
        import profdeck_torch.recorder  # noqa: F401

        hasattr(torch, "_inductor")

        if Activity.CUDA in (self.options.activities or ()):
            if not torch.cuda.is_available():
                raise ConfigError(
                    f"options.activities includes cuda, but torch {torch.__version__} sees no CUDA device, so the "
                    "trace would be empty. Remove cuda, or make a device visible (CUDA_VISIBLE_DEVICES, driver, CUDA "
                    "build of torch)."
                )
            if torch.profiler.ProfilerActivity.CUDA not in supported_activities():
                raise ConfigError(
                    f"options.activities includes cuda, but torch {torch.__version__} was built without CUPTI. "
                    "Remove cuda, or install a build with CUPTI."
                )
        for option in ("cuda_profiler_range", "memory_snapshot"):
            if getattr(self.options, option) and not torch.cuda.is_available():
                raise ConfigError(f"options.{option} requires CUDA, but torch {torch.__version__} sees no CUDA device.")

    def identify(self) -> Identity | None:
        """Return the identity reported by ``torch.distributed``, or ``None`` if torch is not installed."""
        if importlib.util.find_spec("torch") is None:
            return None
        return distributed_identity()

    def activities(self) -> tuple[Activity, ...]:
        """Return the configured activities. Default: the CPU, and CUDA if a device is available and nsys leaves it."""
        import torch

        if self.options.activities is not None:
            return self.options.activities
        device = torch.cuda.is_available() and not self.options.cuda_profiler_range
        return (Activity.CPU, Activity.CUDA) if device else (Activity.CPU,)

    @property
    def analyses_traces(self) -> bool:
        """Value of the option ``analyse``."""
        return self.options.analyse

    def devices(self) -> tuple[str, ...]:
        """Return the GPU of this process, or an empty tuple if the process has not initialized CUDA.

        The CPU needs no lease, because each process records only itself. A process that uses only the CPU, such as a
        gloo rank, must not call `torch.cuda.current_device`, because the call initializes CUDA. If the process
        initializes CUDA during a capture, the trace contains its kernels although the process has no lease.
        """
        import torch

        uses_gpu = Activity.CUDA in self.activities() and torch.cuda.is_initialized()
        if not uses_gpu and not self.options.cuda_profiler_range:
            return ()
        return (f"gpu-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}",)

    @hookimpl
    def profile_start(self, capture: Capture) -> None:
        """Start recording.

        Raises:
            CaptureError: this backend is already recording, or another profiler is active.
        """
        from profdeck_torch import cuda
        from profdeck_torch.recorder import TorchRecorder

        if self._recorder is not None and not self._recorder.thread.is_alive():
            raise CaptureError(
                "The thread of an earlier capture ended during its recording, so torch can no longer record in this "
                "process. Run all steps in one thread."
            )
        if self._recorder is not None:
            raise CaptureError("This backend is already recording. Stop that capture first.")
        outputs: list[Output] = []
        # Exits run in reverse order: the nsys range ends before the export, and the memory history ends last.
        with ExitStack() as recording:
            if self.options.memory_snapshot:
                recording.enter_context(cuda.memory_history(capture, self.options.memory_snapshot_entries, outputs))
            recorder = TorchRecorder(self.options, self.activities(), capture, outputs)
            recorder.start()
            recording.callback(recorder.stop)
            if self.options.cuda_profiler_range:
                recording.enter_context(cuda.profiler_range())
            self._recording = recording.pop_all()
            self._recorder = recorder

    @hookimpl
    def profile_step(self, capture: Capture, step: Step) -> None:
        """Advance the recording if `step.unit` is the capture's unit; otherwise do nothing."""
        if self._recorder is not None and step.unit is capture.unit:
            self._recorder.step()

    @hookimpl
    def profile_stop(self, capture: Capture) -> Sequence[Output]:  # noqa: ARG002  # the recorder holds the capture
        """Stop recording. Return the artifacts, and the callables that write the remaining ones."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return ()
        self._recording.close()
        return recorder.outputs
