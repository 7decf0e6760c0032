"""Tests for findings from the account, with each cause above its limit, below its limit, and without its data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from invented_summaries import run as invented_run, trace

from profdeck_traces.analysis.model import RunSummary
from profdeck_traces.analysis.run_model import CauseState
from profdeck_traces.analysis.step_names import StepNames
from profdeck_traces.findings.finding import with_findings
from profdeck_traces.findings.overview import notes_of, owner_text, teams_of, verdict_of
from profdeck_traces.inputs.facts import CaptureStatus
from profdeck_traces.inputs.host_load import HostLoad
from profdeck_traces.loading import summarise

STEP_US = 10_000.0
Item = tuple[Any, ...]


class Job:
    """A job with 10 ms steps on one thread. `write` places nested events at the start of each step."""

    def __init__(self, *, stacks: bool = True, steps: int = 6) -> None:
        self.stacks, self.steps = stacks, steps
        self.events: list[dict[str, Any]] = []

    def _add(self, item: Item, start_us: float) -> float:
        """Add an event given as category, name, duration, and inner events or args. Return its end time."""
        category, name, duration_us, *rest = item
        inner = [part for part in rest if isinstance(part, tuple)]
        args = next((part for part in rest if isinstance(part, dict)), {})
        if self.stacks or category != "python_function":
            self.events.append({
                "ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start_us, "dur": duration_us,
                "args": args,
            })  # fmt: skip
        now_us = start_us
        for part in inner:
            now_us = self._add(part, now_us)
        end_us: float = start_us + duration_us
        return end_us

    def write(self, path: Path, inside: Sequence[Item], *, in_steps: Sequence[int] | None = None) -> RunSummary:
        """Write the trace and return its summary."""
        for step in range(self.steps):
            begin_us = step * STEP_US
            self._add(("user_annotation", f"ProfilerStep#{step}", STEP_US), begin_us)
            self._add(("python_function", "train.py(5): main", STEP_US), begin_us)
            now_us = begin_us
            if in_steps is None or step in in_steps:
                for item in inside:
                    now_us = self._add(item, now_us)
            if now_us < begin_us + STEP_US:
                self._add(("cpu_op", "aten::addmm", begin_us + STEP_US - now_us), now_us)
        path.write_text(json.dumps({"traceEvents": self.events}))
        run, errors = summarise([path])
        assert not errors
        return run


def frame(name: str, duration_us: float, *inner: Item) -> Item:
    return ("python_function", name, duration_us, *inner)


def function(duration_us: float, *inner: Item) -> Item:
    """Return the frame of a user function."""
    return frame("train.py(40): work", duration_us, *inner)


def operator(name: str, duration_us: float, *inner: Item | dict[str, Any]) -> Item:
    return ("cpu_op", name, duration_us, *inner)


def loop(calls: int) -> Item:
    return function(calls * 20, *[operator("aten::select", 20)] * calls)


def compiled(regions: int) -> Item:
    """Return a call to a compiled function that runs Python code between its regions."""
    region = ("user_annotation", "Torch-Compiled Region: 0/0", 20)
    return frame("torch/_dynamo/eval_frame.py(720): _fn", 900, *[region] * regions, function(600))


DOUBLE = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["double", "double"]}
PLANTED: dict[str, tuple[Item, Item]] = {
    "data-loading": (
        frame("torch/utils/data/dataloader.py(733): __next__", 600),
        frame("torch/utils/data/dataloader.py(733): __next__", 400),
    ),
    "garbage-collection": (function(300, frame("Python GC", 200)), function(300, frame("Python GC", 50))),
    "checkpoint": (
        function(900, frame("torch/serialization.py(943): save", 800)),
        function(900, frame("torch/serialization.py(943): save", 300)),
    ),
    "checkpoint-load": (
        function(900, frame("torch/serialization.py(1300): load", 800)),
        function(900, frame("torch/serialization.py(1300): load", 300)),
    ),
    "anomaly-detection": (
        function(800, operator("aten::add", 800, frame("torch/fx/traceback.py(497): format_stack", 600))),
        function(600, operator("aten::add", 600, frame("torch/fx/traceback.py(497): format_stack", 400))),
    ),
    "output": (
        function(900, frame("<built-in method write of _io.TextIOWrapper object at 0x7f1>", 100)),
        function(400, frame("<built-in method write of _io.TextIOWrapper object at 0x7f1>", 100)),
    ),
    "validation": (
        frame("train.py(40): validate", 1_100, operator("aten::addmm", 1_100)),
        frame("train.py(40): validate", 900, operator("aten::addmm", 900)),
    ),
    "compilation": (
        function(900, frame("torch/_dynamo/convert_frame.py(1290): __call__", 800)),
        function(900, frame("torch/_dynamo/convert_frame.py(1290): __call__", 300)),
    ),
    "profiler": (("overhead", "PROFILER_INIT", 600), ("overhead", "PROFILER_INIT", 400)),
    "waiting": (
        function(1_300, frame("<built-in method acquire of _thread.lock object at 0x7f1>", 1_250)),
        function(1_000, frame("<built-in method acquire of _thread.lock object at 0x7f1>", 950)),
    ),
    "float64": (operator("aten::mm", 300, DOUBLE), operator("aten::mm", 60, DOUBLE)),
    "single-values": (
        function(800, *[operator("aten::item", 40, operator("aten::_local_scalar_dense", 20))] * 20),
        function(800, *[operator("aten::item", 80, operator("aten::_local_scalar_dense", 20))] * 10),
    ),
    "layout-copies": (
        function(1_200, operator("aten::contiguous", 1_200, operator("aten::clone", 1_200))),
        function(900, operator("aten::contiguous", 900, operator("aten::clone", 900))),
    ),
    "small-operators": (loop(64), loop(50)),
    "new-buffers": (
        function(1_200, operator("aten::zeros", 1_200, operator("aten::zero_", 1_100))),
        function(900, operator("aten::zeros", 900, operator("aten::zero_", 800))),
    ),
    "deep-copies": (
        function(900, frame("copy.py(128): deepcopy", 600, *[operator("aten::clone", 5)] * 70)),
        function(400, frame("copy.py(128): deepcopy", 400, *[operator("aten::clone", 5)] * 70)),
    ),
    "python-code": (function(1_100), function(900)),
    "graph-breaks": (compiled(4), compiled(3)),
    "exposed-communication": tuple(("user_annotation", "gloo:all_reduce", time_us) for time_us in (1_100, 900)),
}  # fmt: skip


def state_of(run: RunSummary, cause: str) -> CauseState:
    (state,) = [one for one in run.causes if one.cause == cause]
    return state


@pytest.mark.parametrize("cause", PLANTED)
def test_cause_is_found_above_its_limit_and_clear_below(tmp_path: Path, cause: str) -> None:
    above, below = PLANTED[cause]
    run = Job().write(tmp_path / "above.json", [above])
    assert [finding.rule for finding in run.findings] == [cause]
    assert state_of(run, cause).findings == (run.findings[0].id,)
    run = Job().write(tmp_path / "below.json", [below])
    assert [finding.rule for finding in run.findings] == []
    shapes = cause == "float64"
    assert state_of(run, cause).state == ("not_judged" if shapes and "Input" not in str(below) else "clear")


@pytest.mark.parametrize(
    "cause", sorted({*PLANTED} - {"profiler", "exposed-communication", "float64", "anomaly-detection"})
)
def test_finding_has_the_line_of_the_user_function(tmp_path: Path, cause: str) -> None:
    above, _ = PLANTED[cause]
    finding, *_ = Job().write(tmp_path / "job.json", [above]).findings
    if cause == "data-loading":
        assert (finding.where.file, finding.where.line, finding.where.function) == ("train.py", 5, "main")
    else:
        assert (finding.where.file, finding.where.line) == ("train.py", 40)
        assert "(train.py:40)" in finding.text


@pytest.mark.parametrize(
    "cause", ["garbage-collection", "checkpoint", "checkpoint-load", "output", "python-code", "waiting"]
)
def test_cause_in_python_is_not_judged_without_stacks(tmp_path: Path, cause: str) -> None:
    run = Job(stacks=False).write(tmp_path / "clear.json", [])
    assert state_of(run, cause).state == "clear"

    run = Job(stacks=False).write(tmp_path / "job.json", [function(4_000)])
    state = state_of(run, cause)
    assert (state.state, state.reason) == ("not_judged", "stacks were not recorded, and 40% is outside operators")
    (finding,) = run.findings
    assert (finding.rule, finding.do) == (
        "outside-operators",
        "pass with_stack=True to torch.profiler.profile, to get the function",
    )


@pytest.mark.parametrize(
    ("item", "rule", "cure"),
    [
        (function(1_500, frame("<built-in function read>", 1_400)), "waiting", "background"),
        (
            function(1_500, frame("<built-in method recv_into of _socket.socket object at 0x7f1>", 1_400)),
            "waiting",
            "background",
        ),
        (
            function(1_500, frame("<built-in method read of _io.BufferedReader object at 0x7f1>", 1_400)),
            "data-loading",
            "num_workers",
        ),
        (operator("_compile.compile_inner (dynamo_timed)", 1_500), "compilation", "mark_dynamic"),
    ],
    ids=["pipe", "socket", "file", "compilation"],
)
def test_cause_depends_on_the_event(tmp_path: Path, item: Item, rule: str, cure: str) -> None:
    finding, *_ = Job().write(tmp_path / "job.json", [item]).findings
    assert finding.rule == rule
    assert cure in finding.do


@pytest.mark.parametrize(
    ("name", "calls", "rule", "cure"),
    [
        ("gloo:all_reduce", 20, "small-collectives", "combine"),
        ("gloo:barrier", 20, "small-collectives", "remove the barriers"),
        ("gloo:all_reduce", 19, "exposed-communication", "bucket_cap_mb"),
        ("gloo:all_reduce", 1, "exposed-communication", "bucket_cap_mb"),
    ],
)
def test_many_short_collectives_are_combined(tmp_path: Path, name: str, calls: int, rule: str, cure: str) -> None:
    calls_of_step = [("user_annotation", name, 2_000 / calls)] * calls
    (finding,) = Job().write(tmp_path / "job.json", calls_of_step).findings
    assert finding.rule == rule
    assert cure in finding.do


@pytest.mark.parametrize("cause", ["validation", "deep-copies"])
def test_cause_inside_operators_is_never_ruled_out_without_stacks(tmp_path: Path, cause: str) -> None:
    state = state_of(Job(stacks=False).write(tmp_path / "job.json", []), cause)
    assert (state.state, state.reason) == ("not_judged", "stacks were not recorded")


@pytest.mark.parametrize(
    ("file", "rule"),
    [
        ("profdeck/base/memory.py", "profiler"),
        ("/venv/lib/site-packages/profdeck_torch/recorder.py", "profiler"),
        ("/data/profdeck/model.py", "python-code"),
        ("/home/me/profdeck_train/job.py", "python-code"),
    ],
)
def test_only_packages_of_the_profiler_are_its_own_work(tmp_path: Path, file: str, rule: str) -> None:
    (finding,) = Job().write(tmp_path / "job.json", [frame(f"{file}(7): work", 3_000)]).findings
    assert finding.rule == rule


@pytest.mark.parametrize(
    ("overhead_us", "rules"), [(1_800, ["python-code", "profiler"]), (4_000, ["profiler", "python-code"])]
)
def test_profiler_work_is_a_note_up_to_20_percent(tmp_path: Path, overhead_us: int, rules: list[str]) -> None:
    run = Job().write(tmp_path / "job.json", [("overhead", "PROFILER_INIT", overhead_us), function(1_500)])
    assert [finding.rule for finding in run.findings] == rules
    assert verdict_of(run, teams_of(run)) == run.findings[0].text
    assert any("profiler" in note for note in notes_of(run, advice=False)) == (rules[-1] == "profiler")


@pytest.mark.parametrize(
    ("stacks", "where"),
    [
        (True, ": 91% in main (train.py:5), 9% in work (train.py:40)."),
        (False, "; its largest part, 91%, is operator aten::addmm."),
    ],
)
def test_verdict_without_a_cause_states_where_the_time_is(tmp_path: Path, stacks: bool, where: str) -> None:
    run = Job(stacks=stacks).write(tmp_path / "job.json", [function(900, operator("aten::mm", 900))])
    assert run.findings == ()
    assert verdict_of(run, teams_of(run)) == f"No cause stands out: the step takes 10.00 ms{where}"


def test_advice_without_profiler_options_does_not_name_them(tmp_path: Path) -> None:
    (finding,) = Job(stacks=False).write(tmp_path / "job.json", [("overhead", "PROFILER_INIT", 900)]).findings
    assert finding.rule == "profiler"
    assert "with_stack" not in finding.do


def test_bursts_name_their_steps(tmp_path: Path) -> None:
    (finding,) = Job().write(tmp_path / "one.json", [function(8_000)], in_steps=[4]).findings
    assert finding.text == (
        "Python code without operators takes 8.00 ms in step 4 instead of 0.00 ms in work (train.py:40)."
    )
    assert finding.gain_us == pytest.approx(8_000 / 6)
    assert finding.step_us == STEP_US
    (finding,) = Job().write(tmp_path / "two.json", [function(8_000)], in_steps=[2, 4]).findings
    assert "takes 8.00 ms in 2 of 6 steps instead of 0.00 ms" in finding.text


def on_busy_machine(run: RunSummary, wait_s: float | None, *, throttled_s: float | None = None) -> RunSummary:
    """Return a 10 s run on a busy machine, whose recording thread waited for a CPU."""
    load = HostLoad(
        wall_s=10, cpu_s=9, cpus=8, run_queue_s=wait_s, throttled_s=throttled_s, load_at_start=20, load_at_end=20
    )
    return with_findings(attrs.evolve(run, ranks=tuple(attrs.evolve(rank, host_load=load) for rank in run.ranks)))


@pytest.mark.parametrize("is_busy", [False, True])
def test_waits_for_a_cpu_do_not_make_bursts_of_work_in_each_step(tmp_path: Path, is_busy: bool) -> None:
    run = Job().write(tmp_path / "job.json", [operator("aten::mm", 1_000, DOUBLE)])
    (rank,) = run.ranks
    assert rank.account is not None
    steps_us = (200.0, 200.0, 200.0, 200.0, 2_600.0, 2_600.0)
    causes = tuple(attrs.evolve(of, steps_us=steps_us) if of.cause == "float64" else of for of in rank.account.causes)
    run = attrs.evolve(run, ranks=(attrs.evolve(rank, account=attrs.evolve(rank.account, causes=causes)),))
    (finding,) = (of for of in on_busy_machine(run, 4 if is_busy else 0).findings if of.rule == "float64")
    share = "10% of each step (1.00 ms)" if is_busy else "2.60 ms in 2 of 6 steps instead of 0.20 ms"
    cure = "in float32, each step would be about 0.50 ms shorter"
    assert finding.text == f"Work in float64, most of it in aten::mm, takes {share} in main (train.py:5); {cure}."


def test_work_in_few_steps_is_a_burst_on_a_busy_machine(tmp_path: Path) -> None:
    run = on_busy_machine(Job().write(tmp_path / "one.json", [function(8_000)], in_steps=[4]), 4)
    (finding,) = (of for of in run.findings if of.rule == "python-code")
    assert "takes 8.00 ms in step 4 instead of 0.00 ms" in finding.text


@pytest.mark.parametrize(("wait_s", "is_found"), [(1.9, False), (2.1, True), (None, True)])
def test_short_wait_for_a_cpu_is_a_note(tmp_path: Path, wait_s: float | None, is_found: bool) -> None:
    run = on_busy_machine(Job().write(tmp_path / "job.json", []), wait_s)
    verdict, notes = verdict_of(run, teams_of(run)), notes_of(run, advice=False)
    assert [finding.rule for finding in run.findings] == ["busy-machine"]
    assert verdict.startswith("The machine was busy: " if is_found else "No cause stands out: ")
    assert any(note.startswith("The machine was busy: ") for note in notes) is not is_found


def test_long_wait_for_a_cpu_quota_is_a_finding(tmp_path: Path) -> None:
    run = on_busy_machine(Job().write(tmp_path / "job.json", []), 0.0, throttled_s=3)
    assert verdict_of(run, teams_of(run)).startswith("The machine was busy: its CPU quota throttled the process")


PROBLEM = "The process grew by 930 MB during the capture."


def with_captures(run: RunSummary, *statuses: str) -> RunSummary:
    """Return a run with one recorded rank, and the given capture statuses of this rank and of others."""
    captures = tuple(
        CaptureStatus(
            run="run", capture="step0", role="trainer", replica=None, stage=None, first_step=0, last_step=5, rank=rank,
            host=None, status=status, problem=None if status == "complete" else PROBLEM,
        )
        for rank, status in enumerate(statuses)
    )  # fmt: skip
    ranks = tuple(attrs.evolve(rank, run="run", capture="step0", role="trainer", rank=0) for rank in run.ranks)
    return with_findings(attrs.evolve(run, ranks=ranks, captures=captures))


def test_partial_recording_with_complete_steps_is_a_note_after_the_cause(tmp_path: Path) -> None:
    run = Job().write(tmp_path / "job.json", [function(3_000)])
    partial = with_captures(run, "partial")
    assert [finding.rule for finding in partial.findings] == ["python-code", "partial-recording"]
    assert verdict_of(partial, teams_of(partial)) == partial.findings[0].text
    (note,) = notes_of(partial, advice=False)
    assert note == f"The recording of trainer rank 0 is partial and contains steps 0..5: {PROBLEM}"
    partial = with_captures(run, "partial", "complete")
    assert notes_of(partial, advice=False)[0].startswith(
        "1 of 2 recordings are partial, such as that of trainer rank 0, which contains steps 0..5: "
    )


@pytest.mark.parametrize("other", ["missing", "failed", "partial"])
def test_missing_recording_is_the_first_finding(tmp_path: Path, other: str) -> None:
    run = with_captures(Job().write(tmp_path / "job.json", [function(3_000)]), "partial", other)
    assert [finding.rule for finding in run.findings] == ["incomplete", "python-code"]
    assert " recordings are not complete (" in run.findings[0].text
    assert ", such as trainer rank 1 of step 0: " in run.findings[0].text


def test_damaged_recording_is_the_first_finding(tmp_path: Path) -> None:
    run = Job().write(tmp_path / "job.json", [function(3_000)])
    damaged = attrs.evolve(run, ranks=tuple(attrs.evolve(rank, problem="truncated") for rank in run.ranks))
    assert with_captures(damaged, "partial").findings[0].rule == "incomplete"


def test_findings_of_a_recording_without_steps_do_not_mention_steps(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    Job().write(path, [function(3_000)])
    events = json.loads(path.read_text())["traceEvents"]
    path.write_text(json.dumps({"traceEvents": [event for event in events if event["cat"] != "user_annotation"]}))
    (finding,) = summarise([path])[0].findings
    assert finding.text.startswith("Python code without operators takes 30% of the recording (18.0 ms)")
    assert "step" not in finding.text


def test_slow_worker_recurs(tmp_path: Path) -> None:
    load = (
        "user_annotation",
        "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
        4_000,
    )
    (finding,) = Job(steps=12).write(tmp_path / "job.json", [load], in_steps=[1, 5, 9]).findings
    assert "in 3 of 12 steps instead of 0.00 ms" in finding.text
    assert "The delay recurs every 4 steps, which suggests one slow worker" in finding.text
    assert finding.do == "find what the slow worker reads, such as its shard"


def test_sleep_is_named(tmp_path: Path) -> None:
    (finding,) = (
        Job().write(tmp_path / "job.json", [function(2_000, frame("<built-in function sleep>", 2_000))]).findings
    )
    assert finding.text == "Sleeping (time.sleep) takes 20% of each step (2.00 ms) in work (train.py:40)."
    assert finding.do == "remove the sleep"


def test_function_that_reads_files_loads_data(tmp_path: Path) -> None:
    """Parsing counts as part of loading."""
    read = frame("<built-in method read of _io.BufferedReader object at 0x7f1>", 100)
    (finding,) = Job().write(tmp_path / "job.json", [function(2_000, read)]).findings
    assert (finding.rule, finding.time_us) == ("data-loading", 2_000)


STOP = "profdeck/lifecycle/role.py(331): _stop_recording"


def test_profiler_owns_the_functions_that_it_calls(tmp_path: Path) -> None:
    """Files read by the profiler do not count as data read by the user function that stops it."""
    read = frame("<built-in method read of _io.TextIOWrapper object at 0x7f1>", 500)
    stop = frame(STOP, 2_000, frame("pathlib.py(1053): read_text", 800, read), frame("torch/_ops.py(9): enter", 400))
    summary = Job().write(tmp_path / "job.json", [function(2_100, stop)])
    (account,) = [rank.account for rank in summary.ranks]
    assert account is not None
    assert {(owner.kind, owner.name): owner.time_us / account.steps for owner in account.owners[:2]} == {
        ("operator", "aten::addmm"): 7_900,
        ("profiler", STOP): 2_000,
    }
    assert [finding.rule for finding in summary.findings] == ["profiler"]


def test_profiler_does_not_own_the_job_that_it_calls(tmp_path: Path) -> None:
    wrapper = "profdeck_torch/optimizer_steps.py(79): backward"
    step = frame(wrapper, 2_100, frame("torch/autograd/graph.py(9): run", 2_000, operator("aten::mm", 1_900)))
    (rank,) = Job().write(tmp_path / "job.json", [step]).ranks
    assert rank.account is not None
    times = {(owner.kind, owner.name): owner.time_us / rank.account.steps for owner in rank.account.owners}
    assert times["operator", "aten::mm"] == 1_900
    assert (times["python", "torch/autograd/graph.py(9): run"], times["profiler", wrapper]) == (100, 100)


@pytest.mark.parametrize(
    ("next_step", "inside", "is_switch"),
    [(1, "Optimizer.step#SGD.step", True), (2, "Optimizer.step#SGD.step", False), (1, "it#prefill", False)],
)
def test_profiler_owns_the_switch_between_consecutive_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_step: int, inside: str, *, is_switch: bool
) -> None:
    """The optimizer's annotation can contain the switch. Between engine iterations, the time is idle instead."""
    monkeypatch.setattr(StepNames, "load", classmethod(lambda cls: cls(["it#(?P<stage>prefill)"])))
    job = Job(stacks=False, steps=0)
    for item, start_us in (
        (("user_annotation", "ProfilerStep#0", 900), 0),
        (("cpu_op", "aten::mm", 500), 0),
        (("user_annotation", inside, 700), 500),
        (("user_annotation", f"ProfilerStep#{next_step}", 900), 1_000),
        (("cpu_op", "aten::mm", 500), 1_300),
    ):
        job._add(item, start_us)
    (rank,) = job.write(tmp_path / "job.json", []).ranks
    assert rank.account is not None
    times = {owner.kind: owner.time_us for owner in rank.account.owners if owner.name is None}
    assert times.get("profiler", 0) == (100 if is_switch else 0)
    assert "profiler" not in {cause.cause for cause in rank.account.causes}


