"""Captures by SGLang's own profiler, for engines whose processes have not loaded profdeck.

A request sets the directory and the number of forward passes. Other options can terminate the server (observed with
SGLang 0.5.23), so they are rejected. SGLang's replies do not name the files, so the capture waits for new files.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from packaging.version import InvalidVersion, Version

from profdeck import Activity
from profdeck.engines import CaptureRequest, EngineCapture, OwnProfilerCapture, TraceOrigin
from profdeck.plugin import CaptureError, describe_error, unstructure
from profdeck_sglang.engines import REMEDY, SglangEngine
from profdeck_sglang.options import SglangOptions

# [PREFIX-]ID-TP-0[-DP-0][-PP-0][-EP-0].trace.json.gz. Except for TP, dimensions of size 1 are omitted.
_FILE = re.compile(r".*-TP-(?P<tp>\d+)(?:-DP-(?P<dp>\d+))?(?:-PP-(?P<pp>\d+))?(?:-EP-(?P<ep>\d+))?\.trace\.json\.gz")

_FIRST_WITH_ANNOTATIONS = Version("0.5.19")
_UNSUPPORTED = ("profile_memory", "with_flops", "with_modules", "device_options", "start_step", "stage_min_batch_size")
_ACTIVITIES = {Activity.CPU: "CPU", Activity.CUDA: "GPU"}


class SglangCapture(OwnProfilerCapture[SglangEngine, SglangOptions]):
    """One capture by SGLang's own profiler."""

    backend: ClassVar[str] = "sglang"
    title: ClassVar[str] = "SGLang"
    glob: ClassVar[str] = "*.trace.json.gz"

    def __init__(
        self, engine: SglangEngine, options: SglangOptions, capture: EngineCapture, request: CaptureRequest
    ) -> None:
        """See the base class."""
        super().__init__(engine, options, capture, request)
        self._launch_arguments: Mapping[str, Any] = {}
        self._staging: Path | None = None

    async def start(self) -> None:
        """Start SGLang's profiler.

        Raises:
            CaptureError: SGLang's profiler cannot fulfil the request, or does not start.
        """
        self._launch_arguments = await self._engine.read_launch_arguments()
        environ = await self._engine.read_environment()
        if unsupported := [*self._find_unsupported(environ)]:
            raise CaptureError(f"SGLang's own profiler does not support: {'; '.join(unsupported)}. {REMEDY}")
        tp, pp, dp = (int(self._launch_arguments.get(name) or 1) for name in ("tp_size", "pp_size", "dp_size"))
        self._world = tp * pp * (1 if self._launch_arguments.get("enable_dp_attention") else dp)
        directory = self._create_directory(is_local=await self._engine.is_local())
        self.watch(directory, alone=True)
        arguments: dict[str, Any] = {
            "output_dir": str(directory),
            "activities": self._activities(),
            "with_stack": self._options.with_stack,
            "record_shapes": self._options.record_shapes,
            "profile_id": f"{self._request.id}-{self._request.token}",
        }
        if self._request.iterations is not None:
            arguments["num_steps"] = self._request.iterations.count
        if self._options.detailed_annotations:
            arguments["detailed_annotations"] = True
        await self._engine.start_profile(**arguments)
        self._capture.notes.append("Recorded by SGLang's own profiler, on all ranks of the engine.")

    async def end(self) -> None:
        """Stop the profiler. With a window, the stop fails if the window is already complete."""
        if self._request.iterations is None:
            await self._engine.stop_profile()
            return
        if not self.all_there():
            try:
                await self._engine.stop_profile()
            except CaptureError:
                return  # The window is complete, and `stop` waits for its files.
            count = self._request.iterations.count
            self._capture.report_problem(f"Fewer than {count} iterations ran before the stop.")

    async def stop(self) -> None:
        """Stop the profiler and move the traces into the run."""
        await super().stop()
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)

    def place(self, path: Path) -> TraceOrigin | None:
        """Return the rank and coordinates in a trace's file name; None for other files."""
        match = _FILE.fullmatch(path.name)
        if match is None:
            return None
        tp, pp = (int(self._launch_arguments.get(name) or 1) for name in ("tp_size", "pp_size"))
        indices = {name: int(value) for name, value in match.groupdict().items() if value is not None}
        replica = 0 if self._launch_arguments.get("enable_dp_attention") else indices.get("dp", 0)
        coordinates = {name: value for name, value in indices.items() if name != "tp" or tp > 1}
        return TraceOrigin((replica * pp + indices.get("pp", 0)) * tp + indices["tp"], coordinates)

    @property
    def remedy(self) -> str:
        """Advice for missing traces."""
        return "SGLang reports write errors only in its log."

    def _create_directory(self, *, is_local: bool) -> Path:
        """Create a directory that the engine can write to. If it cannot write the traces, SGLang terminates."""
        native_directory = self._options.native_directory
        root = (native_directory or self._request.output / self._request.run).absolute()
        if native_directory is None and not is_local:
            raise CaptureError(
                f"{self._engine.name} is on another host, where profdeck cannot check that the trace directory is "
                "writable. If it is not, SGLang terminates. Set options.native_directory to a directory that both "
                f"hosts share. {REMEDY}"
            )
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._staging = Path(tempfile.mkdtemp(prefix="sglang-", dir=root))
            self._staging.chmod(0o777)  # The server may run as another user.
        except OSError as error:
            raise CaptureError(f"Cannot write to {root}: {describe_error(error)}") from error
        return self._staging

    def _find_unsupported(self, environ: Mapping[str, str]) -> Iterator[str]:
        options, device = unstructure(self._options), str(self._launch_arguments.get("device"))
        for option in _UNSUPPORTED:
            if options[option]:
                yield option
        if self._request.batch_kinds:
            yield "batch_kinds and profile_by_stage, which cannot be stopped before a batch of each kind"
        if self._request.iterations is not None and self._request.iterations.skip:
            yield "iterations.skip, which cannot be stopped before its first batch"
        if not self._options.ignore_frontend:
            yield "ignore_frontend: false"
        if self._options.detailed_annotations and not self._supports_annotations():
            yield "detailed_annotations, which requires SGLang 0.5.19 or newer"
        if environ.get("SGLANG_PROFILE_V2", "").lower() in {"1", "true", "yes", "y"}:
            yield "any capture with SGLANG_PROFILE_V2 in the engine's environment"
        yield from self._find_unsupported_activities(device)

    def _find_unsupported_activities(self, device: str) -> Iterator[str]:
        if device.partition(":")[0] == Activity.NPU:
            # SGLang 0.5.23 replaces torch's profiler through a function that torch_npu has up to 2.10.0. With the
            # function, torch_npu writes directories instead of traces. Without it, the stop fails.
            yield "the device npu, where the stop fails or no traces are written, depending on the torch_npu version"
        for activity in self._options.activities or ():
            if activity not in _ACTIVITIES or (activity != Activity.CPU and str(activity) != device):
                yield f"the activity {activity} on the device {device}"

    def _supports_annotations(self) -> bool:
        try:
            return Version(str(self._launch_arguments["version"])) >= _FIRST_WITH_ANNOTATIONS
        except (
            KeyError,
            InvalidVersion,
        ):  # Engine objects report no version. They reject unknown arguments themselves.
            return True

    def _activities(self) -> list[str]:
        activities = self._options.activities
        if activities is None:
            has_cuda = self._launch_arguments.get("device") == "cuda"
            activities = (Activity.CPU, Activity.CUDA) if has_cuda else (Activity.CPU,)
        return [_ACTIVITIES[activity] for activity in activities]
