"""Tests of other torch and torch_npu profilers that a job starts during a capture. They must continue."""

from __future__ import annotations

from typing import Any

import pytest
from npu_captures import PREAMBLE, manifests, operators, printed_results, steps

from profdeck import Status

pytestmark = pytest.mark.npu

CODE = """
from torch_npu.profiler import ProfilerAction, profile, tensorboard_trace_handler

KIND, HOW = {parameters!r}

def other():
    if KIND == "torch":
        return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    handler = tensorboard_trace_handler("theirs", "rank_theirs", analyse_flag=False)
    return profile(on_trace_ready=handler, schedule=lambda _: ProfilerAction.RECORD)

def whole():
    with other():
        work()

def in_a_thread():
    thread = threading.Thread(target=whole, name="theirs")
    thread.start()
    thread.join()

def left_open():
    theirs.__enter__()
    work()

theirs = other() if HOW == "left_open" else None
profiler = build("mid", steps=["1..2", 5])
for number in range(8):
    with profiler.capture(number):
        work()
        if number == 1:
            globals()[HOW]()
        work()
    if number == 6 and theirs is not None:
        theirs.__exit__(None, None, None)
capture("after")
print_result(finished=True)
"""
BEGAN = "Another {0} profiler started in this process (thread {1}) and stopped this recording."
ACTIVE = "Another torch or torch_npu profiler is already active in this process"


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("torch", "whole"),
        ("torch", "in_a_thread"),
        ("torch_npu", "whole"),
        ("torch_npu", "left_open"),
        ("torch_npu", "in_a_thread"),
    ],
)
def test_capture_stops_if_another_profiler_starts(job: Any, kind: str, how: str) -> None:
    assert printed_results(job(PREAMBLE + CODE.format(parameters=(kind, how)))) == {"finished": True}
    captures = manifests(job.directory / "mid")
    first, second = captures["step1"], captures["step5"]
    if (kind, how) == ("torch", "in_a_thread"):  # torch's profiler belongs to a thread, torch_npu's to the process
        assert (first.status, first.problems) == (Status.COMPLETE, ())
    else:
        assert first.status is Status.PARTIAL
        assert first.problems[0].startswith(BEGAN.format(kind, "theirs" if how == "in_a_thread" else "MainThread"))
    if how == "left_open":
        assert second.status is Status.FAILED
        assert second.problems[0].startswith(ACTIVE)
    else:
        assert second.status is Status.COMPLETE
    ours = {artifact.name: artifact for capture in (first, second) for artifact in capture.artifacts}
    directories = sorted(job.directory.glob("**/*_ascend_pt"))
    assert [steps(path) for path in directories if path.name in ours and ours[path.name].whole] == [
        *([[1] if first.problems else [1, 2]] if first.artifacts[0].whole else []),
        *([[5]] if second.artifacts else []),
    ]  # fmt: skip
    if kind == "torch_npu" and how != "in_a_thread":
        # The most recent handler sets the process-wide output directory.
        (theirs,) = (path for path in directories if path.name not in ours and "after" not in path.parts)
        assert b"aten::add" in operators(theirs)
