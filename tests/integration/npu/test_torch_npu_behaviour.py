"""What torch_npu itself does where the backend relies on it, so that a release which changes it is noticed.

Most of it is documented nowhere: torch_npu prints its failures and goes on. It all runs over the stub driver and in few
jobs, since importing torch_npu takes seconds; what leaves torch_npu broken has a process of its own, which its job
forks before any uses the device.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

pytestmark = pytest.mark.npu_stub

# What each job begins with: `case` parts what it prints and calls, `tell` prints a result.
PREAMBLE = """
import gc, json, multiprocessing, os, threading, time
import torch, torch_npu
from torch_npu.profiler import AiCMetrics, ProfilerAction, ProfilerActivity, ProfilerLevel
from torch_npu.profiler import _ExperimentalConfig, profile, schedule, tensorboard_trace_handler
from torch_npu.profiler.profiler import analyse

WARMUP, RECORD, NONE = ProfilerAction.WARMUP, ProfilerAction.RECORD, ProfilerAction.NONE

def case(name):
    print(f"\\n=== {name}={time.time_ns()}", flush=True)

def tell(value):
    print("> " + json.dumps(value), flush=True)

def plan(*actions):
    return lambda step: actions[min(step, len(actions) - 1)]

def capture(name, schedule=None, level=ProfilerLevel.Level1):
    handler = tensorboard_trace_handler(name, "worker", analyse_flag=False)
    config = _ExperimentalConfig(profiler_level=level, aic_metrics=AiCMetrics.AiCoreNone)
    return profile(on_trace_ready=handler, schedule=schedule, experimental_config=config)

def step(profiler):
    torch.ones(1, device="npu") + 1
    torch.npu.synchronize()
    profiler.step()

def closed(name):
    profiler = capture(name, schedule(wait=0, warmup=1, active=2, repeat=1))
    profiler.start()
    for _ in range(3):
        step(profiler)
    profiler.stop()
    return profiler.prof_if.prof_path

def on_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()

def apart(function):
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    process.join()
    assert process.exitcode == 0, function
"""
START = ["aclprofInit", "aclprofCreateConfig", "aclprofStart"]
WARM = ["aclprofInit", "aclprofCreateConfig", "aclprofWarmup"]
STOP = ["aclprofStop", "aclprofDestroyConfig", "aclprofFinalize"]
STOPPED_IN_RECORD = "Incorrect schedule: Stop profiler while current state is RECORD which may result in incomplete"


@attrs.frozen
class Case:
    """What a job printed and called in one part of it."""

    printed: str
    calls: list[Any]

    @property
    def names(self) -> list[str]:
        return [call.name for call in self.calls]

    @property
    def messages(self) -> list[str]:
        """Its warnings and errors, without when and by whom."""
        lines = [line for line in self.printed.splitlines() if "[WARNING]" in line or "[ERROR]" in line]
        return [line.partition("profiler.py: ")[2] or line for line in lines]

    @property
    def told(self) -> Any:
        (result,) = [line for line in self.printed.splitlines() if line.startswith("> ")]
        return json.loads(result[2:])


def cases(job) -> dict[str, Case]:
    """Part a job by its calls of `case`."""
    parts = [part.partition("\n") for part in job.stdout.split("\n=== ")[1:]]
    begins = [head.partition("=") for head, _, _ in parts]
    ends = [int(begin) for _, _, begin in begins[1:]] + [float("inf")]
    return {
        name: Case(printed, [call for call in job.calls if int(begin) <= call.time_ns < end])
        for (name, _, begin), end, (_, _, printed) in zip(begins, ends, parts, strict=True)
    }


def directories(directory: Path) -> list[Path]:
    return sorted(directory.glob("*_ascend_pt"))


def operators(directory: Path) -> bytes:
    """What the framework recorded, in torch_npu's binary format, in which names are as they are."""
    (path,) = directories(directory)
    file = path / "FRAMEWORK" / "torch.op_range"
    return file.read_bytes() if file.exists() else b""


