"""Tests of the runner of `make gpu`."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from captured_runs import write_run
from gpu import runner
from gpu.parts import PARTS, Part
from gpu_job import GpuJob
from processes import python_path, until

ROOT = Path(__file__).parents[2]
REPORT = "import json, os; json.dump({}, open(os.environ['PROFDECK_GPU_OUT'] + '/result.json', 'w'));"
HOST = {"gpu": None}
# Starts a worker in a new session, as launchers do. The worker ignores SIGTERM.
WORKER = """
import signal, subprocess, sys, time
worker = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
"""


def make_part(name: str, code: str, **fields: Any) -> Part:
    return Part(
        name=name, backend="b", feature="f", command=("-c", code), **{"limit_s": 60, "needs": ("json",)} | fields
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Function that runs parts, checks the results file and the table, and returns the results."""
    monkeypatch.setattr(runner, "GRACE_S", 0.5)

    def run(*parts: Part, budget_s: float = 600, host: dict[str, Any] = HOST) -> dict[str, Any]:
        gpu_runner = runner.Runner(tmp_path, host, deadline_s=time.monotonic() + budget_s)
        gpu_runner.run(parts)
        assert json.loads((tmp_path / runner.RESULTS).read_text()) == gpu_runner.results
        assert [line.split(" | ")[0] for line in gpu_runner.table().splitlines()[2:]] == [
            f"| {item.name}" for item in parts
        ]
        return gpu_runner.results["parts"]

    return run


def is_running(pid: int) -> bool:
    return (Path("/proc") / str(pid)).exists() and " Z " not in (Path("/proc") / str(pid) / "stat").read_text()


