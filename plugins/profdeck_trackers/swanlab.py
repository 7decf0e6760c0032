"""The listener ``swanlab``, which logs the metrics of each capture at its global step, and its report.

A SwanLab run accepts metrics from only one process, and the job's process is already logging to its run. The listener
therefore logs to a separate run ``RUN profdeck`` in the project and group of the job's run. The modes ``local`` and
``offline`` do not support resuming a run, so each capture gets a new run. ``swanlab.json`` in the run directory
contains the run.
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
from profdeck_trackers.common import (
    HEADLINE,
    headline_of,
    profdeck_run_id,
    read_tracker_run,
    require_library,
    run_directory,
    temporary_report,
    write_tracker_run,
)

_FILE = "swanlab.json"
_ONLINE = "online"


class SwanLabListener:
    """Logs captures to SwanLab, in the mode of the job's run. Without such a run, ``SWANLAB_MODE`` sets the mode."""

    def __init__(self) -> None:
        """Raises:
        MissingLibraryError: SwanLab is not installed.
        """
        require_library("swanlab")

    @hookimpl
    def profile_start(self, capture: Capture) -> None:
        """Write the job's SwanLab run to the run directory, for the process that logs the finished capture."""
        swanlab = sys.modules.get("swanlab")  # a job that uses SwanLab has already imported it
        is_first_rank = capture.target is None and capture.identity.rank == 0
        if swanlab is not None and is_first_rank and swanlab.has_run():
            job_run = swanlab.get_run()
            fields = {"of": job_run.id, "mode": job_run.mode, "log_dir": str(Path(job_run.dir).parent)}
            if job_run.mode == _ONLINE:  # other modes have no URL and project path
                fields |= {"of_url": job_run.url, "project": job_run.path.split("/")[-2]}
            write_tracker_run(run_directory(capture), _FILE, fields)

    @hookimpl
    def capture_finished(self, manifest: Mapping[str, Any]) -> None:
        """Log the metrics of a capture, then its report."""
        import swanlab

        run = Path(manifest["directory"]).parent
        numbers, fields = numbers_of_capture(manifest), read_tracker_run(run, _FILE)
        mode = fields.get("mode") or os.environ.get("SWANLAB_MODE") or _ONLINE
        resume_options = {"id": profdeck_run_id(run), "resume": "allow"} if mode == _ONLINE else {}
        with lock_directory(run), temporary_report(manifest) as page:
            tracker_run = swanlab.init(
                project=fields.get("project") or os.environ.get("SWANLAB_PROJECT") or "profdeck",
                name=f"{run.name} profdeck",
                group=fields.get("of"),
                job_type="profdeck",
                mode=mode,
                log_dir=fields.get("log_dir") or os.environ.get("SWANLAB_LOG_DIR") or str(run / "swanlog"),
                config={"profdeck.directory": str(run), "profdeck.of": fields.get("of_url", "")},
                **resume_options,
            )
            try:
                swanlab.log({**numbers.values, HEADLINE: swanlab.Text(headline_of(manifest))}, step=numbers.step)
                swanlab.log({"profdeck/page": swanlab.Html(page.read_text(encoding="utf-8"))}, step=numbers.step)
                fields |= {"id": tracker_run.id, **({"url": tracker_run.url} if mode == _ONLINE else {})}
            finally:
                swanlab.finish()
        write_tracker_run(run, _FILE, fields)
