"""Stub of CANN's program `msprof`, which torch_npu's analysis starts to read device data.

The stub converts the launches that the stub driver recorded (device_N/data/stub_tasks of a capture) to device rows.
torch_npu's parsers then write kernel_details.csv, step_trace_time.csv, communication.json, a trace_view.json with
device lanes, and a database. The files have the names and columns of real files, but fewer metrics and tables.

All times and sizes are invented. A kernel takes 10 us. It starts 1 us after its launch or after the previous kernel of
its device. If the capture records communication, an all-reduce of 4 us follows each kernel.

Environment:
    STUB_MSPROF       "fail": exit with 1, like CANN for unreadable data; "hang": wait until killed; unset: succeed
    STUB_MSPROF_PIDS  a file to which each process appends its PID, so that tests can check whether it is running
"""

from __future__ import annotations

import csv
import json
import os
import signal
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

HELP = "Stub of msprof: --export=on|--analyze=on --output=DIR [--type=text|db]"
KERNEL_NS = 10_000
COMMUNICATION_NS = 4_000
AFTER_LAUNCH_NS = 1_000
# A thread of torch_npu checks every 0.1 s for the files of an export. If the export ends before the first check,
# torch_npu treats the analysis as failed. Real exports take longer. The stub cannot detect the check, so it waits.
EXPORT_S = 0.5
HCCL_TRACE = 0x20  # ACL_PROF_HCCL_TRACE of acl_prof.h
NO_METRICS = 255  # ACL_AICORE_NONE of acl_prof.h
NO_MODEL = 4294967295
STREAM, COMMUNICATION_STREAM = 2, 3
ALL_REDUCE = "hcom_allReduce_"
GROUP = "127.0.0.1%enp0_60000_0_1700000000000000"
STAMP = "20240101000000"
FIRST_PID = 1 << 23  # larger than any PID, because host lanes use PIDs

TASKS = "Device_id,Model ID,Task ID,Stream ID,Op Name,OP Type,OP State,Task Type"
TIMES = "Task Start Time(us),Task Duration(us),Task Wait Time(us)"
SHAPES = "HF32 Eligible,Input Shapes,Input Data Types,Input Formats,Output Shapes,Output Data Types,Output Formats"
METRICS = "aicore_time(us),aic_total_cycles,aiv_time(us),aiv_total_cycles,aiv_vec_ratio"
OP_SUMMARY = f"{TASKS},{TIMES},Block Num,Mix Block Num,{SHAPES},Context ID"
TASK_TIME = "Device_id,kernel_name,kernel_type,stream_id,task_id,task_time(us),task_start(us),task_stop(us)"
OP_STATISTIC = "Device_id,OP Type,Core Type,Count,Total Time(us),Min Time(us),Avg Time(us),Max Time(us),Ratio(%)"
API_STATISTIC = "Device_id,Level,API Name,Time(us),Count,Avg(us),Min(us),Max(us),Variance"


class Task(NamedTuple):
    """A device task of an operator."""

    number: int
    name: str
    kind: str
    start_ns: int
    duration_ns: int
    wait_ns: int
    launch_ns: int

    @property
    def communicates(self) -> bool:
        return self.kind == ALL_REDUCE

    @property
    def core(self) -> str:
        return "COMMUNICATION" if self.communicates else "AI_VECTOR_CORE"

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


class Device(NamedTuple):
    """One device of a capture."""

    id: int
    metrics: bool
    tasks: list[Task]


def main(arguments: list[str]) -> int:
    if pids := os.environ.get("STUB_MSPROF_PIDS"):
        with Path(pids).open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")
    if "--help" in arguments:
        sys.stdout.write(f"{HELP}\n")
        return 0
    match os.environ.get("STUB_MSPROF"):
        case "fail":
            sys.stderr.write("The msprof stub fails because of STUB_MSPROF.\n")
            return 1
        case "hang":
            while True:
                signal.pause()
    options = dict(argument.removeprefix("--").partition("=")[::2] for argument in arguments)
    capture = Path(options["output"])
    devices = [read(path) for path in sorted(capture.glob("device_*"))]
    match "export" in options, options.get("type", "text"):
        case True, "text":
            export_text(capture / "mindstudio_profiler_output", devices)
            time.sleep(EXPORT_S)
        case True, "db":
            export_database(capture / f"msprof_{STAMP}.db", devices)
            time.sleep(EXPORT_S)
        case False, "text":
            analyze_text(capture / "analyze", devices)
    return 0


def read(path: Path) -> Device:
    """Create the device's tasks from the launches that the stub driver recorded."""
    header, *lines = (path / "data" / "stub_tasks").read_text(encoding="utf-8").splitlines()
    settings = dict(setting.split("=") for setting in header.split())
    communicates = bool(int(settings["data_types"], 16) & HCCL_TRACE)
    tasks: list[Task] = []
    free = 0
    for number, line in enumerate(lines):
        kind, launched = line.rsplit(" ", 1)
        launch = int(launched)
        start = max(launch + AFTER_LAUNCH_NS, free)
        wait = start - (free or start)
        tasks.append(Task(len(tasks), f"{kind}{number}", kind, start, KERNEL_NS, wait, launch))
        free = start + KERNEL_NS
        if communicates:
            name = f"hcom_allReduce__123_{number}_1"
            tasks.append(Task(len(tasks), name, ALL_REDUCE, free, COMMUNICATION_NS, 0, launch))
            free += COMMUNICATION_NS
    return Device(int(path.name.removeprefix("device_")), int(settings["aic_metrics"]) != NO_METRICS, tasks)


