"""Tests of the torch backend with the real torch.profiler in this process."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, strategies as st  # noqa: E402  # after importorskip

from processes import until  # noqa: E402
from profdeck import Profiler, Status, hookimpl  # noqa: E402
from profdeck.backends import trace_analysis  # noqa: E402
from profdeck.config.schedule import Window, WindowPhase  # noqa: E402
from profdeck.records.manifest import read_manifest  # noqa: E402
from profdeck.verification.report_model import RunReport  # noqa: E402
from profdeck.verification.run_report import read_run  # noqa: E402
from profdeck_traces import load as summaries  # noqa: E402
from profdeck_traces.base.errors import ConfigError  # noqa: E402
from profdeck_traces.inputs.result_files import read_result  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))


MAX_FRAMES = 12


def work(model) -> float:
    loss = model(torch.ones(4, 32)).sum()
    loss.backward()
    return loss.item()


@pytest.fixture
def build(tmp_path: Path):
    def make(**settings: Any) -> Profiler:
        base = {"output": str(tmp_path), "run": "run", "trainer.backend": "torch", "steps": [2]}
        return Profiler.from_config(settings=base | settings)

    return make


@pytest.fixture
def gpu_host(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stub ``torch.cuda`` for a host with a GPU. Fail the test if a call initializes CUDA."""
    state: dict[str, Any] = {"initialized": False, "synchronized": 0}

    def initialize() -> None:
        raise AssertionError("CUDA was initialized.")

    def synchronize() -> None:
        state["synchronized"] += 1

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: state["initialized"])
    monkeypatch.setattr(torch.cuda, "_lazy_init", initialize)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    activities = {torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}
    monkeypatch.setattr(
        torch.autograd.profiler, "_supported_activities", lambda: activities
    )  # as in a CUDA build of torch
    return state


