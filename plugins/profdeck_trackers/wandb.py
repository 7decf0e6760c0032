"""The listener ``wandb``: scalars of each capture at its global step, and its page as an artifact.

A run of wandb takes metrics from one process, and the job's is busy: these go to a run of their own, ``RUN profdeck``,
in the project and the group of the job's. ``wandb.json`` in the run directory says which run that is.
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

_FILE = "wandb.json"


class WandbListener:
    """Logs to Weights & Biases, online or offline as ``WANDB_MODE`` says."""

    def __init__(self) -> None:
        """Raises:
        MissingLibraryError: wandb is not installed.
        """
        require("wandb")

    @hookimpl
    def profile_start(self, capture: Capture) -> None:
        """Note which run of wandb the job has: the process that is told of the end of a capture is another one."""
        wandb = sys.modules.get("wandb")  # a job that uses it has imported it
        run = wandb.run if wandb is not None and capture.target is None and capture.identity.rank == 0 else None
        if run is not None:
            about = {"of": run.id, "project": run.project, "entity": run.entity, "group": run.group, "of_url": run.url}
            note(capture, _FILE, {name: value for name, value in about.items() if value})

    @hookimpl
    def capture_finished(self, manifest: Mapping[str, Any]) -> None:
        """Log the numbers of a capture, then its page."""
        os.environ.pop("WANDB_SERVICE", None)  # of the job's own run: its process may end meanwhile
        import wandb

        directory = Path(manifest["directory"])
        numbers, about = numbers_of_capture(manifest), noted(directory.parent, _FILE)
        with lock_directory(directory.parent), page_of(manifest) as page:
            run = wandb.init(
                project=about.get("project") or os.environ.get("WANDB_PROJECT") or "profdeck",
                entity=about.get("entity"),
                group=about.get("group") or about.get("of"),
                id=run_beside(directory.parent),
                name=f"{directory.parent.name} profdeck",
                job_type="profdeck",
                resume="allow",
                dir=str(directory),  # its files are named by the second
                config={"profdeck.directory": str(directory.parent), "profdeck.of": about.get("of_url", "")},
                settings=wandb.Settings(console="off", silent=True),
            )
            try:
                run.log(dict(numbers.values), step=numbers.step)
                run.log_artifact(str(page), name=f"{run.id}-{manifest['capture']}", type="profile")
            finally:
                run.finish()
        note(directory.parent, _FILE, about | {"id": run.id, **({"url": run.url} if run.url else {})})