def us(ns: int) -> str:
    """Format a time like msprof: as text, which keeps all digits of a time since the epoch."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def export_text(output: Path, devices: list[Device]) -> None:
    output.mkdir(exist_ok=True)
    # torch_npu starts reading the timeline as soon as a .csv exists.
    events = [event for device in devices for event in timeline(device)]
    (output / f"msprof_{STAMP}.json").write_text(json.dumps(events), encoding="utf-8")
    metrics = any(device.metrics for device in devices)
    tasks = [(device, task) for device in devices for task in device.tasks]
    if tasks:
        header = f"{OP_SUMMARY},{METRICS}" if metrics else OP_SUMMARY
        write(output / f"op_summary_{STAMP}.csv", header, [summary(device, task) for device, task in tasks])
    rows = [
        # msprof appends a tab to times, so that spreadsheets do not convert them.
        [device.id, task.name, "COMMUNICATION" if task.communicates else "KERNEL_AIVEC", STREAM, task.number, *times]
        for device, task in tasks
        for times in [(task.duration_ns / 1000, f"{us(task.start_ns)}\t", f"{us(task.end_ns)}\t")]
    ]
    write(output / f"task_time_{STAMP}.csv", TASK_TIME, rows)
    kinds = sorted({(device.id, task.kind, task.core) for device, task in tasks})
    rows = []
    for kind in kinds:
        same = [task.duration_ns / 1000 for device, task in tasks if (device.id, task.kind, task.core) == kind]
        rows.append([*kind, len(same), sum(same), min(same), sum(same) / len(same), max(same), 100 / len(kinds)])
    write(output / f"op_statistic_{STAMP}.csv", OP_STATISTIC, rows)
    call = ["host", "acl", "aclopCompileAndExecute", len(tasks), len(tasks), 1, 1, 1, 0]
    write(output / f"api_statistic_{STAMP}.csv", API_STATISTIC, [call])


def summary(device: Device, task: Task) -> list[Any]:
    row = [device.id, NO_MODEL, task.number, STREAM, task.name, task.kind]
    row += ["N/A" if task.communicates else "dynamic", task.core]
    row += [f"{us(task.start_ns)}\t", task.duration_ns / 1000, task.wait_ns / 1000]
    if task.communicates:
        return [*row, 0, 0, *["N/A"] * (13 if device.metrics else 8)]
    row += [40, 0, "NO", '"4,4;4,4"', "FLOAT;FLOAT", "ND;ND", '"4,4"', "FLOAT", "ND", "N/A"]
    return [*row, 0, 0, task.duration_ns / 1000, 18000, 0.5] if device.metrics else row


def write(path: Path, header: str, rows: list[list[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header.split(","), *rows])


def timeline(device: Device) -> list[dict[str, Any]]:
    """Create the device's events like msprof: one process per layer, and flows from host calls to tasks."""
    layers = ["CANN", "Ascend Hardware", "Communication", "Overlap Analysis"]
    pids = [FIRST_PID + 32 * layer + device.id for layer in range(len(layers))]
    host, hardware, communication, overlap = pids
    events: list[dict[str, Any]] = []
    for sort, (pid, layer) in enumerate(zip(pids, layers, strict=True)):
        label = "CPU" if layer == "CANN" else f"NPU {device.id}"
        values = {"process_name": {"name": layer}, "process_labels": {"labels": label}}
        values["process_sort_index"] = {"sort_index": 10 + sort}
        events += [{"ph": "M", "name": key, "pid": pid, "tid": 0, "args": args} for key, args in values.items()]
    lanes = ["Computing", "Communication", "Communication(Not Overlapped)", "Free"]
    threads = [(host, 7, "Thread 7"), (communication, 0, "Group 0 Communication")]
    threads += [(hardware, stream, f"Stream {stream}") for stream in (STREAM, COMMUNICATION_STREAM)]
    threads += [(overlap, tid, lane) for tid, lane in enumerate(lanes)]
    events += [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}} for pid, tid, name in threads
    ]
    before = None
    for task in device.tasks:
        timing = {"ph": "X", "ts": us(task.start_ns), "dur": task.duration_ns / 1000}
        args = {"Model Id": NO_MODEL, "Task Type": task.core, "Stream Id": STREAM, "Task Id": task.number}
        pid, tid = (communication, 0) if task.communicates else (hardware, STREAM)
        events.append({"name": task.name, "pid": pid, "tid": tid, **timing, "args": args})
        if task.communicates:  # the device's stream waits for the other ranks
            args = {**args, "Task Type": "EVENT_WAIT", "Stream Id": COMMUNICATION_STREAM}
            events.append({"name": "EVENT_WAIT", "pid": hardware, "tid": COMMUNICATION_STREAM, **timing, "args": args})
        busy = lanes[1:3] if task.communicates else lanes[:1]
        events += [{"name": lane, "pid": overlap, "tid": lanes.index(lane), **timing} for lane in busy]
        if before is not None and task.start_ns > before:
            idle = {"ph": "X", "ts": us(before), "dur": (task.start_ns - before) / 1000}
            events.append({"name": "Free", "pid": overlap, "tid": 3, **idle})
        before = task.end_ns
        flow = {"cat": "HostToDevice", "name": f"HostToDevice{task.number}", "id": str(device.id << 32 | task.number)}
        events.append({**flow, "ph": "s", "pid": host, "tid": 7, "ts": us(task.launch_ns)})
        events.append({**flow, "ph": "f", "bp": "e", "pid": pid, "tid": tid, "ts": us(task.start_ns)})
        if not task.communicates:
            call = {"name": "AscendCL@aclopCompileAndExecute", "ph": "X", "ts": us(task.launch_ns), "dur": 1.0}
            events.append({**call, "pid": host, "tid": 7, "args": {"level": "acl", "connection_id": task.number}})
    return events


