"""Writes synthetic torch_npu directories with the file names, columns and layout of torch_npu and CANN.

The recording has two steps. The host launches `KERNELS`. The last kernel of step 10 runs while the host is in step 11.
"""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

NAME = "rank_0003.step10_4711_20260102030405678_ascend_pt"
OUTPUT = "ASCEND_PROFILER_OUTPUT"
CPU, NPU = "ProfilerActivity.CPU", "ProfilerActivity.NPU"
BASE_US = 1_713_174_287_000_000

LEVEL_0 = (
    "Device_id", "Name", "Type", "Accelerator Core", "Start Time(us)", "Duration(us)", "Wait Time(us)", "Block Num"
)  # fmt: skip
LEVEL_1 = (
    "Device_id", "Model ID", "Task ID", "Stream ID", "Name", "Type", "OP State", "Accelerator Core", "Start Time(us)",
    "Duration(us)", "Wait Time(us)", "Block Num", "Mix Block Num", "HF32 Eligible", "Input Shapes",
)  # fmt: skip
OLD = (
    "Model ID", "Task ID", "Stream ID", "Name", "Type", "Accelerator Core", "Start Time(us)", "Duration(us)",
    "Wait Time(us)", "Block Dim", "Mix Block Dim", "Input Shapes",
)  # fmt: skip

KERNELS: list[dict[str, Any]] = [
    {"Step Id": 10, "Name": "aclnnMatmul_MatMulV3Common_MatMulV3", "Type": "MatMulV3", "at": 100, "us": 40.5},
    {"Step Id": 10, "Name": "Cast66", "Type": "Cast", "Accelerator Core": "AI_VECTOR_CORE", "at": 150, "us": 10},
    {"Step Id": 10, "Name": "hcom_allReduce__445_0_1", "Type": "hcom_allReduce_", "Stream ID": "N/A",
     "Accelerator Core": "COMMUNICATION", "at": 170, "us": 100.25},
    {"Step Id": 10, "Name": "Cast67", "Type": "Cast", "Accelerator Core": "AI_VECTOR_CORE", "at": 1020, "us": 30},
    {"Step Id": 11, "Name": "aclnnMatmul_MatMulV3Common_MatMulV3", "Type": "MatMulV3", "at": 1100, "us": 41.5},
    {"Step Id": 11, "Name": "hcom_allReduce__445_1_1", "Type": "hcom_allReduce_", "Stream ID": "N/A",
     "Accelerator Core": "COMMUNICATION", "at": 1170, "us": 90},
]  # fmt: skip


def time_us(at_us: float) -> str:
    return f"{BASE_US + at_us:.3f}"


def kernel_rows(kernels: Sequence[dict[str, Any]], columns: Sequence[str], *, steps: bool = True) -> str:
    """Return the text of a kernel_details.csv."""
    text = io.StringIO()
    columns = ("Step Id", *columns) if steps else columns
    writer = csv.writer(text)
    writer.writerow(columns)
    for number, kernel in enumerate(kernels):
        row = {"Device_id": 0, "Model ID": 4294967295, "Task ID": number, "Stream ID": 16, "OP State": "dynamic",
               "Accelerator Core": "AI_CORE", "Block Num": 24, "Block Dim": 24, "Input Shapes": '"4,1025;1025"',
               "Start Time(us)": f"{time_us(kernel['at'])}\t", "Duration(us)": kernel["us"], **kernel}  # fmt: skip
        writer.writerow([row.get(column, "N/A") for column in columns])
    return text.getvalue()


