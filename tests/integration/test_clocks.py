"""Clocks that are set apart, and found again by the collectives that ranks ran together on their hosts."""

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


def test_collectives_tell_how_clocks_stand(tmp_path: Path) -> None:
    """The error against the truth; docs/benchmarks.md has a run on a quiet machine."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}
    environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    apart = clock_that_is_ahead(tmp_path, AHEAD_NS)
    own = [environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    own[1] |= apart
    ranks = [subprocess.Popen([sys.executable, JOB, tmp_path], env=of_rank) for of_rank in own]
    assert [rank.wait(120) for rank in ranks] == [0, 0]

    errors_us, spreads_us = [], []
    for step in sorted((tmp_path / "clocks").glob("step_*")):
        found = align(find_sources([step]), Alignment.COLLECTIVES)
        (first, second), spread_ns = found.shift_ns, found.error_ns
        assert (first, found.unknown) == (0, ())
        assert spread_ns is not None
        errors_us.append(abs(second + AHEAD_NS) / 1e3)
        spreads_us.append(spread_ns / 1e3)
    assert len(errors_us) == CAPTURES
    errors_us.sort()
    print(f"error p50 {errors_us[50]:.0f} us, p99 {errors_us[98]:.0f} us; ends apart {max(spreads_us):.0f} us at most")  # noqa: T201
    assert errors_us[50] < 1000
