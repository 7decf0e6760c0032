"""`profdeck run` and `profdeck demo` as a user meets them: streams, exit codes, what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.torch

SCRIPT = """
import sys, torch
model = torch.nn.Linear(4, 4)
first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
for _ in range(3):
    model(torch.ones(1, 4)).sum().backward()
    first.step()
    second.step()
print(__name__, *sys.argv[1:])
exec(sys.argv[1])
"""


def profdeck(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (cwd / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "profdeck", *arguments]
    return subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True, timeout=240)


def test_the_script_keeps_its_arguments_its_stdout_and_its_exit_status(tmp_path: Path) -> None:
    done = profdeck(tmp_path, "run", "--json", "--steps", "2..3", "script.py", "sys.exit(7)", "--steps", "9")
    assert (done.returncode, done.stdout) == (7, "__main__ sys.exit(7) --steps 9\n")
    report = json.loads(done.stderr.splitlines()[-1])
    # Three steps of the first optimizer; those of the second do not count.
    assert report["optimizer_steps"] == 3
    assert [(capture["id"], capture["status"]) for capture in report["captures"]] == [("step2", "complete")]
    assert profdeck(tmp_path, "ls", report["run"]).returncode == 0


@pytest.mark.parametrize(("options", "is_cold"), [((), False), (("--set", "trainer.warmup_steps=0"), True)])
def test_the_recorder_starts_one_step_before_the_capture(
    tmp_path: Path, options: tuple[str, ...], is_cold: bool
) -> None:
    done = profdeck(tmp_path, "run", "--json", "--steps", "2..3", *options, "script.py", "pass")
    run = Path(json.loads(done.stderr.splitlines()[-1])["run"])
    (manifest,) = (tmp_path / run).rglob("rank_0000.step2.json")
    assert json.loads(manifest.read_text())["cold_first_step"] is is_cold
    (step,) = json.loads(profdeck(tmp_path, "summary", "--json", str(run)).stdout)["ranks"][0]["steps"][:1]
    assert (step["step"], step["cold"]) == (2, is_cold)


def test_a_module_is_run_as_python_runs_it(tmp_path: Path) -> None:
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(SCRIPT)
    done = profdeck(tmp_path, "run", "--json", "--steps", "2", "-m", "trainer", "sys.exit(len(sys.argv))", "-m", "x")
    assert (done.returncode, done.stdout) == (4, "__main__ sys.exit(len(sys.argv)) -m x\n")
    assert [capture["status"] for capture in json.loads(done.stderr.splitlines()[-1])["captures"]] == ["complete"]
    done = profdeck(tmp_path, "run", "--steps", "2", "-m", "trainer", "1 / 0")
    first, second, *_ = done.stderr[done.stderr.index("Traceback") :].splitlines()
    assert "__main__.py" in second, first


def test_what_is_armed_reaches_processes_that_the_script_starts(tmp_path: Path) -> None:
    """Such as engines, which are in other directories; a driver without an optimizer records nothing itself."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "c.yaml").write_text("steps: [2]\nroles: {trainer: {backend: torch}, Critic: {}}\n")
    (tmp_path / "worker.py").write_text(
        "import torch, profdeck\n"
        "profiler = profdeck.Profiler.from_config(role='Critic')\n"
        "for step in range(4):\n"
        "    with profiler.capture(step): torch.ones(2).sum()\n"
    )
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "driver.py").write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, '../worker.py'], cwd='elsewhere', check=True)\n"
    )
    options = ("--config", "config/c.yaml", "--output", "out", "--set", "Critic.backend=torch", "--steps", "1,3")
    done = profdeck(tmp_path, "run", "--json", *options, "driver.py")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stderr.splitlines()[-1])
    assert (report["captures"], Path(report["run"]).parent) == ([], Path("out"))
    listed = json.loads(profdeck(tmp_path, "ls", "--json", report["run"]).stdout)
    assert [(capture["role"], capture["first_step"]) for capture in listed["captures"]] == [
        ("Critic", 1),
        ("Critic", 3),
    ]
    assert listed["status"] == "complete"


def test_an_exception_of_the_script_is_shown_as_its_own(tmp_path: Path) -> None:
    done = profdeck(tmp_path, "run", "--steps", "4", "script.py", "1 / 0")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "runpy" not in done.stderr
    assert "step4 is partial - An exception ended it: ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("script.py", "0"), 2, "No step is selected"),
        (("--steps", "2", "none.py"), 2, "No such script: none.py"),
        (("--steps", "2", "-m", "no.such"), 2, "Cannot import module no.such: No module named 'no'"),
        (("--steps", "2", "-m", "nosuch"), 2, "No module named nosuch in the environment of"),
        (("--steps", "2"), 2, "Nothing to run. Pass a script, or -m and a module."),
        (("--steps", "2", "--ranks", "x", "script.py", "0"), 2, "trainer.ranks[0]: expected an integer"),
        (("--steps", "2", "--set", "trainer.backend=nope", "script.py", "0"), 3, "There is no backend 'nope'"),
        (("--steps", "9", "script.py", "0"), 0, "nothing was captured: the script ended after optimizer step 3"),
        (("--steps", "2..9", "script.py", "0"), 0, "The script ended after step 3; if that was its last one, --set"),
    ],
)
def test_what_cannot_work_is_said(tmp_path: Path, arguments: tuple[str, ...], status: int, message: str) -> None:
    done = profdeck(tmp_path, "run", *arguments)
    assert done.returncode == status
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_demo_in_one_document(tmp_path: Path) -> None:
    done = profdeck(tmp_path, "demo", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["ls"]["status"], len(document["ls"]["captures"][0]["ranks"])) == ("complete", 2)
    assert document["summary"]["ranks"][0]["operators"]


@pytest.mark.parametrize(
    ("config", "captures"),
    [
        ("steps: [1, '3..5', 9]", 3),
        ("steps: [1, '3..5', 9]\nfinal_step: 4", 2),
        ("steps: [1, '3..5']\nmode: discrete\nroles: {trainer: {stages: [a, b]}}", 8),
        ("steps: ['every 10']\nfinal_step: 100", 10),
    ],
)
def test_nsys_gets_the_number_of_captures(tmp_path: Path, config: str, captures: int) -> None:
    (tmp_path / "c.yaml").write_text(config)
    settings = ("--set", "trainer.backend=torch", "--set", "trainer.options.cuda_profiler_range=true")
    done = profdeck(tmp_path, "nsys-args", "c.yaml", "--json", *settings)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["captures"] == captures
    assert f"--capture-range-end=repeat-shutdown:{captures}" in document["flags"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("steps: ['every 10']", "The schedule has no end"),
        ("steps: [3, 'every 10 min']\nfinal_step: 99", "'every 10 min' in steps is a time interval"),
        ("steps: [5]\nfinal_step: 4", "selects no step up to step 4"),
        ("steps: [5]\nmode: discrete", "the stages that run once per step"),
        ("steps: [5]\nroles: {trainer: {options: {cuda_profiler_range: false}}}", "cuda_profiler_range is off"),
    ],
)
def test_nsys_without_a_number_of_captures_is_an_error(tmp_path: Path, config: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(config)
    options = () if "false" in config else ("--set", "trainer.options.cuda_profiler_range=true")
    done = profdeck(tmp_path, "nsys-args", "c.yaml", "--set", "trainer.backend=torch", *options)
    assert done.returncode == 2
    assert message in done.stderr