def load(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def traces(run: Path) -> list[Path]:
    return sorted(run.glob("step_*/**/*.trace.json*"))


def names(trace: dict[str, Any], category: str) -> list[str]:
    return [event["name"] for event in trace["traceEvents"] if event.get("cat") == category]


def read_complete_run(run: Path) -> RunReport:
    report = read_run(run)
    assert report.status is Status.COMPLETE, report
    assert report.problems == ()
    return report


def test_capture_contains_its_steps_stages_and_origin(build, model, tmp_path: Path) -> None:
    profiler = build(steps=["2..3"])
    for step in range(5):
        with profiler.capture(step), profiler.stage("forward_backward"):
            work(model)
    report = read_complete_run(tmp_path / "run")
    (path,) = traces(tmp_path / "run")
    trace = load(path)
    steps = [name for name in names(trace, "user_annotation") if name.startswith("ProfilerStep")]
    assert steps == ["ProfilerStep#2", "ProfilerStep#3"]
    assert names(trace, "user_annotation").count("forward_backward") == 2
    assert names(trace, "cpu_op").count("aten::addmm") == 4
    assert (trace["profdeck"]["capture"], trace["profdeck"]["role"]) == ("step2", "trainer")
    assert trace["traceName"].endswith("rank_0000.step2.trace.json")
    assert report.captures[0].ranks[0].events == sum("ph" in event for event in trace["traceEvents"])
    assert {file.name for file in path.parent.iterdir()} == {"rank_0000.step2.json", "rank_0000.step2.trace.json.gz"}


@pytest.mark.parametrize("ends_with", ["stop", "step"])
def test_steps_exclude_the_work_of_plugins(build, model, tmp_path: Path, ends_with: str) -> None:
    class SlowListener:
        @hookimpl(tryfirst=True)
        def profile_step(self) -> None:
            with torch.profiler.record_function("listener"):
                pass

        @hookimpl(tryfirst=True)
        def profile_stop(self) -> None:
            with torch.profiler.record_function("listener"):
                pass

    profiler = build(steps=["2..3"])
    profiler.register(SlowListener(), "slow")
    try:
        for step in range(2, 4):
            profiler.start(step)
            work(model)
            if ends_with == "step":
                profiler.step(step)
            profiler.stop()
    finally:
        profiler.unregister("slow")
    (path,) = traces(tmp_path / "run")
    annotations = [event for event in load(path)["traceEvents"] if event.get("cat") == "user_annotation"]
    intervals = [(event["name"], event["ts"], event["ts"] + event["dur"]) for event in annotations]
    steps = [interval for interval in intervals if interval[0].startswith("ProfilerStep#")]
    listeners = [interval for interval in intervals if interval[0] == "listener"]
    assert (len(steps), len(listeners)) == (2, 2)
    assert not [name for name, begin, end in steps for _, started, _ in listeners if begin <= started < end], intervals


@pytest.mark.parametrize(
    ("option", "has_effect"),
    [
        ("record_shapes", lambda trace: any("Input Dims" in event.get("args", {}) for event in trace["traceEvents"])),
        ("with_stack", lambda trace: bool(names(trace, "python_function"))),
        ("profile_memory", lambda trace: "[memory]" in names(trace, "cpu_instant_event")),
        ("with_flops", lambda trace: "with_flops" in trace),
        ("with_modules", lambda trace: "with_modules" in trace),
    ],
)
@pytest.mark.parametrize("on", [True, False])
def test_option_is_passed_to_torch(build, model, tmp_path: Path, option: str, has_effect: Any, on: bool) -> None:
    with build(**{f"trainer.options.{option}": on}).capture(2):
        work(model)
    read_complete_run(tmp_path / "run")
    assert has_effect(load(traces(tmp_path / "run")[0])) is on
    manifest = read_manifest(next((tmp_path / "run").rglob("*step2.json")))
    assert manifest.options[option] is on
    assert manifest.versions == {"torch": metadata.version("torch")}


def test_traces_can_be_uncompressed(build, model, tmp_path: Path) -> None:
    with build(**{"trainer.options.gzip": False}).capture(2):
        work(model)
    assert [path.name for path in traces(tmp_path / "run")] == ["rank_0000.step2.trace.json"]
    read_complete_run(tmp_path / "run")


@pytest.mark.parametrize("filters", ["default", "error"])
def test_window_writes_a_trace_per_cycle_and_flushes_the_last(build, model, tmp_path: Path, filters: str) -> None:
    window = {"skip_first": 1, "wait": 1, "warmup": 1, "active": 2, "repeat": 0}
    with warnings.catch_warnings():
        warnings.simplefilter(filters)  # older versions of torch crashed at stop if their warnings were errors
        profiler = build(**{"trainer.window": window})
        for step in range(4):
            with profiler.capture(step):
                for batch in range(8):
                    work(model)
                    profiler.step(batch, "mini_batch")
    report = read_complete_run(tmp_path / "run")
    assert [artifact.iterations for artifact in report.captures[0].ranks[0].artifacts] == [(3, 4), (7, 7)]
    for path, batches in zip(traces(tmp_path / "run"), ((3, 4), (7,)), strict=True):
        step_names = [name for name in names(load(path), "user_annotation") if name.startswith("ProfilerStep")]
        assert step_names[: len(batches)] == [f"ProfilerStep#{batch}" for batch in batches]
        assert names(load(path), "cpu_op").count("aten::addmm") == 2 * len(batches)


def test_first_capture_does_not_warn_or_parse_events(build, model, tmp_path: Path, monkeypatch: Any) -> None:
    """In the first cycle of a process, torch 2.11 and 2.12 warn unless `acc_events` is set."""
    prepare_trace = torch.profiler.profile.prepare_trace

    def warn_as_torch_2_11(self: Any) -> None:
        if not self.acc_events:
            warnings.warn("Warning: Profiler clears events at the end of each cycle.", UserWarning, stacklevel=2)
        prepare_trace(self)

    def parse_events(_: Any) -> None:
        raise AssertionError("`stop` parsed all events in Python.")

    monkeypatch.setattr(torch.profiler.profile, "prepare_trace", warn_as_torch_2_11)
    monkeypatch.setattr(torch.autograd.profiler.profile, "_ensure_function_events", parse_events)
    with build().capture(2):
        work(model)
    read_complete_run(tmp_path / "run")


def test_stop_synchronizes_the_device_only_if_the_process_uses_it(build, tmp_path: Path, gpu_host) -> None:
    """In the second capture, the process initializes CUDA. Its kernels must complete before the trace is written."""
    profiler = build(steps=[1, 2])
    with profiler.capture(1):
        pass
    assert gpu_host == {"initialized": False, "synchronized": 0}
    with profiler.capture(2):
        gpu_host["initialized"] = True
    assert gpu_host["synchronized"] == 1
    read_complete_run(tmp_path / "run")


def test_interrupted_window_keeps_its_trace(build, model, tmp_path: Path) -> None:
    profiler = build(**{"trainer.window": {"active": 4}})
    with pytest.raises(ZeroDivisionError), profiler.capture(2):
        work(model)
        profiler.step(0, "mini_batch")
        work(model)
        _ = 1 / 0
    (rank,) = read_run(tmp_path / "run").captures[0].ranks
    assert (rank.status, rank.artifacts[0].iterations, rank.artifacts[0].whole) == (Status.PARTIAL, (0, 1), True)


@pytest.mark.parametrize(
    ("steps", "settings", "cold_step"),
    [
        pytest.param(["2..4"], {}, None, id="default"),
        pytest.param(["0..2"], {}, 0, id="first step of the job"),
        pytest.param(["2..4"], {"trainer.warmup_steps": 0}, 2, id="warm-up disabled"),
        pytest.param([3], {"trainer.window": {"active": 3}}, 0, id="window"),
        pytest.param([3], {"trainer.window": {"warmup": 1, "active": 3}}, None, id="window with warm-up"),
    ],
)
def test_first_step_is_cold_without_warm_up(
    build, model, tmp_path: Path, steps: list[Any], settings: dict[str, Any], cold_step: int | None
) -> None:
    profiler = build(steps=steps, **settings)
    for step in range(6):
        with profiler.capture(step):
            for batch in range(4):
                work(model)
                profiler.step(batch, "mini_batch")
    read_complete_run(tmp_path / "run")
    manifest = read_manifest(next((tmp_path / "run").rglob("rank_0000.step*[0-9].json")))
    assert manifest.cold_first_step is (cold_step is not None)
    (rank,) = summaries(tmp_path / "run").summary.ranks
    assert [step.step for step in rank.steps if step.cold] == ([] if cold_step is None else [cold_step])
    (statistics,) = rank.iterations
    assert (len(rank.steps), statistics.count) == (3, 3 if cold_step is None else 2)
    assert rank.host_times is not None
    assert rank.host_times.steps == statistics.count


def test_unrecorded_steps_are_measured(build, model, tmp_path: Path) -> None:
    profiler = build(steps=["8..11"], **{"trainer.options.with_stack": True})
    starts_s = []
    for step in range(13):
        starts_s.append(time.monotonic())
        with profiler.capture(step):
            work(model)
            time.sleep(0.3 if 8 <= step <= 11 else 0.1)
    manifest = read_manifest(next((tmp_path / "run").rglob("rank_0000.step8.json")))
    durations_s = [after - before for before, after in itertools.pairwise(starts_s[1:8])]  # the warm-up is in step 7
    assert manifest.unrecorded_step_s == pytest.approx(statistics.median(durations_s), rel=0.01)
    assert manifest.unrecorded_step_s > 0.1
    summary = summaries(tmp_path / "run").summary
    (rank,) = summary.ranks
    assert rank.recording_cost is not None
    assert rank.recording_cost.unrecorded_step_us == pytest.approx(manifest.unrecorded_step_s * 1e6)
    assert rank.recording_cost.ratio > 1.5
    (note,) = (finding for finding in summary.findings if finding.rule == "profiler")
    assert "times as long as the steps before the capture" in note.text
    assert "record without stacks" in note.do
    assert all("times as long as the steps before the capture" in line for line in summary.headlines)


def test_clock_anchors_contain_unix_time(build, model, tmp_path: Path) -> None:
    with build().capture(2):
        work(model)
    manifest = read_manifest(next((tmp_path / "run").rglob("*step2.json")))
    (artifact,) = manifest.artifacts
    first, last = artifact.anchors
    assert manifest.started_ns < first.unix_ns < last.unix_ns < (manifest.ended_ns or 0)
    for anchor in (first, last):
        trace_ns = (artifact.base_time_ns or 0) + float(anchor.trace_us) * 1e3
        assert abs(trace_ns - anchor.unix_ns) < 5e6  # on this platform, Kineto's clock is Unix time
        assert anchor.uncertainty_ns < 5e6


def test_active_profiler_is_reported_and_continues(build, model, tmp_path: Path) -> None:
    profiler = build()
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as active_profile,
        profiler.capture(2),
    ):
        work(model)
    (rank,) = read_run(tmp_path / "run").captures[0].ranks
    assert rank.status is Status.FAILED
    assert "Another torch profiler is already active in this process" in rank.problems[0]
    assert any(event.key == "aten::addmm" for event in active_profile.key_averages())
    with build(steps=[3], run="after").capture(3):
        work(model)
    read_complete_run(tmp_path / "after")


