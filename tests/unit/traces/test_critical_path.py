"""Tests for the critical path as a track in merged, trimmed and slim traces."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from planted_owners import planted
from real_traces import each
from simulated_ranks import NOISE_NS, simulate, write

from gpu_job import GpuJob
from profdeck_traces.analysis.critical_path import PATH_CATEGORY, critical_path
from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.analysis.summary import summarise_trace
from profdeck_traces.base.errors import TraceError
from profdeck_traces.cli.merging import Merge, write_merged
from profdeck_traces.cli.trace_range import TracePart
from profdeck_traces.merge import MergeSource, merge_traces
from profdeck_traces.reading.reader import read_trace
from profdeck_traces.writing.selection import Selection
from profdeck_traces.writing.slim import SlimSource, write_slim
from profdeck_traces.writing.trim import trim_trace
from profdeck_traces.writing.windows import step_window

EVERYTHING = (None, None)


def path_events(file: Path) -> list[dict[str, Any]]:
    events = json.loads(file.read_text())["traceEvents"]
    return [event for event in events if event.get("cat") == PATH_CATEGORY]


def without_file(summary: RankSummary) -> RankSummary:
    return attrs.evolve(summary, path="", events=0, host_load=None)


def job(tmp_path: Path, ranks: int = 1) -> list[Path]:
    GpuJob(ranks=ranks, items=2).write(tmp_path)
    return [tmp_path / f"rank{rank}.trace.json.gz" for rank in range(ranks)]


def check_trim(trace: Path, directory: Path) -> None:
    """Check that an added path matches the account, and changes neither the other events nor the summary."""
    plain, with_path = directory / "plain.json", directory / "path.json"
    trim_trace(trace, plain, Selection())
    path = critical_path(read_trace(trace))
    check = trim_trace(trace, with_path, Selection(), path=path)

    head, separator, tail = plain.read_bytes().rpartition(b"\n]")
    content = with_path.read_bytes()
    assert content.startswith(head)
    assert content.endswith(separator + tail)
    before, after = summarise_trace(plain, pictures=True), summarise_trace(with_path, pictures=True)
    assert check.events == after.events
    assert without_file(before) == without_file(after)
    assert before.account is not None
    if before.account.steps == len(before.steps) or before.account.basis == "recording":  # no cold step was excluded
        assert int((path.end_ns - path.begin_ns).sum()) == round(before.account.time_us * 1000)


def test_a_trimmed_path_is_kept_and_never_empty(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": planted()["device bound"].machine.events}))
    path = critical_path(read_trace(trace))
    kernels = Selection(categories=frozenset({"kernel"}))
    first, second, outside = (tmp_path / name for name in ("first.json", "second.json", "outside.json"))
    trim_trace(trace, first, kernels, path=path)
    trim_trace(first, second, kernels)
    assert path_events(second) == path_events(first) != []
    with pytest.raises(TraceError, match="No event"):
        trim_trace(first, outside, Selection(categories=frozenset({"unknown"})))

    end_ns = int(path.end_ns[-1])
    late = {"ph": "X", "cat": "cpu_op", "name": "late", "pid": 1, "tid": 1, "ts": end_ns / 1000 + 10, "dur": 5}
    trace.write_text(json.dumps({"traceEvents": [*json.loads(first.read_text())["traceEvents"], late]}))
    for source, added in ((trace, None), (outside, path)):
        target = tmp_path / f"from_{source.name}"
        trim_trace(source, target, Selection(begin_ns=end_ns + 5_000), path=added)
        assert "critical path" not in target.read_text()
        target.rename(outside)


@pytest.mark.parametrize("name", ["device bound", "lock"])
def test_a_path_changes_no_other_event_of_a_trimmed_trace(tmp_path: Path, name: str) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": planted()[name].machine.events}))
    check_trim(trace, tmp_path)


@each("gpu/pair_rank0*", "gpu/nccl*")
def test_paths_of_real_traces_change_no_other_event(tmp_path: Path, path: Path) -> None:
    check_trim(path, tmp_path)


def test_only_the_selected_steps_have_a_path(tmp_path: Path) -> None:
    (trace,) = job(tmp_path)
    selection = step_window(trace, range(1, 3))

    trim_trace(trace, tmp_path / "part.json", selection, path=critical_path(read_trace(trace)))

    begin_ns, end_ns = selection.host_bounds
    assert begin_ns is not None
    assert end_ns is not None
    times = [(event["ts"] * 1000, (event["ts"] + event["dur"]) * 1000) for event in path_events(tmp_path / "part.json")]
    assert times[0][0] <= begin_ns + 1
    assert times[-1][1] >= end_ns - 1
    assert all(end > begin_ns - 1 and begin < end_ns + 1 for begin, end in times)


@pytest.mark.parametrize("processes", [1, 2])
def test_merged_traces_have_a_path_for_each_rank(tmp_path: Path, processes: int) -> None:
    traces = job(tmp_path, ranks=2)
    sources = [MergeSource(trace, f"rank {rank}", rank, path_window=EVERYTHING) for rank, trace in enumerate(traces)]
    plain = [attrs.evolve(source, path_window=None) for source in sources]

    merge_traces(plain, tmp_path / "plain.json", gzip=False)
    check = merge_traces(sources, tmp_path / "merged.json", gzip=False, processes=processes)

    events = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    thread = path_events(tmp_path / "merged.json")[0]["tid"]
    added = [event for event in events if event["tid"] == thread]
    others = [event for event in events if event["tid"] != thread]
    assert others == json.loads((tmp_path / "plain.json").read_text())["traceEvents"]
    assert check.events == len(events)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    of_ranks = {names[event["pid"]].partition(":")[0] for event in added}
    assert of_ranks == {"rank 0", "rank 1"}
    assert {event["args"]["name"] for event in added if event["name"] == "thread_name"} == {"critical path"}


def merge_job(source: Path, destination: Path) -> Path:
    """Merge a trace or a directory of traces, including critical paths, and return the new file."""
    part = TracePart.from_options(None, None, None, None)
    merge = Merge(paths=[source], align=None, roles=None, ranks=None, part=part, processes=1, with_path=True)
    write_merged(merge, destination)
    return destination


@pytest.mark.parametrize("ranks", [2, 4])
def test_merged_paths_show_the_waits_for_other_ranks(tmp_path: Path, ranks: int) -> None:
    simulated = simulate(5, ranks=ranks)
    directory = write(simulated, tmp_path / "job")
    expected = sorted(
        (f"wait for rank {item.last}", (item.arrived - item.begin) / 1000)
        for work in simulated.work
        for item in work
        if item.group and item.arrived - item.begin > NOISE_NS
    )
    paths = path_events(merge_job(directory, tmp_path / "merged.json"))
    waits = sorted((event["name"], event["dur"]) for event in paths if event["name"].startswith("wait for rank"))
    assert [name for name, _ in waits] == [name for name, _ in expected]
    assert [duration for _, duration in waits] == pytest.approx([duration for _, duration in expected], abs=1)
    for rank in range(ranks):
        alone = path_events(merge_job(directory / f"rank{rank}.trace.json", tmp_path / f"rank{rank}.json"))
        assert not any(event["name"].startswith("wait for rank") for event in alone)
        of_rank = [event for event in paths if event["pid"] == paths_pid(paths, alone)]
        assert covered(of_rank) == covered(alone)
    slim = merge_job(directory, tmp_path / "merged.pftrace").read_bytes()
    assert all(name.encode() in slim for name, _ in expected)


def paths_pid(paths: list[dict[str, Any]], alone: list[dict[str, Any]]) -> Any:
    """Return the ID of the process whose path has the same start and end as the path of a rank merged alone."""
    bounds = alone[0]["ts"], alone[-1]["ts"] + alone[-1]["dur"]
    ends = {event["pid"]: event["ts"] + event["dur"] for event in paths}
    starts = {event["pid"]: event["ts"] for event in reversed(paths)}
    (pid,) = (pid for pid in ends if (starts[pid], ends[pid]) == pytest.approx(bounds))
    return pid


def covered(events: list[dict[str, Any]]) -> tuple[int, int]:
    """Return a path's total duration in nanoseconds and its start. Assert that the path's events do not overlap."""
    times = [(round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)) for event in events]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(times))
    return sum(end - begin for begin, end in times), times[0][0]


def test_reasons_for_a_missing_path_are_listed_once(tmp_path: Path) -> None:
    (trace,) = job(tmp_path)
    trim_trace(trace, tmp_path / "path.json", Selection(), path=critical_path(read_trace(trace)))
    again = [MergeSource(tmp_path / "path.json", f"rank {rank}", rank, path_window=EVERYTHING) for rank in range(2)]
    reasons: list[str] = []

    merge_traces(again, tmp_path / "merged.json", on_missing_path=reasons.append)
    slim = write_slim(
        [SlimSource(path=source.path, label=source.label, sort_index=0, with_path=True) for source in again],
        tmp_path / "slim",
    )

    assert reasons == list(slim.without_path) == ["The trace already contains its critical path."]


def test_a_trace_without_events_has_no_path(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [{"ph": "X", "cat": "x", "name": "x", "pid": 1, "tid": 1, "ts": 0}]}))
    with pytest.raises(TraceError, match="no critical path"):
        critical_path(read_trace(trace))