# One process for all that leaves torch_npu as it was.
CAPTURES = """
case("closed")
profiler = capture("closed", schedule(wait=0, warmup=1, active=2, repeat=1))
profiler.start()
for _ in range(3):
    step(profiler)
case("closed, stopped")
profiler.stop()

case("open")
profiler = capture("open", plan(WARMUP, RECORD))
profiler.start()
for _ in range(3):
    step(profiler)
case("open, stopped")
profiler.stop()

case("no schedule")
profiler = capture("no_schedule")
profiler.start()
step(profiler)
case("no schedule, stopped")
profiler.stop()

case("ended by its plan")
profiler = capture("by_plan", plan(WARMUP, RECORD, NONE))
profiler.start()
step(profiler)
profiler.current_action = ProfilerAction.RECORD_AND_SAVE
case("ended by its plan, last step")
step(profiler)
case("ended by its plan, stopped")
profiler.stop()

case("warm-up alone")
profiler = capture("warm", plan(WARMUP, NONE))
profiler.start()
case("warm-up alone, last step")
step(profiler)
profiler.stop()
tell(sorted(os.listdir(profiler.prof_if.prof_path)))
case("after warm-up alone")
closed("after_warm")

case("numbered")
profiler = capture("numbered", plan(*[WARMUP] * 42, RECORD))
profiler.step_num = 41
profiler.start()
for _ in range(3):
    step(profiler)
profiler.stop()

case("two handlers")
first = tensorboard_trace_handler("first", "one", analyse_flag=False)
second = tensorboard_trace_handler("second", "two", analyse_flag=False)
profiler = profile(on_trace_ready=first)
profiler.start()
profiler.stop()

case("another thread")
on_thread(lambda: closed("thread"))

case("operators elsewhere")
profiler = capture("elsewhere", plan(RECORD))
profiler.start()
on_thread(lambda: torch.cumsum(torch.ones(3), 0))
profiler.stop()

case("operators elsewhere, enabled")
def enabled():
    profile.enable_profiler_in_child_thread()
    torch.cumsum(torch.ones(3), 0)
    profile.disable_profiler_in_child_thread()
profiler = capture("enabled", plan(RECORD))
profiler.start()
on_thread(enabled)
profiler.stop()

case("nothing recorded")
profiler = capture("nothing")
profiler.start()
profiler.stop()

case("long name")
handler = tensorboard_trace_handler("long", "w" * 226, analyse_flag=False)
handler = tensorboard_trace_handler("longest", "w" * 225, analyse_flag=False)

case("unwritable, made")
handler = tensorboard_trace_handler("file/below", "worker", analyse_flag=False)
tell(callable(handler))
profiler = profile(on_trace_ready=handler, schedule=plan(RECORD))
case("unwritable, started")
profiler.start()
tell(profiler.prof_if.prof_path)
case("unwritable, stopped")
profiler.stop()

case("no handler")
profiler = profile()
profiler.start()
profiler.stop()
del profiler
gc.collect()

case("attributes")
class Attributed:
    def __init__(self):
        self.window = [10, 12]
    def __call__(self, step):
        return RECORD
profiler = capture("attributes", Attributed())
profiler.start()
profiler.stop()

case("rank")
os.environ["RANK"] = "3"
closed("rank")
del os.environ["RANK"]

case("wrong options")
config = _ExperimentalConfig(profiler_level="Level9", l2_cache="yes", mstx_domain_include=["a"])
tell([config._profiler_level, config._l2_cache, config._mstx_domain_include])

case("end")
"""


@pytest.fixture(scope="module")
def captures(driver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Case], Path]]:
    """The parts of a process that makes captures one after the other, and its folder."""
    directory = tmp_path_factory.mktemp("captures")
    (directory / "file").touch()
    with driver.jobs(directory) as jobs:
        yield cases(jobs(PREAMBLE + CAPTURES)), directory


def test_a_closed_window_ends_inside_its_last_step_and_prints_nothing(captures) -> None:
    found, directory = captures
    assert (found["closed"].names, found["closed"].messages) == ([*WARM, "aclprofStart", *STOP], [])
    assert (found["closed, stopped"].names, found["closed, stopped"].messages) == ([], [])
    (made,) = directories(directory / "closed")
    assert {path.name.split("_0")[0] for path in made.iterdir()} >= {"profiler_info.json", "FRAMEWORK", "PROF"}
    assert made.name.startswith("worker_")