def test_recording_does_not_change_results(build, model) -> None:
    def train(profiler: Profiler) -> list[float]:
        torch.manual_seed(1)
        net = torch.nn.Linear(32, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses = []
        for step in range(5):
            with profiler.capture(step):
                loss = net(torch.randn(8, 32)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    assert train(Profiler()) == train(build(steps=["1..3"], **{"trainer.options.with_stack": True}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    ("option", "value"), [("activities", ["cpu", "cuda"]), ("memory_snapshot", True), ("cuda_profiler_range", True)]
)
def test_missing_cuda_is_an_error_at_startup(build, tmp_path: Path, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"sees no CUDA device"):
        build(**{f"trainer.options.{option}": value})
    assert list(tmp_path.glob("run")) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activities": ["cpu", "npu"]}, "the backend torch does not record npu; allowed: cpu, cuda"),
        ({"activities": []}, "the list is empty"),
        ({"cuda_profiler_range": True, "activities": ["cuda"]}, "cuda cannot be combined with cuda_profiler_range"),
        ({"memory_snapshot_entries": 0}, "'memory_snapshot_entries' must be >= 1"),
    ],
)
def test_invalid_options_are_rejected(build, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(**{"trainer.options": options})
    assert message in str(caught.value)


@given(
    active=st.integers(1, 4),
    wait=st.integers(0, 3),
    warmup=st.integers(1, 3),
    repeat=st.integers(0, 3),
    skip_first=st.integers(0, 3),
)
def test_window_phases_equal_torchs_schedule(active: int, wait: int, warmup: int, repeat: int, skip_first: int) -> None:
    phases = {
        "NONE": WindowPhase.OFF,
        "WARMUP": WindowPhase.WARMUP,
        "RECORD": WindowPhase.RECORD,
        "RECORD_AND_SAVE": WindowPhase.RECORD_LAST,
    }
    fields = {"active": active, "wait": wait, "warmup": warmup, "repeat": repeat, "skip_first": skip_first}
    theirs, ours = torch.profiler.schedule(**fields), Window(**fields)
    assert [phases[theirs(n).name] for n in range(60)] == [ours.phase(n) for n in range(60)]


def test_identity_is_read_from_torch_distributed(tmp_path: Path) -> None:
    code = """
import torch.distributed as dist, sys
from torch.distributed.device_mesh import init_device_mesh
from profdeck_torch import identity
from profdeck import Profiler
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
assert identity(mesh=mesh).stem == "rank_0000_dp0-tp0"
assert identity("ref", replica=3).replica == 3
dist.destroy_process_group()
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], check=True, timeout=120)


FILL = """
import sys, torch
from profdeck import Profiler
profiler = Profiler.from_config(
    settings={"output": sys.argv[1], "run": "run", "steps": [1, 3], "trainer.backend": "torch"})
model = torch.nn.Linear(64, 64)
for step in range(5):
    if step == 1: exec(sys.argv[2])
    if step == 3: exec(sys.argv[3])
    with profiler.capture(step):
        for _ in range(300): model(torch.ones(4, 64)).sum().backward()
print("trained")
"""


def run_out_of_space(output: Path, fill: str, free: str) -> RunReport:
    result = subprocess.run(
        [sys.executable, "-c", FILL, str(output), fill, free], check=True, capture_output=True, text=True, timeout=120
    )
    assert result.stdout == "trained\n"
    report = read_run(output / "run")
    statuses = {capture.id: capture.status for capture in report.captures}
    assert statuses["step3"] is Status.COMPLETE, result.stderr
    # Without space for a manifest, only the log has the error.
    assert statuses.get("step1", Status.MISSING) in (Status.FAILED, Status.MISSING, Status.PARTIAL)
    assert "step1" in result.stderr or "Step 1" in result.stderr
    assert not list(output.rglob(".*tmp*"))
    return report


def test_file_size_limit_fails_only_the_capture(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({}, resource.RLIM_INFINITY))"
    report = run_out_of_space(tmp_path, limit.format(100_000), limit.format("resource.RLIM_INFINITY"))
    (problem,) = report.captures[0].ranks[0].problems
    assert "files are limited to 100,000 bytes (ulimit -f)" in problem


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="only root can mount a small disk")
def test_full_disk_fails_only_the_capture(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(tmp_path)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted: {mounted.stderr.strip()}")
    try:
        full = """
import contextlib
with contextlib.suppress(OSError), open(sys.argv[1] + '/full', 'wb', buffering=0) as file:
    while True:
        file.write(b'x' * 100_000)
"""
        run_out_of_space(tmp_path, full, "import os; os.unlink(sys.argv[1] + '/full')")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="only root can mount a small disk")
@pytest.mark.parametrize("filled", [False, True])
def test_failed_trace_releases_the_disk(tmp_path: Path, filled: bool) -> None:
    """The manifest states the reason, and later captures are complete, even with garbage collection disabled."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted: {mounted.stderr.strip()}")
    code = """
import contextlib, gc, os, sys, torch
from profdeck import Profiler
gc.disable()
output, filled = sys.argv[1], int(sys.argv[2])
options = {"trainer.backend": "torch", "trainer.options.with_stack": True, "output": output, "run": "run"}
profiler = Profiler.from_config(settings={**options, "steps": [1, 3]})
def free():
    disk = os.statvfs(output)
    return disk.f_bavail * disk.f_frsize
for step in range(5):
    with profiler.capture(step):
        if filled and step == 1:
            with contextlib.suppress(OSError), open(output + "/full", "wb", buffering=0) as file:
                file.write(b"x" * (2 << 20))
        for _ in range(8000 if step == 1 else 1):
            torch.ones(2) + 1
    if step == 1 and filled:
        os.unlink(output + "/full")
    if step == 1:
        assert free() > 900_000, free()
"""
    try:
        process = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), str(int(filled))], check=False, capture_output=True, text=True
        )
        assert process.returncode == 0, process.stderr
        first, second = (capture.ranks[0] for capture in read_run(tmp_path / "run").captures)
        assert first.status is Status.FAILED
        assert "0 bytes are free on the disk" in first.problems[0]
        assert second.status is Status.COMPLETE
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("window", [None, {"active": 1, "wait": 0, "warmup": 0, "repeat": 0}])
def test_scope_that_ends_in_the_next_recording_does_not_crash(tmp_path: Path, window: dict[str, int] | None) -> None:
    code = """
import json, sys, torch
from contextlib import ExitStack
from torch.profiler import record_function
from profdeck import Profiler

@record_function("work")
def work(between=None):
    for _ in range(50):
        torch.ones(2) + 1
    if between is not None:
        between()
        torch.ones(2) + 1

window = json.loads(sys.argv[1])
settings = {"output": ".", "run": "run", "trainer.backend": "torch", "on_demand": False}
settings |= {"steps": ["every 2"]} if window is None else {"steps": [2], "trainer.window": window}
profiler = Profiler.from_config(settings=settings)
profiler.start(1 if window is None else 2)
for number in range(2, 82, 2):
    if window is None:
        profiler.start(number)
    with ExitStack() as scopes:
        for depth in range(100):
            scopes.enter_context(record_function("scope"))
        scopes.enter_context(profiler.stage("forward"))
        if window is None:
            work(lambda: (profiler.start(number + 1), profiler.start(number + 2)))
        else:
            work(lambda: profiler.step(number, "mini_batch"))
        work()
profiler.stop()
"""
    subprocess.run([sys.executable, "-c", code, json.dumps(window)], cwd=tmp_path, check=True, timeout=120)
    assert len(traces(tmp_path / "run")) >= 40


