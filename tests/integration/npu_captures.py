"""Helpers for tests of the NPU backend: captures in a job with the stub driver, and their results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from profdeck.records.manifest import Manifest, read_manifest

# Start of a job: `build` creates a profiler for a run, `work` launches a kernel, and `print_result` prints a result.
PREAMBLE = """
import gc, json, logging, os, shutil, sys, threading, time, warnings
from pathlib import Path

import torch, torch_npu
from profdeck import Profiler
from profdeck.base.errors import ProfdeckError
from profdeck.base.identity import Identity

logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
x = torch.ones(4).to("npu")

def build(run, options=(), identity=None, **settings):
    trainer_options = {f"trainer.options.{key}": value for key, value in {"analyse": False, **dict(options)}.items()}
    base = {"output": ".", "run": run, "trainer.backend": "npu", "steps": [1]}
    return Profiler.from_config(identity=identity, settings={**base, **settings, **trainer_options})

def work():
    x + 1
    torch.npu.synchronize()

def capture(run, options=(), step=1, **settings):
    profiler = build(run, options, **settings)
    with profiler.capture(step):
        work()
    return profiler

def print_result(**values):
    print("> " + json.dumps(values), flush=True)
"""

START = ["aclprofInit", "aclprofCreateConfig", "aclprofStart"]
WARM = ["aclprofInit", "aclprofCreateConfig", "aclprofWarmup", "aclprofStart"]
STOP = ["aclprofStop", "aclprofDestroyConfig", "aclprofFinalize"]


def printed_results(job: Any) -> dict[str, Any]:
    """Return the results that a job printed with `print_result`."""
    results: dict[str, Any] = {}
    for line in job.stdout.splitlines():
        if line.startswith("> "):
            results |= json.loads(line[2:])
    return results


def by_run(calls: Iterable[Any]) -> dict[str, list[list[Any]]]:
    """Group driver calls by run and recording. Each recording starts with `aclprofInit`."""
    recordings: dict[str, list[list[Any]]] = {}
    recording: list[Any] = []
    for call in calls:
        if call.name == "aclprofInit":
            run = Path(call.arguments["path"]).parents[2].name
            recording = []
            recordings.setdefault(run, []).append(recording)
        if not call.name.startswith("mstx"):
            recording.append(call)
    return recordings


def names(recording: Iterable[Any]) -> list[str]:
    """Return the names of calls."""
    return [call.name for call in recording]


def manifests(run: Path) -> dict[str, Manifest]:
    """Read the manifests of a run, keyed by capture."""
    run_manifests = [read_manifest(path) for path in sorted(run.glob("step_*/**/rank_*.json"))]
    return {manifest.capture: manifest for manifest in run_manifests}


def manifest(run: Path) -> Manifest:
    """Read the only manifest of a run."""
    (only_manifest,) = manifests(run).values()
    return only_manifest


def directories(run: Path) -> list[Path]:
    """Return the torch_npu directories of a run, sorted by time."""
    return sorted(run.glob("step_*/**/*_ascend_pt"), key=lambda path: path.name.split("_")[-3])


def info(directory: Path) -> dict[str, Any]:
    """Read the configuration in torch_npu's info file."""
    (path,) = directory.glob("profiler_info*.json")
    config: dict[str, Any] = json.loads(path.read_text())["config"]
    return config


def operators(directory: Path) -> bytes:
    """Read the host operators in torch_npu's binary format, which contains names as plain text."""
    return (directory / "FRAMEWORK" / "torch.op_range").read_bytes()


def steps(directory: Path) -> list[int]:
    """Return the numbers of the annotated steps in a recording."""
    return sorted({int(number) for number in re.findall(rb"ProfilerStep#(\d+)", operators(directory))})
