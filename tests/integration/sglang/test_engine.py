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
"""What the job generates: a prefill and nine decodes, where there is one prompt."""


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
        of_step = ["EXTEND", "DECODE", "DECODE", "DECODE"] * 2
        window = slice(self.start, self.end) if self.end > self.start else slice(None)
        if not self.by_stage:
            return {"": of_step[window]}
        kinds = {"-prefill": "EXTEND", "-decode": "DECODE"}
        return {suffix: [span for span in of_step if span == kind][window] for suffix, kind in kinds.items()}

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
        "status": "complete", "problems": [], "notes": [], "expected": [0, 1], "same_tokens": True,
    }  # fmt: skip
    found = traces(job, step)
    assert len(found) == 2
    for trace in found:
        assert spans(trace) == kinds
        assert steps(trace) == iterations


def test_names_and_manifests_say_the_ranks(job: Any) -> None:
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


def test_options_of_one_capture_do_not_reach_the_next(job: Any) -> None:
    shapes = [b'"Input Dims"' in gzip.decompress(traces(job, step)[0].read_bytes()) for step in (0, 1, 2)]
    assert shapes == [False, True, False]


def test_kinds_of_batches_apart(job: Any) -> None:
    assert (job.results["by_stage"]["status"], job.results["by_stage"]["problems"]) == ("complete", [])
    for kind, span in (("prefill", "EXTEND"), ("mixed", "MIXED"), ("decode", "DECODE")):
        found = [trace for trace in traces(job, 4) if trace.name.endswith(f".step4-{kind}.trace.json.gz")]
        assert len(found) == 2
        for trace in found:
            assert spans(trace) == [span]
            assert any(".py(" in name for name in names(trace))  # with_stack
    assert len(traces(job, 4)) == 6


@pytest.mark.parametrize(
    ("process", "function"), [("tokenizer", "generate_request"), ("detokenizer", "handle_batch_token_id_out")]
)
def test_the_processes_beside_the_schedulers_have_roles_of_their_own(job: Any, process: str, function: str) -> None:
    (trace,) = traces(job, 4, f"rollout-{process}")
    assert any(function in name for name in names(trace))
    assert not folder(job, 0, f"rollout-{process}").exists()  # not asked for there


def test_one_file_has_the_traces_of_all_ranks(job: Any) -> None:
    (merged,) = folder(job, 4).glob("target.*.merged.json.gz")
    assert Counter(spans(merged)) == dict.fromkeys(["EXTEND", "MIXED", "DECODE"], 2)
    for place in ("rollout rank 0 tp0 ", "rollout rank 1 tp1 "):
        assert any(name.startswith(place) for name in processes(merged))


def test_the_tokenizer_manager_of_the_engine_will_do_once_it_has_an_event_loop(job: Any) -> None:
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
def test_what_cannot_be_recorded_is_refused_and_the_engine_serves_on(job: Any, name: str, step: int, text: str) -> None:
    assert job.results[name] == {"status": None, "same_tokens": True}
    manifest = target(job, step)
    assert manifest["status"] == "failed"
    assert text in manifest["problems"][0]
    assert [path.name for path in folder(job, step).iterdir()] == [f"target.step{step}.json"]


@pytest.mark.parametrize(("name", "step"), [("first", 20), ("first_alone", 22)])
def test_a_second_start_is_refused_and_recorded_and_the_first_is_intact(job: Any, name: str, step: int) -> None:
    assert job.results[f"{name}_second"] == {"status": None}
    assert f"while capture step{step} is" in target(job, step + 1)["problems"][0]
    found = job.results[name]
    assert (found["status"], found["problems"]) == ("complete", [])
    assert found["stop_s"] < 10  # the tokenizer and the detokenizer of the first one were not lost
    (trace,) = traces(job, step)
    assert len(spans(trace)) == TOKENS
    manifest = json.loads((folder(job, step) / f"{trace.name.partition('.')[0]}.step{step}.json").read_text())
    assert manifest["notes"] == [f"A second start (step{step + 1}) was refused."]
    roles = {path.name for path in folder(job, step).parent.iterdir()}
    assert roles == ({"rollout", "rollout-tokenizer", "rollout-detokenizer"} if name == "first" else {"rollout"})


def test_the_engine_records_after_all_that(job: Any) -> None:
    assert job.results["after_all"]["status"] == "complete"
    assert job.results["after_all"]["same_tokens"]
    assert len(traces(job, 25)) == 2


def test_an_engine_that_is_shut_down_in_mid_capture_leaves_its_traces(job: Any) -> None:
    found = job.results["shut_down"]
    assert found["status"] == "partial"
    assert "was shut down during the capture" in " ".join(found["problems"])
    assert found["stop_s"] < 10  # nobody waits for an engine that is gone
    assert [len(spans(trace)) for trace in traces(job, 26)] == [TOKENS] * 2
    for role in ("rollout-tokenizer", "rollout-detokenizer"):
        assert len(traces(job, 26, role)) == 1


def test_nothing_but_captures_is_left_in_the_run(job: Any) -> None:
    others = {path.name for path in (job.output / "run").iterdir() if not path.name.startswith("step_")}
    assert others == {"processes", "run.json"}


def test_ls_reads_it_back(job: Any) -> None:
    report = read_run(job.output / "run")
    status = {found.first_step: found.status for found in report.targets}
    complete = dict.fromkeys([0, 1, 2, 4, 20, 22, 25, 41], Status.COMPLETE)
    assert status == complete | dict.fromkeys([11, 13, 14, 21, 23, 40], Status.FAILED) | {26: Status.PARTIAL}
    assert report.problems == ()


# Tests for jobs with global steps and two replicas.


@pytest.mark.parametrize(("name", "row"), TABLE.items(), ids=[*TABLE])
def test_every_captured_step_and_replica_has_a_directory(job: Any, name: str, row: Row) -> None:
    found = {path for path in (job.output / name).glob("step_*/*/*") if path.is_dir()}
    assert found == set(row.folders(job.output / name))
    assert job.results["same_tokens"][name]


@pytest.mark.parametrize(("name", "row"), CAPTURED)
def test_a_window_contains_the_selected_batches_and_ends_by_itself(job: Any, name: str, row: Row) -> None:
    report = read_run(job.output / name)
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    for directory in row.folders(job.output / name):
        step = f"step{int(directory.parent.parent.name.removeprefix('step_'))}"
        step += "-generate_sequences" if row.discrete else ""
        for rank in RANKS:
            for suffix, expected in row.expected.items():
                # Consecutive batches of the same kind form one capture. Later captures
                # of that kind get the suffix -2, -3 and so on.
                parts = sorted(directory.glob(f"{rank}.{step}{suffix}.trace.json.gz"))
                parts += sorted(directory.glob(f"{rank}.{step}{suffix}-[0-9]*.trace.json.gz"))
                assert [span for part in parts for span in spans(part)] == expected
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
            expected = Counter(span for found in row.expected.values() for span in found)
            assert Counter(spans(path)) == {span: 2 * count for span, count in expected.items()}


def test_captures_that_this_device_cannot_record_are_refused_in_each_replica(job: Any) -> None:
    row = TABLE["cpu-and-cuda"]
    for directory in row.folders(job.output / "cpu-and-cuda"):
        (path,) = directory.iterdir()
        manifest = json.loads(path.read_text())
        assert manifest["status"] == "failed"
        assert row.refused in manifest["problems"][0]