@pytest.mark.parametrize("is_user", [False, True])
def test_functions_that_profdeck_calls_are_not_python_code_of_the_job(tmp_path: Path, *, is_user: bool) -> None:
    called = function(2_000) if is_user else frame("pathlib.py(440): __getitem__", 2_000)
    stop = frame("profdeck/lifecycle/state_machine.py(318): _guarded", 2_100, called)
    findings = Job().write(tmp_path / "job.json", [stop]).findings
    assert ("python-code" in {finding.rule for finding in findings}) is is_user


def test_replies_of_servers_are_not_data(tmp_path: Path) -> None:
    reply = frame(
        "<built-in method readline of _io.BufferedReader object at 0x7f1>",
        1_900,
        frame("socket.py(692): readinto", 1_900, frame("<built-in method recv_into of socket object at 0x7f1>", 1_900)),
    )
    (finding,) = Job().write(tmp_path / "job.json", [function(1_900, reply)]).findings
    assert (finding.rule, finding.time_us) == ("waiting", 1_900)


@pytest.mark.parametrize(("wait_us", "rules"), [(1_900, []), (2_100, ["waiting"])])
def test_short_waits_of_an_event_loop_are_no_finding(tmp_path: Path, wait_us: float, rules: list[str]) -> None:
    poll = frame("<built-in method poll of select.epoll object at 0x7f1>", wait_us)
    run = Job().write(tmp_path / "job.json", [function(wait_us + 10, poll)])
    assert [finding.rule for finding in run.findings] == rules


