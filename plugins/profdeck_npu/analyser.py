"""Child process that analyses one directory: ``python -m profdeck_npu.analyser DIRECTORY EXPORTS``.

`profdeck_npu.analysis.analyse` starts this process as the leader of a process group. Its standard input is a pipe from
the parent process. If the parent dies, the pipe closes, and this process kills its process group.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from pathlib import Path

from profdeck import ProfdeckError
from profdeck_npu import cann
from profdeck_npu.traces.analysis_state import OUTPUT

CANNOT_START = os.EX_UNAVAILABLE
"""Exit code if torch_npu cannot be loaded. The directory is not changed in this case."""

# Intermediate files of msprof, which torch_npu removes at the end of every analysis. If an analysis was killed, msprof
# would treat them as complete data (see "residual files" under "Parsing Profile Data" in CANN's guide).
_INTERMEDIATE = ("PROF_*/host/sqlite", "PROF_*/device_*/sqlite")


def main() -> None:
    """Analyse the directory given on the command line."""
    directory, exports = sys.argv[1:]
    _exit_with_parent()
    try:
        cann.load()
    except ProfdeckError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(CANNOT_START)
    from torch_npu.profiler.profiler import analyse

    for pattern in (OUTPUT, *_INTERMEDIATE):
        for path in Path(directory).glob(pattern):
            if path.resolve().is_relative_to(Path(directory).resolve()):  # a symbolic link can point to other files
                shutil.rmtree(path)
    # On a single core, torch_npu's default is 0 processes, which fails. One process is enough for one directory.
    analyse(directory, max_process_number=1, export_type=exports.split(",") if exports else None)


def _exit_with_parent() -> None:
    """Kill this process group when standard input closes."""
    parent_pipe = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # programs started by torch_npu must not wait for input

    def wait_and_kill() -> None:
        os.read(parent_pipe, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait_and_kill, daemon=True).start()


if __name__ == "__main__":
    main()
