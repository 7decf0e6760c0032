"""A stand-in for torch_npu's ``analyse``, with its manners: it removes old results first, and never fails.

STUB_ANALYSIS says what it does instead of analysing:

    unset         writes whole files
    nothing       writes no file, says an error and that all was parsed
    stale         does nothing, and says that all was parsed
    damaged       leaves a timeline that is not closed
    lost worker   writes whole files and does not say that it is through
    killed        writes whole files and is killed before it is through
    hang          forks a process that does not heed SIGTERM, then waits for it
    orphan        starts a program that does not heed SIGTERM, writes whole files and leaves it behind

STUB_ANALYSIS_PIDS names a pipe or file to which it writes its process ids, one a line, when it is about to wait.
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
    todo = os.environ.get("STUB_ANALYSIS", "")
    if todo == "stale":
        say("INFO", "All profiling data parsed in a total time of 0:00:00.1")
        return
    output = Path(profiler_path, "ASCEND_PROFILER_OUTPUT")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    if todo == "hang":
        child = fork_waiting()
        tell(os.getpid(), child)
        os.waitpid(child, 0)
    if todo == "orphan":
        child = start_waiting()
        tell(child.pid)
        child.returncode = 0  # so that nobody says that it still runs
    if todo != "nothing":
        write(output, export_type or recorded_exports(Path(profiler_path)))
    if todo == "damaged":
        (output / "trace_view.json").write_text(TRACE[:-1])
    if todo == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if todo == "lost worker":
        return
    if todo == "nothing":
        say("ERROR", "Failed to export CANN Profiling data. Error msg: it says why")
    say("INFO", "All profiling data parsed in a total time of 0:00:00.1")


def write(output, exports):
    if "text" in exports:
        (output / "trace_view.json").write_text(TRACE)
        (output / "kernel_details.csv").write_text(KERNELS)
    if "db" in exports:
        import sqlite3

        with sqlite3.connect(output / "ascend_pytorch_profiler_0.db") as database:
            database.execute("CREATE TABLE t (x)")
        database.close()


def recorded_exports(path):
    (info,) = path.glob("profiler_info*.json")
    return json.loads(info.read_text())["config"]["experimental_config"]["_export_type"]


def start_waiting():
    child = subprocess.Popen([sys.executable, "-c", WAIT], stdout=subprocess.PIPE)
    child.stdout.readline()  # it heeds no SIGTERM from now on
    return child


def fork_waiting():
    heeded = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    while not child:
        signal.pause()
    signal.signal(signal.SIGTERM, heeded)
    return child


def tell(*processes):
    Path(os.environ["STUB_ANALYSIS_PIDS"]).write_text("".join(f"{process}\n" for process in processes))


def say(level, text):
    sys.stdout.write(f"|\b[2026-01-01 00:00:00] [{level}] [1] profiler.py: {text}\n")
    sys.stdout.flush()
