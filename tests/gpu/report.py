"""Results of a part, and an independent reader for its traces.

The reader uses only the standard library. It verifies profdeck's summaries.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from profdeck.verification.run_report import read_run

OUT = Path(os.environ["PROFDECK_GPU_OUT"])
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SKIPPED = 77
_DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}


class Report:
    """Checks and figures of a part. Each method writes them to ``result.json``."""

    def __init__(self) -> None:
        self._content: dict[str, Any] = {"checks": {}, "figures": {}}

    def check(self, name: str, passed: bool, detail: object = "") -> None:
        """Record a check. A failed check fails the part."""
        self._content["checks"][name] = {"passed": bool(passed), "detail": str(detail)}
        self._write(f"{name}: {'passed' if passed else 'FAILED'} {detail}")

    def figure(self, name: str, value: object) -> None:
        """Record a measured value. `name` includes the unit."""
        self._content["figures"][name] = value
        self._write(f"{name}: {value}")

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Record an exception as a failed check and continue."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # recorded as a failed check
            traceback.print_exc()
            self.check(name, passed=False, detail=f"{type(error).__name__}: {error}")

    def skip(self, reason: str) -> None:
        """Record the reason and exit with code `SKIPPED`."""
        self._content["skipped"] = reason
        self._write(reason)
        sys.exit(SKIPPED)

    def finish(self) -> None:
        """Exit with code 1 if a check failed, or 0."""
        sys.exit(not all(check["passed"] for check in self._content["checks"].values()))

    def _write(self, line: str) -> None:
        OUT.joinpath("result.json").write_text(json.dumps(self._content), encoding="utf-8")
        print(line, flush=True)


def synchronize() -> None:
    """Wait until the CUDA device is idle. Do nothing without a device."""
    if CUDA:
        torch.cuda.synchronize()


def traces(run: str) -> list[Path]:
    """Return the trace files of a run."""
    found = (OUT / run).glob("step_*/**/*.trace.json*")
    return sorted(path for path in found if path.suffix != ".result")  # results of the background analysis


def status(run: str) -> str:
    """Return the status of a run, as `profdeck ls` reports it."""
    return str(read_run(OUT / run).status)


def summarize(run: str) -> dict[str, Any]:
    """Return the parsed output of `profdeck summary --json`."""
    command = [sys.executable, "-m", "profdeck", "summary", "--json", str(OUT / run)]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary


def count(path: Path) -> dict[str, float]:
    """Return event counts and the busy time of the devices in a trace."""
    data = path.read_bytes()
    events = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    device = [event for event in events if event.get("ph") == "X" and event.get("cat") in _DEVICE_CATEGORIES]
    kernels = [event for event in device if event["cat"] == "kernel"]
    runtime = [event for event in events if event.get("cat") in {"cuda_runtime", "cuda_driver"}]
    launched = {event["args"].get("correlation") for event in runtime if "args" in event}
    return {
        "device_events": len(device),
        "kernels": len(kernels),
        "busy_us": union_us([(event["ts"], event["ts"] + event["dur"]) for event in device]),
        "streams": len({(event["pid"], event["tid"]) for event in device}),
        "graph_launches": sum("GraphLaunch" in event["name"] for event in runtime),
        "without_launch": sum(event["args"].get("correlation") not in launched for event in kernels),
        "collectives": sum("nccl" in event["name"].lower() for event in kernels),
    }


def union_us(spans: list[tuple[float, float]]) -> float:
    """Return the total length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def compare(report: Report, run: str) -> None:
    """Check that a run is complete and that its summary agrees with `count`."""
    with report.attempt(run):
        report.check(f"{run} is complete", status(run) == "complete", status(run))
        ranks = summarize(run)["ranks"]
        report.check(f"the summary of {run} has all traces", len(ranks) == len(traces(run)), len(ranks))
        for rank in ranks:
            path = OUT / run / rank["path"]
            counted = count(path)
            listed = sum(kernel["count"] for kernel in rank["kernels"])  # with copies and fills
            same = listed == counted["device_events"] and abs((rank["busy_us"] or 0.0) - counted["busy_us"]) < 1.0
            detail = f"expected {counted}; profdeck: {listed} device events, {rank['busy_us']} us busy"
            report.check(f"{run} {path.name} summary is correct", same, detail)
            if CUDA and run != "host":
                report.check(f"{run} {path.name} has kernels", counted["kernels"] > 0, detail)
