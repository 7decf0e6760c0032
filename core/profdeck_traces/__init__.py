"""Read, check, compress and summarise Chrome traces in one pass with bounded memory.

Each name is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from profdeck_traces.base.lazy import lazy_names

if TYPE_CHECKING:
    from profdeck_traces.analysis.class_rules import load_rules as load_rules
    from profdeck_traces.analysis.clock_alignment import align as align
    from profdeck_traces.analysis.diff import diff_runs as diff_runs, load_summary as load_summary
    from profdeck_traces.analysis.model import RunSummary as RunSummary
    from profdeck_traces.analysis.recorder_model import (
        CommunicationSummary as CommunicationSummary,
        DeviceStepSummary as DeviceStepSummary,
        LinkSummary as LinkSummary,
        RecorderTables as RecorderTables,
    )
    from profdeck_traces.analysis.run_summary import summarise_run as summarise_run
    from profdeck_traces.analysis.stored_reading import write_result as write_result
    from profdeck_traces.analysis.summary import summarise_trace as summarise_trace
    from profdeck_traces.base.progress import Meter as Meter, Progress as Progress
    from profdeck_traces.findings.finding import findings_of as findings_of, with_findings as with_findings
    from profdeck_traces.inputs.artifact_kinds import (
        ArtifactKind as ArtifactKind,
        FileCheck as FileCheck,
        PendingWork as PendingWork,
        StepOnDevice as StepOnDevice,
    )
    from profdeck_traces.inputs.sources import find_sources as find_sources
    from profdeck_traces.merge import MergeSource as MergeSource, merge_traces as merge_traces
    from profdeck_traces.reading.integrity import TraceCheck as TraceCheck, check_trace as check_trace
    from profdeck_traces.reading.reader import read_trace as read_trace
    from profdeck_traces.run import load as load
    from profdeck_traces.trend.of_capture import (
        CaptureNumbers as CaptureNumbers,
        numbers_of_capture as numbers_of_capture,
    )
    from profdeck_traces.writing.compression import (
        Compressed as Compressed,
        compress_in_child as compress_in_child,
        compress_trace as compress_trace,
    )
    from profdeck_traces.writing.slim import write_slim as write_slim
    from profdeck_traces.writing.trim import trim_trace as trim_trace
    from profdeck_traces.writing.windows import (
        iteration_window as iteration_window,
        read_extent as read_extent,
        step_window as step_window,
        time_window as time_window,
    )

SECTIONS = {
    "Read and summarise": {
        "profdeck_traces.run": "load",
        "profdeck_traces.inputs.sources": "find_sources",
        "profdeck_traces.reading.reader": "read_trace",
        "profdeck_traces.reading.integrity": "TraceCheck check_trace",
        "profdeck_traces.analysis.summary": "summarise_trace",
        "profdeck_traces.analysis.run_summary": "summarise_run",
        "profdeck_traces.analysis.model": "RunSummary",
        "profdeck_traces.findings.finding": "findings_of with_findings",
        "profdeck_traces.trend.of_capture": "numbers_of_capture CaptureNumbers",
        "profdeck_traces.analysis.diff": "diff_runs load_summary",
        "profdeck_traces.analysis.class_rules": "load_rules",
        "profdeck_traces.analysis.clock_alignment": "align",
    },
    "Write": {
        "profdeck_traces.analysis.stored_reading": "write_result",
        "profdeck_traces.writing.windows": "read_extent step_window iteration_window time_window",
        "profdeck_traces.writing.trim": "trim_trace",
        "profdeck_traces.merge": "MergeSource merge_traces",
        "profdeck_traces.writing.slim": "write_slim",
        "profdeck_traces.writing.compression": "compress_trace compress_in_child Compressed",
    },
    "Other kinds of artifacts": {
        "profdeck_traces.inputs.artifact_kinds": "ArtifactKind FileCheck PendingWork StepOnDevice",
        "profdeck_traces.analysis.recorder_model": "CommunicationSummary DeviceStepSummary LinkSummary RecorderTables",
        "profdeck_traces.base.progress": "Meter Progress",
    },
}
"""Public names, grouped by topic and by the module that defines them."""

__getattr__, __dir__ = lazy_names(globals(), *SECTIONS.values())
