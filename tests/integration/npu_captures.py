"""What tests of the NPU backend share: captures in a job over the stub driver, and what became of each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from profdeck.records.manifest import Manifest, read_manifest

# What a job begins with: `build` makes a profiler that writes to a run, `work` is one launch, `tell` prints a result.
PREAMBLE = """
import gc, json, logging, os, shutil, sys, threading, time, warnings
from pathlib import Path

import torch, torch_npu
from profdeck import Profiler
from profdeck.base.errors import ProfdeckError
from profdeck.base.identity import Identity

logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
x = torch.ones(4).to("npu")

def build(run, options=(), identity=None, **given):
    own = {f"trainer.options.{key}": value for key, value in {"analyse": False, **dict(options)}.items()}
    base = {"output": ".", "run": run, "trainer.backend": "npu", "steps": [1]}
    return Profiler.from_config(identity=identity, settings={**base, **given, **own})

def work():
    x + 1
    torch.npu.synchronize()

def capture(run, options=(), step=1, **given):
    profiler = build(run, options, **given)
    with profiler.capture(step):
        work()
    return profiler

def tell(**values):
    print("> " + json.dumps(values), flush=True)
"""

START = ["aclprofInit", "aclprofCreateConfig", "aclprofStart"]
WARM = ["aclprofInit", "aclprofCreateConfig", "aclprofWarmup", "aclprofStart"]
STOP = ["aclprofStop", "aclprofDestroyConfig", "aclprofFinalize"]


def told(job: Any) -> dict[str, Any]:
    """Return what a job told."""
    found: dict[str, Any] = {}
    for line in job.stdout.splitlines():
        if line.startswith("> "):
            found |= json.loads(line[2:])
    return found


def by_run(calls: Iterable[Any]) -> dict[str, list[list[Any]]]:
    """Part the calls of the driver's profiler by run and recording, which all begin with `aclprofInit`."""
    found: dict[str, list[list[Any]]] = {}
    recording: list[Any] = []
    for call in calls:
        if call.name == "aclprofInit":
            run = Path(call.arguments["path"]).parents[2].name
            recording = []
            found.setdefault(run, []).append(recording)
        if not call.name.startswith("mstx"):
            recording.append(call)
    return found


def names(recording: Iterable[Any]) -> list[str]:
    """Return the names of calls."""
    return [call.name for call in recording]


def manifests(run: Path) -> dict[str, Manifest]:
    """Read the manifests of a run, by capture."""
    found = [read_manifest(path) for path in sorted(run.glob("step_*/**/rank_*.json"))]
    return {manifest.capture: manifest for manifest in found}


def manifest(run: Path) -> Manifest:
    """Read the only manifest of a run."""
    (found,) = manifests(run).values()
    return found


def directories(run: Path) -> list[Path]:
    """List what torch_npu left in a run, in the order of time."""
    return sorted(run.glob("step_*/**/*_ascend_pt"), key=lambda path: path.name.split("_")[-3])


def info(directory: Path) -> dict[str, Any]:
    """Read what torch_npu notes of how it recorded."""
    (path,) = directory.glob("profiler_info*.json")
    config: dict[str, Any] = json.loads(path.read_text())["config"]
    return config


def operators(directory: Path) -> bytes:
    """Read what the host recorded, in torch_npu's binary format, in which names are as they are."""
    return (directory / "FRAMEWORK" / "torch.op_range").read_bytes()


def steps(directory: Path) -> list[int]:
    """List the steps that are marked in a recording."""
    return sorted({int(number) for number in re.findall(rb"ProfilerStep#(\d+)", operators(directory))})
