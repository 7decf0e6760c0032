"""Tests of each option's effect on driver calls and on torch_npu's info file. One job makes all captures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from npu_captures import PREAMBLE, START, STOP, by_run, directories, info, manifest, names, operators

from profdeck import Status

# Values and bits of CANN's acl_prof.h.
METRICS = {
    "ArithmeticUtilization": "0",
    "PipeUtilization": "1",
    "Memory": "2",
    "MemoryL0": "3",
    "ResourceConflictRatio": "4",
    "MemoryUB": "5",
    "L2Cache": "6",
    "MemoryAccess": "8",
    "AiCoreNone": "255",
}
ACL_API, TASK_TIME, AICORE_METRICS, AICPU, L2CACHE, HCCL_TRACE = 0x1, 0x2, 0x4, 0x8, 0x10, 0x20
MSPROFTX, RUNTIME_API, TASK_TIME_L0, TASK_MEMORY, OP_ATTR = 0x80, 0x100, 0x800, 0x1000, 0x4000
LEVEL1 = ACL_API | TASK_TIME | AICORE_METRICS | HCCL_TRACE
SYS_IO, SYS_INTERCONNECTION, HOST_SYS = "5", "6", "8"

# For each run: the options, and the metrics, data types and other settings that the driver must receive.
CASES: dict[str, tuple[dict[str, Any], str, int, dict[str, str]]] = {
    "default": ({}, "1", LEVEL1, {}),
    "level0": ({"level": "level0"}, "255", ACL_API | TASK_TIME_L0, {}),
    "level2": ({"level": "level2"}, "1", LEVEL1 | AICPU | RUNTIME_API, {}),
    "level_none": ({"level": "level_none", "mstx": True}, "255", MSPROFTX, {}),
    "level0_mstx": ({"level": "level0", "mstx": True}, "255", ACL_API | TASK_TIME_L0 | MSPROFTX, {}),
    **{f"aic_{name}": ({"aic_metrics": name}, number, LEVEL1, {}) for name, number in METRICS.items()},
    "l2_cache": ({"l2_cache": True}, "1", LEVEL1 | L2CACHE, {}),
    "op_attr": ({"op_attr": True, "export": ["db", "text"]}, "1", LEVEL1 | OP_ATTR, {}),
    "record_op_args": ({"record_op_args": True}, "1", LEVEL1, {}),
    "mstx": ({"mstx": True}, "1", LEVEL1 | MSPROFTX, {}),
    "include": ({"mstx": True, "mstx_domain_include": ["other"]}, "1", LEVEL1 | MSPROFTX, {}),
    "exclude": (
        {"mstx": True, "mstx_domain_exclude": ["other", "communication"]},
        "1",
        LEVEL1 | MSPROFTX,
        {},
    ),
    "sys_io": ({"sys_io": True}, "1", LEVEL1, {SYS_IO: "100"}),
    "sys_interconnection": ({"sys_interconnection": True}, "1", LEVEL1, {SYS_INTERCONNECTION: "50"}),
    "host_sys": ({"host_sys": ["numa"]}, "1", LEVEL1, {HOST_SYS: "numa"}),
    "profile_memory": ({"profile_memory": True}, "1", LEVEL1 | TASK_MEMORY, {"3": "50"}),
    "record_shapes": ({"record_shapes": True}, "1", LEVEL1, {}),
    "with_stack": ({"with_stack": True}, "1", LEVEL1, {}),
    "with_modules": ({"with_modules": True}, "1", LEVEL1, {}),
    "gc": ({"gc_detect_threshold_ms": 0}, "1", LEVEL1, {}),
    "unsimplified": ({"data_simplification": False}, "1", LEVEL1, {}),
    "db": ({"export": ["db"]}, "1", LEVEL1, {}),
    "npu": ({"activities": ["npu"]}, "1", LEVEL1, {}),
}

CODE = f"""
for run, options in {[(run, case[0]) for run, case in CASES.items()]!r}:
    profiler = build(run, options)
    with profiler.capture(1):
        with profiler.stage("forward"):
            work()
        gc.collect()
        with torch_npu.npu.mstx.annotate("mine", domain="other"):
            pass