def test_wait_of_an_event_loop_is_in_the_coroutine_that_resumes(tmp_path: Path) -> None:
    poll = frame("<built-in method poll of select.epoll object at 0x7f1>", 4_000)
    sleep = frame("asyncio/tasks.py(627): sleep", 5)
    tool = frame("agent.py(12): converse", 10, frame("agent.py(30): call_tool", 8, sleep))
    resumed = frame("asyncio/events.py(82): _run", 20, tool)
    (finding,) = Job().write(tmp_path / "job.json", [function(4_100, poll, resumed)]).findings
    assert finding.text == "Waiting in an event loop takes 40% of each step (4.00 ms) in call_tool (agent.py:30)."
    assert "concurrently" in finding.do


def test_wait_that_no_coroutine_follows_is_in_its_caller(tmp_path: Path) -> None:
    poll = frame("<built-in method poll of select.epoll object at 0x7f1>", 4_000)
    later = frame("agent.py(30): call_tool", 8)
    (finding,) = Job().write(tmp_path / "job.json", [function(4_000, poll), later]).findings
    assert finding.where.file == "train.py"


def test_wait_for_a_thread_is_in_the_function_that_waits(tmp_path: Path) -> None:
    job = Job()
    sleeps = {"ph": "X", "cat": "python_function", "pid": 1, "tid": 2, "args": {}}
    for step in range(6):
        start_us = step * STEP_US
        job.events += [
            sleeps | {"name": "rollout.py(9): produce", "ts": start_us + 100, "dur": 2_890.0},
            sleeps | {"name": "<built-in function sleep>", "ts": start_us + 150, "dur": 2_800.0},
        ]
    wait = frame("<built-in method acquire of _thread.lock object at 0x7f1>", 3_000)
    item = ("user_annotation", "samples", 3_000, function(3_000, wait))
    (finding,) = job.write(tmp_path / "job.json", [item]).findings
    assert finding.rule == "waiting"
    assert finding.text.startswith("Waiting for another thread or process (produce) takes")
    assert finding.text.endswith("in work (train.py:40).")
    assert finding.where.stage == "samples"
    assert finding.do == "run the awaited work in the background, and use its result one step later"


