"""Tests of captures of vLLM-Omni pipelines."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run


@pytest.fixture(scope="module")
def two_stages(run_job: Callable[..., Any]) -> Any:
    return run_job("two_stages", PROFDECK__ON_DEMAND="true")


def annotation_counts(path: Path) -> Counter[str]:
    content = path.read_bytes()
    events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


def test_all_ranks_of_all_stages_record_with_their_stage(two_stages: Any) -> None:
    assert two_stages.results["all"] == {"status": "complete", "problems": [], "expected": [0, 1, 2]}
    (capture,) = [capture for capture in read_run(two_stages.output / "run").captures if capture.first_step == 1]
    assert capture.status is Status.COMPLETE
    assert [rank.parallel for rank in capture.ranks] == [{"stage": 0, "dp": 0}, {"stage": 0, "dp": 1}, {"stage": 1}]
    paths = [rank.artifacts[0].path for rank in capture.ranks]
    assert [path.name for path in paths] == [
        "rank_0000_stage0-dp0.step1.trace.json.gz",
        "rank_0001_stage0-dp1.step1.trace.json.gz",
        "rank_0002_stage1.step1.trace.json.gz",
    ]
    for path in paths:
        counts = annotation_counts(path)
        assert (counts["diffusion_request(1)"], counts["encode"], counts["denoise"], counts["decode"]) == (2, 2, 6, 2)
    (merged,) = paths[0].parent.glob("target.step1.merged.json.gz")
    events = json.loads(gzip.decompress(merged.read_bytes()))["traceEvents"]
    titles = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert any("stage1" in title for title in titles)


def test_default_captures_the_first_rank_of_each_stage(two_stages: Any) -> None:
    assert two_stages.results["first ranks"] == {"status": "complete", "problems": [], "expected": [0, 2]}


def test_stage_and_iterations_can_be_selected(two_stages: Any) -> None:
    assert two_stages.results["second stage"] == {"status": "complete", "problems": [], "expected": [0]}
    (capture,) = [capture for capture in read_run(two_stages.output / "run").captures if capture.first_step == 3]
    (rank,) = capture.ranks
    assert rank.parallel == {"stage": 1}
    assert annotation_counts(rank.artifacts[0].path)["diffusion_request(1)"] == 1


def test_nonexistent_stage_is_refused(two_stages: Any) -> None:
    assert two_stages.results["no such stage"] == {"status": None}
    assert "options.stages: [2]: this pipeline has stages 0 to 1." in two_stages.log


@pytest.mark.long
def test_pipeline_in_an_event_loop_is_captured(run_job: Callable[..., Any]) -> None:
    job = run_job("asynchronous", PROFDECK__ON_DEMAND="true")
    assert job.results["capture"] == {"status": "complete", "problems": [], "expected": [0]}
    (capture,) = [capture for capture in read_run(job.output / "run").captures if capture.first_step == 1]
    assert annotation_counts(capture.ranks[0].artifacts[0].path)["diffusion_request(1)"] == 2
    assert job.results["frontend"] == {"status": None}


@pytest.mark.parametrize("form", ["gzip", pytest.param("plain", marks=pytest.mark.long)])
def test_native_profiler_is_used_without_profdeck(run_job: Callable[..., Any], form: str) -> None:
    job = run_job("native", form)
    report = read_run(job.output / "run")
    assert job.results == {step: {"status": "complete", "problems": [], "expected": [0]} for step in ("1", "2")}
    assert [capture.status for capture in report.captures] == [Status.COMPLETE] * 2
    for capture in report.captures:
        assert capture.ranks[0].parallel == {"stage": 0}
        assert "diffusion_forward" in annotation_counts(capture.ranks[0].artifacts[0].path)


def test_config_arms_a_capture_and_missing_plugins_are_reported(run_job: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    window = "{first: 2, count: 2}"
    config.write_text(f"output: {tmp_path}\nrun: armed\nroles: {{rollout: {{backend: vllm, iterations: {window}}}}}\n")
    job = run_job("armed", VLLM_PLUGINS="profdeck,cpu", PROFDECK_CONFIG=str(config))
    assert "VLLM_PLUGINS=profdeck,cpu excludes plugins that vLLM-Omni requires: vllm_omni_register_models." in job.log
    report = read_run(tmp_path / "armed")
    assert report.status is Status.COMPLETE
    (artifact,) = report.captures[0].ranks[0].artifacts
    assert artifact.path.name == "rank_0000_stage0.iteration2-stage0.trace.json.gz"
    assert (artifact.iterations, annotation_counts(artifact.path)["diffusion_request(1)"]) == ((2, 3), 2)
