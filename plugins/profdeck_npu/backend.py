"""The backend `npu`, which records with ``torch_npu.profiler``."""

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
    """Records the current process with ``torch_npu.profiler``."""

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
        """Check that this process can record with the configured options."""
        cann.check_environment()
        torch_npu = cann.load()
        if not torch_npu.npu.is_available():  # torch_npu's profiler initialises the device even for host-only captures
            raise ConfigError(
                f"torch_npu {torch_npu.__version__} finds no NPU, but its profiler requires one. Make a device visible "
                "(check ASCEND_RT_VISIBLE_DEVICES, the driver and the container's devices), or use the backend torch."
            )
        if self.options.analyse and Activity.NPU in self.options.activities:
            cann.check_msprof()
        from torch_npu.profiler import experimental_config

        import profdeck_npu.recorder  # noqa: F401  # import now, so the first captured step is not delayed
        from profdeck_npu import experimental

        experimental.experimental_config(self.options, experimental_config, torch_npu.__version__)
        if self.options.with_stack:
            logger.warning(
                "options.with_stack slows down every step, and some releases of torch_npu, such as 2.10.0.post4, crash "
                "at the end of a capture. Turn it off unless you need stacks."
            )

    def identify(self) -> Identity | None:
        """Return the identity reported by a launcher's library, or ``None`` if torch is not installed."""
        if importlib.util.find_spec("torch") is None:
            return None
        cann.load()
        return library_identity()

    def devices(self) -> tuple[str, ...]:
        """Return the host-wide ID of the current NPU, or nothing if the device is not recorded."""
        if Activity.NPU not in self.options.activities:
            return ()
        npu = cann.load().npu
        index = npu.current_device()
        uuid = str(getattr(npu.get_device_properties(index), "uuid", ""))
        if uuid.strip("0-"):  # all zeros if the driver does not report a UUID
            return (f"npu-{uuid}",)
        return (f"npu-{cann.physical_device(index)}",)

    @classmethod
    def diagnose(cls, error: BaseException) -> str | None:
        """Return advice for an import that failed because torch_npu cannot load CANN."""
        return cann.diagnose(error)

    @hookimpl
    def profile_start(self, capture: Capture) -> None:
        """Start recording."""
        from profdeck_npu.recorder import NpuRecorder

        if self._recorder is not None:
            raise CaptureError("This backend is already recording. Stop that capture first.")
        recorder = NpuRecorder(self.options, capture)
        recorder.start()
        self._recorder = recorder

    @hookimpl
    def profile_step(self, capture: Capture, step: Step) -> None:
        """Advance the recording if `step.unit` is the capture's unit; otherwise do nothing."""
        if self._recorder is not None and step.unit is capture.unit:
            self._recorder.step()

    @hookimpl
    def profile_stop(self, capture: Capture) -> Sequence[Output]:  # noqa: ARG002  # the recorder has the capture
        """Stop recording. The last item returned is a function that checks the files and requests the analysis."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return ()
        recorder.stop()
        if not self.options.analyse or not recorder.outputs:
            return recorder.outputs
        *earlier_outputs, last_output = recorder.outputs

        def check_and_analyse() -> Artifact:
            artifact = last_output() if callable(last_output) else last_output
            from profdeck_npu import background

            background.request(recorder.directories, self.options.analyse_timeout_s)
            return artifact

        return [*earlier_outputs, check_and_analyse]
