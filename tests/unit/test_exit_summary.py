"""What a job says when it ends: once, whatever number of ranks and roles it has."""

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


Said = Callable[..., str]


@pytest.fixture
def said(tally_path: str, tmp_path: Path) -> Said:
    """Run a job and return what it says on stderr."""
    return functools.partial(_said, tally_path, tmp_path)


def _said(
    tally: str, directory: Path, *who: tuple[str, int], before: str = "", after: str = "", **settings: object
) -> str:
    roles = {f"{role}.backend": "tally" for role, _ in who} | {f"{role}.ranks": "all" for role, _ in who}
    program = PROGRAM.format(before=before, after=after)
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(roles | settings), json.dumps(who)],
        check=False,
        capture_output=True,
        text=True,
        cwd=directory,
        env=os.environ | {"PYTHONPATH": python_path(tally)},
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


WORD = "profdeck: 2 captures in profiles/job. Next: profdeck summary profiles/job\n"


def test_the_first_rank_says_it_once(said: Said) -> None:
    assert said(("trainer", 0)) == WORD
    assert said(("trainer", 1)) == ""


def test_one_role_speaks_for_all(said: Said) -> None:
    assert said(("rollout", 0), ("trainer", 0)) == WORD


def test_without_a_trainer_the_first_role_speaks(said: Said) -> None:
    assert said(("critic", 0), ("rollout", 0)) == WORD


def test_what_is_not_complete_is_counted(said: Said) -> None:
    words = said(("trainer", 0), steps=[1, "3..9"], after="for one in profilers: one.close()")
    assert words.endswith(
        "profdeck: 2 captures in profiles/job, 1 not complete: profdeck ls profiles/job says why. "
        "Next: profdeck summary profiles/job\n"
    )


OTHER_KIND = "import functools, tally_backend as tally; tally.Artifact = functools.partial(tally.Artifact, kind='note')"
FAILING = {"trainer.options": {"fail_at": "stop"}, "steps": [1]}


@pytest.mark.parametrize(
    ("before", "settings", "message"),
    [
        (OTHER_KIND, {}, "profdeck: 2 captures in profiles/job. Next: profdeck ls profiles/job\n"),
        ("", FAILING, "profdeck: 1 capture in profiles/job, 1 not complete. Next: profdeck ls profiles/job\n"),
    ],
    ids=["other kind", "failed"],
)
def test_without_a_trace_the_next_command_is_ls(said: Said, before: str, settings: dict, message: str) -> None:
    assert said(("trainer", 0), before=before, **settings).endswith(message)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("logging.getLogger('profdeck').setLevel(logging.ERROR)", ""),
        ("", "sys.stderr.close()"),
        ("", "os.fork() or sys.exit(); os.wait(); os._exit(0)"),
    ],
    ids=["logger", "closed", "forked"],
)
def test_where_it_is_not_wanted_nothing_is_said(said: Said, before: str, after: str) -> None:
    assert said(("trainer", 0), before=before, after=after) == ""


def test_nothing_captured_nothing_said(said: Said) -> None:
    assert said(("trainer", 0), steps=[77]) == ""
