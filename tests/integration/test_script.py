"""Tests of `profdeck run`, `profdeck demo` and `profdeck nsys-args`: streams, exit codes and messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


def test_script_keeps_its_arguments_stdout_and_exit_status(tmp_path: Path) -> None:
    result = profdeck(tmp_path, "run", "--json", "--steps", "2..3", "script.py", "sys.exit(7)", "--steps", "9")
    assert (result.returncode, result.stdout) == (7, "__main__ sys.exit(7) --steps 9\n")
    report = json.loads(result.stderr.splitlines()[-1])
    # Only the steps of the first optimizer are counted.
    assert report["optimizer_steps"] == 3
    assert [(capture["id"], capture["status"]) for capture in report["captures"]] == [("step2", "complete")]
    assert profdeck(tmp_path, "ls", report["run"]).returncode == 0


@pytest.mark.parametrize(("options", "is_cold"), [((), False), (("--set", "trainer.warmup_steps=0"), True)])
def test_recorder_starts_one_step_before_the_capture(tmp_path: Path, options: tuple[str, ...], is_cold: bool) -> None:
    result = profdeck(tmp_path, "run", "--json", "--steps", "2..3", *options, "script.py", "pass")
    run = Path(json.loads(result.stderr.splitlines()[-1])["run"])
    (manifest,) = (tmp_path / run).rglob("rank_0000.step2.json")
    assert json.loads(manifest.read_text())["cold_first_step"] is is_cold
    (step,) = json.loads(profdeck(tmp_path, "summary", "--json", str(run)).stdout)["ranks"][0]["steps"][:1]
    assert (step["step"], step["cold"]) == (2, is_cold)


def test_module_is_run_like_python_dash_m(tmp_path: Path) -> None:
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(SCRIPT)
    result = profdeck(tmp_path, "run", "--json", "--steps", "2", "-m", "trainer", "sys.exit(len(sys.argv))", "-m", "x")
    assert (result.returncode, result.stdout) == (4, "__main__ sys.exit(len(sys.argv)) -m x\n")
    assert [capture["status"] for capture in json.loads(result.stderr.splitlines()[-1])["captures"]] == ["complete"]
    result = profdeck(tmp_path, "run", "--steps", "2", "-m", "trainer", "1 / 0")
    first, second, *_ = result.stderr[result.stderr.index("Traceback") :].splitlines()
    assert "__main__.py" in second, first


def test_child_processes_of_the_script_inherit_the_config(tmp_path: Path) -> None:
    """Engines can have another working directory. A script without an optimizer records nothing."""
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
    result = profdeck(tmp_path, "run", "--json", *options, "driver.py")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stderr.splitlines()[-1])
    assert (report["captures"], Path(report["run"]).parent) == ([], Path("out"))
    listed = json.loads(profdeck(tmp_path, "ls", "--json", report["run"]).stdout)
    assert [(capture["role"], capture["first_step"]) for capture in listed["captures"]] == [
        ("Critic", 1),
        ("Critic", 3),
    ]
    assert listed["status"] == "complete"


def test_traceback_of_the_script_is_unchanged(tmp_path: Path) -> None:
    result = profdeck(tmp_path, "run", "--steps", "4", "script.py", "1 / 0")
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr
    assert "runpy" not in result.stderr
    assert "step4 is partial - An exception ended it: ZeroDivisionError" in result.stderr


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
        (
            ("--steps", "9..10, 12", "script.py", "0"),
            0,
            "ended after optimizer step 3, before the selected steps (9..10, 12). Select earlier steps, such as",
        ),
        (
            ("--steps", "2..9", "script.py", "0"),
            0,
            "The script ended after step 3. To end the last capture",
        ),
    ],
)
def test_invalid_arguments_are_reported(tmp_path: Path, arguments: tuple[str, ...], status: int, message: str) -> None:
    result = profdeck(tmp_path, "run", *arguments)
    assert result.returncode == status
    assert message in result.stderr
    assert "Traceback" not in result.stderr


ONE_LAYER = "import torch\nmodel = torch.nn.Linear(4, 4)\nbatch = torch.ones(2, 4)\n"
IN_BACKWARD = (
    ONE_LAYER
    + """
optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
for _ in range(5):
    model(batch).sum().backward()
"""
)
UNUSED_FIRST = (
    ONE_LAYER
    + """
unused = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    model(batch).sum().backward()
    optimizer.step()
"""
)
DELETED_FIRST = (
    ONE_LAYER
    + """
for count, kind in ((2, torch.optim.SGD), (3, torch.optim.AdamW)):
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(count):
        model(batch).sum().backward()
        optimizer.step()
"""
)
KEPT_FIRST = (
    ONE_LAYER
    + """
warmup, optimizer = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.parameters())
for step in range(7):
    model(batch).sum().backward()
    (warmup if step < 2 else optimizer).step()
"""
)
RENEWED_PER_PHASE = (
    ONE_LAYER
    + """
optimizers = []
for phase in range(3):
    optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2 + phase):
        model(batch).sum().backward()
        optimizers[-1].step()
"""
)
TWO_MODELS = (
    ONE_LAYER
    + """
first, second = torch.optim.SGD([model.weight], lr=0.1), torch.optim.AdamW([model.bias])
for step in range(5):
    for count, optimizer in zip(COUNTS, (first, second)):
        for _ in range(count):
            model(batch).sum().backward()
            optimizer.step()
"""
)
COMPILED = (
    ONE_LAYER
    + """
import torch._dynamo
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
step = torch.compile(optimizer.step, backend="eager")
for _ in range(5):
    model(batch).sum().backward()
    step()
    schedule.step()
