"""Captures by vLLM's own profiler, for engines whose workers have not loaded profdeck.

The launch of the engine fixes the profiler's options and output directory. A capture that requires other options is
rejected. The new files of the directory are checked and moved into the run.

In vLLM 0.12 to 0.32, ``WorkerProfiler.step`` in vllm/profiler/wrapper.py counts iterations at their start.
``delay_iterations`` D > 0 skips D - 1 iterations, and ``max_iterations`` N records N iterations. The recording stops
when iteration N + 1 starts, or at the stop request.
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

# File names of ``tensorboard_trace_handler``: the worker name, then the time in nanoseconds. Depending on the release,
# the worker name is [PREFIX_]dp0_pp0_tp1_dcp0_ep0_rank1, rank1 or INSTANCE-rank-1.
_FILE = re.compile(r"(?:.*_)?(?P<coordinates>(?:[a-z]+\d+_)*)rank(?P<rank>\d+)\.\d+\.pt\.trace\.json(?:\.gz)?")
_OLD_FILE = re.compile(r".*-rank-(?P<rank>\d+)\.\d+\.pt\.trace\.json(?:\.gz)?")
# ``OmniTorchProfilerWrapper`` in vllm_omni/profiler/omni_torch_profiler.py: TIME_stage0_rank1_SECONDS/trace_rank1.json,
# TIME_stage_0_rep_0_diffusion_SECONDS/trace_rank0.json.gz (0.30); stage_0_diffusion_SECONDS_rank0.json (0.18).
_OMNI_FILE = re.compile(r".*?stage_?(?P<stage>\d+)_.*_rank(?P<rank>\d+)\.json(?:\.gz)?")
_COMPRESSION_START_S = 2.0
"""A trace of this age, in seconds, will not be compressed: vLLM-Omni starts the compression at once."""

_LAUNCH_OPTIONS = {
    "record_shapes": "torch_profiler_record_shapes",
    "with_stack": "torch_profiler_with_stack",
    "profile_memory": "torch_profiler_with_memory",
    "with_flops": "torch_profiler_with_flops",
    "detailed_trace_annotation": "detailed_trace_annotation",
}
"""Capture options, and the options of vLLM's ``ProfilerConfig`` that must be enabled at launch."""
_UNSUPPORTED = ("with_modules", "profile_by_stage", "device_options")

# ``TorchNPUProfilerWrapper`` in vllm_ascend/profiler/torch_npu_profiler.py.
_ON_NPU = "On NPUs, vLLM's own profiler writes torch_npu directories, and profdeck cannot move them into the run."


