"""The listener ``mlflow``, which logs the metrics of each capture at its global step, and its report as an artifact.

The listener logs to the job's MLflow run. This is the active run in the process of rank 0, else the run
``MLFLOW_RUN_ID``. Without either, the listener creates a run with the name of the profdeck run. ``mlflow.json`` in the
run directory contains the run.
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
from profdeck_trackers.common import (
    headline_of,
    read_tracker_run,
    require_library,
    run_directory,
    temporary_report,
    write_tracker_run,
)

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_FILE = "mlflow.json"
_MAX_BATCH_METRICS = 1000
"""Limit of MLflow's REST API for one request."""
_MAX_TAG_LENGTH = 5000
"""Maximum length of a tag value in MLflow's REST API."""


class MlflowListener:
    """Logs captures to MLflow."""

    def __init__(self) -> None:
        """Raises:
        MissingLibraryError: MLflow is not installed.
        """
        require_library("mlflow")

    @hookimpl
    def profile_start(self, capture: Capture) -> None:
        """Write the job's active MLflow run to the run directory, for the process that logs the finished capture."""
        mlflow = sys.modules.get("mlflow")  # a job that uses MLflow has already imported it
        active_run = mlflow.active_run() if mlflow is not None and capture.target is None else None
        if mlflow is not None and active_run is not None and capture.identity.rank == 0:
            tracker_run = {"run_id": active_run.info.run_id, "tracking_uri": mlflow.get_tracking_uri()}
            write_tracker_run(run_directory(capture), _FILE, tracker_run)

    @hookimpl
    def capture_finished(self, manifest: Mapping[str, Any]) -> None:
        """Log the metrics of a capture, then its report."""
        from mlflow.tracking import MlflowClient

        run = Path(manifest["directory"]).parent
        numbers = numbers_of_capture(manifest)
        with lock_directory(run):  # otherwise, each process would create a run
            job_run = read_tracker_run(run, _FILE)
            client = MlflowClient(tracking_uri=job_run.get("tracking_uri"))
            run_id = job_run.get("run_id") or os.environ.get("MLFLOW_RUN_ID") or _create_run(client, run.name)
            tracker_run = {
                "run_id": run_id,
                "tracking_uri": client.tracking_uri,
                "experiment_id": client.get_run(run_id).info.experiment_id,
            }
            write_tracker_run(run, _FILE, tracker_run)
        _log_metrics(client, run_id, numbers)
        client.set_tag(run_id, "profdeck.directory", str(run))
        client.set_tag(run_id, "profdeck.headline", f"Step {numbers.step}: {headline_of(manifest)}"[:_MAX_TAG_LENGTH])
        with temporary_report(manifest) as page:
            client.log_artifact(run_id, str(page), "profdeck")


def _create_run(client: MlflowClient, name: str) -> str:
    experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "profdeck")
    experiment = client.get_experiment_by_name(experiment_name)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(experiment_name)
    run_id: str = client.create_run(experiment_id, run_name=name).info.run_id
    return run_id


def _log_metrics(client: MlflowClient, run_id: str, numbers: CaptureNumbers) -> None:
    from mlflow.entities import Metric

    now_ms = time.time_ns() // 1_000_000
    metrics = [Metric(name, value, now_ms, numbers.step) for name, value in numbers.values.items()]
    for start in range(0, len(metrics), _MAX_BATCH_METRICS):
        client.log_batch(run_id, metrics=metrics[start : start + _MAX_BATCH_METRICS])
