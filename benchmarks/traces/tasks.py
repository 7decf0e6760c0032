"""Benchmark tasks of profdeck. Each runs in its own process.

python -m benchmarks.traces.tasks [--shares] NAME [ARGUMENT...]

The last output line is the result as JSON. Common figures have the same names for all tools: `events` of any phase,
`kernels` and their total time `kernel_ns`, `device_events` and `device_ns` (also with copies and memory sets), and
`busy_ns`, the time in which anything ran, summed over devices.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:  # tasks import their modules, because the import is part of the measured time
    from profdeck_traces.analysis.model import RankSummary
    from profdeck_traces.base.result_cache import ResultCache

PROCESSES = 2
SAMPLE_S = 0.001


def columns(path: str) -> dict[str, Any]:
    """Read a trace with all args into sorted columns, and find the parent of each event."""
    import numpy as np

    from profdeck_traces.reading.columns import DEVICE_CATEGORIES
    from profdeck_traces.reading.events import read_events

    events = read_events(Path(path))
    assert len(events.parent) == events.complete
    kernels, work = events.has_category({"kernel"}), events.has_category(DEVICE_CATEGORIES)
    return {
        "events": len(events),
        "whole": events.check.whole,
        "kernels": int(np.count_nonzero(kernels)),
        "kernel_ns": int(events.duration_ns[kernels].sum()),
        "device_events": int(np.count_nonzero(work)),
        "device_ns": int(events.duration_ns[work].sum()),
    }


def all_events(path: str) -> dict[str, Any]:
    """Summarise all events of a trace."""
    from profdeck_traces.analysis.summary import summarise_trace

    summary = summarise_trace(Path(path))
    return {"events": summary.events, "whole": summary.whole, **_figures(summary)}


def all_answers(path: str) -> dict[str, Any]:
    """Summarise a trace, and compute the findings and tables that `profdeck summary` prints."""
    from profdeck_traces.analysis.run_summary import summarise_run
    from profdeck_traces.findings.finding import findings_of
    from profdeck_traces.findings.overview import teams_of
    from profdeck_traces.inputs.sources import TraceSource

    run, errors = summarise_run([TraceSource(Path(path))], processes=1)
    assert not errors, errors
    assert teams_of(run)
    return {"findings": len(findings_of(run)), "whole": run.ranks[0].whole}


def again(*paths: str) -> dict[str, Any]:
    """Summarise a job from cached results."""
    from profdeck_traces.base.result_cache import ResultCache

    return job(*paths, cache=ResultCache.of_user())


def first(*paths: str) -> dict[str, Any]:
    """Summarise a job with an empty cache, like the first command after a capture."""
    from profdeck_traces.base.result_cache import CACHE_VARIABLE, ResultCache

    with tempfile.TemporaryDirectory() as directory:
        return job(*paths, cache=ResultCache.of_user({CACHE_VARIABLE: directory}))


def store(*paths: str) -> dict[str, Any]:
    """Analyse traces and store the results next to them, as a capture does."""
    from profdeck_traces import write_result
    from profdeck_traces.inputs.result_files import result_path

    traces = [Path(path) for path in paths]
    assert all(map(write_result, traces))
    return {"file_bytes": sum(result_path(trace).stat().st_size for trace in traces)}


def job(*paths: str, cache: ResultCache | None = None) -> dict[str, Any]:
    """Summarise all ranks of a job, and compute the skew between them."""
    from profdeck_traces.analysis.run_summary import summarise_run
    from profdeck_traces.inputs.sources import TraceSource

    sources = [TraceSource(Path(path)) for path in paths]
    run, errors = summarise_run(sources, processes=PROCESSES, cache=cache)
    assert not errors, errors
    (group,) = run.skew
    figures = Counter[str]()
    for rank in run.ranks:
        figures.update(_figures(rank))
    return {
        **figures,
        "clock_offsets_us": [rank.clock_offset_us for rank in group.ranks],
        "straggler": group.straggler,
        "late_us": next((rank.late_us for rank in group.ranks if rank.rank == group.straggler), None),
    }


def merge(destination: str, *paths: str) -> dict[str, Any]:
    """Merge the traces of a job into one complete trace."""
    from profdeck_traces.merge import MergeSource, merge_traces

    sources = [MergeSource(Path(path), f"rank {rank}", rank) for rank, path in enumerate(paths)]
    check = merge_traces(sources, Path(destination), processes=PROCESSES)
    return {"whole": check.whole, "file_bytes": check.size_bytes}


def merge_slim(destination: str, *paths: str) -> dict[str, Any]:
    """Merge the traces of a job into one slim Perfetto trace."""
    from profdeck_traces.writing.slim import SlimSource, write_slim

    sources = [SlimSource(path=Path(path), label=f"rank {rank}", sort_index=rank) for rank, path in enumerate(paths)]
    result = write_slim(sources, Path(destination), processes=PROCESSES)
    return {"whole": not result.problems, "file_bytes": result.size_bytes}


def _figures(rank: RankSummary) -> dict[str, int]:
    kernels = [kernel for kernel in rank.kernels if kernel.kind == "kernel"]
    return {
        "kernels": sum(kernel.count for kernel in kernels),
        "kernel_ns": sum(round(kernel.total_us * 1000) for kernel in kernels),
        "device_events": sum(kernel.count for kernel in rank.kernels),
        "device_ns": sum(round(kernel.total_us * 1000) for kernel in rank.kernels),
        "busy_ns": round((rank.busy_us or 0.0) * 1000),
    }


class Shares:
    """Samples the CPU time of the main thread by function of profdeck, including the compiled code that it calls.

    Python handles a signal only after compiled code returns, so each sample covers the time since the previous one.
    """

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = defaultdict(float)
        self._last_s = 0.0

    def __enter__(self) -> Self:
        self._begin_s = time.process_time()
        self._last_s = time.thread_time()
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        self.spent_s["other threads"] = time.process_time() - self._begin_s - sum(self.spent_s.values())

    def _sample(self, _number: int, frame: FrameType | None) -> None:
        now_s = time.thread_time()
        while frame and not frame.f_globals["__name__"].startswith(("profdeck.", "profdeck_traces.")):
            frame = frame.f_back
        function = (
            f"{frame.f_globals['__name__'].rpartition('.')[2]}.{frame.f_code.co_qualname}"
            if frame
            else "outside profdeck"
        )
        self.spent_s[function] += now_s - self._last_s
        self._last_s = now_s


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "columns": columns,
    "all_events": all_events,
    "all_answers": all_answers,
    "job": job,
    "again": again,
    "first": first,
    "store": store,
    "merge": merge,
    "merge_slim": merge_slim,
}


def main(arguments: Sequence[str]) -> None:
    """Run one task from the command line."""
    if arguments[0] == "--shares":
        with Shares() as shares:
            TASKS[arguments[1]](*arguments[2:])
        print(json.dumps(shares.spent_s))
    else:
        print(json.dumps(TASKS[arguments[0]](*arguments[1:])))


if __name__ == "__main__":  # worker processes import this file
    main(sys.argv[1:])
