"""Tests for traces written by other tools and by old or broken recorders."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.analysis.run_model import Finding
from profdeck_traces.analysis.summary import summarise_trace
from profdeck_traces.base.errors import TraceError
from profdeck_traces.findings.overview import teams_of
from profdeck_traces.loading import summarise
from profdeck_traces.merge import MergeSource, merge_traces
from profdeck_traces.reading import compiled
from profdeck_traces.writing.selection import Selection
from profdeck_traces.writing.trim import trim_trace

Event = dict[str, Any]
STEP_US, KERNEL_US, KERNELS = 1000.0, 60.0, 8


def recording(steps: int = 6, start_us: float = 1_000_000.0) -> list[Event]:
    """Return steps of 1 ms. In each step, 8 operators launch one kernel of 60 us each, all on the same stream."""
    events: list[Event] = []
    for step in range(steps):
        begin_us = start_us + step * STEP_US
        mark = {"name": f"ProfilerStep#{step}", "args": {"External id": 1000 + step}}
        host = {"ph": "X", "pid": 100, "tid": 100}
        events.append({**host, **mark, "cat": "user_annotation", "ts": begin_us, "dur": STEP_US - 10})
        for kernel in range(KERNELS):
            call_us = begin_us + 20 + kernel * 100
            args = {"correlation": step * KERNELS + kernel + 1}
            events += [
                {**host, "cat": "cpu_op", "name": "aten::mm", "ts": call_us, "dur": 30.0},
                {
                    **host,
                    "cat": "cuda_runtime",
                    "name": "cudaLaunchKernel",
                    "ts": call_us + 5,
                    "dur": 8.0,
                    "args": args,
                },
                {
                    "ph": "X",
                    "cat": "kernel",
                    "name": "gemm",
                    "pid": 0,
                    "tid": 7,
                    "args": args,
                    "ts": call_us + 20,
                    "dur": KERNEL_US,
                },
            ]
    return events


def kernels(events: list[Event]) -> list[Event]:
    return [event for event in events if event["cat"] == "kernel"]


@pytest.fixture
def summary_of(tmp_path: Path) -> Callable[[list[Event]], tuple[RankSummary, tuple[Finding, ...]]]:
    """Return a function that computes the summary and findings for a list of events."""

    def summarised(events: list[Event]) -> tuple[RankSummary, tuple[Finding, ...]]:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"traceEvents": events}))
        run, errors = summarise([path])
        assert errors == []
        (rank,) = run.ranks
        return rank, run.findings

    return summarised


SummaryOf = Callable[[list[Event]], tuple[RankSummary, tuple[Finding, ...]]]


def test_sound_recording_has_no_such_finding(summary_of: SummaryOf) -> None:
    rank, findings = summary_of(recording())
    assert (rank.launches, rank.launches_without_work, rank.unrecorded_steps) == (48, 0, ())
    assert rank.implausible == ()
    assert {finding.rule for finding in findings} & {"device-not-recorded", "implausible-times"} == set()


def test_categories_of_torch_1_8_are_known(summary_of: SummaryOf) -> None:
    old = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel", "user_annotation": "Operator"}
    rank, _ = summary_of([{**event, "cat": old[event["cat"]]} for event in recording()])
    expected, _ = summary_of(recording())
    assert rank.busy_us == expected.busy_us
    assert [step.step for step in rank.steps] == list(range(6))
    assert [kernel.count for kernel in rank.kernels] == [48]


def test_trace_without_known_categories_has_no_summary(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [{**event, "cat": "rail"} for event in recording()] + [{"ph": "X", "name": "a", "ts": 1, "dur": 2}]
    path.write_text(json.dumps(events))
    with pytest.raises(TraceError, match=r"category of almost none of its events.*rail \(150\), none \(1\)"):
        summarise_trace(path)


def test_launches_without_kernels_are_a_device_that_was_not_recorded(summary_of: SummaryOf) -> None:
    rank, findings = summary_of([event for event in recording() if event["cat"] != "kernel"])
    assert (rank.launches, rank.launches_without_work, rank.devices) == (48, 48, ())
    (finding,) = [finding for finding in findings if finding.rule == "device-not-recorded"]
    assert finding.text == "The device was not recorded: 48 launches have no kernel (trace.json)."
    assert "unexplained" not in {finding.rule for finding in findings}


def test_device_time_of_steps_without_recorded_kernels_is_unknown(summary_of: SummaryOf) -> None:
    events = [event for event in recording(8) if event["cat"] != "kernel" or event["ts"] > 1_003_000]
    rank, findings = summary_of(events)
    assert rank.unrecorded_steps == (0, 1, 2)
    assert [step.device_us for step in rank.steps] == [None] * 3 + [KERNELS * KERNEL_US] * 5
    assert [len(step.devices) for step in rank.steps] == [0] * 3 + [1] * 5
    (finding,) = [finding for finding in findings if finding.rule == "device-not-recorded"]
    assert "steps 0..2 have launches only" in finding.text


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({"ts": 0.0, "dur": 0.0}, 1),  # the device reported no time
        ({"ts": 8_000.0, "dur": 12.0}, 1),  # from an earlier recording
        ({"dur": 1_600_000.0}, 1),  # the reported end is too late
        ({"dur": 20_000.0}, 0),  # queued work may end after the last host event
    ],
)
def test_device_times_outside_of_the_recording_are_counted_apart(
    summary_of: SummaryOf, change: Event, count: int
) -> None:
    events = recording(start_us=20_000_000.0)
    kernels(events)[19].update(change)
    rank, findings = summary_of(events)
    assert sum(implausible.count for implausible in rank.implausible) == count
    assert sum(kernel.count for kernel in rank.kernels) == 48 - count
    assert [finding.rule for finding in findings].count("implausible-times") == count
    assert all(device.busy_us <= device.span_us for device in rank.devices)


@pytest.mark.parametrize("in_python", [False, True])
@pytest.mark.parametrize(
    "change",
    [{"dur": math.nan}, {"dur": math.inf}, {"dur": -1.5}, {"dur": "a"}, {"dur": 1e40}, {"dur": None}, {"ts": math.nan}],
)
def test_events_with_invalid_times_are_counted_apart(
    summary_of: SummaryOf, monkeypatch: pytest.MonkeyPatch, change: Event, *, in_python: bool
) -> None:
    if in_python:
        monkeypatch.setattr(compiled, "load_library", lambda: None)
    events = recording()
    for kernel in kernels(events)[10:13]:
        kernel.update(change)
    rank, findings = summary_of(events)
    assert rank.whole  # the file itself is intact
    assert [(implausible.name, implausible.count) for implausible in rank.implausible] == [("gemm", 3)]
    assert sum(kernel.count for kernel in rank.kernels) == 45
    (finding,) = [finding for finding in findings if finding.rule == "implausible-times"]
    assert finding.text == "3 events with invalid times or outside the recording, such as gemm (trace.json)."


def test_kernels_of_a_graph_belong_to_the_iteration_that_launched_it(summary_of: SummaryOf) -> None:
    events: list[Event] = []
    for iteration in range(8):
        begin_us = 1_000_000.0 + iteration * 2000
        host = {"ph": "X", "pid": 100, "tid": 100}
        name = "execute_context_0(0)_generation_32(32)"
        args = {"correlation": iteration + 1, "External id": 0}
        events += [
            {**host, "cat": "user_annotation", "name": name, "ts": begin_us, "dur": 300.0},
            {**host, "cat": "cuda_runtime", "name": "hipGraphLaunch", "ts": begin_us + 50, "dur": 100.0, "args": args},
        ]
        device = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 0, "dur": 44.0, "args": args}
        events += [{**device, "ts": begin_us + 150 + kernel * 45} for kernel in range(40)]
    rank, _ = summary_of(events)
    assert [step.device_us for step in rank.steps] == [40 * 44.0] * 8  # although the annotation lasts only 0.3 ms
    assert rank.iterations[0].tokens_per_s == pytest.approx(32 / (39 * 45 + 44) * 1e6)


def test_begin_and_end_events_are_complete_events(summary_of: SummaryOf) -> None:
    events: list[Event] = []
    for step in range(6):
        kernel_us = [1_000_040.0 + step * STEP_US + kernel * 100 for kernel in range(KERNELS)]
        span = {"cat": "gpu_user_annotation", "name": f"ProfilerStep#{step}", "pid": 0, "tid": 7, "ph": "X"}
        events.append({**span, "ts": kernel_us[0], "dur": kernel_us[-1] + KERNEL_US - kernel_us[0]})
    pairs: list[Event] = []
    for event in [*recording(), *events]:  # each device annotation starts with its first kernel
        begin = {key: value for key, value in event.items() if key != "dur"} | {"ph": "B"}
        pairs += [begin, {"ph": "E", "pid": event["pid"], "tid": event["tid"], "ts": event["ts"] + event["dur"]}]
    rank, _ = summary_of(sorted(pairs, key=lambda event: event["ts"]))
    assert [(kernel.count, kernel.max_us) for kernel in rank.kernels] == [(48, KERNEL_US)]
    assert [step.device_us for step in rank.steps] == [KERNELS * KERNEL_US] * 6


@pytest.mark.parametrize("devices", [1, 4])
def test_shares_of_devices_are_means_over_the_devices(tmp_path: Path, devices: int, summary_of: SummaryOf) -> None:
    events = recording()
    events += [{**kernel, "pid": device} for device in range(1, devices) for kernel in kernels(events)]
    rank, _ = summary_of(events)
    assert len(rank.devices) == devices
    run, _ = summarise([tmp_path / "trace.json"])
    (team,) = teams_of(run)
    (work,) = [row for row in team.device if not row.is_idle]
    assert (work.mean_us, work.share) == pytest.approx((KERNELS * KERNEL_US, KERNELS * KERNEL_US / team.step_us))
    assert [(kernel.mean_us, kernel.calls) for kernel in team.kernels] == [(KERNELS * KERNEL_US, KERNELS)]


@pytest.mark.parametrize("category", ["kernel", "gpu_memcpy", "gpu_memset", "cpu_op", "user_annotation"])
@pytest.mark.parametrize("start_us", [0.0, 1_700_000_000_000_000.0], ids=["boot", "unix"])
def test_events_without_duration_have_a_summary(
    tmp_path: Path, summary_of: SummaryOf, category: str, start_us: float
) -> None:
    for steps in (1, 2, 4):
        events = [{**event, "dur": 0.0} if event["cat"] == category else event for event in recording(steps, start_us)]
        summary_of(events)
        run, errors = summarise([tmp_path / "trace.json"], buckets=1024)
        assert errors == []
        assert run.ranks[0].timelines


def test_steps_without_duration_have_no_ratio_to_their_median(summary_of: SummaryOf) -> None:
    mark = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1}
    steps = [{**mark, "name": f"ProfilerStep#{step}", "ts": 10.0 * step, "dur": float(step > 1)} for step in range(4)]
    _, findings = summary_of([{**steps[0], "dur": 0.0}, {**steps[1], "dur": 0.0}, steps[2]])
    assert "unsteady-steps" not in {finding.rule for finding in findings}


def test_waits_of_mtia_are_idle_time(summary_of: SummaryOf) -> None:
    events = [event | {"cat": "mtia_ccp_events"} if event["cat"] == "kernel" else event for event in recording()]
    expected, _ = summary_of(events)
    waits = [{**kernel, "name": "WaitForSemaphore", "ts": kernel["ts"] + KERNEL_US} for kernel in kernels(recording())]
    rank, _ = summary_of([*events, *({**wait, "cat": "mtia_ccp_events", "dur": 5.0} for wait in waits)])
    assert (rank.busy_us, rank.idle_us) == (expected.busy_us, expected.idle_us)
    assert [kernel.name for kernel in rank.kernels] == ["gemm"]


def in_group(events: list[Event], rank: int) -> list[Event]:
    """Turn the last kernel of each step into a collective, in which rank 0 waits 25 us for the other ranks."""
    for collective in kernels(events)[KERNELS - 1 :: KERNELS]:
        collective["name"] = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
        if rank == 0:
            collective["ts"] -= 25
            collective["dur"] += 25
    return events


@pytest.mark.parametrize(
    "name",
    ["rank{}_trace.json", "job-rank[{}].1700000{}.pt.trace.json", "x_RANK-{}.json", "rank_{}/trace.json"],
)
def test_names_of_files_and_directories_state_ranks(tmp_path: Path, name: str) -> None:
    for rank in range(2):
        path = tmp_path / name.format(rank, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"traceEvents": in_group(recording(), rank)}))
    run, errors = summarise(sorted(tmp_path.rglob("*.json")))
    assert errors == []
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert [group.straggler for group in run.skew] == [1]


@pytest.mark.parametrize("names", [("a.json", "b.json"), ("rank0_of_rank1.json", "rank1_of_rank0.json")])
def test_other_names_state_no_rank(tmp_path: Path, names: tuple[str, str]) -> None:
    for rank, name in enumerate(names):
        (tmp_path / name).write_text(json.dumps(in_group(recording(), rank)))
    run, _ = summarise([tmp_path / name for name in names])
    assert [rank.rank for rank in run.ranks] == [None, None]


def test_engines_with_data_parallelism_count_their_own_ranks(tmp_path: Path) -> None:
    for engine in range(2):
        for rank in range(2):
            document = {
                "traceEvents": in_group(recording(start_us=1e6 + 333 * engine), rank),
                "distributedInfo": {"rank": rank, "world_size": 2},
            }
            (tmp_path / f"dp{engine}_pp0_tp{rank}_rank{rank}.170.json").write_text(json.dumps(document))
    run, errors = summarise(sorted(tmp_path.iterdir()))
    assert errors == []
    assert [(rank.replica, rank.rank) for rank in run.ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [(group.replica, group.straggler, group.note) for group in run.skew] == [(0, 1, None), (1, 1, None)]


def test_data_parallel_ranks_of_one_program_are_no_replicas(tmp_path: Path) -> None:
    for rank in range(2):
        document = {"traceEvents": in_group(recording(), rank), "distributedInfo": {"rank": rank, "world_size": 2}}
        (tmp_path / f"dp{rank}_tp0_rank{rank}.json").write_text(json.dumps(document))
    run, _ = summarise(sorted(tmp_path.iterdir()))
    assert [(rank.replica, rank.rank) for rank in run.ranks] == [(None, 0), (None, 1)]
    assert [group.straggler for group in run.skew] == [1]


SURROGATE = b"\xed\xa0\xbd"
NAMES = {
    "half of an encoded pair": (SURROGATE, "\ud83d"),
    "encoded pair": (SURROGATE + b"\xed\xb8\x80", "\U0001f600"),
    "escaped half": (b"\\ud83d", "\ud83d"),
    "NaN in a name": (b'NaN \\" -Infinity', 'NaN " -Infinity'),
    "Hangul": ("훈련".encode(), "훈련"),
}


@pytest.mark.parametrize("name", NAMES)
def test_written_traces_are_valid_json(tmp_path: Path, name: str) -> None:
    text, expected = NAMES[name]
    event = (
        b'{"ph": "X", "cat": "cpu_op", "name": "%b", "pid": 1, "tid": 1, "ts": 1, "dur": 2, "args": {"%b": -Infinity}}'
    )
    path, trimmed, merged = (tmp_path / name for name in ("trace.json", "trimmed.json", "merged.json"))
    events = event % (text, text)
    path.write_bytes(b'{"%b": NaN, "deviceProperties": [NaN, "%b"], "traceEvents": [%b]}' % (text, text, events))
    assert trim_trace(path, trimmed, Selection()).whole
    assert merge_traces([MergeSource(path, "label", 0)], merged, gzip=False).whole
    for written in (trimmed, merged):
        document = json.loads(written.read_bytes().decode(), parse_constant=pytest.fail)
        (copied,) = [event for event in document["traceEvents"] if event["ph"] == "X"]
        assert (copied["name"], copied["args"]) == (expected, {expected: None})
        members = document if written == trimmed else document["profdeck"]["sources"][0]
        assert members["deviceProperties"] == [None, expected]


@pytest.mark.parametrize("text", [b"\x01", b"\n", b"\xff", b"\xe2\x82", b"\xc0\x80", b'"b"', b"\\U"])
def test_one_bad_name_loses_one_event(tmp_path: Path, text: bytes) -> None:
    events = [json.dumps(event).encode() for event in recording(1)]
    bad = b'{"ph": "X", "cat": "cpu_op", "name": "a%bb", "pid": 1, "tid": 1, "ts": 1000001, "dur": 2}' % text
    path, trimmed = tmp_path / "trace.json", tmp_path / "trimmed.json"
    path.write_bytes(b'{"traceEvents": [%b]}' % b", ".join([*events[:5], bad, *events[5:]]))
    check = trim_trace(path, trimmed, Selection())
    assert (check.whole, check.events) == (False, len(events))
    assert json.loads(trimmed.read_bytes().decode())["traceEvents"] == [json.loads(event) for event in events]
