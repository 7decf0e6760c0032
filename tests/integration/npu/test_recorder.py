"""Tests of the recorder with the real torch_npu: driver calls, their order and thread, and output files.

Tests share a process, because importing torch_npu takes seconds. Tests that break torch_npu have separate processes.
"""

from __future__ import annotations

import json
import os
import select
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from npu_captures import (
    PREAMBLE,
    START,
    STOP,
    WARM,
    by_run,
    directories,
    info,
    manifest,
    manifests,
    names,
    operators,
    printed_results,
    steps,
)

from profdeck import Status
from profdeck.base import leases
from profdeck.verification.run_report import read_run
from profdeck_npu.traces.analysis_state import read_state

CODE = """
profiler = build("warm", steps=["4..5"], **{"trainer.warmup_steps": 2})
for number in range(8):
    with profiler.capture(number), profiler.stage(f"step_{number}"):
        work()

profiler = build("row", steps=[1, 3, 5])
for number in range(7):
    with profiler.capture(number):
        work()

window = {"skip_first": 1, "wait": 1, "warmup": 1, "active": 2, "repeat": 0}
profiler = build("window", **{"trainer.window": window})
for number in range(3):
    with profiler.capture(number):
        for batch in range(8):
            work()
            profiler.step(batch, "mini_batch")

profiler = build("in_warm_up", steps=[5], **{"trainer.warmup_steps": 2})
for number in range(3, 5):
    profiler.start(number)
    work()
profiler.close()
capture("after_warm_up", {"level": "level0"})

handler = torch_npu.profiler.tensorboard_trace_handler
handler("elsewhere", "one", analyse_flag=False)
profiler = build("handlers", steps=[1, 3])
with profiler.capture(1):
    handler("elsewhere", "two", analyse_flag=False)
    work()
other = build("handlers_other")
with other.capture(1):
    work()
with profiler.capture(3):
    work()

os.environ["STUB_DRIVER_FAIL"] = "aclprofStart"
capture("no_start")
os.environ["STUB_DRIVER_FAIL"] = ""
os.environ["STUB_DRIVER_NO_DEVICE_DATA"] = "1"
capture("no_device_data")
del os.environ["STUB_DRIVER_NO_DEVICE_DATA"]
capture("good")
os.mkdir("real")
os.symlink(Path("real").absolute(), "link")
capture("run", output="link")

os.environ["RANK"], os.environ["WORLD_SIZE"] = "1", "2"
capture("ranks", **{"trainer.ranks": "all"})
"""