counters = torch._dynamo.utils.counters
print(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
"""
)


@pytest.mark.parametrize("script", [IN_BACKWARD, UNUSED_FIRST, DELETED_FIRST, COMPILED])
def test_steps_are_those_of_the_optimizer_that_trains(tmp_path: Path, script: str) -> None:
    (tmp_path / "train.py").write_text(script)
    unprofiled = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True, capture_output=True, text=True)
    result = profdeck(tmp_path, "run", "--json", "--steps", "2..3", "train.py")
    assert result.stdout == unprofiled.stdout  # the number of graph breaks
    report = json.loads(result.stderr.splitlines()[-1])
    assert report["optimizer_steps"] == 5
    assert [(capture["status"], capture["problems"]) for capture in report["captures"]] == [("complete", [])]


@pytest.mark.parametrize(
    ("script", "steps"),
    [
        (KEPT_FIRST, 7),
        (RENEWED_PER_PHASE, 9),
        (TWO_MODELS.replace("COUNTS", "(1, 1)"), 5),
        (TWO_MODELS.replace("COUNTS", "(3, 1)"), 15),
        (TWO_MODELS.replace("COUNTS", "(1, 3)"), 16),
    ],
    ids=["kept", "renewed", "alternating", "first_steps_more_often", "second_steps_more_often"],
)
def test_steps_are_those_of_the_optimizer_that_steps_most_often(tmp_path: Path, script: str, steps: int) -> None:
    (tmp_path / "train.py").write_text(script)
    result = profdeck(tmp_path, "run", "--json", "--steps", str(steps), "train.py")
    report = json.loads(result.stderr.splitlines()[-1])
    assert report["optimizer_steps"] == steps
    assert [(capture["id"], capture["status"]) for capture in report["captures"]] == [(f"step{steps}", "complete")]


def test_capture_of_two_optimizer_steps_is_partial(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KEPT_FIRST)
    result = profdeck(tmp_path, "run", "--json", "--steps", "3..5", "train.py")
    report = json.loads(result.stderr.splitlines()[-1])
    capture = report["captures"][0]
    assert (capture["id"], capture["status"]) == ("step3", "partial"), capture
    assert any("AdamW stepped twice in step 3" in problem for problem in capture["problems"]), capture


CHILDREN = """
import multiprocessing, sys

def train():
    import torch
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager") if sys.argv[2] == "compiled" else optimizer.step
    model(torch.ones(2, 4)).sum().backward()
    step()

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    if sys.argv[2] == "shared":
        import torch
        shared = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    targets = [print if sys.argv[2] == "print" else train] * 2
    processes = [context.Process(target=target) for target in targets]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
"""


@pytest.mark.parametrize(
    ("method", "kind", "count"),
    [("spawn", "eager", 2), ("spawn", "compiled", 2), ("fork", "shared", 2), ("spawn", "print", 0)],
)
def test_optimizer_steps_of_child_processes_are_reported(tmp_path: Path, method: str, kind: str, count: int) -> None:
    (tmp_path / "children.py").write_text(CHILDREN)
    result = profdeck(tmp_path, "run", "--steps", "2..3", "children.py", method, kind)
    assert result.returncode == 0, result.stderr
    message = f"{count} child processes of the script ran torch optimizer steps"
    assert (message in result.stderr) is (count > 0)
    assert ("torchrun -m profdeck run" in result.stderr) is (count > 0)
    assert ("the script's own process ran no torch optimizer step" in result.stderr) is (count == 0)


def test_other_optimizers_are_named_if_the_capture_did_not_end(tmp_path: Path) -> None:
    result = profdeck(tmp_path, "run", "--steps", "2..9", "script.py", "0")
    assert "Only the steps of SGD were counted, because it stepped first; SGD stepped 3 times" in result.stderr


@pytest.mark.slow
def test_demo_writes_one_json_document(tmp_path: Path) -> None:
    result = profdeck(tmp_path, "demo", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    ranks = min(2, torch.cuda.device_count() or 2)
    assert (document["ls"]["status"], len(document["ls"]["captures"][0]["ranks"])) == ("complete", ranks)
    assert document["summary"]["ranks"][0]["operators"]
    screen = profdeck(tmp_path, "summary", document["run"], "--no-cache").stdout
    first_screen = screen.splitlines()[:24]
    assert [line for line in first_screen if "demo-1.py" in line], screen


@pytest.mark.parametrize(
    ("config", "captures"),
    [
        ("steps: [1, '3..5', 9]", 3),
        ("steps: [1, '3..5', 9]\nfinal_step: 4", 2),
        ("steps: [1, '3..5']\nmode: discrete\nroles: {trainer: {stages: [a, b]}}", 8),
        ("steps: ['every 10']\nfinal_step: 100", 10),
    ],
)
def test_nsys_flags_contain_the_number_of_captures(tmp_path: Path, config: str, captures: int) -> None:
    (tmp_path / "c.yaml").write_text(config)
    settings = ("--set", "trainer.backend=torch", "--set", "trainer.options.cuda_profiler_range=true")
    result = profdeck(tmp_path, "nsys-args", "c.yaml", "--json", *settings)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
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
def test_nsys_flags_require_a_number_of_captures(tmp_path: Path, config: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(config)
    options = () if "false" in config else ("--set", "trainer.options.cuda_profiler_range=true")
    result = profdeck(tmp_path, "nsys-args", "c.yaml", "--set", "trainer.backend=torch", *options)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("steps", "status", "reason"),
    [
        # The first step starts in the main thread. Each later step starts in the previous step's thread.
        ("2..3", "missing", "Step 1 ran in another thread than the start of its recording; run all steps in one"),
        ("4", "failed", "The thread that started the capture has ended. Run all steps in one thread."),
    ],
)
def test_steps_in_new_threads_end_the_capture(tmp_path: Path, steps: str, status: str, reason: str) -> None:
    """Only the thread that starts a torch recording can stop it."""
    (tmp_path / "threads.py").write_text(
        "import threading, torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "def train():\n"
        "    model(torch.ones(1, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "for _ in range(6):\n"
        "    thread = threading.Thread(target=train)\n"
        "    thread.start()\n"
        "    thread.join()\n"
    )
    result = profdeck(tmp_path, "run", "--json", "--steps", steps, "threads.py")
    assert result.returncode == 0, result.stderr
    first, *_ = json.loads(result.stderr.splitlines()[-1])["captures"]
    assert (first["status"], first["problems"][0][: len(reason)]) == (status, reason)
