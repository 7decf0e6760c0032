"""The backend `torch`: what core builds and calls."""

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
    """Records this process with ``torch.profiler``: CUDA when present, CPU otherwise."""

    name: ClassVar[str] = "torch"
    Options: ClassVar[type[TorchOptions]] = TorchOptions
    libraries: ClassVar[tuple[Library, ...]] = (Library(("torch",), ">=2.6,<3"),)
    device_types: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    cold_first_step: ClassVar[bool] = True
    common_options: ClassVar[tuple[str, ...]] = (
        "activities", "record_shapes", "with_stack", "profile_memory", "with_flops", "with_modules",
    )  # fmt: skip

    _recorder: TorchRecorder | None = attrs.field(default=None, init=False)
    _end: ExitStack = attrs.field(factory=ExitStack, init=False)

    def preflight(self) -> None:
        """Check that this process can record what the options ask for."""
        import torch
        from torch.profiler import supported_activities

        # Kineto prints two lines per recording to stderr, from torch 2.13 on. It reads this when it first records.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        # Import the compiler now: otherwise, torch imports it in the first captured step, which takes seconds.
        import profdeck_torch.cuda
        import profdeck_torch.recorder  # noqa: F401

        hasattr(torch, "_inductor")

        if Activity.CUDA in (self.options.activities or ()):
            if not torch.cuda.is_available():
                built = f"torch {torch.__version__} sees no CUDA device"
                raise ConfigError(
                    f"options.activities asks for cuda, but {built}, so the trace would be empty. "
                    "Remove cuda, or run where a device is visible (CUDA_VISIBLE_DEVICES, driver, CUDA build of torch)."
                )
            if torch.profiler.ProfilerActivity.CUDA not in supported_activities():
                raise ConfigError(
                    f"options.activities asks for cuda, but torch {torch.__version__} was built without CUPTI."
                )
        for option in ("cuda_profiler_range", "memory_snapshot"):
            if getattr(self.options, option) and not torch.cuda.is_available():
                raise ConfigError(f"options.{option} needs CUDA, and torch {torch.__version__} sees no CUDA device.")

    def identify(self) -> Identity | None:
        """Return the rank that ``torch.distributed`` knows, if it is initialised."""
        if importlib.util.find_spec("torch") is None:
            return None
        return distributed_identity()

    def activities(self) -> tuple[Activity, ...]:
        """Return what is observed: as asked, else the CPU and the device that is there."""
        import torch

        if self.options.activities is not None:
            return self.options.activities
        device = torch.cuda.is_available() and not self.options.cuda_profiler_range
        return (Activity.CPU, Activity.CUDA) if device else (Activity.CPU,)

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
        """Begin to record."""
        from profdeck_torch import cuda
        from profdeck_torch.recorder import TorchRecorder

        if self._recorder is not None:
            raise CaptureError("This backend is recording already; one capture at a time.")
        outputs: list[Output] = []
        with ExitStack() as recording:  # ended in reverse: nsys does not see the export, the snapshot sees it all
            if self.options.memory_snapshot:
                recording.enter_context(cuda.memory_history(capture, self.options.memory_snapshot_entries, outputs))
            recorder = TorchRecorder(self.options, self.activities(), capture, outputs)
            recorder.start()
            recording.callback(recorder.stop)
            if self.options.cuda_profiler_range:
                recording.enter_context(cuda.profiler_range())
            self._end = recording.pop_all()
            self._recorder = recorder

    @hookimpl
    def profile_step(self, capture: Capture, step: Step) -> None:
        """Pass a boundary of the unit that the capture counts; others leave the recording as it is."""
        if self._recorder is not None and step.unit is capture.unit:
            self._recorder.step()

    @hookimpl
    def profile_stop(self, capture: Capture) -> Sequence[Output]:  # noqa: ARG002  # the recorder knows it
        """End the recording; what writes the trace is returned."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return ()
        self._end.close()
        return recorder.outputs
