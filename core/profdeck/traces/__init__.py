"""Functions that read, check, compress and summarise Chrome traces in one pass and bounded memory.

Each name is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from profdeck.base.lazy import lazy_names

if TYPE_CHECKING:
    from profdeck.traces.analysis.alignment import align as align
    from profdeck.traces.analysis.class_rules import load_rules as load_rules
    from profdeck.traces.analysis.diff import diff_runs as diff_runs, load_summary as load_summary
    from profdeck.traces.analysis.run_summary import summarise_run as summarise_run
    from profdeck.traces.analysis.summary import summarise_trace as summarise_trace
    from profdeck.traces.merge import merge_traces as merge_traces
    from profdeck.traces.reading.reader import read_trace as read_trace
    from profdeck.traces.run import load as load
    from profdeck.traces.sources import find_sources as find_sources
    from profdeck.traces.trend.of_capture import (
        CaptureNumbers as CaptureNumbers,
        numbers_of_capture as numbers_of_capture,
    )
    from profdeck.traces.writing.compression import (
        Compressed as Compressed,
        compress_in_child as compress_in_child,
        compress_trace as compress_trace,
    )
    from profdeck.traces.writing.slim import write_slim as write_slim
    from profdeck.traces.writing.trim import trim_trace as trim_trace
    from profdeck.traces.writing.windows import (
        iteration_window as iteration_window,
        read_extent as read_extent,
        step_window as step_window,
        time_window as time_window,
    )

HOMES = {
    "traces.run": "load",
    "traces.sources": "find_sources",
    "traces.reading.reader": "read_trace",
    "traces.analysis.summary": "summarise_trace",
    "traces.analysis.run_summary": "summarise_run",
    "traces.trend.of_capture": "numbers_of_capture CaptureNumbers",
    "traces.analysis.diff": "diff_runs load_summary",
    "traces.analysis.class_rules": "load_rules",
    "traces.analysis.alignment": "align",
    "traces.writing.windows": "read_extent step_window iteration_window time_window",
    "traces.writing.trim": "trim_trace",
    "traces.merge": "merge_traces",
    "traces.writing.slim": "write_slim",
    "traces.writing.compression": "compress_trace compress_in_child Compressed",
}
"""Public names by the module that defines them, relative to ``profdeck``."""

__getattr__, __dir__ = lazy_names(globals(), HOMES)
