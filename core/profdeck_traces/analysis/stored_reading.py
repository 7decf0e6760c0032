"""Writes result files for traces."""

from __future__ import annotations

from pathlib import Path

from profdeck_traces.analysis import cached_reading
from profdeck_traces.analysis.classes import Classifier
from profdeck_traces.analysis.step_names import StepNames
from profdeck_traces.analysis.summary import read_summary
from profdeck_traces.base.files import sha256_of
from profdeck_traces.inputs.artifact_kinds import FileCheck, kind_of
from profdeck_traces.inputs.result_files import ResultFile, question_text, store_result
from profdeck_traces.inputs.sources import TraceSource


def write_result(trace: Path, *, cold_first_step: bool = False, last_step: int | None = None) -> bool:
    """Analyse a trace and store the result next to it for later commands. See `profdeck_traces.inputs.result_files`.

    Args:
        trace: A Chrome trace.
        cold_first_step: True if the recorder started in the first step of the trace, without warm-up.
        last_step: Last global step in the trace, as in `profdeck_traces.inputs.sources.TraceSource`.

    Returns:
        True if the result was stored. False if the trace is corrupt, changed during the analysis, contains values that
        cannot be encoded, or is a plugin's artifact.

    Raises:
        TraceError: The trace cannot be read, or almost none of its events have a known category.
        OSError: The result cannot be written.
    """
    if kind_of(trace) is not None or (sha256 := sha256_of(trace)) is None:
        return False
    classifier, step_names = Classifier(), StepNames.load()
    reading = read_summary(
        TraceSource(trace),
        classifier=classifier,
        step_names=step_names,
        cold_first_step=cold_first_step,
        last_step=last_step,
        pictures=True,
    )
    content, pictures = cached_reading.to_bytes(reading), cached_reading.pictures_to_bytes(reading)
    if not reading.summary.whole or content is None or pictures is None or sha256_of(trace) != sha256:
        return False
    result = ResultFile(
        check=FileCheck(whole=True, problem=None, events=reading.summary.events, sha256=sha256),
        question=question_text(*cached_reading.question(classifier, step_names), cold_first_step, last_step),
        reading=content,
        pictures=pictures,
    )
    store_result(trace, sha256, result)
    return True