def test_idle_worker_of_a_thread_pool_is_not_awaited(tmp_path: Path) -> None:
    job = Job()
    for step in range(6):
        job.events.append({
            "ph": "X", "cat": "python_function", "name": "<built-in method get of _queue.SimpleQueue object at 0x7f1>",
            "pid": 1, "tid": 2, "ts": step * STEP_US + 10, "dur": 9_000, "args": {},
        })  # fmt: skip
    wait = frame("<built-in method acquire of _thread.lock object at 0x7f1>", 3_000)
    findings = job.write(tmp_path / "job.json", [function(3_000, wait)]).findings
    assert [finding.rule for finding in findings] == ["waiting"]


@pytest.mark.parametrize("calls", [1, 4])
def test_repeated_waits_can_overlap(tmp_path: Path, calls: int) -> None:
    waits = [frame("<built-in function waitpid>", 4_000 / calls)] * calls
    (finding,) = Job().write(tmp_path / "job.json", [function(4_000, *waits)]).findings
    assert ("concurrently" in finding.do) is (calls > 1)


SAVE = frame("torch/serialization.py(900): save", 2_000)
LOAD = frame(
    "torch/serialization.py(1300): load",
    1_500,
    frame("<built-in method read of _io.BufferedReader object at 0x7f1>", 900),
)


