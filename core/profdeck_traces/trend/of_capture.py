"""Metrics of one finished capture, for experiment trackers."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.inputs.sources import recorded_sources
from profdeck_traces.trend.points import RankPoint, read_points
from profdeck_traces.trend.trend import trend_of

_UNITS = {"us": ("ms", 1e-3), "share": ("percent", 100.0), "tokens/s": ("per_s", 1.0)}
_OTHER = re.compile(r"[^A-Za-z0-9_.-]+")


@attrs.frozen(kw_only=True)
class CaptureNumbers:
    """Metrics of one capture."""

    step: int
    """First global step."""
    values: Mapping[str, float]
    """Values by name, such as ``profdeck/trainer/global_step_ms``, ``profdeck/rollout/2/decode_tokens_per_s`` or
    ``profdeck/trainer/stage/update_ms``. ``profdeck/complete`` is 1 for a complete capture, else 0."""


def numbers_of_capture(document: Mapping[str, Any], *, processes: int = 1) -> CaptureNumbers:
    """Read the traces of a capture and return the means over the ranks, as `profdeck trend` does.

    Args:
        document: The argument that the hook `capture_finished` receives.
        processes: Number of traces to read in parallel.
    """
    directory, files = Path(document["directory"]), set(document["files"])
    sources = [source for source in recorded_sources([directory]) if str(source.path) in files]
    points, _, _ = read_points(sources, processes=processes, cache=ResultCache.of_user())
    values: dict[str, float] = {"profdeck/complete": float(document["status"] == "complete")}
    for series in trend_of(points).series:
        unit, scale = _UNITS[series.unit]
        values[_name(series.role, series.replica, series.stage, f"{series.what}_{unit}")] = (
            series.points[-1].value * scale
        )
    stages: defaultdict[str, list[float]] = defaultdict(list)
    for point in points:
        for stage, time_us in point.numbers.stages.items():
            stages[_stage_name(point, stage)].append(time_us * 1e-3)
    values |= {name: statistics.fmean(times) for name, times in stages.items()}
    return CaptureNumbers(step=int(directory.name.removeprefix("step_")), values=values)


def _stage_name(point: RankPoint, stage: str) -> str:
    return _name(point.role, point.replica, point.stage, f"stage/{_OTHER.sub('_', stage)}_ms")


def _name(role: str, replica: int | None, stage: str | None, what: str) -> str:
    parts = ["profdeck", role, *([] if replica is None else [str(replica)]), *([stage] if stage else [])]
    return "/".join([*parts, what.replace(" ", "_")])