capture("cpu", {{"activities": ["cpu"]}})
"""


@pytest.fixture(scope="module")
def job(driver: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """The job that made all captures, and its directory."""
    directory = tmp_path_factory.mktemp("options")
    with driver.jobs(directory, PROFDECK_LEASE_DIR=str(directory / "leases")) as jobs:
        yield jobs(PREAMBLE + CODE), directory


@pytest.mark.parametrize("run", CASES)
def test_option_is_passed_to_the_driver(job: tuple[Any, Path], run: str) -> None:
    job_result, directory = job
    _, metrics, types, settings = CASES[run]
    (recording,) = by_run(job_result.calls)[run]
    changed = [call for call in recording if call.name == "aclprofSetConfig"]
    assert {call.arguments["type"]: call.arguments["value"] for call in changed} == settings
    assert (
        names([call for call in recording if call.name.startswith("aclprof") and call not in changed]) == START + STOP
    )
    created = recording[1 + len(changed)].arguments
    assert (created["aic_metrics"], int(created["data_types"], 16), created["devices"]) == (metrics, types, "0")
    capture_manifest = manifest(directory / run)
    assert (capture_manifest.status, capture_manifest.problems, capture_manifest.notes) == (Status.COMPLETE, (), ())


@pytest.mark.parametrize("run", CASES)
def test_option_is_in_the_manifest_and_torch_npus_info(job: tuple[Any, Path], run: str) -> None:
    """The manifest and torch_npu's info file have the same options."""
    _, directory = job
    options = manifest(directory / run).options
    (recording_directory,) = directories(directory / run)
    recorded_config = info(recording_directory)
    common, experimental = recorded_config["common_config"], recorded_config["experimental_config"]
    assert {key: options[key] for key in CASES[run][0]} == CASES[run][0]
    assert experimental["_profiler_level"].lower() == options["level"]
    for name in ("l2_cache", "mstx", "op_attr", "data_simplification", "sys_io", "sys_interconnection"):
        assert experimental[f"_{name}"] == options[name], name
    for name in ("host_sys", "mstx_domain_include", "mstx_domain_exclude"):
        assert sorted(experimental[f"_{name}"]) == sorted(options[name]), name
    assert experimental["record_op_args"] == options["record_op_args"]
    assert sorted(experimental["_export_type"]) == sorted(options["export"])
    assert experimental["_gc_detect_threshold"] == options["gc_detect_threshold_ms"]
    for name in ("record_shapes", "profile_memory", "with_stack", "with_modules", "with_flops"):
        assert common[name] == options[name], name
    assert sorted(common["activities"]) == sorted(f"ProfilerActivity.{name.upper()}" for name in options["activities"])


def test_option_adds_its_files(job: tuple[Any, Path]) -> None:
    _, directory = job

    def framework(run: str) -> set[str]:
        (recording_directory,) = directories(directory / run)
        return {path.name for path in recording_directory.glob("FRAMEWORK/*")}

    plain = framework("default")
    assert "torch.op_range" in plain
    assert framework("with_stack") - plain >= {"torch.python_tracer_func", "torch.python_tracer_hash"}
    assert framework("with_modules") - plain >= {"torch.python_tracer_func"}
    assert framework("gc") - plain == {"torch.gc_record"}
    assert framework("profile_memory") - plain == {"torch.memory_usage"}
    (recording_directory,) = directories(directory / "record_shapes")
    assert len(operators(recording_directory)) > len(operators(directories(directory / "default")[0]))


def test_host_only_capture_does_not_call_the_driver(job: tuple[Any, Path]) -> None:
    job_result, directory = job
    assert "cpu" not in by_run(job_result.calls)
    capture_manifest = manifest(directory / "cpu")
    assert (capture_manifest.status, capture_manifest.options["aic_metrics"]) == (Status.COMPLETE, "AiCoreNone")
    (recording_directory,) = directories(directory / "cpu")
    assert {path.name for path in recording_directory.iterdir()} == {
        "FRAMEWORK",
        "profiler_info.json",
        "profiler_metadata.json",
    }


def test_device_only_capture_has_no_host_data(job: tuple[Any, Path]) -> None:
    _, directory = job
    (recording_directory,) = directories(directory / "npu")
    assert not (recording_directory / "FRAMEWORK").exists()
    assert list(recording_directory.glob("PROF_*/device_0"))


def test_stages_are_mstx_ranges_or_host_annotations(job: tuple[Any, Path]) -> None:
    job_result, directory = job
    begun = [call.arguments for call in job_result.calls if call.name == "mstxRangeStartA"]
    ended = {call.arguments["id"] for call in job_result.calls if call.name == "mstxRangeEnd"}
    stages = [call for call in begun if call["message"] == "forward"]
    with_mstx = [run for run, (options, *_) in CASES.items() if options.get("mstx") and run != "include"]
    assert len(stages) == len(with_mstx)
    assert {call["on_stream"] for call in stages} == {"yes"}
    assert {call["id"] for call in stages} <= ended
    for run in CASES:
        if "cpu" in manifest(directory / run).options["activities"]:
            (recording_directory,) = directories(directory / run)
            assert (b"forward" in operators(recording_directory)) is (run not in with_mstx), run
    domain_ranges = [call.arguments for call in job_result.calls if call.name == "mstxDomainRangeStartA"]
    assert len(domain_ranges) == len([run for run in [*with_mstx, "include"] if run != "exclude"])


def test_operator_arguments_are_dumped_next_to_the_capture(job: tuple[Any, Path]) -> None:
    job_result, directory = job
    (recording_directory,) = directories(directory / "record_op_args")
    dumps = [call for call in job_result.all_calls if "DumpArgs" in call.name]
    assert names(dumps) == ["aclopStartDumpArgs", "aclopStopDumpArgs"]
    assert dumps[0].arguments["path"] == f"{recording_directory}_op_args"


def test_with_stack_logs_a_warning(job: tuple[Any, Path]) -> None:
    job_result, _ = job
    (warning,) = [line for line in job_result.stderr.splitlines() if "options.with_stack" in line]
    assert "crash at the end of a capture" in warning
