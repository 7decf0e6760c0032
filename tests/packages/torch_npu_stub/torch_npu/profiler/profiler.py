"""Stub of torch_npu's ``analyse``. Like the original, it removes old results first and never raises an error.

STUB_ANALYSIS selects the behaviour:

    unset         write complete files
    nothing       write no file, print an error and report completion
    stale         keep the old results and report completion
    damaged       write a truncated timeline
    lost worker   write complete files without reporting completion
    killed        write complete files and send SIGKILL to this process
    hang          fork a process that ignores SIGTERM, and wait for it
    orphan        start a process that ignores SIGTERM, write complete files and exit without stopping it

STUB_ANALYSIS_PIDS is a pipe or file. Before it waits, the stub writes its process IDs to it, one per line.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

TRACE = '[{"ph": "X", "name": "aten::add", "pid": 1, "tid": 1, "ts": "1.000", "dur": 2.0}]'
KERNELS = "Name,Type,Accelerator Core,Start Time(us),Duration(us)\nAdd1,Add,AI_VECTOR_CORE,1.000\t,2.0\n"
WAIT = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"


def analyse(profiler_path, max_process_number=0, export_type=None):
    assert isinstance(max_process_number, int)
    assert max_process_number >= 1
    assert export_type is None or isinstance(export_type, list)
    behaviour = os.environ.get("STUB_ANALYSIS", "")
    if behaviour == "stale":
        print_log_line("INFO", "All profiling data parsed in a total time of 0:00:00.1")
        return
    output = Path(profiler_path, "ASCEND_PROFILER_OUTPUT")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    if behaviour == "hang":
        child = fork_unstoppable()
        write_process_ids(os.getpid(), child)
        os.waitpid(child, 0)
    if behaviour == "orphan":
        child = start_unstoppable()
        write_process_ids(child.pid)
        child.returncode = 0  # prevents Popen's ResourceWarning for a running child
    if behaviour != "nothing":
        write_results(output, export_type or read_export_types(Path(profiler_path)))
    if behaviour == "damaged":
        (output / "trace_view.json").write_text(TRACE[:-1])
    if behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "lost worker":
        return
    if behaviour == "nothing":
        print_log_line("ERROR", "Failed to export CANN Profiling data. Error msg: it says why")
    print_log_line("INFO", "All profiling data parsed in a total time of 0:00:00.1")


def write_results(output, exports):
    if "text" in exports:
        (output / "trace_view.json").write_text(TRACE)
        (output / "kernel_details.csv").write_text(KERNELS)
    if "db" in exports:
        import sqlite3

        with sqlite3.connect(output / "ascend_pytorch_profiler_0.db") as database:
            database.execute("CREATE TABLE t (x)")
        database.close()


def read_export_types(path):
    (info,) = path.glob("profiler_info*.json")
    return json.loads(info.read_text())["config"]["experimental_config"]["_export_type"]


def start_unstoppable():
    child = subprocess.Popen([sys.executable, "-c", WAIT], stdout=subprocess.PIPE)
    child.stdout.readline()  # printed after SIGTERM is ignored
    return child


def fork_unstoppable():
    previous_handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    while not child:
        signal.pause()
    signal.signal(signal.SIGTERM, previous_handler)
    return child


def write_process_ids(*processes):
    Path(os.environ["STUB_ANALYSIS_PIDS"]).write_text("".join(f"{process}\n" for process in processes))


def print_log_line(level, text):
    sys.stdout.write(f"|\b[2026-01-01 00:00:00] [{level}] [1] profiler.py: {text}\n")
    sys.stdout.flush()
