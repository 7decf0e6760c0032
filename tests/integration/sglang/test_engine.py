"""The engine object `Engine`, used without an event loop: one engine, many captures, with one rank and with two."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_traces import names, processes, spans, steps

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run

TOKENS = 10
"""What the job generates: a prefill and nine decodes, where there is one prompt."""


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.long), 2], ids=["tp1", "tp2"])
def job(request: pytest.FixtureRequest, run_job: Callable[..., Any]) -> Any:
    done = run_job("engine", str(request.param), SGLANG_PLUGINS="profdeck,torchcpu")
    done.results["ranks"] = request.param
    return done


def folder(job: Any, step: int, role: str = "rollout") -> Path:
    return Path(job.output / "run" / f"step_{step:06d}" / role)


def traces(job: Any, step: int, role: str = "rollout") -> list[Path]:
    return sorted(folder(job, step, role).glob("rank_*.trace.json.gz"))


def target(job: Any, step: int) -> dict[str, Any]:
    return dict(json.loads((folder(job, step) / f"target.step{step}.json").read_text()))


def test_a_whole_generation_is_recorded_by_rank_0(job: Any) -> None:
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
        "status": "complete", "problems": [], "notes": [], "expected": [*range(job.results["ranks"])],
        "same_tokens": True,
    }  # fmt: skip
    found = traces(job, step)
    assert len(found) == job.results["ranks"]
    for trace in found:
        assert spans(trace) == kinds
        assert steps(trace) == iterations


def test_names_and_manifests_say_the_ranks(job: Any) -> None:
    stems = [trace.name.partition(".")[0] for trace in traces(job, 2)]
    assert stems == (["rank_0000"] if job.results["ranks"] == 1 else ["rank_0000_tp0", "rank_0001_tp1"])
    manifest = json.loads((folder(job, 2) / f"{stems[-1]}.step2.json").read_text())
    assert manifest["world_size"] == job.results["ranks"]
    assert manifest["parallel"] == ({} if job.results["ranks"] == 1 else {"tp": 1})
    assert manifest["backend"] == "torch"
    assert manifest["versions"].keys() == {"torch", "sglang"}
    assert manifest["iterations"] == {"count": 3, "skip": 2, "first": None}
    assert manifest["artifacts"][0]["iterations"] == [2, 4]
    assert manifest["artifacts"][0]["anchors"]


def test_every_rank_says_for_how_long_it_was_kept_from_its_work(job: Any) -> None:
    for step in (0, 1, 2, 3, 4, 5):
        for trace in traces(job, step):
            manifest = json.loads(trace.with_name(trace.name.replace(".trace.json.gz", ".json")).read_text())
            assert 0 < manifest["stall_s"] < 30


def test_options_of_one_capture_do_not_reach_the_next(job: Any) -> None:
    shapes = [b'"Input Dims"' in gzip.decompress(traces(job, step)[0].read_bytes()) for step in (0, 1, 2)]
    assert shapes == [False, True, False]
    detailed, plain = (names(traces(job, step)[0]) for step in (8, 9))
    assert any("c_sqsk=" in name for name in detailed)
    assert any("g_sqsk=" in name for name in detailed)
    assert not any("sqsk=" in name for name in plain)


def test_decode_alone(job: Any) -> None:
    assert job.results["decode"]["status"] == "complete"
    assert len(traces(job, 3)) == job.results["ranks"]
    for trace in traces(job, 3):
        assert "step3-decode." in trace.name
        assert spans(trace) == ["DECODE"] * 5
        assert steps(trace) == [1, 2, 3, 4, 5]


def test_kinds_of_batches_apart(job: Any) -> None:
    assert (job.results["by_stage"]["status"], job.results["by_stage"]["problems"]) == ("complete", [])
    for kind, span in (("prefill", "EXTEND"), ("mixed", "MIXED"), ("decode", "DECODE")):
        found = [trace for trace in traces(job, 4) if trace.name.endswith(f".step4-{kind}.trace.json.gz")]
        assert len(found) == job.results["ranks"]
        for trace in found:
            assert spans(trace) == [span]
            assert any(".py(" in name for name in names(trace))  # with_stack
    assert len(traces(job, 4)) == 3 * job.results["ranks"]


@pytest.mark.parametrize(
    ("process", "function"), [("tokenizer", "generate_request"), ("detokenizer", "handle_batch_token_id_out")]
)
def test_the_processes_beside_the_schedulers_have_roles_of_their_own(job: Any, process: str, function: str) -> None:
    (trace,) = traces(job, 4, f"rollout-{process}")
    assert any(function in name for name in names(trace))
    assert not folder(job, 0, f"rollout-{process}").exists()  # not asked for there


def test_one_file_has_the_traces_of_all_ranks(job: Any) -> None:
    ranks = job.results["ranks"]
    (merged,) = folder(job, 5).glob("target.*.merged.json.gz")
    assert Counter(spans(merged)) == {"EXTEND": ranks, "DECODE": 3 * ranks}
    places = ["rollout rank 0:"] if ranks == 1 else ["rollout rank 0 tp0:", "rollout rank 1 tp1:"]
    assert all(any(name.startswith(place) for name in processes(merged)) for place in places)
    (by_stage,) = folder(job, 4).glob("target.*.merged.json.gz")
    assert Counter(spans(by_stage)) == dict.fromkeys(["EXTEND", "MIXED", "DECODE"], ranks)


def test_a_window_that_has_ended_by_itself_is_not_stopped_again(job: Any) -> None:
    # The windows above ended while the job generated; their stops found nothing to say, and others began after them.
    for name in ("window", "later_window", "decode", "merged", "detailed", "undetailed"):
        assert (job.results[name]["status"], job.results[name]["problems"], job.results[name]["notes"]) == (
            "complete", [], [],
        )  # fmt: skip


def test_the_tokenizer_manager_of_the_engine_will_do_once_it_has_an_event_loop(job: Any) -> None:
    assert "Nobody runs the event loop" in target(job, 40)["problems"][0]
    assert job.results["manager"]["status"] == "complete"
    assert [len(spans(trace)) for trace in traces(job, 41)] == [TOKENS] * job.results["ranks"]


def test_a_window_that_is_not_filled_is_partial(job: Any) -> None:
    found = job.results["too_long"]
    assert found["status"] == "partial"
    assert found["problems"] == [f"Rank 0: Only {TOKENS} of 500 iterations ran before the stop."]
    assert steps(traces(job, 6)[0]) == list(range(TOKENS))


def test_a_window_that_is_not_reached_leaves_a_reason(job: Any) -> None:
    found = job.results["too_late"]
    assert found["status"] == "partial"
    assert found["problems"][0] == "Rank 0 left no file."
    assert f"It ended after {TOKENS} iterations, before its window began." in found["problems"][1]


def test_start_step_counts_as_sglang_does(job: Any) -> None:
    assert job.results["start_step"]["status"] == "complete"
    (trace,) = traces(job, 31)
    # The job asked for the fourth forward pass of a generation.
    assert steps(trace) == [3, 4]
    assert spans(trace) == ["DECODE", "DECODE"]


def test_decode_batches_that_are_too_small_are_passed_over(job: Any) -> None:
    assert job.results["min_batch"]["status"] == "partial"
    assert traces(job, 32) == []


@pytest.mark.parametrize(
    "name",
    ["no_cuda", "no_rank", "memory", "cuda_profiler", "passed", "unwritable"],
)
def test_what_cannot_be_recorded_is_refused_and_the_engine_serves_on(job: Any, name: str) -> None:
    assert job.results[name] == {"status": None, "same_tokens": True}


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (10, "sees no CUDA device"),
        (11, "The ranks [7] are not in this engine, whose ranks are 0 to"),
        (13, "options.memory_snapshot needs CUDA"),
        (14, "options.cuda_profiler_range needs CUDA"),
        (21, "Capture step20 is"),
        (23, "Capture step22 is"),
        (30, "this scheduler has done"),
    ],
)
def test_refusals_are_in_the_manifest_of_the_target(job: Any, step: int, text: str) -> None:
    manifest = target(job, step)
    assert manifest["status"] == "failed"
    assert text in manifest["problems"][0]
    assert [path.name for path in folder(job, step).iterdir()] == [f"target.step{step}.json"]


def test_where_nothing_can_be_written_the_log_says_so(job: Any) -> None:
    assert "cannot write to" in job.log


@pytest.mark.parametrize(("name", "step"), [("first", 20), ("first_alone", 22)])
def test_a_second_start_is_refused_and_recorded_and_the_first_is_intact(job: Any, name: str, step: int) -> None:
    assert job.results[f"{name}_second"] == {"status": None}
    found = job.results[name]
    assert (found["status"], found["problems"]) == ("complete", [])
    assert found["stop_s"] < 10  # the tokenizer and the detokenizer of the first one were not lost
    (trace,) = traces(job, step)
    assert len(spans(trace)) == TOKENS
    manifest = json.loads((folder(job, step) / f"{trace.name.partition('.')[0]}.step{step}.json").read_text())
    assert manifest["notes"] == [f"A second start (step{step + 1}) was refused."]
    roles = {path.name for path in folder(job, step).parent.iterdir()}
    assert roles == ({"rollout", "rollout-tokenizer", "rollout-detokenizer"} if name == "first" else {"rollout"})


def test_a_capture_that_nobody_stops_ends_by_itself(job: Any) -> None:
    assert job.results["limited"]["status"] == "partial"
    assert "was not stopped within max_capture_s=0.2 seconds." in " ".join(job.results["limited"]["problems"])


def test_the_engine_records_after_all_that(job: Any) -> None:
    assert job.results["after_all"]["status"] == "complete"
    assert job.results["after_all"]["same_tokens"]
    assert len(traces(job, 25)) == job.results["ranks"]


def test_an_engine_that_is_shut_down_in_mid_capture_leaves_its_traces(job: Any) -> None:
    found = job.results["shut_down"]
    assert found["status"] == "partial"
    assert "was shut down in mid-capture" in " ".join(found["problems"])
    assert found["stop_s"] < 10  # nobody waits for an engine that is gone
    assert [len(spans(trace)) for trace in traces(job, 26)] == [TOKENS] * job.results["ranks"]
    for role in ("rollout-tokenizer", "rollout-detokenizer"):
        assert len(traces(job, 26, role)) == 1


def test_nothing_but_captures_is_left_in_the_run(job: Any) -> None:
    others = {path.name for path in (job.output / "run").iterdir() if not path.name.startswith("step_")}
    assert others == {"processes", "run.json"}


def test_ls_reads_it_back(job: Any) -> None:
    report = read_run(job.output / "run")
    status = {found.first_step: found.status for found in report.targets}
    assert status == dict.fromkeys([0, 1, 2, 3, 4, 5, 8, 9, 20, 22, 25, 31, 41], Status.COMPLETE) | dict.fromkeys(
        [6, 7, 24, 26], Status.PARTIAL
    ) | dict.fromkeys([10, 11, 13, 14, 21, 23, 30, 40], Status.FAILED) | {32: Status.MISSING}
    assert report.problems == ()
