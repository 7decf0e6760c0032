"""Tests of cached readings: a reading is unchanged after serialization."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import test_fuzz

from gpu_job import GpuJob
from profdeck_traces.analysis import cached_reading
from profdeck_traces.analysis.classes import Classifier
from profdeck_traces.analysis.rank_reading import RankReading
from profdeck_traces.analysis.step_names import StepNames
from profdeck_traces.analysis.summary import read_summary
from profdeck_traces.base.errors import TraceError
from profdeck_traces.inputs.sources import TraceSource
from seeds import FIRST_SEED


def reading_of(path: Path) -> RankReading:
    return read_summary(TraceSource(path), classifier=Classifier(), step_names=StepNames.load(), pictures=True)


def is_kept(reading: RankReading, path: Path) -> bool:
    content, pictures = cached_reading.to_bytes(reading), cached_reading.pictures_to_bytes(reading)
    if content is None or pictures is None:
        return False
    again = cached_reading.from_bytes(content, TraceSource(path), pictures)
    assert (again.origin_ns, again.base_ns) == (reading.origin_ns, reading.base_ns)
    assert again.summary == reading.summary
    assert repr(again.summary) == repr(reading.summary)  # equal numbers may be written in different ways
    for name in ("names", "groups", "meant", "rank", "anchor_offset_ns", "host", "run", "capture"):
        assert getattr(again.collectives, name) == getattr(reading.collectives, name), name
    for name in ("name", "group", "start_ns", "end_ns"):
        assert np.array_equal(getattr(again.collectives, name), getattr(reading.collectives, name)), name
    return True


def test_readings_of_jobs_round_trip(tmp_path: Path) -> None:
    for number, job in enumerate((GpuJob(ranks=2, items=3), GpuJob(steps=1), GpuJob(small=600, allocate_us=200))):
        for path in job.write(tmp_path / str(number)).iterdir():
            assert is_kept(reading_of(path), path)


@pytest.mark.parametrize("part", range(2))
def test_readings_of_mutated_traces_round_trip(tmp_path: Path, part: int) -> None:
    path, cached_count = tmp_path / "trace.json", 0
    for seed in range(FIRST_SEED + part, FIRST_SEED + 60, 2):
        chance = random.Random(seed)  # noqa: S311 - reproducible input
        path.write_bytes(test_fuzz.zipped(test_fuzz.mutated(test_fuzz.base(chance), chance), chance))
        try:
            cached_count += is_kept(reading_of(path), path)
        except TraceError:
            continue
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert cached_count > 10
