"""Tests of polars data frames. Only the environment `trackers` contains polars."""

from __future__ import annotations

from pathlib import Path

import pytest

import profdeck_traces as traces
from gpu_job import GpuJob

pytestmark = pytest.mark.trackers


def test_polars_frames_equal_arrow_tables(tmp_path: Path) -> None:
    import polars as pl

    run = traces.load(GpuJob(ranks=2).write(tmp_path / "run"))
    for table in (run.kernels, run.steps, run.captures):
        expected = table.to_arrow()
        assert table.to_polars().to_dicts() == expected.to_pylist()
        assert pl.DataFrame(table).shape == expected.shape  # uses the Arrow C stream interface
