"""Pipelines of vLLM-Omni whose workers have loaded profdeck."""

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


def marks(path: Path) -> Counter[str]:
    content = path.read_bytes()
    events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


def test_all_ranks_of_all_stages_record_and_say_their_stage(two_stages: Any) -> None:
    assert two_stages.results["all"] == {"status": "complete", "problems": [], "expected": [0, 1, 2]}
    (capture,) = [one for one in read_run(two_stages.output / "run").captures if one.first_step == 1]
    assert capture.status is Status.COMPLETE
    assert [rank.parallel for rank in capture.ranks] == [{"stage": 0, "dp": 0}, {"stage": 0, "dp": 1}, {"stage": 1}]
    paths = [rank.artifacts[0].path for rank in capture.ranks]
    assert [path.name for path in paths] == [
        "rank_0000_stage0-dp0.step1.trace.json.gz",
        "rank_0001_stage0-dp1.step1.trace.json.gz",
        "rank_0002_stage1.step1.trace.json.gz",
    ]
    for path in paths:
        found = marks(path)
        assert (found["diffusion_request(1)"], found["encode"], found["denoise"], found["decode"]) == (2, 2, 6, 2)
    (merged,) = paths[0].parent.glob("target.step1.merged.json.gz")
    events = json.loads(gzip.decompress(merged.read_bytes()))["traceEvents"]
    titles = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert any("stage1" in title for title in titles)


def test_ranks_are_those_of_each_stage(two_stages: Any) -> None:
    assert two_stages.results["first ranks"] == {"status": "complete", "problems": [], "expected": [0, 2]}


def test_stages_and_iterations_are_selected(two_stages: Any) -> None:
    assert two_stages.results["second stage"] == {"status": "complete", "problems": [], "expected": [0]}
    (capture,) = [one for one in read_run(two_stages.output / "run").captures if one.first_step == 3]
    (rank,) = capture.ranks
    assert rank.parallel == {"stage": 1}
    assert marks(rank.artifacts[0].path)["diffusion_request(1)"] == 1


def test_a_stage_that_is_not_there_is_refused(two_stages: Any) -> None:
    assert two_stages.results["no such stage"] == {"status": None}
    assert "options.stages: [2]: this pipeline has stages 0 to 1." in two_stages.log


@pytest.mark.long
def test_a_pipeline_in_an_event_loop(run_job: Callable[..., Any]) -> None:
    job = run_job("asynchronous", PROFDECK__ON_DEMAND="true")
    assert job.results["capture"] == {"status": "complete", "problems": [], "expected": [0]}
    (capture,) = [one for one in read_run(job.output / "run").captures if one.first_step == 1]
    assert marks(capture.ranks[0].artifacts[0].path)["diffusion_request(1)"] == 2
    assert job.results["frontend"] == {"status": None}


@pytest.mark.parametrize("form", ["gzip", pytest.param("plain", marks=pytest.mark.long)])
def test_its_own_profiler_where_profdeck_is_not_loaded(run_job: Callable[..., Any], form: str) -> None:
    job = run_job("native", form)
    report = read_run(job.output / "run")
    assert job.results == {step: {"status": "complete", "problems": [], "expected": [0]} for step in ("1", "2")}
    assert [capture.status for capture in report.captures] == [Status.COMPLETE] * 2
    for capture in report.captures:
        assert capture.ranks[0].parallel == {"stage": 0}
        assert "diffusion_forward" in marks(capture.ranks[0].artifacts[0].path)


def test_a_config_alone_captures_and_what_it_leaves_out_is_said(run_job: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    window = "{first: 2, count: 2}"
    config.write_text(f"output: {tmp_path}\nrun: armed\nroles: {{rollout: {{backend: vllm, iterations: {window}}}}}\n")
    job = run_job("armed", VLLM_PLUGINS="profdeck,cpu", PROFDECK_CONFIG=str(config))
    assert "VLLM_PLUGINS=profdeck,cpu excludes plugins that vLLM-Omni requires: vllm_omni_register_models." in job.log
    report = read_run(tmp_path / "armed")
    assert report.status is Status.COMPLETE
    (artifact,) = report.captures[0].ranks[0].artifacts
    assert artifact.path.name == "rank_0000_stage0.iteration2-stage0.trace.json.gz"
    assert (artifact.iterations, marks(artifact.path)["diffusion_request(1)"]) == ((2, 3), 2)
