"""The backend `npu`: what core builds and calls."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import attrs

from profdeck import Activity, Artifact, Backend, Capture, Identity, Library, Step, hookimpl
from profdeck.plugin import CaptureError, ConfigError, Output, library_identity
from profdeck_npu import cann
from profdeck_npu.options import NpuOptions

if TYPE_CHECKING:
    from profdeck_npu.recorder import NpuRecorder

logger = logging.getLogger("profdeck")


@attrs.define
class NpuBackend(Backend[NpuOptions]):
    """Records this process with ``torch_npu.profiler``."""

    name: ClassVar[str] = "npu"
    Options: ClassVar[type[NpuOptions]] = NpuOptions
    libraries: ClassVar[tuple[Library, ...]] = (cann.LIBRARY,)
    device_types: ClassVar[tuple[str, ...]] = ("npu",)
    cold_first_step: ClassVar[bool] = True
    common_options: ClassVar[tuple[str, ...]] = (
        "activities", "record_shapes", "with_stack", "profile_memory", "with_flops", "with_modules",
    )  # fmt: skip

    _recorder: NpuRecorder | None = attrs.field(default=None, init=False)

    def preflight(self) -> None:
        """Check that this process can record what the options ask for."""
        cann.check_environment()
        torch_npu = cann.load()
        if not torch_npu.npu.is_available():  # also without the activity npu: its profiler begins with the device
            raise ConfigError(
                f"torch_npu {torch_npu.__version__} sees no NPU, and its profiler needs one. Run where a device is "
                "visible (ASCEND_RT_VISIBLE_DEVICES, driver, the container's devices), or choose the backend torch."
            )
        if self.options.analyse and Activity.NPU in self.options.activities:
            cann.check_msprof()
        from torch_npu.profiler import experimental_config

        import profdeck_npu.recorder  # noqa: F401  # paid for now rather than in the first captured step
        from profdeck_npu import experimental

        experimental.experimental_config(self.options, experimental_config, torch_npu.__version__)
        if self.options.with_stack:
            logger.warning(
                "options.with_stack: with it, some releases of torch_npu, such as 2.10.0.post4, crash at the end of a "
                "capture, and every step slows down. Leave it off unless it is needed."
            )

    def identify(self) -> Identity | None:
        """Return the rank that ``torch.distributed`` knows, if it is initialised."""
        if importlib.util.find_spec("torch") is None:
            return None
        cann.load()
        return library_identity()

    def devices(self) -> tuple[str, ...]:
        """Name the NPU that this process uses, as the host calls it."""
        if Activity.NPU not in self.options.activities:
            return ()
        npu = cann.load().npu
        index = npu.current_device()
        uuid = str(getattr(npu.get_device_properties(index), "uuid", ""))
        if uuid.strip("0-"):  # zeros where the driver does not tell
            return (f"npu-{uuid}",)
        return (f"npu-{cann.physical_device(index)}",)

    @classmethod
    def diagnose(cls, error: BaseException) -> str | None:
        """Recognise imports that fail because torch_npu finds no CANN."""
        return cann.diagnose(error)

    @hookimpl
    def profile_start(self, capture: Capture) -> None:
        """Begin to record."""
        from profdeck_npu.recorder import NpuRecorder

        if self._recorder is not None:
            raise CaptureError("This backend is recording already; one capture at a time.")
        recorder = NpuRecorder(self.options, capture)
        recorder.start()
        self._recorder = recorder

    @hookimpl
    def profile_step(self, capture: Capture, step: Step) -> None:
        """Pass a boundary of the unit that the capture counts; others leave the recording as it is."""
        if self._recorder is not None and step.unit is capture.unit:
            self._recorder.step()

    @hookimpl
    def profile_stop(self, capture: Capture) -> Sequence[Output]:  # noqa: ARG002  # the recorder has the capture
        """Stop the recording. The returned list ends with a function that checks the files and starts the analysis."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return ()
        recorder.stop()
        if not self.options.analyse or not recorder.outputs:
            return recorder.outputs
        *others, last = recorder.outputs

        def check_and_analyse() -> Artifact:
            artifact = last() if callable(last) else last
            from profdeck_npu import background

            background.request(recorder.directories, self.options.analyse_timeout_s)
            return artifact

        return [*others, check_and_analyse]
