"""Exports the stacks of a run in the file format of https://www.speedscope.app, as weighted samples.

Format: https://www.speedscope.app/file-format-schema.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from profdeck_traces.analysis.detail_model import StackFrame
from profdeck_traces.analysis.model import RunSummary
from profdeck_traces.analysis.rank_labels import labels_of


def speedscope(run: RunSummary) -> dict[str, Any] | None:
    """Return a document with one profile for each trace with stacks, or ``None`` if no trace has stacks."""
    frames: dict[str, int] = {}
    labels = labels_of(run.ranks)
    profiles = [_profile(labels[rank.path], rank.stacks, frames) for rank in run.ranks if rank.stacks]
    if not profiles:
        return None
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "exporter": "profdeck",  # near the start of the file, where `profdeck export` looks for it
        "shared": {"frames": [{"name": name} for name in frames]},
        "profiles": profiles,
    }


def _profile(name: str, stacks: Sequence[StackFrame], frames: dict[str, int]) -> dict[str, Any]:
    paths: list[list[int]] = []
    samples, weights = [], []
    for frame in stacks:
        above = paths[frame.parent] if frame.parent is not None else []
        paths.append([*above, frames.setdefault(frame.name, len(frames))])
        if frame.self_us:
            samples.append(paths[-1])
            weights.append(frame.self_us)
    return {
        "type": "sampled",
        "name": name,
        "unit": "microseconds",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }
