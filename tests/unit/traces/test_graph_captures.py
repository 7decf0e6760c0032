"""Tests for operators inside graphs: matching graph launches with traces of graph captures."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from real_traces import named

from profdeck_traces.account import windows
from profdeck_traces.analysis.critical_path import critical_path
from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.attribution.model import AttributedTime
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.inputs.sources import find_sources
from profdeck_traces.loading import summarise
from profdeck_traces.reading.reader import read_trace

Event = dict[str, Any]
REAL = "public/tl__traces__inference__vllm_decode_full__{}.json.gz"
LINEAR = ("aten::addmm", "gemm", [[4], [2, 8], [8, 4]])
NORM = ("aten::layer_norm", "norm", [[2, 4], [4]])


def complete(category: str, name: str, start: float, end: float, thread: int = 1, pid: int = 9, **args: Any) -> Event:
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": thread, "ts": start, "dur": end - start} | {
        "args": args
    }


def graph_launches(*graphs: Sequence[str]) -> list[Event]:
    """Return a trace that launches graphs with the given kernels. Each kernel takes 10 us."""
    events = [complete("user_annotation", "serve", 0, 1000 * len(graphs) - 975)]
    for index, kernels in enumerate(graphs):
        start = 1000 * index
        events.append(complete("cuda_runtime", "hipGraphLaunch", start, start + 20, correlation=index + 1))
        events += [
            complete("kernel", name, start + 30 + 10 * place, start + 40 + 10 * place, 0, 0, correlation=index + 1)
            for place, name in enumerate(kernels)
        ]
    return events


def capture(*operators: tuple[str, str, Any], start: float = 0, is_named: bool = True, batch: int = 2) -> list[Event]:
    """Return a trace of a graph capture. Each operator has a name, the kernel it launches and the input shapes."""
    end = start + 20 + 10 * len(operators)
    events = [
        complete("python_function", "job.py(7): forward", start, end),
        complete("cuda_runtime", "hipStreamBeginCapture", start + 1, start + 2, correlation=1),
        complete("cuda_runtime", "hipStreamEndCapture", end - 2, end - 1, correlation=2),
    ]
    for place, (operator, kernel, dims) in enumerate(operators):
        at = start + 10 + 10 * place
        shapes = json.loads(json.dumps(dims).replace("[2,", f"[{batch},"))
        name = {"kernel": kernel} if is_named else {}
        events += [
            complete("cpu_op", operator, at, at + 8, **{"Input Dims": shapes, "Input type": ["float"] * len(dims)}),
            complete("cuda_runtime", "hipLaunchKernel", at + 1, at + 2, correlation=100 + place, **name),
        ]
    return events


def write(path: Path, events: Sequence[Event]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"traceEvents": [*events]}))
    return path


def summary(trace: Path, captures: Path | None = None, cache: ResultCache | None = None) -> RankSummary:
    run, errors = summarise([trace], graph_captures=captures, cache=cache)
    for error in errors:
        raise error
    return run.ranks[0]


def times(rows: Sequence[AttributedTime]) -> dict[str, float]:
    return {row.name: row.time_us for row in rows}


def test_kernels_have_the_operators_of_the_capture(tmp_path: Path) -> None:
    trace = write(tmp_path / "a.trace.json", graph_launches(("gemm", "norm", "gemm"), ("gemm", "norm", "gemm")))
    write(tmp_path / "capture_traces" / "graphs.json", capture(LINEAR, NORM, LINEAR))
    rank = summary(trace)
    assert rank.attributed is not None
    assert rank.account is not None
    assert times(rank.attributed.operators) == {"aten::addmm": 40, "aten::layer_norm": 20}
    assert times(rank.attributed.lines) == {"job.py(7): forward": 60}
    assert rank.attributed.note == "Operators inside graphs are known for 2 of 2 graph launches."
    of_kernels = {owner.name: (owner.operator, owner.line) for owner in rank.account.owners if owner.kind == "kernel"}
    assert of_kernels == {
        "gemm": ("aten::addmm", "job.py(7): forward"),
        "norm": ("aten::layer_norm", "job.py(7): forward"),
    }


def test_a_capture_does_not_change_times_or_the_path(tmp_path: Path) -> None:
    trace = write(tmp_path / "a.trace.json", graph_launches(("gemm", "norm"), ("gemm", "norm")))
    without = summary(trace)
    write(tmp_path / "capture_traces" / "graphs.json", capture(LINEAR, NORM))
    rank = summary(trace)
    assert rank.account is not None
    assert without.account is not None
    assert rank.account.time_us == without.account.time_us
    assert sum(owner.time_us for owner in rank.account.owners) == pytest.approx(rank.account.time_us)
    by_kind = [Counter[str](), Counter[str]()]
    for counter, account in zip(by_kind, (rank.account, without.account), strict=True):
        for owner in account.owners:
            counter[owner.kind] += round(owner.time_us * 1000)
    assert by_kind[0] == by_kind[1]
    for name in ("events", "span_us", "kernels", "operators", "runtime", "steps", "shapes", "product_flops"):
        assert getattr(rank, name) == getattr(without, name)


def test_the_path_track_has_the_operators_of_the_capture(tmp_path: Path) -> None:
    trace = write(tmp_path / "a.trace.json", graph_launches(("gemm", "norm")))
    write(tmp_path / "capture_traces" / "graphs.json", capture(LINEAR, NORM))
    owners = critical_path(read_trace(trace)).owners
    assert {owner.name: owner.operator for owner in owners if owner.kind == "kernel"} == {
        "gemm": "aten::addmm",
        "norm": "aten::layer_norm",
    }


def test_windows_of_a_large_trace_have_the_operators_of_the_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = graph_launches(*[("gemm", "norm")] * 20)
    events += [
        complete("user_annotation", f"ProfilerStep#{step}", 1000 * step, 1000 * step + 900) for step in range(20)
    ]
    trace = write(tmp_path / "a.trace.json", events)
    captures = write(tmp_path / "graphs.json", capture(LINEAR, NORM))
    whole = summary(trace, captures).account
    monkeypatch.setattr(windows, "MAX_WHOLE_EVENTS", 20)
    monkeypatch.setattr(windows, "MAX_EVENTS", 20)
    divided = summary(trace, captures).account
    assert whole is not None
    assert divided is not None
    assert "windows" in " ".join(divided.notes)
    assert {owner.key: owner.time_us for owner in divided.owners} == {
        owner.key: owner.time_us for owner in whole.owners
    }


def test_every_launch_performs_the_captured_flops(tmp_path: Path) -> None:
    trace = write(tmp_path / "a.trace.json", graph_launches(*[("gemm", "norm")] * 3))
    attributed = summary(trace, write(tmp_path / "graphs.json", capture(LINEAR, NORM))).attributed
    assert attributed is not None
    assert {row.name: row.flops for row in attributed.operators} == {
        "aten::addmm": 3 * 2 * 2 * 8 * 4,
        "aten::layer_norm": None,
    }


@pytest.mark.parametrize(
    "kernels", [("norm", "gemm"), ("gemm",), ("gemm", "norm", "norm"), ("gemm", "softmax")], ids=" ".join
)
def test_a_graph_with_other_kernels_stays_unknown(tmp_path: Path, kernels: tuple[str, ...]) -> None:
    trace = write(tmp_path / "a.trace.json", graph_launches(("gemm", "norm"), kernels))
    attributed = summary(trace, write(tmp_path / "graphs.json", capture(LINEAR, NORM))).attributed
    assert attributed is not None
    assert times(attributed.operators) == {
        "aten::addmm": 10,
        "aten::layer_norm": 10,
        "hipGraphLaunch": 10 * len(kernels),
    }
    assert attributed.note == (
        "Operators inside graphs are known for 1 of 2 graph launches. The kernels of 1 launches match no graph capture."
    )


def test_captures_with_different_operators_are_ambiguous(tmp_path: Path) -> None:
    trace = write(tmp_path / "a.trace.json", graph_launches(("gemm", "norm")))
    other = ("aten::mm", "gemm", [[2, 8], [8, 4]])
    write(tmp_path / "graphs" / "a.json", capture(LINEAR, NORM))
    write(tmp_path / "graphs" / "b.json", [*capture(LINEAR, NORM), *capture(other, NORM, start=100)])
    attributed = summary(trace, tmp_path / "graphs").attributed
    assert attributed is not None
    assert times(attributed.operators) == {"hipGraphLaunch": 20}
    assert attributed.note == (
        "Operators inside graphs are known for 0 of 1 graph launches. "
        "The kernels of 1 launches match graph captures with different operators."
    )


def test_shapes_are_unknown_if_captures_of_several_batch_sizes_match(tmp_path: Path) -> None:
    trace = write(tmp_path / "a.trace.json", graph_launches(("gemm", "norm")))
    events = [*capture(LINEAR, NORM), *capture(LINEAR, NORM, start=100, batch=16)]
    attributed = summary(trace, write(tmp_path / "graphs.json", events)).attributed
    assert attributed is not None
    assert [(row.name, row.shapes, row.flops) for row in attributed.shapes] == [
        ("aten::addmm", None, None),
        ("aten::layer_norm", None, None),
    ]


def test_nodes_with_ids_match_in_the_order_of_the_capture(tmp_path: Path) -> None:
    events = graph_launches(("norm", "gemm"))
    events[-1]["args"]["graph node id"], events[-2]["args"]["graph node id"] = 1, 2
    attributed = summary(
        write(tmp_path / "a.trace.json", events), write(tmp_path / "graphs.json", capture(LINEAR, NORM))
    ).attributed
    assert attributed is not None
    assert times(attributed.operators) == {"aten::addmm": 10, "aten::layer_norm": 10}


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (graph_launches(("gemm",)), "contains no graph capture"),
        (capture(LINEAR)[:2], "contains no graph capture"),
        (capture(LINEAR, is_named=False), "have no kernel names"),
    ],
)
def test_an_unusable_capture_is_an_error_only_if_requested(tmp_path: Path, events: list[Event], message: str) -> None:
    trace = write(tmp_path / "a.trace.json", graph_launches(("gemm",)))
    file = write(tmp_path / "capture_traces" / "graphs.json", events)
    with pytest.raises(TraceError, match=message) as raised:
        summary(trace, file)
    assert str(file) in str(raised.value)
    attributed = summary(trace).attributed
    assert attributed is not None
    assert attributed.note is not None
    assert message in attributed.note
    assert times(attributed.operators) == {"hipGraphLaunch": 10}


@pytest.mark.parametrize("events", [graph_launches(("gemm",)), capture(LINEAR)], ids=["graphs", "no graphs"])
def test_a_missing_capture_is_an_error(tmp_path: Path, events: list[Event]) -> None:
    trace = write(tmp_path / "a.trace.json", events)
    with pytest.raises(TraceError, match="missing.json do not exist"):
        summary(trace, tmp_path / "missing.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="No trace found in .*empty"):
        summary(trace, tmp_path / "empty")


def test_a_corrupt_capture_is_an_error_only_if_requested(tmp_path: Path) -> None:
    trace = write(tmp_path / "a.trace.json", graph_launches(("gemm",)))
    file = write(tmp_path / "capture_traces" / "graphs.trace.json", capture(LINEAR))
    whole = file.read_text()
    file.write_text(whole[:-40])
    cache = ResultCache(tmp_path / "cache")
    message = "graphs.trace.json is not a complete Chrome trace: .*Replace or remove it."
    for _ in range(2):
        attributed = summary(trace, cache=cache).attributed
        assert attributed is not None
        assert re.search(message, attributed.note or "")
        with pytest.raises(TraceError, match=message):
            summary(trace, file, cache=cache)
        with pytest.raises(TraceError, match=message):
            summary(trace, file.parent, cache=cache)
    file.write_text(whole)
    for captures in (None, file):
        attributed = summary(trace, captures, cache=cache).attributed
        assert attributed is not None
        assert times(attributed.operators) == {"aten::addmm": 10}


def test_captures_next_to_a_trace_are_not_traces_of_ranks(tmp_path: Path) -> None:
    trace = write(tmp_path / "a.trace.json", graph_launches(("gemm",)))
    captured = write(tmp_path / "capture_traces" / "graphs.trace.json", capture(LINEAR))
    assert [source.path for source in find_sources([tmp_path])] == [trace]
    assert [source.path for source in find_sources([captured.parent])] == [captured]


def test_cached_results_depend_on_the_captures(tmp_path: Path) -> None:
    trace = write(tmp_path / "a.trace.json", graph_launches(("gemm", "norm")))
    cache = ResultCache(tmp_path / "cache")
    assert summary(trace, cache=cache).attributed == summary(trace).attributed
    write(tmp_path / "capture_traces" / "graphs.json", capture(LINEAR, NORM))
    attributed = summary(trace, cache=cache).attributed
    assert attributed is not None
    assert times(attributed.operators) == {"aten::addmm": 10, "aten::layer_norm": 10}


def test_the_kernels_of_a_real_graph_are_the_nodes_of_its_capture(tmp_path: Path) -> None:
    trace = named(REAL.format("graph_execution"))
    captured = named(REAL.format("capture_traces__graph_capture_rank_0.1773709742341309550.pt.trace"))
    launched, expected = _expected(trace, captured)
    assert len(launched) == sum(count for count, _ in expected.values()) == 421
    attributed, before = summary(trace, captured).attributed, summary(trace).attributed
    assert attributed is not None
    assert before is not None
    assert attributed.note == "Operators inside graphs are known for 1 of 1 graph launches."
    rows = {row.name: (row.count, row.time_us) for row in attributed.operators}
    eager = {row.name: (row.count, row.time_us) for row in before.operators if row.kind == "operator"}
    for operator, (count, time_us) in expected.items():
        of_eager = eager.get(operator, (0, 0.0))
        assert rows[operator] == (count + of_eager[0], pytest.approx(time_us + of_eager[1]))
    assert attributed.total_us == before.total_us
    assert sum(row.time_us for row in attributed.lines) == pytest.approx(before.total_us)


def _expected(trace: Path, captured: Path) -> tuple[list[str], dict[str, tuple[int, float]]]:
    """Return the graph launch's kernels, and their number and time for each operator that encloses a captured call."""
    events, capturing = (json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] for path in (trace, captured))
    (launch,) = (event for event in events if event["name"] == "hipGraphLaunch")
    kernels = [
        event
        for event in events
        if event.get("cat") == "kernel" and event["args"]["correlation"] == launch["args"]["correlation"]
    ]
    kernels.sort(key=lambda event: event["ts"])
    begin, end = (
        next(event["ts"] for event in capturing if event["name"] == name)
        for name in ("hipStreamBeginCapture", "hipStreamEndCapture")
    )
    calls = [event for event in capturing if "kernel" in event.get("args", {}) and begin < event["ts"] < end]
    calls.sort(key=lambda event: event["ts"])
    assert [call["args"]["kernel"] for call in calls] == [kernel["name"] for kernel in kernels]
    operators = [event for event in capturing if event.get("cat") == "cpu_op"]
    sums: dict[str, tuple[int, float]] = {}
    for call, kernel in zip(calls, kernels, strict=True):
        around = [event for event in operators if event["ts"] <= call["ts"] < event["ts"] + event["dur"]]
        name = max(around, key=lambda event: event["ts"])["name"]
        count, time_us = sums.get(name, (0, 0.0))
        sums[name] = count + 1, time_us + kernel["dur"]
    return [kernel["name"] for kernel in kernels], sums