def complete(process: int, thread: int, name: str, at_us: float, us: float, **members: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": time_us(at_us), "dur": us, **members}


def names(process: int, name: str, label: str, threads: dict[int, str]) -> list[dict[str, Any]]:
    return [
        {"name": "process_name", "pid": process, "tid": 0, "args": {"name": name}, "ph": "M"},
        {"name": "process_labels", "pid": process, "tid": 0, "args": {"labels": label}, "ph": "M"},
        *(
            {"name": "thread_name", "pid": process, "tid": tid, "args": {"name": thread}, "ph": "M"}
            for tid, thread in threads.items()
        ),
    ]


HOST, CANN, HARDWARE, COMMUNICATION, OVERLAP = 4711, 4824096, 4824416, 4824448, 4824480


def framework_events() -> list[dict[str, Any]]:
    """Return events that torch_npu writes: operators and the task queue."""
    return [
        complete(HOST, HOST, "ProfilerStep#10", 0, 990, cat="cpu_op", args={"Sequence number": -1}),
        complete(HOST, HOST, "ProfilerStep#11", 1000, 990, cat="cpu_op", args={"Sequence number": -1}),
        complete(HOST, HOST, "aten::mm", 20, 30, cat="cpu_op", args={"Sequence number": 7}),
        complete(HOST, HOST, "aten::mm", 1030, 31, cat="cpu_op", args={"Sequence number": 8}),
        complete(HOST, 4713, "Dequeue@aclnnMatmul", 40, 20, cat="dequeue", args={"correlation_id": 1}),
        {"ph": "s", "bp": "e", "name": "enqueue_to_dequeue", "id": 1, "pid": HOST, "tid": HOST, "ts": time_us(30),
         "cat": "async_task_queue"},
        *names(HOST, "Python", "CPU", {HOST: f"Thread {HOST}"}),
    ]  # fmt: skip


def msprof_events(*, communication: str = "Communication") -> list[dict[str, Any]]:
    """Return events that msprof writes. The device process's metadata follows its tasks, as in real files."""
    return [
        *names(COMMUNICATION, communication, "NPU 0", {0: "Group 13681369207305868445 Communication", 1: "Plane 0"}),
        complete(COMMUNICATION, 0, "hcom_allReduce__445_0_1", 170, 100.25, args={"count": 8}),
        complete(COMMUNICATION, 1, "Notify_Wait", 170, 80, args={"task type": "Notify_Wait"}),
        complete(COMMUNICATION, 1, "Memcpy", 250, 20.25, args={"task type": "Memcpy"}),
        *names(OVERLAP, "Overlap Analysis", "NPU 0", {0: "Computing", 1: "Communication"}),
        complete(OVERLAP, 0, "Computing", 100, 40.5),
        complete(OVERLAP, 1, "Communication", 170, 100.25),
        complete(CANN, 4713, "AscendCL@aclnnMatmul", 45, 10, args={"connection_id": 8}),
        *names(CANN, "CANN", "CPU", {4713: "Thread 4713"}),
        # Device: kernels, waits between them, and an mstx range around a step.
        complete(HARDWARE, 16, "aclnnMatmul_MatMulV3Common_MatMulV3", 100, 40.5, args={"Task Type": "AI_CORE"}),
        complete(HARDWARE, 16, "Cast66", 150, 10, args={"Task Type": "AI_VECTOR_CORE"}),
        complete(HARDWARE, 17, "EVENT_WAIT", 160, 800, args={"Task Type": "EVENT_WAIT"}),
        complete(HARDWARE, 16, "ProfilerStep#10", 90, 900, args={"Physic Stream Id": 16, "Task Id": 7}),
        {"name": "HostToDevice8", "ph": "f", "id": "8", "ts": time_us(100), "cat": "HostToDevice", "pid": HARDWARE,
         "tid": 16, "bp": "e"},
        *names(HARDWARE, "Ascend Hardware", "NPU 0", {16: "Stream 16", 17: "Stream 17"}),
    ]  # fmt: skip


def trace_view(framework: list[dict[str, Any]], msprof: list[dict[str, Any]]) -> str:
    """Return the text of a trace_view.json. torch_npu appends the text of the second list to the first."""
    first = json.dumps(framework, ensure_ascii=False)[:-1]
    return f"{first},{json.dumps(msprof, ensure_ascii=False)[1:]}"


STEP_TRACE_TIME = (
    "Device_id,Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free,Stage,Bubble,"
    "Communication(Not Overlapped and Exclude Receive),Preparing\r\n"
    "0,10,80.5,100.25,0.0,100.25,769.25,950.0,0.0,100.25,100.0\r\n"
    "0,11,41.5,90.0,0.0,90.0,28.5,160.0,0.0,90.0,100.0\r\n"
)


def raw(
    folder: Path,
    name: str = NAME,
    *,
    rank: int | None = 3,
    activities: Sequence[str] = (CPU, NPU),
    level: str = "Level1",
) -> Path:
    """Write the raw data of a recording and return its directory."""
    directory = folder / name
    (directory / "logs").mkdir(parents=True)
    info = {
        "config": {
            "common_config": {"activities": [*activities], "schedule": None, "record_shapes": False},
            "experimental_config": {"_profiler_level": level, "_export_type": ["text"]},
        },
        "rank_id": rank,
    }
    suffix = "" if rank is None else f"_{rank}"
    (directory / f"profiler_info{suffix}.json").write_text(json.dumps(info, indent=4))
    (directory / "profiler_metadata.json").write_text("{}")
    if CPU in activities:
        (directory / "FRAMEWORK").mkdir()
        (directory / "FRAMEWORK" / "torch.op_range").write_bytes(b"\x01" * 64)
    if NPU in activities:
        data = directory / "PROF_000001_20260102030405678_ABCDEF" / "device_0" / "data"
        data.mkdir(parents=True)
        (data / "ascend.slice_0").write_bytes(b"\x02" * 128)
    return directory


def analysed(directory: Path, *, kernels: str | None = None, trace: str | None = None) -> Path:
    """Write the output of an analysis and return the output directory."""
    output = directory / OUTPUT
    output.mkdir()
    table = kernel_rows(KERNELS, LEVEL_1) if kernels is None else kernels
    text = trace_view(framework_events(), msprof_events()) if trace is None else trace
    (output / "kernel_details.csv").write_bytes(table.encode())
    (output / "trace_view.json").write_text(text)
    (output / "step_trace_time.csv").write_bytes(STEP_TRACE_TIME.encode())
    (output / "communication.json").write_text(json.dumps({"step10": {"p2p": {}, "collective": {}}}))
    (output / "analyse.done").touch()
    return output


def database(file: Path) -> None:
    """Write an SQLite database like torch_npu's."""
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE STRING_IDS (id INTEGER, value TEXT)")
        connection.executemany("INSERT INTO STRING_IDS VALUES (?, ?)", [(n, f"aten::op{n}" * 20) for n in range(2000)])
        connection.commit()
