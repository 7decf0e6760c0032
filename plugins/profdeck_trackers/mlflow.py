"""The listener ``mlflow``: metrics of each capture at its global step, and its page as an artifact.

They go to the run that the job itself has in MLflow: the one that is active where rank 0 records, else that of
``MLFLOW_RUN_ID``, else a run of the name of the profdeck run. ``mlflow.json`` in the run directory says which it is.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profdeck import Capture, hookimpl
from profdeck.plugin import lock_directory
from profdeck_traces import CaptureNumbers, numbers_of_capture
from profdeck_trackers.library import note, noted, page_of, require

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_FILE = "mlflow.json"
_MOST_METRICS = 1000
"""Of one call of MLflow's REST API."""


class MlflowListener:
    """Logs to MLflow."""

    def __init__(self) -> None:
        """Raises:
        MissingLibraryError: MLflow is not installed.
        """
        require("mlflow")

    @hookimpl
    def profile_start(self, capture: Capture) -> None:
        """Note which run of MLflow the job has: the process that is told of the end of a capture is another one."""
        mlflow = sys.modules.get("mlflow")  # a job that uses it has imported it
        active = mlflow.active_run() if mlflow is not None and capture.target is None else None
        if mlflow is not None and active is not None and capture.identity.rank == 0:
            about = {"run_id": active.info.run_id, "tracking_uri": mlflow.get_tracking_uri()}
            note(capture, _FILE, about)

    @hookimpl
    def capture_finished(self, manifest: Mapping[str, Any]) -> None:
        """Log the numbers of a capture, then its page."""
        from mlflow.tracking import MlflowClient

        directory = Path(manifest["directory"])
        numbers = numbers_of_capture(manifest)
        with lock_directory(directory.parent):  # otherwise, each process would create a run
            about = noted(directory.parent, _FILE)
            client = MlflowClient(tracking_uri=about.get("tracking_uri"))
            run_id = about.get("run_id") or os.environ.get("MLFLOW_RUN_ID") or _own_run(client, directory.parent)
            link = {"run_id": run_id, "tracking_uri": client.tracking_uri}
            note(directory.parent, _FILE, link | {"experiment_id": client.get_run(run_id).info.experiment_id})
        _log(client, run_id, numbers)
        client.set_tag(run_id, "profdeck.directory", str(directory.parent))
        with page_of(manifest) as page:
            client.log_artifact(run_id, str(page), "profdeck")


def _own_run(client: MlflowClient, run: Path) -> str:
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "profdeck")
    experiment = client.get_experiment_by_name(name)
    identity = experiment.experiment_id if experiment else client.create_experiment(name)
    created: str = client.create_run(identity, run_name=run.name).info.run_id
    return created


def _log(client: MlflowClient, run_id: str, numbers: CaptureNumbers) -> None:
    from mlflow.entities import Metric

    now_ms = time.time_ns() // 1_000_000
    metrics = [Metric(name, value, now_ms, numbers.step) for name, value in numbers.values.items()]
    for begin in range(0, len(metrics), _MOST_METRICS):
        client.log_batch(run_id, metrics=metrics[begin : begin + _MOST_METRICS])
