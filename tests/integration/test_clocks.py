"""Test of clock alignment by collectives, with two ranks whose clocks differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from namespaces import clock_that_is_ahead
from processes import free_port
from profdeck_traces.analysis.clock_alignment import Alignment, align
from profdeck_traces.inputs.sources import find_sources

pytestmark = [pytest.mark.torch, pytest.mark.slow]

JOB = Path(__file__).with_name("clocks_job.py")
AHEAD_NS = 2_345_678_901
CAPTURES = 100


def test_collectives_align_clocks(tmp_path: Path) -> None:
    """Measure the error of the alignment. docs/benchmarks.md has the result of an idle machine."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}
    environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shifted_clock = clock_that_is_ahead(tmp_path, AHEAD_NS)
    environments = [environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    environments[1] |= shifted_clock
    ranks = [
        subprocess.Popen([sys.executable, JOB, tmp_path], env=rank_environment) for rank_environment in environments
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]

    errors_us, spreads_us = [], []
    for step in sorted((tmp_path / "clocks").glob("step_*")):
        alignment = align(find_sources([step]), Alignment.COLLECTIVES)
        (first, second), spread_ns = alignment.shift_ns, alignment.error_ns
        assert (first, alignment.unknown) == (0, ())
        assert spread_ns is not None
        errors_us.append(abs(second + AHEAD_NS) / 1e3)
        spreads_us.append(spread_ns / 1e3)
    assert len(errors_us) == CAPTURES
    errors_us.sort()
    print(f"error p50 {errors_us[50]:.0f} us, p99 {errors_us[98]:.0f} us; maximum spread {max(spreads_us):.0f} us")  # noqa: T201
    assert errors_us[50] < 1000