def test_loading_a_saved_checkpoint_counts(tmp_path: Path) -> None:
    (finding,) = Job().write(tmp_path / "job.json", [function(3_500, SAVE, LOAD)]).findings
    assert finding.text == "Saving and loading a checkpoint takes 35% of each step (3.50 ms) in work (train.py:40)."
    assert finding.do.startswith("pass the weights in memory")


@pytest.mark.parametrize(
    ("inside", "text"),
    [
        ([LOAD], "Loading files with torch.load takes 15% of each step (1.50 ms) in work (train.py:40)."),
        (
            [frame("safetensors/torch.py(336): load_file", 1_500)],
            "Loading files with safetensors takes 15% of each step (1.50 ms) in work (train.py:40).",
        ),
        (
            [LOAD, frame("torch/nn/modules/module.py(2530): load_state_dict", 500)],
            "Loading a checkpoint takes 20% of each step (2.00 ms) in work (train.py:40).",
        ),
        # The state dict may have another origin.
        (
            [LOAD, frame("net.py(9): average", 10), frame("torch/nn/modules/module.py(2530): load_state_dict", 500)],
            "Loading files with torch.load takes 15% of each step (1.50 ms) in work (train.py:40).",
        ),
    ],
)
def test_files_that_no_data_loader_reads_are_not_data(tmp_path: Path, inside: list[Item], text: str) -> None:
    (finding,) = Job().write(tmp_path / "job.json", [function(2_010, *inside)]).findings
    assert (finding.rule, finding.text) == ("checkpoint-load", text)
    assert "once, before the loop, and keep it in memory" in finding.do


@pytest.mark.parametrize(
    "inside",
    [
        [frame("data.py(9): __getitem__", 1_500, LOAD)],
        [("user_annotation", "data", 1_500, LOAD)],
        [frame("torch/utils/data/_utils/fetch.py(50): fetch", 1_500, LOAD), SAVE],
    ],
)
def test_files_of_a_data_loader_are_no_checkpoint(tmp_path: Path, inside: list[Item]) -> None:
    findings = Job().write(tmp_path / "job.json", [function(4_000, *inside)]).findings
    assert {finding.rule: finding.time_us for finding in findings}["data-loading"] >= 900


def test_other_thread_is_named(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    wait = frame("<built-in method acquire of _thread.lock object at 0x7f1>", 2_000)
    Job().write(path, [function(2_000, wait)])
    events = json.loads(path.read_text())["traceEvents"]
    for step in range(6):
        for name, start_us, duration_us in (("writer.py(9): flush", 100, 1_890), ("writer.py(30): pack", 150, 1_800)):
            events.append({
                "ph": "X", "cat": "python_function", "name": name, "pid": 1, "tid": 2,
                "ts": step * STEP_US + start_us, "dur": duration_us, "args": {},
            })  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events}))
    finding, *_ = summarise([path])[0].findings
    assert finding.rule == "lock"
    # The first step does not count, because its frames may have been open before the recording started.
    assert finding.text.startswith("Waiting for another thread, which is in pack, takes 15% of each step (1.50 ms)")
    assert finding.where.file == "writer.py"


def test_function_that_also_computes_keeps_its_time(tmp_path: Path) -> None:
    read = frame("<built-in method read of _io.BufferedReader object at 0x7f1>", 600)
    (finding,) = Job().write(tmp_path / "job.json", [function(2_000, read, operator("aten::addmm", 1_400))]).findings
    assert (finding.rule, finding.time_us) == ("data-loading", 600)


def test_frames_that_were_open_at_the_start_are_not_awaited(tmp_path: Path) -> None:
    """A thread that was blocked before the recording started looks busy, because its C call was not recorded."""
    wait = frame("<built-in method acquire of _thread.lock object at 0x7f1>", 500)
    path = tmp_path / "job.json"
    Job().write(path, [function(500, wait)])
    events = json.loads(path.read_text())["traceEvents"]
    for name in ("threading.py(1002): _bootstrap", "server.py(7): serve"):
        events.append({
            "ph": "X", "cat": "python_function", "name": name, "pid": 1, "tid": 2, "ts": 1, "dur": 60_000, "args": {}
        })  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events}))
    run, _ = summarise([path])
    account = run.ranks[0].account
    assert account is not None
    assert [owner.name for owner in account.owners if "serve" in (owner.name or "")] == []


def test_uneven_batches_are_named(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    events, now_us = [], 0.0
    for step in range(6):
        rows = 256 if step == 3 else 64
        duration_us = rows * 100.0
        args = {"Input Dims": [[rows, 64], [64, 64]], "Input type": ["float", "float"]}
        base = {"ph": "X", "pid": 1, "tid": 1, "ts": now_us, "dur": duration_us}
        events += [
            base | {"cat": "user_annotation", "name": f"ProfilerStep#{step}"},
            base | {"cat": "cpu_op", "name": "aten::mm", "args": args},
        ]
        now_us += duration_us
    path.write_text(json.dumps({"traceEvents": events}))
    run, _ = summarise([path])
    (finding,) = run.findings
    assert finding.rule == "uneven-batches"
    assert finding.text == (
        "Step 3 takes 25.6 ms instead of 6.40 ms because its batch is larger: it has 4.0 times the FLOPs of the median "
        "step."
    )


def test_busy_machine_does_not_blame_the_job() -> None:
    rank = trace({"gemm": [100, 100, 100, 100, 200]}, span_us=600.0)
    load = HostLoad(wall_s=10, cpu_s=9, cpus=8, run_queue_s=4)
    run = with_findings(invented_run(attrs.evolve(rank, host_load=load)))
    assert [finding.rule for finding in run.findings] == ["busy-machine"]
    assert state_of(run, "unsteady-steps").reason == "the machine was busy"


def helpers(*times_us: float) -> Item:
    parts = [frame(f"train.py({60 + index}): part_{index}", time_us) for index, time_us in enumerate(times_us)]
    return function(sum(times_us), *parts)


def test_time_of_small_functions_is_summed_at_their_caller(tmp_path: Path) -> None:
    (finding,) = Job().write(tmp_path / "split.json", [helpers(700, 500, 600)]).findings
    assert (finding.where.function, finding.where.line) == ("work", 40)
    assert finding.text == "Python code without operators takes 18% of each step (1.80 ms) in work (train.py:40)."
    assert finding.gain_us == pytest.approx(1_800)


def test_large_function_keeps_its_line(tmp_path: Path) -> None:
    (finding,) = Job().write(tmp_path / "large.json", [helpers(1_800, 300, 300)]).findings
    assert (finding.where.function, finding.where.line) == ("part_0", 60)


def test_functions_of_a_module_are_not_summed(tmp_path: Path) -> None:
    parts = [
        frame("nn.Module: Linear_0", 500, frame(f"train.py({60 + index}): part_{index}", 500)) for index in range(4)
    ]
    assert Job().write(tmp_path / "module.json", [function(2_000, *parts)]).findings == ()


SHAPES = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}