def analyze_text(output: Path, devices: list[Device]) -> None:
    """Write the times and links of each communication."""
    zero = {"Transit Size(MB)": 0, "Transit Time(ms)": 0, "Bandwidth(GB/s)": 0}
    times: dict[str, Any] = {}
    links: dict[str, Any] = {}
    for task in (task for device in devices for task in device.tasks if task.communicates):
        ms = task.duration_ns / 1e6
        used = {"Transit Size(MB)": 1.0, "Transit Time(ms)": ms, "Bandwidth(GB/s)": round(1.0 / ms, 4)}
        link = used | {"Large Packet Ratio": 1.0, "Size Distribution": {"1.0": [1, ms]}}
        unused = zero | {"Large Packet Ratio": 0, "Size Distribution": {}}
        time_info = {"Start Timestamp(us)": task.start_ns / 1000, "Elapse Time(ms)": ms, "Transit Time(ms)": ms}
        time_info |= dict.fromkeys(("Wait Time(ms)", "Synchronization Time(ms)", "Idle Time(ms)"), 0)
        time_info |= dict.fromkeys(("Wait Time Ratio", "Synchronization Time Ratio"), 0)
        bandwidth = {"RDMA": unused, "HCCS": link, "PCIE": unused, "SDMA": link, "SIO": unused}
        times[f"{task.name}@{GROUP}"] = {
            "Communication Time Info": time_info,
            "Communication Bandwidth Info": bandwidth,
        }
        links[f"{task.name}@{GROUP}"] = {"0-0": {"Transport Type": "LOCAL", **used}}
    if times:
        output.mkdir(exist_ok=True)
        (output / "communication.json").write_text(json.dumps(times), encoding="utf-8")
        (output / "communication_matrix.json").write_text(json.dumps(links), encoding="utf-8")


def export_database(path: Path, devices: list[Device]) -> None:
    """Write the tables of msprof's database that torch_npu's tables refer to."""
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.executescript(
        """
        CREATE TABLE STRING_IDS (id INTEGER, value TEXT);
        CREATE TABLE CANN_API (startNs INTEGER, endNs INTEGER, type INTEGER, globalTid INTEGER, connectionId INTEGER,
            name INTEGER);
        CREATE TABLE TASK (startNs INTEGER, endNs INTEGER, deviceId INTEGER, connectionId INTEGER,
            globalTaskId INTEGER, globalPid INTEGER, taskType INTEGER, contextId INTEGER, streamId INTEGER,
            taskId INTEGER, modelId INTEGER);
        CREATE TABLE COMPUTE_TASK_INFO (name INTEGER, globalTaskId INTEGER, blockDim INTEGER, opType INTEGER);
        CREATE TABLE COMMUNICATION_OP (opName INTEGER, startNs INTEGER, endNs INTEGER, connectionId INTEGER);
        INSERT INTO STRING_IDS VALUES (1, 'launch');
        """
    )
    tasks = [(device.id, task) for device in devices for task in device.tasks]
    for number, (device, task) in enumerate(tasks, start=1):
        name = number + 1
        connection.execute("INSERT INTO STRING_IDS VALUES (?, ?)", (name, task.name))
        connection.execute(
            "INSERT INTO CANN_API VALUES (?, ?, 10000, 0, ?, 1)", (task.launch_ns, task.launch_ns + 1, number)
        )
        task_row = (task.start_ns, task.end_ns, device, number, number, STREAM, task.number, NO_MODEL)
        connection.execute("INSERT INTO TASK VALUES (?, ?, ?, ?, ?, 0, 0, 0, ?, ?, ?)", task_row)
        if task.communicates:
            row = (name, task.start_ns, task.end_ns, number)
            connection.execute("INSERT INTO COMMUNICATION_OP VALUES (?, ?, ?, ?)", row)
        else:
            connection.execute("INSERT INTO COMPUTE_TASK_INFO VALUES (?, ?, 40, ?)", (name, number, name))
    connection.commit()
    connection.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