def test_start_does_not_depend_on_the_number_of_objects(build, model) -> None:
    profiler = build(steps=["every 2"])

    def start_s(step: int) -> float:
        work(model)
        begin = time.perf_counter()
        profiler.start(step)
        profiler.start(step + 1)  # also starts to warm up for the next step
        return time.perf_counter() - begin

    start_s(2)  # loads modules
    few_s = min(start_s(step) for step in (4, 6, 8))
    objects = [[] for _ in range(2_000_000)]
    many_s = min(start_s(step) for step in (10, 12, 14))
    assert len(objects) == 2_000_000
    profiler.close()
    assert many_s < few_s + 0.05


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise ValueError", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_trace_is_saved_during_interpreter_shutdown(tmp_path: Path, ending: str) -> None:
    """During shutdown, new threads cannot be started. Traces are usually written in a thread."""
    code = """
import os, signal, sys, torch
from profdeck import Profiler
settings = {"output": sys.argv[1], "run": "run", "steps": ["1..9"], "trainer.backend": "torch"}
profiler = Profiler.from_config(settings=settings)
profiler.start(1)
torch.ones(8).sum()
"""
    subprocess.run([sys.executable, "-c", code + ending, str(tmp_path)], check=False, timeout=120)
    (rank,) = read_run(tmp_path / "run").captures[0].ranks
    assert (rank.status, rank.artifacts[0].whole) == (Status.PARTIAL, True), rank.problems