def forward(module: str = "Net_0", number: int = -1) -> Item:
    return frame(f"nn.Module: {module}", 1_000, operator("aten::linear", 1_000, SHAPES | {"Sequence number": number}))


def backward(sequence: int) -> Item:
    return operator("LinearBackward0", 500, {"Sequence number": sequence, "Fwd thread id": 1})


def stage(name: str, *inner: Item) -> Item:
    return ("user_annotation", name, sum(item[2] for item in inner), *inner)


@pytest.mark.parametrize(
    ("items", "is_found"),
    [
        ([stage("a", forward(number=1), forward(number=2)), backward(1)], True),
        ([stage("a", forward(number=1), forward()), backward(1)], True),
        ([forward(number=1), forward(), backward(1)], False),
        ([stage("a", forward(number=1), forward("Net_1")), backward(1)], False),
        ([stage("a", forward(number=1)), stage("b", forward()), backward(1)], False),
        ([stage("a", forward(), forward()), backward(1)], False),
        (
            [
                stage("a", forward(number=1), forward(number=2)),
                backward(1),
                backward(2),
            ],
            False,
        ),
    ],
    ids=["unused", "without gradients", "without stages", "other module", "other stage", "inference", "both used"],
)
def test_repeated_forward_pass(tmp_path: Path, items: list[Item], is_found: bool) -> None:
    run = Job(steps=3).write(tmp_path / "job.json", items)
    found = [finding for finding in run.findings if finding.rule == "duplicated-work"]
    assert len(found) == is_found
    assert state_of(run, "duplicated-work").state == ("found" if is_found else "clear")
    if is_found:
        assert found[0].text == (
            "Running Net again, with the same operators but no backward pass, takes 10% of each step (1.00 ms) in main "
            "(train.py:5)."
        )


def test_repeated_forward_pass_is_not_judged_without_stacks(tmp_path: Path) -> None:
    run = Job(stacks=False).write(tmp_path / "job.json", [])
    assert state_of(run, "duplicated-work").state == "not_judged"


@pytest.mark.parametrize(
    ("name", "rules"), [("nn.Module: Linear_{}", []), ("nn.Module: Linear_0", ["small-operators"])]
)
def test_layers_of_a_model_are_no_python_loop(tmp_path: Path, name: str, rules: list[str]) -> None:
    calls = [frame(name.format(layer), 20, operator("aten::select", 20)) for layer in range(100)]
    run = Job().write(tmp_path / "layers.json", [function(100 * 20, *calls)])
    assert [finding.rule for finding in run.findings] == rules


def generated(sequences: int, operator_us: int) -> Item:
    """Return calls of a function that calls a model for each of 16 tokens of a sequence."""
    layer = frame("nn.Module: Linear_0", operator_us, operator("aten::linear", operator_us))
    model = frame("nn.Module: Net_0", operator_us, frame("model.py(9): forward", operator_us, layer))
    return function(
        16 * sequences * operator_us, *[frame("train.py(60): decode", 16 * operator_us, *[model] * 16)] * sequences
    )


def test_many_calls_of_a_model_with_small_operators_are_at_their_caller(tmp_path: Path) -> None:
    (finding,) = Job().write(tmp_path / "small.json", [generated(4, 50)]).findings
    assert (finding.rule, finding.where.function, finding.where.line) == ("small-batches", "decode", 60)
    assert finding.gain_us == pytest.approx(4 * 16 * 50)
    assert "(64 calls of aten::linear per step)" in finding.text
    assert Job().write(tmp_path / "few.json", [generated(3, 50)]).findings == ()
    assert Job().write(tmp_path / "large.json", [generated(4, 120)]).findings == ()


def test_a_second_forward_pass_is_at_the_function_that_calls_the_model(tmp_path: Path) -> None:
    inner = frame("model.py(9): forward", 1_000, operator("aten::linear", 1_000, SHAPES))
    again = frame("nn.Module: Net_0", 1_000, inner)
    items = [stage("a", forward(number=1), frame("train.py(60): accuracy", 1_000, again)), backward(1)]
    run = Job(steps=3).write(tmp_path / "job.json", items)
    (finding,) = [finding for finding in run.findings if finding.rule == "duplicated-work"]
    assert (finding.where.function, finding.where.line) == ("accuracy", 60)


def test_validation_is_at_its_own_function(tmp_path: Path) -> None:
    inner = frame("model.py(9): forward", 2_000, operator("aten::linear", 2_000))
    items = [function(2_000, frame("train.py(60): validate", 2_000, frame("nn.Module: Net_0", 2_000, inner)))]
    (finding,) = Job().write(tmp_path / "job.json", items).findings
    assert (finding.rule, finding.where.function, finding.where.line) == ("validation", "validate", 60)


def test_loop_over_a_helper_function_is_at_its_caller(tmp_path: Path) -> None:
    calls = [frame("train.py(60): step_of_loop", 20, operator("aten::select", 20))] * 64
    (finding,) = Job().write(tmp_path / "loop.json", [function(64 * 20, *calls)]).findings
    assert (finding.rule, finding.where.function) == ("small-operators", "work")
    assert Job().write(tmp_path / "few.json", [function(50 * 20, *calls[:50])]).findings == ()


READ = "<built-in method read of _io.TextIOWrapper object at 0x7f1>"
WRITE = "<built-in method write of _io.TextIOWrapper object at 0x7f1>"