class VllmCapture(OwnProfilerCapture[VllmEngine, VllmOptions]):
    """One capture by vLLM's own profiler."""

    backend: ClassVar[str] = "vllm"
    title: ClassVar[str] = "vLLM"
    glob: ClassVar[str] = "*.json*"
    in_directories: ClassVar[bool] = True

    async def start(self) -> None:
        """Start vLLM's profiler.

        Raises:
            CaptureError: vLLM's profiler cannot fulfil the request, or does not start.
        """
        if await self._engine.read_device_type() == Activity.NPU:
            raise CaptureError(f"{_ON_NPU} {REMEDY}")
        launch_config = await self._engine.read_launch_config()
        if launch_config is not None and not launch_config:
            raise TargetError(
                f"{self._engine.name} was launched without a profiler, and its workers have not loaded profdeck. "
                f"{REMEDY} Or launch it with --profiler-config.profiler=torch "
                "--profiler-config.torch_profiler_dir=DIRECTORY (for an engine object: profiler_config={...}).",
                Outcome.NOT_ENABLED,
            )
        if await self._engine.is_pipeline():
            self._check_pipeline()
        if unsupported := list(self._find_unsupported(launch_config)):
            raise CaptureError(
                f"vLLM's own profiler does not support these options per capture: {'; '.join(unsupported)}. {REMEDY}"
            )
        directory = launch_config["torch_profiler_dir"] if launch_config else self._options.native_directory
        if not directory:
            raise CaptureError(
                f"{self._engine.name} writes its traces to the torch_profiler_dir of its launch, which the server does "
                f"not report. Set options.native_directory to that directory. {REMEDY}"
            )
        prefix = self._create_prefix() if await self._engine.supports_trace_prefix() else None
        self.watch(Path(directory), f"{prefix}_" if prefix else "")
        try:
            self._world = await self._engine.read_world_size()
            await self._engine.start_profile(**self._arguments(prefix))
        except BaseException:
            self._unwatch()
            raise
        self._capture.notes.append("Recorded by vLLM's own profiler, with the options of its launch.")

    async def end(self) -> None:
        """Stop the profiler. After a complete window, vLLM also requires the stop before it starts another profile."""
        stages = {} if self._options.stages is None else {"stages": list(self._options.stages)}
        await self._engine.stop_profile(**stages)

    def place(self, path: Path) -> TraceOrigin | None:
        """Return the rank and coordinates in a trace's file name; None for the frontend's trace."""
        if match := _FILE.fullmatch(path.name):
            pairs = re.findall(r"(dp|pp|tp|dcp|ep)(\d+)_", match["coordinates"])
            return TraceOrigin(int(match["rank"]), {name: int(index) for name, index in pairs})
        if match := _OLD_FILE.fullmatch(path.name):
            return TraceOrigin(int(match["rank"]))
        name = f"{path.parent.name}_{path.name}"
        if (match := _OMNI_FILE.fullmatch(path.name) or _OMNI_FILE.fullmatch(name)) and not _may_be_compressed(path):
            return TraceOrigin(int(match["rank"]), {"stage": int(match["stage"])})
        return None

    @property
    def remedy(self) -> str:
        """Advice for missing traces."""
        if self._directory is not None and any(self._directory.glob("*_ascend_pt")):
            return f"{_ON_NPU} The directories are in {self._directory}. {REMEDY}"
        return "vLLM reports write errors only in its log, after 'Failed to stop profiler'."

    def _create_prefix(self) -> str:
        """Return a unique prefix for trace names. vLLM accepts up to 128 letters, digits, dots and dashes."""
        request = self._request
        replica = "" if request.replica is None else f"-{request.replica}"
        label = re.sub(r"[^A-Za-z0-9.-]", "-", f"{request.run}-{request.role}{replica}-{request.id}")
        return f"p{secrets.token_hex(4)}-{label}"[:120]

    def _check_pipeline(self) -> None:
        """Require exactly one stage, because the ranks in vLLM-Omni's trace names are only unique within a stage."""
        if len(self._options.stages or ()) != 1:
            raise CaptureError(
                "vLLM-Omni's own profiler numbers the ranks of each stage from 0. Select one stage, such as "
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

    def _find_unsupported(self, launch_config: Mapping[str, Any] | None) -> Iterator[str]:
        """Yield the requested options that the launch did not enable. If `launch_config` is None, none are enabled."""
        options = unstructure(self._options)
        for option in _UNSUPPORTED:
            if options[option]:
                yield option
        if self._request.batch_kinds and not self._options.profile_by_stage:
            yield "batch_kinds"
        for option, launch_option in _LAUNCH_OPTIONS.items():
            if options[option] and not (launch_config and launch_config.get(launch_option)):
                yield option + (f" (launch with --profiler-config.{launch_option}=true)" if launch_config else "")
        if options["activities"] is not None:
            launch_activities = (launch_config or {}).get("torch_profiler_activities") or ()
            if {str(name).lower() for name in launch_activities} != set(options["activities"]):
                yield "activities (launch with --profiler-config.torch_profiler_activities)"
        if not self._options.ignore_frontend and (launch_config is None or launch_config.get("ignore_frontend")):
            yield "ignore_frontend: false (launch with --profiler-config.ignore_frontend=false)"
        if launch_config and launch_config.get("profiler") != "torch":
            yield f"traces (the engine was launched with the profiler {launch_config.get('profiler')}, not torch)"


def _may_be_compressed(path: Path) -> bool:
    """Return whether vLLM-Omni may still replace a trace by a compressed file."""
    if path.suffix == ".gz":
        return False
    with contextlib.suppress(OSError):  # The file has been replaced.
        return path.with_name(f"{path.name}.gz").exists() or path.stat().st_mtime > time.time() - _COMPRESSION_START_S
    return True
