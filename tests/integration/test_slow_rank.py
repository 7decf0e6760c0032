"""Tests for findings in real jobs with three gloo ranks, where rank 1 is slow for a known reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from profdeck_traces.findings.finding import is_note
from profdeck_traces.loading import summarise

pytestmark = [pytest.mark.torch, pytest.mark.slow]

JOB = Path(__file__).with_name("slow_rank_job.py")


@pytest.mark.parametrize(
    ("cause", "stacks", "owner", "function", "advice"),
    [
        ("python", "stacks", "count_tokens", "count_tokens", "vectorize this Python code"),
        ("data", "stacks", "load_batch", "load_batch", "load the batches"),
        ("data", "", "data_loading", None, "load the batches"),
        ("batch", "", "times as many FLOPs", None, "the same amount of work"),
    ],
)
def test_the_slow_rank_and_what_it_did_are_named(
    tmp_path: Path, cause: str, stacks: str, owner: str, function: str | None, advice: str
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(JOB), str(tmp_path), cause, stacks], env=environment, check=True, timeout=500)
    run, errors = summarise([tmp_path])
    assert not errors
    finding = next(finding for finding in run.findings if not is_note(finding))
    assert "rank 1" in finding.text
    assert owner in finding.text
    assert advice in finding.do
    assert (finding.where.rank, finding.where.function) == (1, function)
    assert finding.time_us is not None
    assert finding.time_us > 50_000
    for rank in run.ranks:
        assert rank.account is not None
        total_ns = sum(round(item.time_us * 1000) for item in rank.account.owners)
        assert total_ns == round(rank.account.time_us * 1000)
        waits_us = sum(item.time_us for item in rank.account.owners if item.rank == 1) / rank.account.steps
        assert (waits_us > 50_000) is (rank.rank != 1)
