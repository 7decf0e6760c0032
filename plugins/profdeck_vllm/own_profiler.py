"""Captures by vLLM's own profiler, for engines whose workers have not loaded profdeck.

It is fixed when the engine is launched, and writes where it was told then. What a capture asks for beyond that is
refused, with what to do. The files are found by what is new in the directory, checked, and brought into the run.

Windows, as the code of 0.12 to 0.32 counts them (``WorkerProfiler.step`` in vllm/profiler/wrapper.py, run at the head
of an iteration): ``delay_iterations`` D > 0 passes over D - 1 iterations, ``max_iterations`` N records N; the recording
ends when iteration N + 1 begins, or at the stop.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from profdeck import Activity
from profdeck.engines import Outcome, OwnProfilerCapture, TraceOrigin
from profdeck.plugin import CaptureError, TargetError, unstructure
from profdeck_vllm.engines import REMEDY, VllmEngine
from profdeck_vllm.options import VllmOptions

# Names of ``tensorboard_trace_handler`` with the worker names of the releases: [PREFIX_]dp0_pp0_tp1_dcp0_ep0_rank1,
# rank1, INSTANCE-rank-1; then the time in nanoseconds.
_FILE = re.compile(r"(?:.*_)?(?P<place>(?:[a-z]+\d+_)*)rank(?P<rank>\d+)\.\d+\.pt\.trace\.json(?:\.gz)?")
_OLD_FILE = re.compile(r".*-rank-(?P<rank>\d+)\.\d+\.pt\.trace\.json(?:\.gz)?")
# ``OmniTorchProfilerWrapper`` in vllm_omni/profiler/omni_torch_profiler.py: TIME_stage0_rank1_SECONDS/trace_rank1.json,
# TIME_stage_0_rep_0_diffusion_SECONDS/trace_rank0.json.gz (0.30); stage_0_diffusion_SECONDS_rank0.json (0.18).
_OMNI_FILE = re.compile(r".*?stage_?(?P<stage>\d+)_.*_rank(?P<rank>\d+)\.json(?:\.gz)?")
_SETTLED_S = 2.0
"""So old is a trace that vLLM-Omni does not compress; it begins at once, in another process."""

# Our options, and those of vLLM's ProfilerConfig that must have been on at launch.
_AT_LAUNCH = {
    "record_shapes": "torch_profiler_record_shapes",
    "with_stack": "torch_profiler_with_stack",
    "profile_memory": "torch_profiler_with_memory",
    "with_flops": "torch_profiler_with_flops",
    "detailed_trace_annotation": "detailed_trace_annotation",
}
_NEVER = ("with_modules", "profile_by_stage", "device_options")

# ``TorchNPUProfilerWrapper`` in vllm_ascend/profiler/torch_npu_profiler.py.
_ON_NPU = (
    "On an NPU vLLM's own profiler leaves directories of torch_npu and no traces that can be brought into the run."
)


class VllmCapture(OwnProfilerCapture[VllmEngine, VllmOptions]):
    """One capture by vLLM's own profiler."""

    backend: ClassVar[str] = "vllm"
    title: ClassVar[str] = "vLLM"
    glob: ClassVar[str] = "*.json*"
    search_subdirectories: ClassVar[bool] = True

    async def start(self) -> None:
        """Start it.

        Raises:
            CaptureError: it cannot do what is asked for, or does not start.
        """
        if await self._engine.device_type() == Activity.NPU:
            raise CaptureError(f"{_ON_NPU} {REMEDY}")
        launched = await self._engine.launched_with()
        if launched is not None and not launched:
            raise TargetError(
                f"{self._engine.name} was launched without a profiler, and its workers have not loaded profdeck. "
                f"{REMEDY} Or launch it with --profiler-config.profiler=torch "
                "--profiler-config.torch_profiler_dir=DIRECTORY (profiler_config={...} of an engine object).",
                Outcome.NOT_ENABLED,
            )
        if await self._engine.is_pipeline():
            self._check_pipeline()
        if refused := list(self._refusals(launched)):
            raise CaptureError(f"vLLM's own profiler cannot be told for one capture: {'; '.join(refused)}. {REMEDY}")
        directory = launched["torch_profiler_dir"] if launched else self._options.native_directory
        if not directory:
            raise CaptureError(
                f"{self._engine.name} writes its traces to the torch_profiler_dir of its launch and does not tell "
                f"which that is: give options.native_directory. {REMEDY}"
            )
        prefix = self._own_prefix() if await self._engine.names_traces() else None
        self.watch(Path(directory), f"{prefix}_" if prefix else "")
        try:
            self._world = await self._engine.world()
            await self._engine.start_profile(**self._arguments(prefix))
        except BaseException:
            self._unwatch()
            raise
        self._capture.notes.append("Recorded by vLLM's own profiler, with the options of its launch.")

    async def end(self) -> None:
        """Stop the profiler, also when the window has ended by itself: only this lets vLLM start another profile."""
        stages = {} if self._options.stages is None else {"stages": list(self._options.stages)}
        await self._engine.stop_profile(**stages)

    def parse_name(self, path: Path) -> TraceOrigin | None:
        """Read the name of a trace; the frontend's has no rank."""
        if found := _FILE.fullmatch(path.name):
            pairs = re.findall(r"(dp|pp|tp|dcp|ep)(\d+)_", found["place"])
            return TraceOrigin(int(found["rank"]), {name: int(index) for name, index in pairs})
        if found := _OLD_FILE.fullmatch(path.name):
            return TraceOrigin(int(found["rank"]))
        name = f"{path.parent.name}_{path.name}"
        if (found := _OMNI_FILE.fullmatch(path.name) or _OMNI_FILE.fullmatch(name)) and not _is_to_be_compressed(path):
            return TraceOrigin(int(found["rank"]), {"stage": int(found["stage"])})
        return None

    @property
    def remedy(self) -> str:
        """Where the engine tells what it failed to write."""
        if self._directory is not None and any(self._directory.glob("*_ascend_pt")):
            return f"{_ON_NPU} They are in {self._directory}. {REMEDY}"
        return "What vLLM failed to write is only in its log, after 'Failed to stop profiler'."

    def _own_prefix(self) -> str:
        """Return what nobody else's traces begin with; vLLM takes 128 letters, digits, dots and dashes."""
        request = self._request
        replica = "" if request.replica is None else f"-{request.replica}"
        about = re.sub(r"[^A-Za-z0-9.-]", "-", f"{request.run}-{request.role}{replica}-{request.id}")
        return f"p{secrets.token_hex(4)}-{about}"[:120]

    def _check_pipeline(self) -> None:
        """Refuse what cannot be told apart: the names of vLLM-Omni's traces have ranks of their stage."""
        if len(self._options.stages or ()) != 1:
            raise CaptureError(
                "vLLM-Omni's own profiler numbers the ranks of each stage from 0: choose one stage, such as "
                f"options.stages: [0]. {REMEDY}"
            )

    def _arguments(self, prefix: str | None) -> dict[str, Any]:
        arguments: dict[str, Any] = {} if prefix is None else {"profile_prefix": prefix}
        if (iterations := self._request.iterations) is not None:
            arguments["delay_iterations"] = iterations.skip + 1 if iterations.skip else 0
            arguments["max_iterations"] = iterations.count
        if self._options.stages is not None:
            arguments["stages"] = list(self._options.stages)
        return arguments

    def _refusals(self, launched: Mapping[str, Any] | None) -> Iterator[str]:
        """Say what is asked for and was not given at launch; of a server that is unknown, so nothing passes."""
        asked = unstructure(self._options)
        for option in _NEVER:
            if asked[option]:
                yield option
        if self._request.batch_kinds and not self._options.profile_by_stage:
            yield "batch_kinds"
        for option, native in _AT_LAUNCH.items():
            if asked[option] and not (launched and launched.get(native)):
                yield option + (f" (launch with --profiler-config.{native}=true)" if launched else "")
        if asked["activities"] is not None:
            native_activities = {str(name).lower() for name in (launched or {}).get("torch_profiler_activities") or ()}
            if native_activities != set(asked["activities"]):
                yield "activities (launch with --profiler-config.torch_profiler_activities)"
        if not self._options.ignore_frontend and (launched is None or launched.get("ignore_frontend")):
            yield "ignore_frontend: false (launch with --profiler-config.ignore_frontend=false)"
        if launched and launched.get("profiler") != "torch":
            yield f"traces (it was launched with the profiler {launched.get('profiler')}, whose files are no traces)"


def _is_to_be_compressed(path: Path) -> bool:
    """Tell whether vLLM-Omni may be replacing a trace by a compressed one."""
    if path.suffix == ".gz":
        return False
    with contextlib.suppress(OSError):  # it went away
        return path.with_name(f"{path.name}.gz").exists() or path.stat().st_mtime > time.time() - _SETTLED_S
    return True
