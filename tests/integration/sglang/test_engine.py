"""Tests for capturing an SGLang `Engine` with two ranks and no event loop. All tests share one engine."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from sglang_traces import events, names, processes, spans, steps

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run

TOKENS = 10
"""Number of tokens per prompt. With one prompt, the job runs one prefill and nine decodes."""


RANKS = ("rank_0000_tp0", "rank_0001_tp1")


@attrs.frozen(kw_only=True)
class Row:
    """Config for a job with five global steps and two replicas, with the captures that the job should produce."""

    start: int = 0
    end: int = 0
    """The window contains the iterations from `start` up to, but not including, `end`. 0 disables the window."""
    by_stage: bool = False
    merge: bool = False
    stack: bool = False
    shapes: bool = False
    memory: bool = False
    activities: tuple[str, ...] = ()
    steps: tuple[int | str, ...] = (1, 3)
    discrete: bool = False
    refused: str | None = None

    @property
    def config(self) -> dict[str, Any]:
        """Arguments of the job."""
        options: dict[str, Any] = {
            "profile_by_stage": self.by_stage,
            "merge_profiles": self.merge,
            "with_stack": self.stack,
            "record_shapes": self.shapes,
            "profile_memory": self.memory,
        }
        role: dict[str, Any] = {"ranks": "all", "options": options}
        if self.activities:
            options["activities"] = self.activities
        if self.end > self.start:
            role["iterations"] = {"skip": self.start, "count": self.end - self.start}
        return {"steps": self.steps, "role": role, "top": {"mode": "discrete"} if self.discrete else {}}

    @property
    def expected(self) -> dict[str, list[str]]:
        """Span names that each rank should record in each captured step, keyed by file-name suffix."""
        step_spans = ["EXTEND", "DECODE", "DECODE", "DECODE"] * 2
        window = slice(self.start, self.end) if self.end > self.start else slice(None)
        if not self.by_stage:
            return {"": step_spans[window]}
        kinds = {"-prefill": "EXTEND", "-decode": "DECODE"}
        return {suffix: [span for span in step_spans if span == kind][window] for suffix, kind in kinds.items()}

    def folders(self, run: Path) -> list[Path]:
        """Return one directory for each captured step and replica."""
        steps = [1, 2] if self.discrete else [1, 3]
        return [run / f"step_{step:06d}" / "rollout" / f"replica_{replica:03d}" for step in steps for replica in (0, 1)]


# The fields of `Row` correspond to verl's parameters for rollout captures.
TABLE = {
    "whole": Row(),
    "across-prompts": Row(start=3, end=6),
    "by-stage-start": Row(by_stage=True, start=1, end=2),
    "all-at-once": Row(
        start=1, end=2, by_stage=True, merge=True, stack=True, shapes=True, memory=True, activities=("cpu",)
    ),
    "adjacent-steps": Row(end=2, steps=("1..2",), discrete=True),
    "cpu-and-cuda": Row(activities=("cpu", "cuda"), end=3, by_stage=True, merge=True, refused="sees no CUDA device"),
}
CAPTURED = [pytest.param(name, row, id=name) for name, row in TABLE.items() if not row.refused]


@pytest.fixture(scope="module")
def job(run_job: Callable[..., Any]) -> Any:
    configs = json.dumps({name: row.config for name, row in TABLE.items()})
    return run_job("engine", configs, SGLANG_PLUGINS="profdeck,torchcpu")


def folder(job: Any, step: int, role: str = "rollout") -> Path:
    return Path(job.output / "run" / f"step_{step:06d}" / role)


def traces(job: Any, step: int, role: str = "rollout") -> list[Path]:
    return sorted(folder(job, step, role).glob("rank_*.trace.json.gz"))


def target(job: Any, step: int) -> dict[str, Any]:
    return dict(json.loads((folder(job, step) / f"target.step{step}.json").read_text()))


def test_generation_is_recorded_by_rank_0(job: Any) -> None:
    assert job.results["whole"] == {
        "status": "complete", "problems": [], "notes": [], "expected": [0], "same_tokens": True,
    }  # fmt: skip
    (trace,) = traces(job, 0)
    assert spans(trace) == ["EXTEND", *["DECODE"] * (TOKENS - 1)]
    assert steps(trace) == list(range(TOKENS))


@pytest.mark.parametrize(
    ("name", "step", "kinds", "iterations"),
    [("window", 1, ["EXTEND", "DECODE", "DECODE"], [0, 1, 2]), ("later_window", 2, ["DECODE"] * 3, [2, 3, 4])],
)
def test_every_rank_records_exactly_the_window(
    job: Any, name: str, step: int, kinds: list[str], iterations: list[int]
) -> None:
    assert job.results[name] == {
        "status": "complete", "problems": [], "notes": [], "expected": [0, 1], "same_tokens": True,
    }  # fmt: skip
    rank_traces = traces(job, step)
    assert len(rank_traces) == 2
    for trace in rank_traces:
        assert spans(trace) == kinds
        assert steps(trace) == iterations


def test_file_names_and_manifests_contain_the_ranks(job: Any) -> None:
    stems = [trace.name.partition(".")[0] for trace in traces(job, 2)]
    assert stems == [*RANKS]
    manifest = json.loads((folder(job, 2) / f"{stems[-1]}.step2.json").read_text())
    assert (manifest["world_size"], manifest["parallel"]) == (2, {"tp": 1})
    assert 0 < manifest["stall_s"] < 30
    assert manifest["backend"] == "torch"
    assert manifest["versions"].keys() == {"torch", "sglang"}
    assert manifest["iterations"] == {"count": 3, "skip": 2, "first": None}
    assert manifest["artifacts"][0]["iterations"] == [2, 4]
    assert manifest["artifacts"][0]["anchors"]


def test_options_do_not_affect_the_next_capture(job: Any) -> None:
    shapes = [b'"Input Dims"' in gzip.decompress(traces(job, step)[0].read_bytes()) for step in (0, 1, 2)]
    assert shapes == [False, True, False]


def test_batch_kinds_are_recorded_separately(job: Any) -> None:
    assert (job.results["by_stage"]["status"], job.results["by_stage"]["problems"]) == ("complete", [])
    for kind, span in (("prefill", "EXTEND"), ("mixed", "MIXED"), ("decode", "DECODE")):
        rank_traces = [trace for trace in traces(job, 4) if trace.name.endswith(f".step4-{kind}.trace.json.gz")]
        assert len(rank_traces) == 2
        for trace in rank_traces:
            assert spans(trace) == [span]
            assert any(".py(" in name for name in names(trace))  # with_stack
    assert len(traces(job, 4)) == 6


@pytest.mark.parametrize(
    ("process", "function"), [("tokenizer", "generate_request"), ("detokenizer", "handle_batch_token_id_out")]
)
def test_tokenizer_and_detokenizer_have_separate_roles(job: Any, process: str, function: str) -> None:
    (trace,) = traces(job, 4, f"rollout-{process}")
    assert any(function in name for name in names(trace))
    assert not folder(job, 0, f"rollout-{process}").exists()  # capture 0 does not include this process


def test_merged_file_has_the_traces_of_all_ranks(job: Any) -> None:
    (merged,) = folder(job, 4).glob("target.*.merged.json.gz")
    assert Counter(spans(merged)) == dict.fromkeys(["EXTEND", "MIXED", "DECODE"], 2)
    for prefix in ("rollout rank 0 tp0 ", "rollout rank 1 tp1 "):
        assert any(name.startswith(prefix) for name in processes(merged))


def test_tokenizer_manager_requires_a_running_event_loop(job: Any) -> None:
    assert "event loop that receives this engine's replies is not running" in target(job, 40)["problems"][0]
    assert job.results["manager"]["status"] == "complete"
    assert [len(spans(trace)) for trace in traces(job, 41)] == [TOKENS] * 2


@pytest.mark.parametrize(
    ("name", "step", "text"),
    [
        ("no_rank", 11, "This engine does not have the ranks [7]. Its ranks are 0 to"),
        ("memory", 13, "options.memory_snapshot requires CUDA"),
        ("cuda_profiler", 14, "options.cuda_profiler_range requires CUDA"),
    ],
)
def test_unsupported_capture_is_refused_without_affecting_the_engine(job: Any, name: str, step: int, text: str) -> None:
    assert job.results[name] == {"status": None, "same_tokens": True}
    manifest = target(job, step)
    assert manifest["status"] == "failed"
    assert text in manifest["problems"][0]
    assert [path.name for path in folder(job, step).iterdir()] == [f"target.step{step}.json"]


@pytest.mark.parametrize(("name", "step"), [("first", 20), ("first_alone", 22)])
def test_second_start_is_refused_and_the_first_capture_is_complete(job: Any, name: str, step: int) -> None:
    assert job.results[f"{name}_second"] == {"status": None}
    assert f"while capture step{step} is" in target(job, step + 1)["problems"][0]
    result = job.results[name]
    assert (result["status"], result["problems"]) == ("complete", [])
    assert result["stop_s"] < 10  # the tokenizer and the detokenizer still belong to the first capture
    (trace,) = traces(job, step)
    assert len(spans(trace)) == TOKENS
    manifest = json.loads((folder(job, step) / f"{trace.name.partition('.')[0]}.step{step}.json").read_text())
    assert manifest["notes"] == [f"A second start (step{step + 1}) was refused."]
    roles = {path.name for path in folder(job, step).parent.iterdir()}
    assert roles == ({"rollout", "rollout-tokenizer", "rollout-detokenizer"} if name == "first" else {"rollout"})


def test_engine_records_after_failed_captures(job: Any) -> None:
    assert job.results["after_all"]["status"] == "complete"
    assert job.results["after_all"]["same_tokens"]
    assert len(traces(job, 25)) == 2


def test_engine_shutdown_during_a_capture_keeps_its_traces(job: Any) -> None:
    result = job.results["shut_down"]
    assert result["status"] == "partial"
    assert "was shut down during the capture" in " ".join(result["problems"])
    assert result["stop_s"] < 10  # the stop does not wait for an engine that has exited
    assert [len(spans(trace)) for trace in traces(job, 26)] == [TOKENS] * 2
    for role in ("rollout-tokenizer", "rollout-detokenizer"):
        assert len(traces(job, 26, role)) == 1


def test_run_contains_only_captures_and_run_records(job: Any) -> None:
    other_names = {path.name for path in (job.output / "run").iterdir() if not path.name.startswith("step_")}
    assert other_names == {"processes", "run.json"}


def test_run_report_has_the_status_of_each_capture(job: Any) -> None:
    report = read_run(job.output / "run")
    status = {target.first_step: target.status for target in report.targets}
    complete = dict.fromkeys([0, 1, 2, 4, 20, 22, 25, 41], Status.COMPLETE)
    assert status == complete | dict.fromkeys([11, 13, 14, 21, 23, 40], Status.FAILED) | {26: Status.PARTIAL}
    assert report.problems == ()


# Tests for jobs with global steps and two replicas.


@pytest.mark.parametrize(("name", "row"), TABLE.items(), ids=[*TABLE])
def test_each_captured_step_and_replica_has_a_directory(job: Any, name: str, row: Row) -> None:
    directories = {path for path in (job.output / name).glob("step_*/*/*") if path.is_dir()}
    assert directories == set(row.folders(job.output / name))
    assert job.results["same_tokens"][name]


@pytest.mark.parametrize(("name", "row"), CAPTURED)
def test_window_contains_the_selected_batches_and_ends_automatically(job: Any, name: str, row: Row) -> None:
    report = read_run(job.output / name)
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    for directory in row.folders(job.output / name):
        step = f"step{int(directory.parent.parent.name.removeprefix('step_'))}"
        step += "-generate_sequences" if row.discrete else ""
        for rank in RANKS:
            for suffix, expected in row.expected.items():
                # Consecutive batches of the same kind form one capture. Later captures
                # of that kind get the suffix -2, -3 and so on.
                trace_files = sorted(directory.glob(f"{rank}.{step}{suffix}.trace.json.gz"))
                trace_files += sorted(directory.glob(f"{rank}.{step}{suffix}-[0-9]*.trace.json.gz"))
                assert [span for trace in trace_files for span in spans(trace)] == expected
        (path,) = directory.glob("target.*[!d].json")
        manifest = json.loads(path.read_text())
        assert (manifest["problems"], manifest["notes"], manifest["expected_ranks"]) == ([], [], [0, 1])


@pytest.mark.parametrize(("name", "row"), CAPTURED)
def test_traces_have_the_selected_content(job: Any, name: str, row: Row) -> None:
    for directory in row.folders(job.output / name):
        for trace in directory.glob("rank_*.trace.json.gz"):
            assert any(".py(" in name for name in names(trace)) == row.stack
            assert (b'"Input Dims"' in gzip.decompress(trace.read_bytes())) == row.shapes
            assert any(event["name"] == "[memory]" for event in events(trace)) == row.memory
        merged = list(directory.glob("target.*.merged.json.gz"))
        assert len(merged) == row.merge
        for path in merged:
            expected = Counter(span for expected_spans in row.expected.values() for span in expected_spans)
            assert Counter(spans(path)) == {span: 2 * count for span, count in expected.items()}


def test_unsupported_capture_is_refused_in_each_replica(job: Any) -> None:
    row = TABLE["cpu-and-cuda"]
    for directory in row.folders(job.output / "cpu-and-cuda"):
        (path,) = directory.iterdir()
        manifest = json.loads(path.read_text())
        assert manifest["status"] == "failed"
        assert row.refused in manifest["problems"][0]