@pytest.mark.parametrize(
    ("inner", "cause"),
    [
        ([frame(READ, 300), frame(WRITE, 100)], "data-loading"),
        ([frame(READ, 100), frame(WRITE, 300)], "output"),
        ([frame(READ, 100), frame("<built-in method sendto of _socket.socket object at 0x7f1>", 100)], "python-code"),
        ([frame(READ, 100), frame("<built-in method connect of _socket.socket object at 0x7f1>", 1_800)], "waiting"),
        ([frame("<built-in function read>", 100), frame("<built-in function waitpid>", 1_800)], "waiting"),
    ],
    ids=["reads", "logs to a file", "sends metrics", "waits for a server", "waits for a process"],
)
def test_cause_of_a_function_is_what_it_mostly_does(tmp_path: Path, inner: list[Item], cause: str) -> None:
    run = Job().write(tmp_path / "job.json", [function(2_000, *inner)])
    assert [finding.rule for finding in run.findings] == [cause]


def test_phases_of_the_compiler_that_are_recorded_as_operators(tmp_path: Path) -> None:
    compiler = operator("_compile.compile_inner (dynamo_timed)", 800, operator("build_guards (dynamo_timed)", 500))
    (finding,) = Job(stacks=False).write(tmp_path / "job.json", [compiler]).findings
    assert (finding.rule, finding.gain_us) == ("compilation", pytest.approx(800))