def test_stopping_an_open_window_prints_a_message_and_calls_the_driver_as_a_closed_one_does(captures) -> None:
    found, _ = captures
    assert found["open"].names == [*WARM, "aclprofStart"]
    assert found["open, stopped"].names == STOP
    (message,) = found["open, stopped"].messages
    assert message.startswith(STOPPED_IN_RECORD)


def test_without_a_schedule_steps_are_not_marked(captures) -> None:
    found, directory = captures
    assert found["no schedule"].names == START
    assert found["no schedule, stopped"].names == STOP
    assert found["no schedule, stopped"].messages[0].startswith(STOPPED_IN_RECORD)
    assert b"aten::add" in operators(directory / "no_schedule")
    assert b"ProfilerStep#" not in operators(directory / "no_schedule")
    assert b"ProfilerStep#2" in operators(directory / "open")


def test_an_open_window_that_its_schedule_ends_prints_nothing(captures) -> None:
    found, directory = captures
    assert found["ended by its plan, last step"].names == STOP
    assert found["ended by its plan, stopped"].names == []
    assert not [message for name, part in found.items() if name.startswith("ended") for message in part.messages]
    assert operators(directory / "by_plan").count(b"ProfilerStep#") == 1


def test_warm_up_that_its_schedule_ends_is_started_and_stopped_and_does_not_touch_the_next(captures) -> None:
    found, _ = captures
    assert found["warm-up alone"].names == WARM
    assert found["warm-up alone, last step"].names == ["aclprofStart", *STOP]
    assert found["warm-up alone, last step"].messages == ["Incorrect schedule: WARMUP followed by NONE"]
    assert "profiler_info.json" in found["warm-up alone, last step"].told
    assert found["after warm-up alone"].names == [*WARM, "aclprofStart", *STOP]


def test_steps_are_numbered_from_step_num(captures) -> None:
    _, directory = captures
    recorded = operators(directory / "numbered")
    assert [number for number in range(40, 47) if b"ProfilerStep#%d" % number in recorded] == [42, 43, 44]


def test_the_handler_that_was_built_last_names_the_directory_of_all(captures) -> None:
    _, directory = captures
    assert not (directory / "first").exists()
    (made,) = directories(directory / "second")
    assert made.name.startswith("two_")


def test_all_on_one_thread_which_is_not_the_main_one_is_recorded(captures) -> None:
    found, directory = captures
    assert found["another thread"].names == [*WARM, "aclprofStart", *STOP]
    assert len({call.tid for call in found["another thread"].calls}) == 1
    assert b"aten::add" in operators(directory / "thread")


def test_operators_of_other_threads_are_recorded_only_if_these_ask_for_it(captures) -> None:
    _, directory = captures
    assert b"aten::cumsum" not in operators(directory / "elsewhere")
    assert b"aten::cumsum" in operators(directory / "enabled")


def test_a_capture_in_which_no_operator_ran_has_no_file_of_operators(captures) -> None:
    _, directory = captures
    (made,) = directories(directory / "nothing")
    assert list((made / "FRAMEWORK").iterdir()) == []


def test_a_worker_name_that_is_too_long_is_replaced_with_a_warning(captures) -> None:
    found, _ = captures
    assert found["long name"].messages == ["Invalid parameter worker_name, reset it to default."]


def test_a_directory_that_cannot_be_made_is_only_printed(captures) -> None:
    found, directory = captures
    assert found["unwritable, made"].told is True
    started = found["unwritable, started"]
    assert started.told == ""
    assert started.messages[0].startswith("Call start failed. Exception: Failed to make directory")
    assert started.names == found["unwritable, stopped"].names == []
    assert (directory / "profiler_info.json").exists(), "stop() writes into the working directory"


def test_without_a_handler_data_land_in_the_working_directory_and_stay(captures) -> None:
    _, directory = captures
    (made,) = directories(directory / "export_only_prof_dir")
    assert (made / "profiler_info.json").exists()


def test_attributes_of_the_schedule_and_the_rank_are_in_profiler_info(captures) -> None:
    _, directory = captures
    (made,) = directories(directory / "attributes")
    config = json.loads((made / "profiler_info.json").read_text())["config"]
    assert config["common_config"]["schedule"] == {"window": [10, 12]}
    assert config["experimental_config"]["_profiler_level"] == "Level1"
    (made,) = directories(directory / "rank")
    assert json.loads((made / "profiler_info_3.json").read_text())["rank_id"] == "3"