def test_run_can_be_verified_during_interpreter_shutdown(build, model, tmp_path: Path) -> None:
    with build().capture(2):
        work(model)
    code = """
import atexit, sys
from pathlib import Path
from profdeck.verification.run_report import read_run
atexit.register(lambda: print(read_run(Path(sys.argv[1])).status))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    assert subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout == "complete\n"


def test_first_captured_step_does_not_import_the_compiler(tmp_path: Path) -> None:
    """Importing the compiler takes seconds."""
    job = (
        "import sys, torch; from profdeck import Profiler\n"
        "settings = {'output': '.', 'run': 'run', 'trainer.backend': 'torch', 'steps': [0], 'on_demand': False}\n"
        "profiler = Profiler.from_config(settings=settings); before = {*sys.modules}\n"
        "with profiler.capture(0): torch.ones(2) + 1\n"
        "print(len({*sys.modules} - before))\n"
    )
    result = subprocess.run([sys.executable, "-c", job], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int(result.stdout) < 10


def test_start_adds_few_stack_frames(build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracebacks contain all frames from `Profiler.start` to `torch.profiler.profile.start`, inclusive."""
    stack = ["profile.start"]
    start = torch.profiler.profile.start

    def counted(profile: Any) -> None:
        frame = sys._getframe(1)
        while stack[-1] != "Profiler.start":
            stack.append(frame.f_code.co_qualname)
            assert frame.f_back is not None
            frame = frame.f_back
        start(profile)

    monkeypatch.setattr(torch.profiler.profile, "start", counted)
    with build() as profiler:
        profiler.start(2)
        profiler.stop()
    assert len(stack) <= MAX_FRAMES, stack


