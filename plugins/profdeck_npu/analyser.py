"""The process that analyses one directory: ``python -m profdeck_npu.analyser DIRECTORY EXPORTS ...``.

`profdeck_npu.analysis.analyse` starts it, with two more arguments for `profdeck_npu.process_group.attach`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from profdeck import ProfdeckError
from profdeck_npu import cann
from profdeck_npu.process_group import attach
from profdeck_npu.traces.analysis_state import OUTPUT

# What msprof made of the raw data on its way. torch_npu removes it at the end of every analysis; where an analysis was
# killed, msprof would take it for all that there is ("residual files", says "Parsing Profile Data" in CANN's guide).
_HALF_WAY = ("PROF_*/host/sqlite", "PROF_*/device_*/sqlite")


def main() -> None:
    """Analyse the directory that the command line names."""
    directory, exports, lifeline, news = sys.argv[1:]
    try:
        cann.load()
    except ProfdeckError as error:
        sys.exit(str(error))
    from torch_npu.profiler.profiler import analyse

    for pattern in (OUTPUT, *_HALF_WAY):
        for left in Path(directory).glob(pattern):
            shutil.rmtree(left)  # whatever is there later is new
    attach(int(lifeline), int(news))
    # It counts directories, of which there is one; its own default is 0 on a single core, and fails.
    analyse(directory, max_process_number=1, export_type=exports.split(",") if exports else None)


if __name__ == "__main__":
    main()