def test_wrong_options_are_reset_with_a_warning(captures) -> None:
    found, _ = captures
    assert found["wrong options"].told == ["Level0", False, []]
    assert len(found["wrong options"].messages) == 3


# Each of these leaves its process unfit for another capture.
SPOILING = """
def leak():
    case("leak")
    profiler = capture("leak", plan(WARMUP))
    profiler.start()
    step(profiler)
    profiler.stop()
    tell(os.path.exists(profiler.prof_if.prof_path))
    case("after leak")
    profiler = capture("after_leak", plan(RECORD), ProfilerLevel.Level0)
    profiler.start()
    step(profiler)
    profiler.stop()

def elsewhere():
    case("started here")
    profiler = capture("elsewhere", plan(RECORD))
    profiler.start()
    step(profiler)
    case("stopped elsewhere")
    on_thread(profiler.stop)
    tell(os.listdir(os.path.join(profiler.prof_if.prof_path, "FRAMEWORK")))
    case("after elsewhere")
    profiler = capture("after_elsewhere", plan(RECORD))
    profiler.start()
    step(profiler)
    profiler.stop()

def dropped():
    case("dropped")
    profiler = capture("dropped", plan(RECORD))
    profiler.start()
    step(profiler)
    profiler.stopped = True
    del profiler
    gc.collect()
    case("after dropped")
    closed("after_dropped")

def refused():
    for call in ("aclprofCreateConfig", "aclprofStart"):
        case(call)
        os.environ["STUB_DRIVER_FAIL"] = call
        tell(sorted({name.split("_")[0] for name in os.listdir(closed(call))}))

def mode():
    case("PROFILING_MODE")
    os.environ["PROFILING_MODE"] = "dynamic"
    tell(closed("mode"))

def sample():
    case("PROFILER_SAMPLECONFIG")
    os.environ["PROFILER_SAMPLECONFIG"] = "dynamic"
    tell(closed("sample"))

for function in (leak, elsewhere, dropped, refused, mode, sample):
    apart(function)
"""


@pytest.fixture(scope="module")
def spoiling(driver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Case], Path]]:
    """The parts of processes of which each breaks its torch_npu, and their folder."""
    directory = tmp_path_factory.mktemp("spoiling")
    with driver.jobs(directory) as jobs:
        yield cases(jobs(PREAMBLE + SPOILING)), directory


def test_stop_in_warm_up_leaks_the_drivers_config_into_the_next_capture(spoiling) -> None:
    found, directory = spoiling
    assert found["leak"].names == [*WARM, "aclprofFinalize"]
    assert found["leak"].told is False
    assert found["after leak"].names == ["aclprofInit", "aclprofStart", *STOP], "with the level of the first capture"
    assert found["after leak"].calls[1].arguments["config"] == "1"
    assert operators(directory / "after_leak") == b""
    assert b"aten::add" in operators(directory / "leak"), "the second's data are where the first's had been"


def test_stop_on_another_thread_does_not_stop_the_driver_and_spoils_the_next_capture(spoiling) -> None:
    found, directory = spoiling
    assert found["stopped elsewhere"].names == ["aclprofFinalize"]
    assert found["stopped elsewhere"].told == []
    assert found["after elsewhere"].names == ["aclprofInit", *STOP]
    assert operators(directory / "after_elsewhere") == b""


def test_a_profiler_that_is_dropped_while_it_records_spoils_the_next_capture(spoiling) -> None:
    found, directory = spoiling
    assert found["dropped"].names == START
    assert "aclprofStart" not in found["after dropped"].names
    (made,) = directories(directory / "after_dropped")
    assert not list(made.glob("PROF_*")), "the device's data of the second went where the first's are"


@pytest.mark.parametrize("call", ["aclprofCreateConfig", "aclprofStart"])
def test_a_driver_that_refuses_is_not_reported(spoiling, call: str) -> None:
    found = spoiling[0][call]
    assert found.messages == []
    assert found.told == ["FRAMEWORK", "profiler"], "only the missing PROF_* says that the device gave nothing"


