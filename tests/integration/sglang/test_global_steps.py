"""What an RL trainer asks of rollout captures, as a table: a loop of global steps with two replicas of two ranks.

The columns are the parameters that verl once gave to SGLang: the first and the last engine iteration, kinds of batches
apart, one merged file, stacks, shapes, and what is observed.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from sglang_traces import events, names, processes, spans

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run

ONE_STEP = ["EXTEND", "DECODE", "DECODE", "DECODE"] * 2
"""The forward passes of one global step of the job."""
RANKS = ("rank_0000_tp0", "rank_0001_tp1")


@attrs.frozen(kw_only=True)
class Row:
    """One config, and what it must give."""

    start: int = 0
    end: int = 0
    """The window is from `start` to before `end`; none if it would be empty."""
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
        """What the job is given."""
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
        """The spans of each rank in each captured step, by what follows the capture's name in the names of files."""
        window = slice(self.start, self.end) if self.end > self.start else slice(None)
        if not self.by_stage:
            return {"": ONE_STEP[window]}
        kinds = {"-prefill": "EXTEND", "-decode": "DECODE"}
        return {suffix: [span for span in ONE_STEP if span == kind][window] for suffix, kind in kinds.items()}

    @property
    def captured(self) -> list[int]:
        """The global steps that are captured."""
        return [1, 2] if self.discrete else [1, 3]


TABLE = {
    "whole": Row(),
    "cpu": Row(activities=("cpu",)),
    "end": Row(end=4),
    "start": Row(start=1, end=3),
    "across-prompts": Row(start=3, end=6),
    "empty-window": Row(start=5, end=5),
    "by-stage": Row(by_stage=True),
    "by-stage-end": Row(by_stage=True, end=2),
    "by-stage-start": Row(by_stage=True, start=1, end=2),
    "merge": Row(merge=True, end=3),
    "merge-by-stage": Row(merge=True, by_stage=True, end=1),
    "stack": Row(stack=True, end=2),
    "shapes": Row(shapes=True, end=2),
    "memory": Row(memory=True, end=2),
    "all-at-once": Row(
        start=1, end=2, by_stage=True, merge=True, stack=True, shapes=True, memory=True, activities=("cpu",)
    ),
    "adjacent-steps": Row(end=2, steps=("1..2",), discrete=True),
    "cuda": Row(activities=("cuda",), refused="sees no CUDA device"),
    "cpu-and-cuda": Row(activities=("cpu", "cuda"), end=3, by_stage=True, merge=True, refused="sees no CUDA device"),
}
ROWS = [pytest.param(name, row, id=name) for name, row in TABLE.items()]
CAPTURED = [pytest.param(name, row, id=name) for name, row in TABLE.items() if not row.refused]


@pytest.fixture(scope="module")
def job(run_job: Callable[..., Any]) -> Any:
    configs = json.dumps({name: row.config for name, row in TABLE.items()})
    return run_job("global_steps", configs, SGLANG_PLUGINS="profdeck,torchcpu")


def folders(job: Any, name: str, row: Row) -> list[Path]:
    return [
        job.output / name / f"step_{step:06d}" / "rollout" / f"replica_{replica:03d}"
        for step in row.captured
        for replica in range(2)
    ]


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_every_captured_step_and_replica_has_a_directory(job: Any, name: str, row: Row) -> None:
    found = {path for path in (job.output / name).glob("step_*/*/*") if path.is_dir()}
    assert found == set(folders(job, name, row))
    assert job.results["same_tokens"][name]


@pytest.mark.parametrize(("name", "row"), CAPTURED)
def test_the_window_is_what_was_asked_for(job: Any, name: str, row: Row) -> None:
    for folder in folders(job, name, row):
        step = f"step{int(folder.parent.parent.name.removeprefix('step_'))}"
        step += "-generate_sequences" if row.discrete else ""
        for rank in RANKS:
            for suffix, expected in row.expected.items():
                # A series of one kind is a capture of its own: -2, -3 and so on.
                parts = sorted(folder.glob(f"{rank}.{step}{suffix}.trace.json.gz"))
                parts += sorted(folder.glob(f"{rank}.{step}{suffix}-[0-9]*.trace.json.gz"))
                assert [span for part in parts for span in spans(part)] == expected


@pytest.mark.parametrize(("name", "row"), CAPTURED)
def test_what_ended_by_itself_is_complete(job: Any, name: str, row: Row) -> None:
    report = read_run(job.output / name)
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    for folder in folders(job, name, row):
        (target,) = folder.glob("target.*[!d].json")
        manifest = json.loads(target.read_text())
        assert (manifest["problems"], manifest["notes"], manifest["expected_ranks"]) == ([], [], [0, 1])


@pytest.mark.parametrize(("name", "row"), CAPTURED)
def test_a_merged_file_has_both_ranks(job: Any, name: str, row: Row) -> None:
    for folder in folders(job, name, row):
        merged = list(folder.glob("target.*.merged.json.gz"))
        assert len(merged) == row.merge
        for path in merged:
            expected = Counter(span for found in row.expected.values() for span in found)
            assert Counter(spans(path)) == {span: 2 * count for span, count in expected.items()}
            for rank in ("rank 0 tp0", "rank 1 tp1"):
                assert any(rank in process for process in processes(path))


@pytest.mark.parametrize(("name", "row"), CAPTURED)
def test_traces_have_what_was_asked_for_and_no_more(job: Any, name: str, row: Row) -> None:
    for folder in folders(job, name, row):
        for trace in folder.glob("rank_*.trace.json.gz"):
            assert any(".py(" in name for name in names(trace)) == row.stack
            assert (b'"Input Dims"' in gzip.decompress(trace.read_bytes())) == row.shapes
            assert any(event["name"] == "[memory]" for event in events(trace)) == row.memory


@pytest.mark.parametrize(("name", "row"), [param for param in ROWS if param not in CAPTURED])
def test_what_this_device_cannot_record_is_refused_with_the_reason(job: Any, name: str, row: Row) -> None:
    for folder in folders(job, name, row):
        (target,) = folder.iterdir()
        manifest = json.loads(target.read_text())
        assert manifest["status"] == "failed"
        assert row.refused in manifest["problems"][0]
