"""The listener ``swanlab``: scalars of each capture at its global step, and its page.

A run of SwanLab takes metrics from one process, and the job's is busy: these go to a run of their own, ``RUN
profdeck``, in the project and the group of the job's. In the modes ``local`` and ``offline``, in which SwanLab resumes
no run, it is a run for each capture. ``swanlab.json`` in the run directory says which run that is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profdeck import Capture, hookimpl
from profdeck.plugin import lock_directory
from profdeck_traces import numbers_of_capture
from profdeck_trackers.library import note, noted, page_of, require, run_beside

_FILE = "swanlab.json"
_ONLINE = "online"


class SwanLabListener:
    """Logs to SwanLab, in the mode of the job's own run, else in that of ``SWANLAB_MODE``."""

    def __init__(self) -> None:
        """Raises:
        MissingLibraryError: SwanLab is not installed.
        """
        require("swanlab")

    @hookimpl
    def profile_start(self, capture: Capture) -> None:
        """Note which run of SwanLab the job has: the process that is told of the end of a capture is another one."""
        swanlab = sys.modules.get("swanlab")  # a job that uses it has imported it
        is_first = capture.target is None and capture.identity.rank == 0
        if swanlab is not None and is_first and swanlab.has_run():
            run = swanlab.get_run()
            about = {"of": run.id, "mode": run.mode, "log_dir": str(Path(run.dir).parent)}
            if run.mode == _ONLINE:  # else it has none
                about |= {"of_url": run.url, "project": run.path.split("/")[-2]}
            note(capture, _FILE, about)

    @hookimpl
    def capture_finished(self, manifest: Mapping[str, Any]) -> None:
        """Log the numbers of a capture, then its page."""
        import swanlab

        directory = Path(manifest["directory"])
        run = directory.parent
        numbers, about = numbers_of_capture(manifest), noted(run, _FILE)
        mode = about.get("mode") or os.environ.get("SWANLAB_MODE") or _ONLINE
        same = {"id": run_beside(run), "resume": "allow"} if mode == _ONLINE else {}
        with lock_directory(run), page_of(manifest) as page:
            made = swanlab.init(
                project=about.get("project") or os.environ.get("SWANLAB_PROJECT") or "profdeck",
                name=f"{run.name} profdeck",
                group=about.get("of"),
                job_type="profdeck",
                mode=mode,
                log_dir=about.get("log_dir") or os.environ.get("SWANLAB_LOG_DIR") or str(run / "swanlog"),
                config={"profdeck.directory": str(run), "profdeck.of": about.get("of_url", "")},
                **same,
            )
            try:
                swanlab.log(dict(numbers.values), step=numbers.step)
                swanlab.log({"profdeck/page": swanlab.Html(page.read_text(encoding="utf-8"))}, step=numbers.step)
                about |= {"id": made.id, **({"url": made.url} if mode == _ONLINE else {})}
            finally:
                swanlab.finish()
        note(run, _FILE, about)
