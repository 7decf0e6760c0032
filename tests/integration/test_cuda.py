"""Tests of the torch backend on a GPU. They are skipped without a GPU."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from profdeck import Profiler, Status  # noqa: E402  # after the skip
from profdeck.verification.run_report import read_run  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture
def capture(tmp_path: Path):
    """Return a function that captures step 2 of a loop of matrix products and returns the trace."""

    def run(work: Any = None, **options: Any) -> dict[str, Any]:
        settings = {"output": str(tmp_path), "run": "run", "steps": [2], "trainer.backend": "torch"}
        profiler = Profiler.from_config(settings=settings | {f"trainer.options.{k}": v for k, v in options.items()})
        matrix = torch.randn(1024, 1024, device="cuda")
        for step in range(4):
            with profiler.capture(step):
                for _ in range(5):
                    matrix = matrix @ matrix / 32
                if work is not None and step == 2:
                    work()
                torch.cuda.synchronize()
        (path,) = tmp_path.glob("run/step_*/trainer/*.trace.json.gz")
        return json.loads(gzip.decompress(path.read_bytes()))

    return run


def categories(trace: dict[str, Any]) -> set[str]:
    return {event.get("cat") for event in trace["traceEvents"]}


def test_kernels_are_recorded_by_default(capture, tmp_path: Path) -> None:
    trace = capture()
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    assert len(kernels) >= 10  # five products and five divisions
    assert {"kernel", "cuda_runtime", "cpu_op"} <= categories(trace)
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_activities_can_exclude_cuda(capture) -> None:
    assert "kernel" not in categories(capture(activities=["cpu"]))


def test_gpu_is_leased(tmp_path: Path) -> None:
    settings = {"output": str(tmp_path), "steps": [1], "trainer.backend": "torch", "other.backend": "torch"}
    first = Profiler.from_config(settings=settings | {"run": "one"})
    second = Profiler.from_config(role="other", settings=settings | {"run": "two"})
    with first.capture(1), second.capture(1):
        torch.ones(2, device="cuda").sum().item()
    assert read_run(tmp_path / "one").captures[0].status is Status.COMPLETE
    (rank,) = read_run(tmp_path / "two").captures[0].ranks
    assert rank.status is Status.MISSING
    assert ", held by this process (trainer, step1)" in rank.problems[0]


def test_capture_has_a_memory_snapshot(capture, tmp_path: Path) -> None:
    capture(memory_snapshot=True)
    (path,) = tmp_path.glob("run/step_*/trainer/*.memory.pickle")
    assert pickle.loads(path.read_bytes())["device_traces"]  # noqa: S301  # written by this test
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_memory_snapshot_is_written_on_out_of_memory(capture, tmp_path: Path) -> None:
    def exhaust() -> None:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    capture(exhaust, memory_snapshot=True)
    assert len(list(tmp_path.glob("run/step_*/trainer/*.oom.memory.pickle"))) == 1


def test_profiler_range_does_not_record_the_device(capture, tmp_path: Path) -> None:
    trace = capture(cuda_profiler_range=True)
    assert "kernel" not in categories(trace)
    assert "cpu_op" in categories(trace)
    assert read_run(tmp_path / "run").status is Status.COMPLETE