@pytest.mark.parametrize("variable", ["PROFILING_MODE", "PROFILER_SAMPLECONFIG"])
def test_variables_of_other_profilers_make_all_of_it_do_nothing(spoiling, variable: str) -> None:
    found, directory = spoiling
    assert found[variable].told == ""
    assert found[variable].calls == []
    assert "torch_npu profiler api is not effective" in found[variable].printed
    assert not (directory / "mode").exists()
    assert not (directory / "sample").exists()


def test_missing_libraries_of_options_are_only_printed(job, driver) -> None:
    without = job.directory / "without"
    names = ("libms_tools_ext.so", "libascend_dump.so")
    shutil.copytree(driver.libraries, without, ignore=shutil.ignore_patterns(*names))
    code = """
for option in ("mstx", "record_op_args"):  # the second breaks torch_npu
    case(option)
    config = _ExperimentalConfig(**{"profiler_level": ProfilerLevel.Level1, option: True})
    handler = tensorboard_trace_handler(option, "worker", analyse_flag=False)
    windows = schedule(wait=0, warmup=1, active=2, repeat=1)
    profiler = profile(on_trace_ready=handler, schedule=windows, experimental_config=config)
    profiler.start()
    for _ in range(3):
        step(profiler)
"""
    found = cases(job(PREAMBLE + code, env={"LD_LIBRARY_PATH": str(without)}))
    for option, library, ended in (("mstx", names[0], True), ("record_op_args", names[1], False)):
        assert f"{library}: cannot open shared object file" in found[option].messages[0]
        (made,) = directories(job.directory / option)
        assert (made / "profiler_info.json").exists() is ended
        assert ("aclprofFinalize" in found[option].names) is ended


ANALYSES = """
case("read")
path = closed("read")
multiprocessing.set_start_method("spawn", force=True)
analyse(path, 1)
tell([multiprocessing.get_start_method(), path])

case("daemon")
path = closed("daemon")
process = multiprocessing.get_context("fork").Process(target=analyse, args=(path, 1), daemon=True)
process.start()
process.join()
tell([process.exitcode, sorted(os.listdir(path))])

for outcome in ("fail", "nothing"):
    case(outcome)
    path = closed(outcome)
    os.environ["STUB_MSPROF"] = outcome
    analyse(path, 1)
    tell(sorted(os.listdir(os.path.join(path, "ASCEND_PROFILER_OUTPUT"))))

case("missing")
path = closed("missing")
os.environ["PATH"] = "/nowhere"
analyse(path, 1)
tell(sorted(os.listdir(os.path.join(path, "ASCEND_PROFILER_OUTPUT"))))
"""


@pytest.fixture(scope="module")
def analyses(driver, msprof_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    """The parts of a process that analyses captures one after the other; it exits with 0."""
    with driver.jobs(tmp_path_factory.mktemp("analyses"), PATH=msprof_path) as jobs:
        yield cases(jobs(PREAMBLE + ANALYSES))


def test_an_analysis_writes_kernels_by_step(analyses) -> None:
    _, path = analyses["read"].told
    output = Path(path) / "ASCEND_PROFILER_OUTPUT"
    with (output / "kernel_details.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["Step Id"], row["Type"]) for row in rows if row["Type"] == "Add"] == [("1", "Add"), ("2", "Add")]
    names = {"trace_view.json", "step_trace_time.csv", "communication.json", "analyse.done"}
    assert names <= {file.name for file in output.iterdir()}
    assert analyses["read"].messages == []


def test_an_analysis_changes_how_the_process_starts_others(analyses) -> None:
    method, _ = analyses["read"].told
    assert method == "fork"


def test_in_a_daemon_an_analysis_reads_nothing_and_succeeds(analyses) -> None:
    code, names = analyses["daemon"].told
    assert code == 0
    assert "ASCEND_PROFILER_OUTPUT" not in names
    assert "FRAMEWORK" in names
    assert analyses["daemon"].messages[0].startswith("The profiling data cannot be parsed during the daemon process")


@pytest.mark.parametrize("outcome", ["fail", "nothing", "missing"])
def test_an_analysis_that_cannot_read_the_device_succeeds_and_says_that_it_is_done(analyses, outcome: str) -> None:
    names = analyses[outcome].told
    assert "analyse.done" in names
    assert "kernel_details.csv" not in names
    assert "Task [KernelViewParser] run failed." in analyses[outcome].messages
