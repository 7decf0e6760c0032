"""Captures by vLLM's own profiler, for engines whose workers have not loaded profdeck.

It is fixed when the engine is launched, and writes where it was told then. What a capture asks for beyond that is
refused, with what to do. The files are found by what is new in the directory, checked, and brought into the run.

Windows, as the code of 0.12 to 0.32 counts them (``WorkerProfiler.step`` in vllm/profiler/wrapper.py, run at the head
of an iteration): ``delay_iterations`` D > 0 passes over D - 1 iterations, ``max_iterations`` N records N; the recording
ends when iteration N + 1 begins, or at the stop.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from profdeck import Artifact, Capture, Identity
from profdeck.capture import Unit
from profdeck.engine.request import CaptureRequest
from profdeck.errors import CaptureError, TraceError
from profdeck.files import publish
from profdeck.recording import adopt, claim
from profdeck.run import Recorder, RunDirectory
from profdeck.strict import unstructure
from profdeck.traces.integrity import TraceCheck, check_trace
from profdeck_vllm.engines import REMEDY, Engine
from profdeck_vllm.options import VllmOptions

# Names of ``tensorboard_trace_handler`` with the worker names of the releases: [PREFIX_]dp0_pp0_tp1_dcp0_ep0_rank1,
# rank1, INSTANCE-rank-1; then the time in nanoseconds.
_FILE = re.compile(r"(?:.*_)?(?P<place>(?:[a-z]+\d+_)*)rank(?P<rank>\d+)\.\d+\.pt\.trace\.json(?:\.gz)?")
_OLD_FILE = re.compile(r".*-rank-(?P<rank>\d+)\.\d+\.pt\.trace\.json(?:\.gz)?")

# Our options, and those of vLLM's ProfilerConfig that must have been on at launch.
_AT_LAUNCH = {
    "record_shapes": "torch_profiler_record_shapes",
    "with_stack": "torch_profiler_with_stack",
    "profile_memory": "torch_profiler_with_memory",
    "with_flops": "torch_profiler_with_flops",
    "detailed_trace_annotation": "detailed_trace_annotation",
}
_NEVER = ("with_modules", "profile_by_stage", "device_options")
_POLL_S = 0.2
_QUIET_S = 30.0
"""vLLM answers a stop when its workers have written, or failed to; the rest is for file systems that tell late."""


class NativeCapture:
    """One capture by vLLM's own profiler."""

    def __init__(self, engine: Engine, options: VllmOptions, capture: Capture, request: CaptureRequest) -> None:
        """Args:
        engine: what records.
        options: the role's options.
        capture: the capture of the target.
        request: what is asked for.
        """
        self._engine = engine
        self._options = options
        self._capture = capture
        self._request = request
        self._directory: Path | None = None
        self._before: set[Path] = set()
        self._world: int | None = None

    async def start(self) -> None:
        """Start it.

        Raises:
            CaptureError: it cannot do what is asked for, or does not start.
        """
        launched = await self._engine.launched_with()
        if launched is not None and not launched:
            raise CaptureError(
                f"{self._engine.name} was launched without a profiler, and its workers have not loaded profdeck. "
                f"{REMEDY} Or launch it with --profiler-config.profiler=torch "
                "--profiler-config.torch_profiler_dir=DIRECTORY (profiler_config={...} of an engine object)."
            )
        if refused := list(self._refusals(launched)):
            raise CaptureError(f"vLLM's own profiler cannot be told for one capture: {'; '.join(refused)}. {REMEDY}")
        directory = launched["torch_profiler_dir"] if launched else self._options.native_directory
        if not directory:
            raise CaptureError(
                f"{self._engine.name} writes its traces to the torch_profiler_dir of its launch and does not tell "
                f"which that is: give options.native_directory. {REMEDY}"
            )
        self._directory = Path(directory)
        self._world = await self._engine.world()
        self._before = set(self._files())
        await self._engine.start_profile(profile_prefix=f"{self._request.role}-{self._request.id}", **self._arguments())
        self._capture.notes.append("Recorded by vLLM's own profiler, with the options of its launch.")

    async def stop(self) -> Sequence[Artifact]:
        """Stop it, wait for the files and bring them into the run, with a manifest for each rank."""
        stages = {} if self._options.stages is None else {"stages": list(self._options.stages)}
        problems = self._capture.problems
        try:
            # Also when the window has ended by itself: only this lets vLLM start another profile.
            await self._engine.stop_profile(**stages)
            answered = True
        except CaptureError as error:
            problems.append(str(error))
            answered = False
        if self._directory is None or not self._directory.is_dir():
            problems.append(f"The traces cannot be brought into the run: {self._directory} is not on this host.")
            return ()
        whole, broken = await self._wait(_QUIET_S if answered else self._options.flush_timeout_s)
        wanted = self._wanted() or tuple(broken)
        self._capture.expected_ranks = tuple(sorted({*wanted, *whole}))
        problems += [
            f"Rank {rank} left no whole file in {self._directory}{broken.get(rank, '')}. What vLLM failed to write is "
            "only in its log, after 'Failed to stop profiler'."
            for rank in wanted
            if rank not in whole
        ]
        if not whole and not wanted:
            problems.append(f"There is no new trace in {self._directory}.")
        for rank, found in sorted(whole.items()):
            await self._engine.call(self._adopt, rank, found)
        return ()

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
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
        if self._request.stages and not self._options.profile_by_stage:
            yield "stages"
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

    def _files(self) -> Iterator[Path]:
        if self._directory is not None and self._directory.is_dir():
            yield from self._directory.glob("*.pt.trace.json*")

    def _wanted(self) -> tuple[int, ...]:
        if self._world is not None:
            return tuple(rank for rank in range(self._world) if self._request.selects(rank))
        return () if isinstance(self._request.ranks, str) else self._request.ranks

    async def _wait(self, quiet_s: float) -> tuple[dict[int, list[_Found]], dict[int, str]]:
        """Wait until every wanted rank has a new file that is whole, or none of them has changed for a while.

        Returns:
            The whole files by rank, and what is wrong with those of the other ranks.
        """
        began = changed = time.monotonic()
        checked: dict[tuple[Path, int], _Found] = {}
        while True:
            before = len(checked)
            for path in self._files():
                place, key = _place(path), (path, path.stat().st_size)
                if path in self._before or place is None or not self._request.selects(place[0]) or key in checked:
                    continue
                try:
                    checked[key] = _Found(path, *place, await self._engine.call(check_trace, path))
                except TraceError:  # it went away, or cannot be read yet
                    continue
            whole: dict[int, list[_Found]] = {}
            for found in checked.values():
                if found.check.whole:
                    whole.setdefault(found.rank, []).append(found)
            if whole and whole.keys() >= set(self._wanted()):
                return whole, {}
            now = time.monotonic()
            changed = now if len(checked) > before else changed
            if now >= changed + quiet_s or now >= began + self._options.flush_timeout_s:
                broken = {found.rank: f" ({found.path.name}: {found.check.problem})" for found in checked.values()}
                return whole, broken
            await self._engine.sleep(_POLL_S)

    def _adopt(self, rank: int, found: Sequence[_Found]) -> None:
        request = self._request
        identity = Identity(
            role=request.role,
            replica=request.replica,
            rank=rank,
            world_size=max(self._world or 0, rank + 1),
            parallel=found[0].place,
        )
        run = RunDirectory(request.output, request.run, {"roles": [request.role]})
        capture = Capture(
            id=request.id,
            directory=run.directory(request.first_step, identity),
            identity=identity,
            first_step=request.first_step,
            current_step=request.first_step,
            unit=Unit.ENGINE_ITERATION,
            iterations=request.iterations,
            request=request,
            started_ns=self._capture.started_ns,
        )
        recorder = Recorder(
            backend="vllm",
            versions={},
            options=unstructure(self._options),
            expected_ranks=self._capture.expected_ranks or (),
        )
        claim(capture, run, recorder)
        artifacts = []
        for number, item in enumerate(found):
            suffix = ".trace.json.gz" if item.path.suffix == ".gz" else ".trace.json"
            path = capture.artifact_path(suffix, str(number) if number else None)
            _bring(item.path, path)
            artifacts.append(Artifact(path=path, size_bytes=item.check.size_bytes, events=item.check.events))
        capture.notes.append(f"Recorded by vLLM's own profiler in {self._directory}.")
        adopt(capture, recorder, tuple(artifacts))


@attrs.frozen
class _Found:
    path: Path
    rank: int
    place: Mapping[str, int]
    check: TraceCheck


def _place(path: Path) -> tuple[int, dict[str, int]] | None:
    """Read rank and parallel coordinates from the name of a trace; None if it has none, as the frontend's."""
    if found := _FILE.fullmatch(path.name):
        pairs = re.findall(r"(dp|pp|tp|dcp|ep)(\d+)_", found["place"])
        return int(found["rank"]), {name: int(index) for name, index in pairs}
    if found := _OLD_FILE.fullmatch(path.name):
        return int(found["rank"]), {}
    return None


def _bring(source: Path, destination: Path) -> None:
    """Give a file a second name in the run directory, or copy it where that is on another file system."""
    try:
        destination.hardlink_to(source)
    except FileExistsError:
        raise
    except OSError:
        temporary = destination.with_name(f".{destination.name}.tmp")
        try:
            shutil.copyfile(source, temporary)
            publish(temporary, destination)
        finally:
            temporary.unlink(missing_ok=True)
