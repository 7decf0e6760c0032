"""The listener ``wandb``, which logs the metrics of each capture at its global step, and its report as an artifact.

A wandb run accepts metrics from only one process, and the job's process is already logging to its run. The listener
therefore logs to a separate run ``RUN profdeck`` in the project and group of the job's run. ``wandb.json`` in the run
directory contains the run.
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

_FILE = "wandb.json"


class WandbListener:
    """Logs captures to Weights & Biases, in the mode that ``WANDB_MODE`` sets."""

    def __init__(self) -> None:
        """Raises:
        MissingLibraryError: wandb is not installed.
        """
        require_library("wandb")

    @hookimpl
    def profile_start(self, capture: Capture) -> None:
        """Write the job's wandb run to the run directory, for the process that logs the finished capture."""
        wandb = sys.modules.get("wandb")  # a job that uses wandb has already imported it
        job_run = wandb.run if wandb is not None and capture.target is None and capture.identity.rank == 0 else None
        if job_run is not None:
            fields = {
                "of": job_run.id,
                "project": job_run.project,
                "entity": job_run.entity,
                "group": job_run.group,
                "of_url": job_run.url,
            }
            tracker_run = {name: value for name, value in fields.items() if value}
            write_tracker_run(run_directory(capture), _FILE, tracker_run)

    @hookimpl
    def capture_finished(self, manifest: Mapping[str, Any]) -> None:
        """Log the metrics of a capture, then its report."""
        os.environ.pop("WANDB_SERVICE", None)  # a service process of the job, which may exit at any time
        import wandb

        directory = Path(manifest["directory"])
        run = directory.parent
        numbers, fields = numbers_of_capture(manifest), read_tracker_run(run, _FILE)
        with lock_directory(run), temporary_report(manifest) as page:
            tracker_run = wandb.init(
                project=fields.get("project") or os.environ.get("WANDB_PROJECT") or "profdeck",
                entity=fields.get("entity"),
                group=fields.get("group") or fields.get("of"),
                id=profdeck_run_id(run),
                name=f"{run.name} profdeck",
                job_type="profdeck",
                resume="allow",
                dir=str(directory),  # file names have a resolution of one second and could collide in the run directory
                config={"profdeck.directory": str(run), "profdeck.of": fields.get("of_url", "")},
                settings=wandb.Settings(console="off", silent=True),
            )
            try:
                tracker_run.log({**numbers.values, HEADLINE: headline_of(manifest)}, step=numbers.step)
                tracker_run.log_artifact(str(page), name=f"{tracker_run.id}-{manifest['capture']}", type="profile")
            finally:
                tracker_run.finish()
        fields |= {"id": tracker_run.id, **({"url": tracker_run.url} if tracker_run.url else {})}
        write_tracker_run(run, _FILE, fields)