@pytest.mark.analysis
@pytest.mark.parametrize("analyse", [True, False])
def test_traces_are_analysed_after_the_capture(
    build, model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, analyse: bool
) -> None:
    started = list[tuple[str, ...]]()
    monkeypatch.setattr(
        trace_analysis, "start_detached", lambda module, *arguments, **_: started.append((module, *arguments))
    )
    with build(**{"steps": [2, 4], "trainer.options.analyse": analyse}) as profiler:
        for step in range(6):
            with profiler.capture(step):
                work(model)
    assert read_run(tmp_path / "run").status is Status.COMPLETE
    paths = traces(tmp_path / "run")
    assert len(paths) == 2
    module = "profdeck.backends.trace_analysis"
    expected = [(module, "0", str(step), str(path)) for step, path in zip((2, 4), paths, strict=True)]
    assert started == (expected if analyse else [])


@pytest.mark.analysis
def test_analysis_that_cannot_start_does_not_affect_the_capture(
    build, model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(trace_analysis, "start_detached", fail)
    with build(on_error="raise") as profiler:
        for step in range(4):
            with profiler.capture(step):
                work(model)
    assert read_run(tmp_path / "run").status is Status.COMPLETE


@pytest.mark.analysis
def test_analysis_writes_the_result_of_a_trace(build, model, tmp_path: Path) -> None:
    with build() as profiler:
        for step in range(4):
            with profiler.capture(step):
                work(model)
    (path,) = (tmp_path / "run").rglob("*.trace.json.gz")
    until(lambda: read_result(path) is not None, every_s=0.2, timeout_s=600)
    assert read_run(tmp_path / "run").status is Status.COMPLETE
    assert [file.name for file in path.parent.iterdir() if file.name.startswith(".")] == []
