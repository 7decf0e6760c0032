"""Tests of the message that one process of a job prints at exit."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import python_path

PROGRAM = """
import os, sys, json
from profdeck import Identity, Profiler
import logging
{before}
settings = {{"output": "profiles", "run": "job", "steps": [1, 3], **json.loads(sys.argv[1])}}
profilers = [
    Profiler.from_config(settings=settings, role=role, identity=Identity(role=role, rank=rank, world_size=2))
    for role, rank in json.loads(sys.argv[2])
]
for profiler in profilers:
    for step in range(5):
        with profiler.capture(step):
            pass
{after}
"""


RunJob = Callable[..., str]


@pytest.fixture
def run_job(tally_path: str, tmp_path: Path) -> RunJob:
    """Function that runs a job in a subprocess and returns its stderr."""
    return functools.partial(_run_job, tally_path, tmp_path)


def _run_job(
    tally: str, directory: Path, *ranks: tuple[str, int], before: str = "", after: str = "", **settings: object
) -> str:
    roles = {f"{role}.backend": "tally" for role, _ in ranks} | {f"{role}.ranks": "all" for role, _ in ranks}
    program = PROGRAM.format(before=before, after=after)
    completed = subprocess.run(
        [sys.executable, "-c", program, json.dumps(roles | settings), json.dumps(ranks)],
        check=False,
        capture_output=True,
        text=True,
        cwd=directory,
        env=os.environ | {"PYTHONPATH": python_path(tally)},
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stderr


MESSAGE = "profdeck: 2 captures in profiles/job. Next: profdeck summary profiles/job\n"


def test_only_the_first_rank_prints_the_message(run_job: RunJob) -> None:
    assert run_job(("trainer", 0)) == MESSAGE
    assert run_job(("trainer", 1)) == ""


def test_one_role_prints_the_message_for_all_roles(run_job: RunJob) -> None:
    assert run_job(("rollout", 0), ("trainer", 0)) == MESSAGE


def test_first_role_prints_the_message_if_there_is_no_trainer(run_job: RunJob) -> None:
    assert run_job(("critic", 0), ("rollout", 0)) == MESSAGE


def test_message_counts_incomplete_captures(run_job: RunJob) -> None:
    stderr = run_job(("trainer", 0), steps=[1, "3..9"], after="for profiler in profilers: profiler.close()")
    assert stderr.endswith(
        "profdeck: 2 captures in profiles/job, 1 not complete (for the reasons, run profdeck ls profiles/job). "
        "Next: profdeck summary profiles/job\n"
    )


NOTE_ARTIFACTS = (
    "import functools, tally_backend as tally; tally.Artifact = functools.partial(tally.Artifact, kind='note')"
)
FAILING_STOP = {"trainer.options": {"fail_at": "stop"}, "steps": [1]}


@pytest.mark.parametrize(
    ("before", "settings", "message"),
    [
        (NOTE_ARTIFACTS, {}, "profdeck: 2 captures in profiles/job. Next: profdeck ls profiles/job\n"),
        ("", FAILING_STOP, "profdeck: 1 capture in profiles/job, 1 not complete. Next: profdeck ls profiles/job\n"),
    ],
    ids=["other kind", "failed"],
)
def test_message_suggests_ls_if_there_is_no_trace(run_job: RunJob, before: str, settings: dict, message: str) -> None:
    assert run_job(("trainer", 0), before=before, **settings).endswith(message)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("logging.getLogger('profdeck').setLevel(logging.ERROR)", ""),
        ("", "sys.stderr.close()"),
        ("", "os.fork() or sys.exit(); os.wait(); os._exit(0)"),
    ],
    ids=["logger", "closed", "forked"],
)
def test_message_is_suppressed(run_job: RunJob, before: str, after: str) -> None:
    assert run_job(("trainer", 0), before=before, after=after) == ""


def test_no_message_without_captures(run_job: RunJob) -> None:
    assert run_job(("trainer", 0), steps=[77]) == ""
