"""The child process that analyses one directory: ``python -m profdeck_npu.analyser DIRECTORY EXPORTS``.

`profdeck_npu.analysis.analyse` starts it as the leader of a process group and holds the other end of its standard
input, which is a pipe. If that process dies, the pipe closes, and this process kills its group.
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

CANNOT_BEGIN = os.EX_UNAVAILABLE
"""Exit code if torch_npu cannot be loaded. The directory is unchanged then."""

# Intermediate files of msprof. torch_npu removes them at the end of every analysis. After a killed analysis, msprof
# would use them as the complete data ("residual files", says "Parsing Profile Data" in CANN's guide).
_INTERMEDIATE = ("PROF_*/host/sqlite", "PROF_*/device_*/sqlite")


def main() -> None:
    """Analyse the directory that the command line names."""
    directory, exports = sys.argv[1:]
    _end_with_parent()
    try:
        cann.load()
    except ProfdeckError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(CANNOT_BEGIN)
    from torch_npu.profiler.profiler import analyse

    for pattern in (OUTPUT, *_INTERMEDIATE):
        for path in Path(directory).glob(pattern):
            shutil.rmtree(path)
    # The default number of processes is 0 on a single core, and fails. There is one directory, so 1 is enough.
    analyse(directory, max_process_number=1, export_type=exports.split(",") if exports else None)


def _end_with_parent() -> None:
    """Kill this process group when the standard input closes."""
    parent = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # programs that torch_npu starts must not wait for input

    def wait() -> None:
        os.read(parent, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    main()