def with_thread(job: Job, *names: str) -> Job:
    """Add a thread that repeatedly calls each function for 100 us."""
    place = {"ph": "X", "cat": "python_function", "pid": 1, "tid": 2, "args": {}}
    end_us = job.steps * STEP_US
    job.events.append(place | {"name": "threading.py(982): run", "ts": 0.0, "dur": end_us})
    for index in range(1, int(end_us) // 100):
        job.events.append(place | {"name": names[index % len(names)], "ts": index * 100.0, "dur": 100.0})
    return job


def test_python_code_of_two_threads_contends_for_the_gil(tmp_path: Path) -> None:
    run = with_thread(Job(), "train.py(90): hash_rows").write(tmp_path / "job.json", [function(6_000)])
    (finding,) = [finding for finding in run.findings if finding.rule == "gil-contention"]
    assert finding.text == (
        "Python code of another thread, which needs the GIL, overlaps 58% of each step (5.83 ms) in hash_rows "
        "(train.py:90)."
    )
    assert finding.gain_us == pytest.approx(3_000, rel=0.03)


@pytest.mark.parametrize(
    "name",
    [
        "<built-in method acquire of _thread.lock object at 0x7f1>",
        "<built-in function sha256>",
        "selectors.py(451): select",
    ],
)
def test_waiting_or_native_thread_does_not_contend_for_the_gil(tmp_path: Path, name: str) -> None:
    run = with_thread(Job(), name).write(tmp_path / "job.json", [function(6_000)])
    assert state_of(run, "gil-contention").state == "not_judged"


def test_thread_that_the_main_thread_waits_for_does_not_contend_for_the_gil(tmp_path: Path) -> None:
    """While the main thread waits in queue.get, the critical path runs through the other thread."""
    wait = frame("queue.py(154): get", 5_990, frame("<built-in method acquire of _thread.lock object at 0x7f1>", 5_980))
    run = with_thread(Job(), "train.py(90): produce").write(tmp_path / "job.json", [function(6_000, wait)])
    assert "gil-contention" not in [finding.rule for finding in run.findings]


def test_thread_that_runs_during_operators_does_not_contend_for_the_gil(tmp_path: Path) -> None:
    run = with_thread(Job(), "train.py(90): hash_rows").write(tmp_path / "job.json", [operator("aten::mm", 6_000)])
    assert state_of(run, "gil-contention").state == "not_judged"


def test_function_that_may_be_blocked_does_not_contend_for_the_gil(tmp_path: Path) -> None:
    job = Job()
    place = {"ph": "X", "cat": "python_function", "pid": 1, "tid": 2, "args": {}}
    for start_us, name in ((0.0, "train.py(80): run"), (1.0, "train.py(90): report")):
        job.events.append(place | {"name": name, "ts": start_us, "dur": 60_000 - start_us})
    run = job.write(tmp_path / "job.json", [function(6_000)])
    assert state_of(run, "gil-contention").state == "not_judged"


def with_load(run: RunSummary, **times_s: float) -> RunSummary:
    """Add CPU times to the only rank of a run, as fractions of the time of its steps."""
    account = run.ranks[0].account
    assert account is not None
    shares = {"wall_s": 1.0, "cpu_s": 1.0, "run_queue_s": 0.0, **times_s}
    load = HostLoad(cpus=8, **{name: share * account.time_us / 1e6 for name, share in shares.items()})
    return with_findings(invented_run(attrs.evolve(run.ranks[0], host_load=load)))


@pytest.mark.parametrize(("thread_cpu_s", "rule"), [(0.4, "lock"), (1.0, "python-code")])
def test_function_that_uses_no_cpu_time_waits_for_a_lock(tmp_path: Path, thread_cpu_s: float, rule: str) -> None:
    run = Job().write(tmp_path / "job.json", [function(6_000), operator("aten::mm", 3_900)])
    (finding,) = with_load(run, thread_cpu_s=thread_cpu_s).findings
    assert finding.rule == rule
    assert finding.gain_us == pytest.approx(6_000, rel=0.02)


@pytest.mark.parametrize(
    ("times_s", "items"),
    [
        ({"wall_s": 10.0, "thread_cpu_s": 1.0}, [function(6_000)]),  # the recording is far longer
        ({"thread_cpu_s": 0.4}, [("cuda_runtime", "cudaStreamSynchronize", 6_000)]),
        ({"thread_cpu_s": 0.4}, [operator("c10d::allreduce_", 6_000)]),
        ({"thread_cpu_s": 0.4}, [operator("aten::mm", 6_000)]),
    ],
    ids=["short steps", "synchronisation", "collective", "operator"],
)
def test_blocked_time_without_an_explanation_is_no_finding(
    tmp_path: Path, times_s: dict[str, float], items: list[Item]
) -> None:
    run = with_load(Job().write(tmp_path / "job.json", items), **times_s)
    assert not {"lock", "gil-contention", "waiting"} & {finding.rule for finding in run.findings}


def test_function_that_waits_for_a_lock_of_a_busy_thread_is_not_called_gil_contention(tmp_path: Path) -> None:
    job = Job()
    place = {"ph": "X", "cat": "python_function", "pid": 1, "tid": 2, "args": {}}
    job.events.append(place | {"name": "train.py(90): count", "ts": 0.0, "dur": job.steps * STEP_US + 1_000})
    run = job.write(tmp_path / "job.json", [function(6_000), operator("aten::mm", 3_900)])
    assert with_load(run, cpu_s=1.0, thread_cpu_s=0.4).findings[0].rule == "lock"


@pytest.mark.parametrize(("cpu_s", "is_found"), [(1.0, True), (0.2, False)])
def test_thread_that_never_calls_a_function_holds_the_gil(tmp_path: Path, cpu_s: float, is_found: bool) -> None:
    job = Job()
    place = {"ph": "X", "cat": "python_function", "pid": 1, "tid": 2, "args": {}}
    job.events.append(place | {"name": "train.py(90): count", "ts": 0.0, "dur": job.steps * STEP_US + 1_000})
    run = job.write(tmp_path / "job.json", [operator("aten::mm", 4_000), operator("aten::add", 4_000)])
    findings = [one for one in with_load(run, cpu_s=cpu_s, thread_cpu_s=0.1).findings if one.rule == "gil-contention"]
    assert [(one.where.function, one.where.line) for one in findings if one.where] == [("count", 90)] * is_found
    assert all("90% of each step" in one.text for one in findings)


@pytest.mark.parametrize(("message_us", "cause"), [(500, None), (1_800, "data-loading")])
def test_batch_that_a_worker_loaded_ahead_is_not_slow_loading(
    tmp_path: Path, message_us: float, cause: str | None
) -> None:
    loads = frame("<built-in function loads>", message_us + 100, frame("<built-in function read>", message_us))
    get = frame("torch/utils/data/dataloader.py(1275): _try_get_data", message_us + 150, loads)
    run = Job().write(
        tmp_path / "job.json", [frame("torch/utils/data/dataloader.py(760): __next__", message_us + 200, get)]
    )
    assert [one.rule for one in run.findings] == ([cause] if cause else [])


def test_large_batches_of_python_objects_are_unpickled(tmp_path: Path) -> None:
    get = frame("torch/utils/data/dataloader.py(1275): _try_get_data", 2_000, frame("<built-in function loads>", 1_900))
    (finding,) = Job().write(tmp_path / "job.json", [get]).findings
    assert (finding.rule, finding.gain_us) == ("unpickling", pytest.approx(1_900, rel=0.02))


def test_output_of_a_child_process_is_not_data_loading(tmp_path: Path) -> None:
    read = frame("<built-in method read of _io.BufferedReader object at 0x7f1>", 1_900)
    (finding,) = (
        Job().write(tmp_path / "job.json", [function(2_000, frame("subprocess.py(508): run", 1_950, read))]).findings
    )
    assert finding.rule == "waiting"


@pytest.mark.parametrize(("duration_us", "is_found"), [(1_200, True), (2_000, False)])
def test_repeated_forward_pass_without_shapes(tmp_path: Path, duration_us: float, is_found: bool) -> None:
    def call(time_us: float, number: int) -> Item:
        return frame("nn.Module: Net_0", time_us, operator("aten::linear", time_us, {"Sequence number": number}))

    run = Job().write(tmp_path / "job.json", [call(1_000, 1), call(duration_us, 2), backward(1)])
    assert state_of(run, "duplicated-work").state == ("found" if is_found else "clear")


GRADIENT = operator(
    "autograd::engine::evaluate_function: MmBackward0",
    1_500,
    operator("MmBackward0", 200),
    operator("aten::isnan", 600, operator("aten::ne", 600)),
    operator("aten::_is_any_true", 400, operator("aten::any", 400)),
    operator("aten::item", 100, operator("aten::_local_scalar_dense", 100)),
)


@pytest.mark.parametrize(
    ("stacks", "text"),
    [
        (True, "Autograd's anomaly detection takes 19% of each step (1.90 ms)."),
        (False, "Checking gradients for NaN in autograd's anomaly detection takes 11% of each step (1.10 ms)."),
    ],
)
def test_anomaly_detection_formats_stacks_and_checks_gradients(tmp_path: Path, *, stacks: bool, text: str) -> None:
    read = frame("<built-in method readlines of _io.TextIOWrapper object at 0x7f1>", 300)
    formatting = frame(
        "torch/fx/traceback.py(497): format_stack", 800, frame("linecache.py(80): updatecache", 700, read)
    )
    items = [function(2_500, operator("aten::add", 900, formatting), GRADIENT)]
    (finding,) = Job(stacks=stacks).write(tmp_path / "job.json", items).findings
    assert (finding.rule, finding.text, finding.where.file) == ("anomaly-detection", text, None)
    assert finding.do.endswith("torch.autograd.set_detect_anomaly(False)")


def test_gradient_hooks_of_the_job_are_not_anomaly_detection(tmp_path: Path) -> None:
    check = [operator("aten::isnan", 600), operator("aten::any", 400), operator("aten::item", 100)]
    evaluation = operator("autograd::engine::evaluate_function: MmBackward0", 1_500, *check)
    stack = frame("traceback.py(200): format_stack", 900)
    run = Job().write(tmp_path / "job.json", [evaluation, function(900, stack)])
    assert state_of(run, "anomaly-detection").state == "clear"


@pytest.mark.parametrize(("caller", "rules"), [("lib::parse", []), (None, ["python-code"])])
def test_library_function_that_an_operator_calls_is_not_python_code_of_the_job(
    tmp_path: Path, caller: str | None, rules: list[str]
) -> None:
    decode = frame("json/decoder.py(332): decode", 1_500)
    inside = operator(caller, 1_500, decode) if caller else decode
    findings = Job().write(tmp_path / "job.json", [function(1_500, inside)]).findings
    assert [finding.rule for finding in findings] == rules


FLOAT = {"Input Dims": [[64, 64], []], "Input type": ["float", ""]}
NUMBERS = {"Input Dims": [[], []], "Input type": ["ScalarList", "Scalar"]}
LIST = {"Input Dims": [[[64, 64], [64, 64]], []], "Input type": ["TensorList", "Scalar"]}


@pytest.mark.parametrize(
    ("outer", "args", "is_found"),
    [
        ("aten::_sample_dirichlet", FLOAT, False),
        ("aten::to", FLOAT, True),
        ("aten::softmax", FLOAT, True),
        ("aten::zeros", NUMBERS, True),
        ("aten::_foreach_mul_", LIST, True),
        ("aten::linear", DOUBLE, True),
        ("ToCopyBackward0", FLOAT, True),
    ],
)
def test_float64_inside_an_operator_without_float64_input_is_not_of_the_job(
    tmp_path: Path, outer: str, args: dict[str, Any], *, is_found: bool
) -> None:
    inside = operator(outer, 500, operator("aten::sum", 300, DOUBLE), args)
    run = Job().write(tmp_path / "job.json", [inside])
    assert state_of(run, "float64").state == ("found" if is_found else "clear")


def test_wait_for_a_child_process_is_not_called_a_wait_for_a_thread(tmp_path: Path) -> None:
    wait = frame("subprocess.py(506): run", 900, frame("<built-in method poll of select.poll object at 0x7f1>", 900))
    run = Job().write(tmp_path / "job.json", [function(900, wait)])
    account = run.ranks[0].account
    assert account is not None
    (owner,) = [owner for owner in account.owners if "poll" in (owner.name or "")]
    assert owner_text(owner.kind, "poll") == "wait poll"
