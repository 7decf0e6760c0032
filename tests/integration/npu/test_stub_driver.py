"""The ground of the tests of the NPU: the stub driver is what it says, and its switches do what they are for."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

# One capture: a warm-up step and three recorded ones, with an operator of the device in each.
CAPTURE = """
import json, os, sys, torch, torch_npu
from torch_npu.profiler import AiCMetrics, ProfilerActivity, ProfilerLevel, _ExperimentalConfig
from torch_npu.profiler import profile, schedule, tensorboard_trace_handler
from torch_npu.profiler.profiler import analyse

x = torch.ones(4).to("npu")

def capture(name, **config):
    handler = tensorboard_trace_handler(name, "worker", analyse_flag=False)
    config = _ExperimentalConfig(**{"profiler_level": ProfilerLevel.Level1} | config)
    plan = schedule(wait=0, warmup=1, active=3, repeat=1)
    profiler = profile(on_trace_ready=handler, schedule=plan, experimental_config=config)
    profiler.start()
    for _ in range(4):
        x + 1
        torch.npu.synchronize()
        with torch_npu.npu.mstx.annotate("a step", torch_npu.npu.current_stream()):
            profiler.step()
    profiler.stop()
    return profiler.prof_if.prof_path
"""
PLAIN = ["aclprofInit", "aclprofCreateConfig", "aclprofWarmup", "aclprofStart"]
PLAIN += ["aclprofStop", "aclprofDestroyConfig", "aclprofFinalize"]


def kernels(path: Path) -> list[tuple[str, str]]:
    """The steps and types of the computing kernels of an analysed capture."""
    with (path / "ASCEND_PROFILER_OUTPUT" / "kernel_details.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [(row["Step Id"], row["Type"]) for row in rows if row["Accelerator Core"] != "COMMUNICATION"]


def test_a_plain_capture_makes_the_calls_of_a_driver_and_names_the_stub(job, driver) -> None:
    code = 'capture("plain"); print(open("/proc/self/maps").read())'
    done = job(CAPTURE + code, env={"LD_BIND_NOW": "1"})  # all symbols resolve when loaded
    assert done.names == PLAIN
    assert len({(call.pid, call.tid) for call in done.calls}) == 1
    assert [call.time_ns for call in done.calls] == sorted(call.time_ns for call in done.calls)
    assert [call.arguments["type"] for call in done.all_calls if call.name == "aclopCompileAndExecute"] == ["Add"] * 4
    (path,) = (job.directory / "plain").iterdir()
    assert done.calls[0].arguments == {"path": str(path)}
    assert done.calls[1].arguments == {"config": "1", "devices": "0", "aic_metrics": "1", "data_types": "0x27"}
    (data,) = path.glob("PROF_*")
    assert data.name.endswith("DRIVER")
    assert "STUB" in data.name
    assert {file.name for file in data.iterdir()} == {"host", "device_0"}
    maps = set(done.stdout.split())
    ours = {Path(file).name for file in maps if file.startswith(str(driver.libraries))}
    assert {"libascendcl.so", "libhccl.so", "libge_runner.so", "libgraph.so", "libmsprofiler.so"} <= ours
    assert [file for file in maps if file.endswith("site-packages/torch_npu/lib/libtorch_npu.so")]


def test_without_the_stub_the_wheel_cannot_be_imported(job, driver) -> None:
    assert str(driver.libraries) in job.environ["LD_LIBRARY_PATH"]
    done = job("import torch", env={"LD_LIBRARY_PATH": ""}, check=False)
    assert done.returncode == 1
    assert "libhccl.so" in done.stderr


def test_options_reach_the_driver(job) -> None:
    code = """
capture("none", profiler_level=ProfilerLevel.Level_none, aic_metrics=AiCMetrics.AiCoreNone, mstx=True)
capture("access", aic_metrics=AiCMetrics.MemoryAccess, op_attr=True, export_type="db", l2_cache=True)
capture("system", host_sys=["cpu"], sys_io=True, sys_interconnection=True, record_op_args=True)
capture("marks", mstx=True, mstx_domain_include=["other"])
"""
    done = job(CAPTURE + code)
    created = [call.arguments for call in done.calls if call.name == "aclprofCreateConfig"]
    assert [(config["aic_metrics"], config["data_types"]) for config in created] == [
        ("255", "0x80"),
        ("8", "0x4037"),
        ("1", "0x27"),
        ("1", "0xa7"),
    ]
    values = {
        (call.arguments["type"], call.arguments["value"]) for call in done.calls if call.name == "aclprofSetConfig"
    }
    assert values == {("8", "cpu"), ("5", "100"), ("6", "50")}
    assert [call.name for call in done.calls if "DumpArgs" in call.name] == ["aclopStartDumpArgs", "aclopStopDumpArgs"]
    marks = [call.arguments for call in done.calls if call.name == "mstxRangeStartA"]
    assert {"a step", "ProfilerStep#2"} <= {mark["message"] for mark in marks}
    assert {mark["on_stream"] for mark in marks} == {"yes"}
    ends = {call.arguments["id"] for call in done.calls if call.name == "mstxRangeEnd"}
    # The window ended inside of the last, and torch_npu then lets no more through.
    assert {mark["message"] for mark in marks if mark["id"] not in ends} == {"a step"}


def test_it_has_as_many_devices_as_it_is_told_and_fails_where_it_is_told(job) -> None:
    code = 'import torch; print(torch.npu.device_count()); torch.npu.set_device(2); torch.ones(1).to("npu")'
    done = job(code, env={"STUB_DRIVER_DEVICES": "3", "STUB_DRIVER_FAIL": "aclInitialise,aclFinalize"})
    assert done.stdout.split()[-1] == "3"
    assert [call.name for call in done.all_calls if call.failed] == ["aclFinalize"]
    assert {"device": "2"} in [call.arguments for call in done.all_calls if call.name == "aclrtSetDevice"]


def test_device_data_can_be_missing_or_lack_the_head_of_the_window(job, msprof) -> None:
    code = """