@pytest.fixture(scope="module")
def shared(driver: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """A process that makes several captures, and its directory."""
    directory = tmp_path_factory.mktemp("captures")
    with driver.jobs(directory, PROFDECK_LEASE_DIR=str(directory / "leases")) as jobs:
        yield jobs(PREAMBLE + CODE), directory


def assert_complete(run: Path) -> None:
    capture_manifest = manifest(run)
    assert (capture_manifest.status, capture_manifest.problems) == (Status.COMPLETE, ())


def test_warm_up_is_not_recorded(shared: tuple[Any, Path]) -> None:
    job, directory = shared
    (recording,) = by_run(job.calls)["warm"]
    assert names(recording) == WARM + STOP
    assert_complete(directory / "warm")
    (recording_directory,) = directories(directory / "warm")
    assert recording_directory.name.startswith("rank_0000.step4_")
    assert steps(recording_directory) == [4, 5]
    assert [number for number in range(8) if b"step_%d" % number in operators(recording_directory)] == [4, 5]
    assert operators(recording_directory).count(b"aten::add") == 2


def test_consecutive_captures_are_separate_recordings(shared: tuple[Any, Path]) -> None:
    job, directory = shared
    recordings = by_run(job.calls)["row"]
    assert [names(recording) for recording in recordings] == [WARM + STOP] * 3
    created = [call.arguments["config"] for recording in recordings for call in recording if "Create" in call.name]
    assert len(set(created)) == 3
    assert [steps(recording_directory) for recording_directory in directories(directory / "row")] == [[1], [3], [5]]
    assert [entry.status for entry in manifests(directory / "row").values()] == [Status.COMPLETE] * 3


def test_each_window_cycle_is_a_recording(shared: tuple[Any, Path]) -> None:
    job, directory = shared
    recordings = by_run(job.calls)["window"]
    assert [names(recording) for recording in recordings] == [WARM + STOP] * 2
    assert_complete(directory / "window")
    assert [record.iterations for record in manifest(directory / "window").artifacts] == [(3, 4), (7, 7)]
    recording_directories = directories(directory / "window")
    assert [path.name.split("_")[1] for path in recording_directories] == ["0000.step1.mb0003", "0000.step1.mb0007"]
    assert [
        steps(path)[: last - first + 1]
        for path, (first, last) in zip(recording_directories, [(3, 4), (7, 7)], strict=True)
    ] == [
        [3, 4],
        [7],
    ]


def test_stop_during_the_warm_up_cleans_up_disk_and_driver(shared: tuple[Any, Path]) -> None:
    job, directory = shared
    (recording,) = by_run(job.calls)["in_warm_up"]
    assert names(recording) == WARM + STOP
    capture_manifest = manifest(directory / "in_warm_up")
    assert capture_manifest.status is Status.FAILED
    assert "The capture ended before recording started." in capture_manifest.problems
    assert directories(directory / "in_warm_up") == []
    (after,) = by_run(job.calls)["after_warm_up"]
    assert names(after) == START + STOP
    assert after[1].arguments["data_types"] == "0x801", "its own level"
    assert_complete(directory / "after_warm_up")


def test_other_trace_handlers_do_not_change_the_output_directory(shared: tuple[Any, Path]) -> None:
    job, directory = shared
    assert not (directory / "elsewhere").exists()
    assert len(by_run(job.calls)["handlers"]) == 2
    assert [steps(path) for path in directories(directory / "handlers")] == [[1], [3]]
    assert [steps(path) for path in directories(directory / "handlers_other")] == [[1]]


@pytest.mark.parametrize("run", ["no_start", "no_device_data"])
def test_missing_device_data_is_reported(shared: tuple[Any, Path], run: str) -> None:
    _, directory = shared
    capture_manifest = manifest(directory / run)
    assert (capture_manifest.status, capture_manifest.artifacts[0].whole) == (Status.PARTIAL, False)
    (problem,) = capture_manifest.problems
    assert "torch_npu did not write PROF_*/device_* (device data); check CANN's logs" in problem
    assert_complete(directory / "good")


def test_output_can_be_a_link(shared: tuple[Any, Path]) -> None:
    _, directory = shared
    assert_complete(directory / "real" / "run")
    assert len(directories(directory / "link" / "run")) == 1


def test_rank_is_in_the_info_file_name(shared: tuple[Any, Path]) -> None:
    _, directory = shared
    (recording_directory,) = directories(directory / "ranks")
    assert recording_directory.name.startswith("rank_0001.step1_")
    assert (recording_directory / "profiler_info_1.json").exists()
    assert_complete(directory / "ranks")


def test_metadata_identifies_the_capture(shared: tuple[Any, Path]) -> None:
    _, directory = shared
    (recording_directory,) = directories(directory / "good")
    about = json.loads((recording_directory / "profiler_metadata.json").read_text())["profdeck"]
    assert (about["capture"], about["role"], about["options"]["level"]) == ("step1", "trainer", "level1")
    assert info(recording_directory)["common_config"]["schedule"] == {}


def test_torch_npu_logs_no_warnings(shared: tuple[Any, Path]) -> None:
    job, _ = shared
    assert [line for line in job.stdout.splitlines() if "[WARNING]" in line or "[ERROR]" in line] == []
    assert "Traceback" not in job.stderr


# Rejected captures.

OTHERS = """
from torch_npu.profiler import ProfilerAction, profile, tensorboard_trace_handler

def foreign(name, plan):
    handler = tensorboard_trace_handler(name, "theirs", analyse_flag=False)
    return profile(on_trace_ready=handler, schedule=plan)

theirs = foreign("recording", lambda _: ProfilerAction.RECORD)
theirs.start()
capture("during_recording")
work()
theirs.stop()
theirs = foreign("warming", lambda step: ProfilerAction.RECORD if step else ProfilerAction.WARMUP)
theirs.start()
capture("during_warm_up")
theirs.step()
work()
theirs.stop()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as kineto:
    capture("during_torch")
    torch.ones(2) + 1
print_result(kineto=[event.key for event in kineto.key_averages()])
capture("free")

for run, steps, inside in (("late", ["3..4"], False), ("still", [3], True)):
    profiler = build(run, steps=steps, **{"trainer.warmup_steps": 1})
    profiler.start(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as kineto:
        profiler.start(3)
        torch.ones(2) + 1
        if inside:
            profiler.stop()
    if run == "late":
        profiler.start(4)
        work()
    profiler.stop()
    print_result(**{run: [event.key for event in kineto.key_averages()]})
    capture(f"after_{run}")
"""


def test_other_active_profilers_are_detected_and_continue(job: Any) -> None:
    job_result = job(PREAMBLE + OTHERS)
    for run in ("during_recording", "during_warm_up", "during_torch"):
        capture_manifest = manifest(job.directory / run)
        assert (capture_manifest.status, capture_manifest.artifacts) == (Status.FAILED, ())
        assert "Another torch or torch_npu profiler is already active" in capture_manifest.problems[0]
    for theirs in ("recording", "warming"):
        (recording_directory,) = (job.directory / theirs).iterdir()
        assert b"aten::add" in operators(recording_directory)
    assert "aten::add" in printed_results(job_result)["kineto"]
    assert_complete(job.directory / "free")
    # If another profiler starts during the warm-up, torch_npu does not record and logs nothing.
    for run, status in (("late", Status.PARTIAL), ("still", Status.FAILED)):
        capture_manifest = manifest(job.directory / run)
        assert capture_manifest.status is status
        assert (
            "npu at global_step 2: Cannot start recording: another torch profiler started during the warm-up."
            in capture_manifest.problems[0]
        )
        assert "aten::add" in printed_results(job_result)[run]
    (recording_directory,) = directories(job.directory / "late")
    assert steps(recording_directory) == [4]
    assert_complete(job.directory / "after_late")
    # A profile in its warm-up can only be stopped by recording.
    after = manifest(job.directory / "after_still")
    assert "an earlier recording of this process could not be stopped" in after.problems[0]


UNSUPPORTED_PATHS = """
capture("strange", output="out@put")
long = Identity(parallel={f"dim{letter}": 10**12 for letter in "abcdefghijkl"})
capture("long", identity=long)

from profdeck.records.capture import CaptureRecord
from profdeck_npu import NpuBackend, NpuOptions

def direct(directory):
    backend = NpuBackend(NpuOptions(analyse=False))
    backend.preflight()
    capture = CaptureRecord(id="step1", directory=Path(directory), identity=Identity(), first_step=1, current_step=1)
    try:
        backend.profile_start(capture)
    except ProfdeckError as error:
        return str(error)
    return [item() if callable(item) else item for item in backend.profile_stop(capture)]

print_result(unwritable=direct("/proc/self/nowhere"))
capture("good")
one_role, another = build("one_role"), build("another")
one_role.start(1)
another.start(1)
one_role.stop()
another.stop()
"""


def test_unsupported_output_paths_are_rejected(job: Any) -> None:
    job_result = job(PREAMBLE + UNSUPPORTED_PATHS)
    strange = manifest(job.directory / "out@put" / "strange")
    assert strange.status is Status.FAILED
    assert (
        "contains '@', which torch_npu does not support. Change output, run or role. Allowed characters: "
        in strange.problems[0]
    )
    long = manifest(job.directory / "long")
    assert long.status is Status.FAILED
    assert "characters, but torch_npu supports at most" in long.problems[0]
    assert printed_results(job_result)["unwritable"].startswith(
        "torch_npu's profiler did not start: RuntimeError: Failed to make directory: /proc/"
    )
    assert list(job.directory.glob("profiler_info*")) == []
    assert_complete(job.directory / "good")
    assert [names(recording) for recording in by_run(job_result.calls)["good"]] == [START + STOP]
    assert {*by_run(job_result.calls)} == {"good", "one_role"}
    assert_complete(job.directory / "one_role")
    assert "npu-0, held by this process (trainer, step1)" in manifest(job.directory / "another").problems[0]


STARTS = """
def start(**environ):
    os.environ.update(environ)
    try:
        build("none")
    except ProfdeckError as error:
        return str(error)
    finally:
        for name in environ:
            del os.environ[name]

print_result(
    mode=start(PROFILING_MODE="dynamic"),
    daemon=start(MSMONITOR_USE_DAEMON="1"),
)
try:
    build("none", {"analyse": True})
except ProfdeckError as error:
    print_result(msprof=str(error))
"""


def test_unusable_environment_is_rejected_at_startup(job: Any) -> None:
    job_result = job(PREAMBLE + STARTS)
    results = printed_results(job_result)
    assert results["mode"].startswith("PROFILING_MODE=dynamic indicates that msprof profiles this process")
    assert results["daemon"].startswith("MSMONITOR_USE_DAEMON=1 lets the msMonitor daemon")
    assert "CANN's program msprof, which is not on the PATH" in results["msprof"]
    code = PREAMBLE.replace('x = torch.ones(4).to("npu")\n', "") + "try:\n    build('none')\n"
    code += "except ProfdeckError as error:\n    print_result(device=str(error))"
    job_result = job(code, env={"STUB_DRIVER_DEVICES": "0"})
    assert printed_results(job_result)["device"].startswith(
        "torch_npu 2.13.0 finds no NPU, but its profiler requires one."
    )
    assert job_result.calls == []


def test_capture_waits_for_the_device_lease(job: Any) -> None:
    held = leases.acquire_lease(["npu-5"], holder="rollout, step1")
    try:
        code = "capture('run')"
        job(PREAMBLE + code, env={"ASCEND_RT_VISIBLE_DEVICES": "5"})
    finally:
        held.release()
    missing = manifest(job.directory / "run")
    assert missing.status is Status.MISSING
    assert f"npu-5, held by process {os.getpid()} (rollout, step1)" in missing.problems[0]
    job_result = job(PREAMBLE + "capture('free')", env={"ASCEND_RT_VISIBLE_DEVICES": "5"})
    assert_complete(job.directory / "free")
    assert names(by_run(job_result.calls)["free"][0]) == START + STOP


# Stops.

ELSEWHERE = """
def on_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()

profiler = build("elsewhere", steps=["1..9"])
profiler.start(1)
work()
on_thread(profiler.close)
(path,) = Path("elsewhere").glob("step_*/trainer/rank_*.json")
print_result(pending=json.loads(path.read_text()), thread=threading.get_native_id())
work()
profiler.step(1)
print_result(active=profiler.active is not None)
capture("next")
"""


def test_stop_from_another_thread_is_deferred(job: Any) -> None:
    job_result = job(PREAMBLE + ELSEWHERE)
    results = printed_results(job_result)
    assert results["pending"]["status"] == "recording"
    assert results["pending"]["notes"][0].endswith("was deferred to the owner's next boundary.")
    assert results["active"] is False
    (recording,) = by_run(job_result.calls)["elsewhere"]
    assert names(recording) == START + STOP
    assert {call.tid for call in recording} == {results["thread"]}
    (recording_directory,) = directories(job.directory / "elsewhere")
    assert operators(recording_directory).count(b"aten::add") == 2
    assert manifest(job.directory / "elsewhere").problems == ("The profiler was closed in mid-capture.",)
    assert_complete(job.directory / "next")


def test_process_exit_stops_the_recording_before_the_driver(job: Any) -> None:
    job_result = job(PREAMBLE + "profiler = build('run')\nprofiler.start(1)\nwork()\nsys.exit(3)", check=False)
    assert job_result.returncode == 3, job_result.stderr
    capture_manifest = manifest(job.directory / "run")
    assert (capture_manifest.status, capture_manifest.problems) == (
        Status.PARTIAL,
        ("The process ended in mid-capture.",),
    )
    assert capture_manifest.artifacts[0].whole
    assert names(by_run(job_result.calls)["run"][0]) == START + STOP


def test_failed_stop_makes_the_capture_partial_and_blocks_later_captures(job: Any) -> None:
    code = """
profiler = build("failed")
with profiler.capture(1):
    work()
    os.environ["STUB_DRIVER_FAIL"] = "aclrtSynchronizeDevice"
os.environ["STUB_DRIVER_FAIL"] = ""
capture("next")
"""
    job(PREAMBLE + code)
    capture_manifest = manifest(job.directory / "failed")
    assert (capture_manifest.status, capture_manifest.artifacts[0].whole) == (Status.PARTIAL, False)
    assert "the recording could not be stopped: RuntimeError: " in capture_manifest.problems[0]
    after = manifest(job.directory / "next")
    assert after.status is Status.FAILED
    assert "an earlier recording of this process could not be stopped" in after.problems[0]
    assert "Restart the process to capture again." in after.problems[0]


@pytest.fixture
def old_cann(job: Any, driver: Any) -> str:
    """A stub driver without the libraries that older CANN lacks. Only some options need them."""
    without = job.directory / "without"
    shutil.copytree(driver.libraries, without, ignore=shutil.ignore_patterns("libms_tools_ext.so", "libascend_dump.so"))
    return str(without)


def test_missing_mstx_library_is_reported(job: Any, old_cann: str) -> None:
    code = "capture('plain')\ncapture('lost', {'mstx': True})\n"
    code += "capture('not_requested', {'mstx': True, 'mstx_domain_include': ['other']})\ncapture('next')"
    job(PREAMBLE + code, env={"LD_LIBRARY_PATH": old_cann})
    capture_manifest = manifest(job.directory / "lost")
    assert capture_manifest.status is Status.PARTIAL
    assert (
        "No mstx ranges are recorded: CANN's mstx library (libms_tools_ext.so) cannot be used"
        in capture_manifest.problems[0]
    )
    for run in ("plain", "not_requested", "next"):
        assert_complete(job.directory / run)


def test_failed_start_is_reported_and_blocks_later_captures(job: Any, old_cann: str) -> None:
    code = "capture('lost', {'record_op_args': True})\ncapture('next')"
    job_result = job(PREAMBLE + code, env={"LD_LIBRARY_PATH": old_cann})
    capture_manifest = manifest(job.directory / "lost")
    assert (capture_manifest.status, len(capture_manifest.problems)) == (Status.FAILED, 1)
    assert capture_manifest.problems[0].startswith("torch_npu's profiler did not start: RuntimeError: ")
    assert "libascend_dump.so" in capture_manifest.problems[0]
    (recording,) = by_run(job_result.calls)["lost"]
    assert names(recording) == START + STOP[:2], "the driver was stopped as far as torch_npu can"
    assert directories(job.directory / "lost") == []
    after = manifest(job.directory / "next")
    assert "an earlier recording of this process could not be stopped" in after.problems[0]


ANALYSED = """
profiler = build("window", {"analyse": True}, **{"trainer.window": {"active": 1, "repeat": 2}})
with profiler.capture(1):
    for batch in range(3):
        work()
        profiler.step(batch, "mini_batch")
"""


@pytest.mark.usefixtures("msprof")
def test_analysed_captures_are_complete(job: Any) -> None:
    job(PREAMBLE + ANALYSED)
    run = job.directory / "window"
    recording_directories = directories(run)
    assert len(recording_directories) == 2
    for directory in recording_directories:
        state = read_state(directory)
        assert state is not None
        if state.is_active:
            process = os.pidfd_open(state.pid)
            try:
                assert select.select([process], [], [], 120)[0]
            finally:
                os.close(process)
        state = read_state(directory)
        assert state is not None
        assert (state.state, state.problems) == ("done", ())
        assert list(directory.glob("ASCEND_PROFILER_OUTPUT/kernel_details.csv"))
    report = read_run(run)
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    assert all(artifact.events for artifact in report.captures[0].ranks[0].artifacts)