def test_results_have_a_status_and_a_reason(run) -> None:
    failing = REPORT.format({"checks": {"a": {"passed": False, "detail": "1, not 2"}}, "figures": {"time ms": 3}})
    results = run(
        make_part("passes", REPORT.format({"figures": {"time ms": 3}})),
        make_part("fails", f"{failing} raise SystemExit(1)"),
        make_part("raises", "raise ValueError('the reason')"),
        make_part("skips", f"{REPORT.format({'skipped': 'there is no nsys'})} raise SystemExit(77)"),
        make_part("kills_itself", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        make_part("needs_a_module", "", needs=("no_such_module",)),
        make_part("needs_a_device", "", needs=("cuda",)),
        make_part("runs_after_all", "pass"),
    )
    assert {name: (result["status"], result.get("reason")) for name, result in results.items()} == {
        "passes": ("passed", None),
        "fails": ("failed", "a: 1, not 2"),
        "raises": ("failed", "ValueError: the reason"),
        "skips": ("skipped", "there is no nsys"),
        "kills_itself": ("killed", "killed by SIGKILL"),
        "needs_a_module": ("skipped", "no_such_module is not installed"),
        "needs_a_device": ("skipped", "there is no CUDA device"),
        "runs_after_all": ("passed", None),
    }
    assert results["passes"]["figures"] == results["fails"]["figures"] == {"time ms": 3}


def test_failed_pytest_part_reports_the_failed_tests(run, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2\n")
    code = f"import pytest; raise SystemExit(pytest.main(['-q', '-ra', '-p', 'no:cacheprovider', {str(tmp_path)!r}]))"
    result = run(make_part("tests", code))["tests"]
    assert result["status"] == "failed"
    assert "test_some.py::test_bad" in result["reason"]
    assert result["figures"]["tests"].startswith("1 failed, 1 passed in ")


def test_hanging_part_is_killed_with_its_workers(run, tmp_path: Path) -> None:
    started_s = time.monotonic()
    results = run(make_part("hangs", f"{WORKER}\ntime.sleep(600)", limit_s=5), make_part("next", "pass"))
    assert (results["hangs"]["status"], results["hangs"]["reason"]) == (
        "timed out",
        "exceeded its time limit of 5 s",
    )
    assert results["next"]["status"] == "passed"
    assert time.monotonic() - started_s < 60
    assert not is_running(int((tmp_path / "hangs" / "log.txt").read_text()))


def test_workers_that_outlive_their_part_are_killed(run, tmp_path: Path) -> None:
    assert run(make_part("leaves_a_worker", WORKER))["leaves_a_worker"]["status"] == "passed"
    assert not is_running(int((tmp_path / "leaves_a_worker" / "log.txt").read_text()))


def test_terminated_runner_kills_its_parts(tmp_path: Path) -> None:
    code = f"""
import signal, sys, time
from pathlib import Path
from captured_runs import write_run
from gpu import runner
from gpu.parts import Part
runner.GRACE_S = 0.5
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
part = Part(name="hangs", backend="b", feature="f", limit_s=600, needs=(), alone=False,
            command=("-c", {WORKER + "time.sleep(600)"!r}))
runner.Runner(Path({str(tmp_path)!r}), {{}}, deadline_s=time.monotonic() + 600).run([part])
"""
    environ = os.environ | {"PYTHONPATH": python_path(ROOT / "tests")}
    process = subprocess.Popen([sys.executable, "-c", code], env=environ)
    log = tmp_path / "hangs" / "log.txt"
    until(lambda: log.exists() and log.read_text().endswith("\n"))
    process.terminate()
    assert process.wait(60) == 1
    assert not is_running(int(log.read_text()))


def test_parts_run_concurrently_unless_they_must_run_alone(run, tmp_path: Path) -> None:
    meeting_code = f"""
import time
from pathlib import Path
Path({str(tmp_path)!r}, "here.%s").touch()
while not Path({str(tmp_path)!r}, "here.%s").exists(): time.sleep(0.01)
"""
    results = run(
        make_part("one", meeting_code % (1, 2), alone=False),
        make_part("two", meeting_code % (2, 1), alone=False),
        make_part("three", "pass"),
    )
    assert [result["status"] for result in results.values()] == ["passed"] * 3


def test_part_is_skipped_if_the_budget_is_spent(run) -> None:
    assert run(make_part("late", "pass"), budget_s=5)["late"]["reason"] == "only 5 s of the budget remain"


def test_only_vllm_parts_have_the_vllm_directory_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "layer" / "vllm").mkdir(parents=True)
    gpu_runner = runner.Runner(tmp_path, HOST, deadline_s=time.monotonic() + 600, vllm=tmp_path / "layer")
    code = "import os, sys; print(os.environ['PYTHONPATH'])"
    gpu_runner.run([make_part("with", code, needs=("vllm",)), make_part("without", code)])
    paths = {name: (tmp_path / name / "log.txt").read_text().split(os.pathsep) for name in ("with", "without")}
    assert paths["with"][0] == str(tmp_path / "layer")
    assert str(tmp_path / "layer") not in paths["without"]


def test_command_lists_parts_and_rejects_unknown_parts(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "run.py")]
    lines = subprocess.run([*command, "--list"], check=True, capture_output=True, text=True).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [part.name for part in PARTS]
    rejected = subprocess.run([*command, "trainin"], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert rejected.returncode == 2
    assert "unknown part: trainin. Choose from: probe, " in rejected.stderr


def test_summaries_agree_with_the_independent_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFDECK_GPU_OUT", str(tmp_path))
    report = importlib.import_module("gpu.report")
    monkeypatch.setattr(report, "CUDA", True)
    monkeypatch.setattr(report, "status", lambda _: "complete")  # the run has no run.json
    write_run(tmp_path / "run", 1, lambda _: GpuJob(pageable_us=50.0, reduce_us=0.0))
    counted = report.count(report.traces("run")[0])
    assert 0 < counted["kernels"] < counted["device_events"]  # also copies

    report.compare(report.Report(), "run")

    checks = json.loads((tmp_path / "result.json").read_text())["checks"]
    assert {name: check["detail"] for name, check in checks.items() if not check["passed"]} == {}