os.environ["STUB_DRIVER_NO_DEVICE_DATA"] = "1"
capture("without")
del os.environ["STUB_DRIVER_NO_DEVICE_DATA"]
os.environ["STUB_DRIVER_LOSE_TASKS"] = "2"
analyse(capture("later"), 1)
"""
    job(CAPTURE + code)
    (without,) = (job.directory / "without").iterdir()
    assert not list(without.glob("PROF_*/device_*"))
    (later,) = (job.directory / "later").iterdir()
    assert kernels(later) == [("3", "Add")]


def test_msprofs_rows_become_torch_npus_files(job, msprof) -> None:
    code = """
for kind in ("text", "db"):
    analyse(capture(kind, export_type=kind), 1)
analyse(capture("level0", profiler_level=ProfilerLevel.Level0, aic_metrics=AiCMetrics.AiCoreNone), 1)
"""
    done = job(CAPTURE + code)
    assert "[ERROR]" not in done.stdout
    (text,) = (job.directory / "text").iterdir()
    assert "[ERROR]" not in "".join(log.read_text() for log in (text / "logs").iterdir())
    output = text / "ASCEND_PROFILER_OUTPUT"
    assert kernels(text) == [("1", "Add"), ("2", "Add"), ("3", "Add")]
    with (output / "step_trace_time.csv").open(encoding="utf-8") as file:
        assert [row["Step"] for row in csv.DictReader(file)] == ["1", "2", "3"]
    assert list(json.loads((output / "communication.json").read_text())) == ["step1", "step2", "step3"]
    events = json.loads((output / "trace_view.json").read_text())
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"Python", "CANN", "Ascend Hardware", "Communication", "Overlap Analysis"} == set(processes.values())
    lanes = {(processes[event["pid"]], event["name"]) for event in events if event["ph"] == "X"}
    assert {("Python", "ProfilerStep#3"), ("Ascend Hardware", "Add2"), ("Overlap Analysis", "Computing")} <= lanes
    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    tasks = [event for event in events if processes.get(event["pid"]) == "Ascend Hardware" and event["ph"] == "X"]
    assert float(steps[0]["ts"]) <= min(float(task["ts"]) for task in tasks)
    assert len({event["id"] for event in events if event["name"] == "torch_to_npu"}) == 6
    (database,) = (job.directory / "db").iterdir()
    names = {file.name for file in (database / "ASCEND_PROFILER_OUTPUT").iterdir()}
    assert names == {"analyse.done", "analysis.db", "ascend_pytorch_profiler.db"}
    (level0,) = (job.directory / "level0").iterdir()
    assert kernels(level0) == [("1", "Add"), ("2", "Add"), ("3", "Add")]
    assert not (level0 / "ASCEND_PROFILER_OUTPUT" / "communication.json").exists()


def test_msprof_can_wait_for_ever(msprof, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    environ = {"STUB_MSPROF": "hang", "STUB_MSPROF_PIDS": str(pids), "PATH": "/usr/bin:/bin"}
    with subprocess.Popen([msprof, "--export=on", f"--output={tmp_path}"], env=environ) as process:
        while not pids.exists():
            assert process.poll() is None
            time.sleep(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        process.send_signal(signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM
    assert pids.read_text().split() == [str(process.pid)]


def test_a_job_that_was_started_ends_with_its_test(driver, tmp_path: Path) -> None:
    with driver.jobs(tmp_path) as jobs:
        process, _ = jobs.start("import time\nprint('up', flush=True)\ntime.sleep(600)")
        assert process.stdout.readline() == "up\n"
        began = time.monotonic()
    assert process.returncode == -signal.SIGKILL
    assert time.monotonic() - began < 60
