"""Captures by SGLang's own profiler, for engines whose processes have not loaded profdeck.

It takes a directory and a number of forward passes per request, and ends servers that are asked for other things (seen
with 0.5.23): what is known to do so is refused here. Its answers say neither what was written nor whether it was: the
files are awaited.
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

# [PREFIX-]ID-TP-0[-DP-0][-PP-0][-EP-0].trace.json.gz; coordinates of size 1 are left out, except TP.
_FILE = re.compile(r".*-TP-(?P<tp>\d+)(?:-DP-(?P<dp>\d+))?(?:-PP-(?P<pp>\d+))?(?:-EP-(?P<ep>\d+))?\.trace\.json\.gz")

_ANNOTATES = Version("0.5.19")
_NEVER = ("profile_memory", "with_flops", "with_modules", "device_options", "start_step", "stage_min_batch_size")
_ACTIVITIES = {Activity.CPU: "CPU", Activity.CUDA: "GPU"}


class SglangCapture(OwnProfilerCapture[SglangEngine, SglangOptions]):
    """One capture by SGLang's own profiler."""

    backend: ClassVar[str] = "sglang"
    title: ClassVar[str] = "SGLang"
    glob: ClassVar[str] = "*.trace.json.gz"

    def __init__(
        self, engine: SglangEngine, options: SglangOptions, capture: EngineCapture, request: CaptureRequest
    ) -> None:
        """Take an engine of SGLang; see the base class."""
        super().__init__(engine, options, capture, request)
        self._launched: Mapping[str, Any] = {}
        self._staging: Path | None = None

    async def start(self) -> None:
        """Start it.

        Raises:
            CaptureError: it cannot do what is asked for, or does not start.
        """
        self._launched = await self._engine.launched_with()
        environ = await self._engine.environment()
        if refused := [*self._refusals(environ)]:
            raise CaptureError(f"SGLang's own profiler cannot be trusted with: {'; '.join(refused)}. {REMEDY}")
        sizes = [int(self._launched.get(name) or 1) for name in ("tp_size", "pp_size", "dp_size")]
        self._world = sizes[0] * sizes[1] * (1 if self._launched.get("enable_dp_attention") else sizes[2])
        directory = self._own_directory(here=await self._engine.is_local())
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
        """Stop the profiler; a window that has ended by itself leaves nothing to stop, which SGLang calls a failure."""
        if self._request.iterations is None:
            await self._engine.stop_profile()
            return
        if not self.has_all_traces():
            try:
                await self._engine.stop_profile()
            except CaptureError:
                return  # the window is over; its files are awaited
            count = self._request.iterations.count
            self._capture.report_problem(f"Fewer than {count} iterations ran before the stop.")

    async def stop(self) -> None:
        """Stop it and bring the files into the run."""
        await super().stop()
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)

    def parse_name(self, path: Path) -> TraceOrigin | None:
        """Read the name of a trace."""
        found = _FILE.fullmatch(path.name)
        if found is None:
            return None
        tp, pp = (int(self._launched.get(name) or 1) for name in ("tp_size", "pp_size"))
        index = {name: int(value) for name, value in found.groupdict().items() if value is not None}
        replica = 0 if self._launched.get("enable_dp_attention") else index.get("dp", 0)
        shown = {name: value for name, value in index.items() if name != "tp" or tp > 1}
        return TraceOrigin((replica * pp + index.get("pp", 0)) * tp + index["tp"], shown)

    @property
    def remedy(self) -> str:
        """Where the engine tells what it failed to write."""
        return "What SGLang failed to write is only in its log."

    def _own_directory(self, *, here: bool) -> Path:
        """Return a directory that is known to be writable where the engine runs: SGLang ends when it is not."""
        given = self._options.native_directory
        root = (given or self._request.output / self._request.run).absolute()
        if given is None and not here:
            raise CaptureError(
                f"{self._engine.name} is on another host, where profdeck cannot check that traces can be written, and "
                f"SGLang ends when they cannot. Give options.native_directory, on a file system of both hosts. {REMEDY}"
            )
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._staging = Path(tempfile.mkdtemp(prefix="sglang-", dir=root))
            self._staging.chmod(0o777)  # the server may be another user's
        except OSError as error:
            raise CaptureError(f"Nothing can be written to {root}: {describe_error(error)}") from error
        return self._staging

    def _refusals(self, environ: Mapping[str, str]) -> Iterator[str]:
        asked, device = unstructure(self._options), str(self._launched.get("device"))
        for option in _NEVER:
            if asked[option]:
                yield option
        if self._request.batch_kinds:
            yield "batch_kinds and profile_by_stage, which cannot be stopped before a batch of each kind"
        if self._request.iterations is not None and self._request.iterations.skip:
            yield "iterations.skip, which cannot be ended before its first batch comes"
        if not self._options.ignore_frontend:
            yield "ignore_frontend: false"
        if self._options.detailed_annotations and not self._annotates():
            yield "detailed_annotations, which SGLang has since 0.5.19"
        if environ.get("SGLANG_PROFILE_V2", "").lower() in {"1", "true", "yes", "y"}:
            yield "anything, with SGLANG_PROFILE_V2 in its environment"
        yield from self._refused_of(device)

    def _refused_of(self, device: str) -> Iterator[str]:
        if device.partition(":")[0] == Activity.NPU:
            # SGLang (0.5.23) puts torch_npu's profiler in the place of torch's by a function that torch_npu has no
            # more: the stop fails. Where torch_npu (up to 2.10.0) has it, directories of torch_npu are left.
            yield "the device npu, where it fails at its stop or leaves no traces, depending on torch_npu"
        for activity in self._options.activities or ():
            if activity not in _ACTIVITIES or (activity != Activity.CPU and str(activity) != device):
                yield f"the activity {activity} on the device {device}"

    def _annotates(self) -> bool:
        try:
            return Version(str(self._launched["version"])) >= _ANNOTATES
        except (KeyError, InvalidVersion):  # an engine object says by itself what it does not take
            return True

    def _activities(self) -> list[str]:
        asked = self._options.activities
        if asked is None:
            asked = (Activity.CPU, Activity.CUDA) if self._launched.get("device") == "cuda" else (Activity.CPU,)
        return [_ACTIVITIES[activity] for activity in asked]
