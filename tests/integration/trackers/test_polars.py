"""Tests of polars data frames; polars is installed in the environment `trackers` only."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_job import GpuJob
from profdeck import traces

pytestmark = pytest.mark.trackers


def test_polars_frames_equal_arrow_tables(tmp_path: Path) -> None:
    import polars as pl

    run = traces.load(GpuJob(ranks=2).write(tmp_path / "run"))
    for table in (run.kernels, run.steps, run.captures):
        expected = table.to_arrow()
        assert table.to_polars().to_dicts() == expected.to_pylist()
        assert pl.DataFrame(table).shape == expected.shape  # through the Arrow C stream
