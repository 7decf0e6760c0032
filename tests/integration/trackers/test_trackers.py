"""Tests of the tracker listeners with a real MLflow server and the files of the other trackers."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from processes import until
from profdeck_traces import load
from profdeck_trackers.common import HEADLINE

pytestmark = pytest.mark.trackers

BLOCK = 32768
JOB = """
import os, sys
from profdeck import Profiler
from profdeck.after_capture.finish_child import await_own_finishes

if "wandb" in sys.argv[3:]:
    import wandb
    wandb.init(project="the project", group="the group", settings=wandb.Settings(console="off", silent=True))
if "swanlab" in sys.argv[3:]:
    import swanlab
    swanlab.init(project="the-project", mode="local", log_dir=os.path.join(sys.argv[1], "swanlog"), id="job0")
if "active" in sys.argv[3:]:
    import mlflow
    mlflow.set_experiment("the job's")
    mlflow.start_run(run_name="training")
settings = {"output": sys.argv[1], "run": "job", "steps": [3, 7], "trainer.backend": "replaying",
            "listeners": sys.argv[2].split(",")}
with Profiler.from_config(settings=settings, role="trainer") as profiler:
    for step in range(10):
        with profiler.capture(step), profiler.stage("update"):
            pass
await_own_finishes()
"""


@pytest.fixture(scope="module")
def environment(replaying_site: str) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": replaying_site,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


@pytest.fixture(scope="module")
def server(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run an MLflow server, yield its URL, and stop the server with its workers."""
    directory = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{directory}/db",
        "--artifacts-destination",
        str(directory / "artifacts"),
    ]
    process = subprocess.Popen(command, cwd=directory, env=environment, start_new_session=True)
    try:
        until(lambda: is_ready(f"http://127.0.0.1:{port}/health"), every_s=0.2, timeout_s=120)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):  # noqa: S310 - a URL of this machine
            return True
    except OSError:
        return False


def train(directory: Path, environment: dict[str, str], listeners: str, *options: str) -> Path:
    """Run the job, wait for its finish commands, and return its run directory."""
    command = [sys.executable, "-c", JOB, str(directory), listeners, *options]
    result = subprocess.run(
        command, env=environment, cwd=directory, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return directory / "job"


def finish_record(run: Path, step: int) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run / f"step_{step:06d}" / f"finish.step{step}.json").read_text())
    return record


def median_step_ms(run: Path, step: int) -> float:
    """Return the median step time of a capture in milliseconds, like `profdeck summary`."""
    command = [sys.executable, "-m", "profdeck", "summary", str(run / f"step_{step:06d}"), "--json"]
    (rank,) = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["ranks"]
    lengths = sorted(step["devices"][0]["duration_us"] for step in rank["steps"] if step["kind"] == "global_step")
    return (lengths[1] + lengths[2]) / 2e3


def headline(run: Path, step: int) -> str:
    """Return the first sentences of `profdeck summary` for a capture."""
    summary = load(run / f"step_{step:06d}").summary
    assert summary.headlines
    return f"{summary.verdict} {summary.headlines[0]}."


def test_tensorboard_reads_the_scalars_of_each_capture(environment: dict[str, str], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    run = train(tmp_path, environment, "tensorboard")
    assert finish_record(run, 3)["state"] == "done", finish_record(run, 3)
    read = EventMultiplexer().AddRunsFromDirectory(str(run)).Reload()
    (name,) = read.Runs()
    tags = read.Runs()[name]["scalars"] or read.Runs()[name]["tensors"]
    assert {
        "profdeck/complete",
        "profdeck/trainer/global_step_ms",
        "profdeck/trainer/device_busy_percent",
        "profdeck/trainer/stage/data_loading_ms",
    } <= set(tags)
    steps = {event.step: event.value for event in read.Scalars(name, "profdeck/trainer/global_step_ms")}
    assert steps == pytest.approx({step: median_step_ms(run, step) for step in (3, 7)}, rel=1e-6)
    (text, _) = read.Tensors(name, "profdeck/capture")
    assert b"complete: `profdeck report " in text.tensor_proto.string_val[0]
    headlines = {event.step: event.tensor_proto.string_val[0].decode() for event in read.Tensors(name, HEADLINE)}
    assert headlines == {step: headline(run, step) for step in (3, 7)}


def test_tensorboard_uses_the_jobs_directory(environment: dict[str, str], tmp_path: Path) -> None:
    train(tmp_path, environment | {"TENSORBOARD_DIR": str(tmp_path / "board")}, "tensorboard")
    assert len(list((tmp_path / "board" / "profdeck" / "job").glob("events.*"))) == 2
    assert not (tmp_path / "job" / "tensorboard").exists()


@pytest.mark.parametrize("how", ["active", "by variable", "alone"])
def test_mlflow_run_has_metrics_and_report(server: str, environment: dict[str, str], tmp_path: Path, how: str) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=server)
    job_environment = environment | {"MLFLOW_TRACKING_URI": server}
    if how == "by variable":
        experiment = client.create_experiment("by variable")
        job_environment["MLFLOW_RUN_ID"] = client.create_run(experiment).info.run_id
    run = train(tmp_path, job_environment, "mlflow", how)
    assert finish_record(run, 7)["state"] == "done", finish_record(run, 7)
    about = json.loads((run / "mlflow.json").read_text())
    mlflow_run = client.get_run(about["run_id"])
    if how == "active":
        assert mlflow_run.info.run_name == "training"
    elif how == "by variable":
        assert about["run_id"] == job_environment["MLFLOW_RUN_ID"]
    else:
        assert mlflow_run.info.run_name == "job"
    assert mlflow_run.data.tags["profdeck.directory"] == str(run)
    history = client.get_metric_history(about["run_id"], "profdeck/trainer/global_step_ms")
    assert {metric.step: metric.value for metric in history} == pytest.approx(
        {step: median_step_ms(run, step) for step in (3, 7)}
    )
    pages = [artifact.path for artifact in client.list_artifacts(about["run_id"], "profdeck")]
    assert sorted(pages) == ["profdeck/step_000003.html", "profdeck/step_000007.html"]
    assert mlflow_run.data.tags["profdeck.headline"] in {f"Step {step}: {headline(run, step)}" for step in (3, 7)}


def read_records(file: Path) -> Iterator[Any]:
    """Read the records of a wandb file, which has the format of a LevelDB log."""
    from wandb.proto import wandb_internal_pb2

    data, offset, fragments = file.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        if BLOCK - offset % BLOCK < 7:
            offset += BLOCK - offset % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[offset + 4 : offset + 7])
        fragments += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in {1, 4}:  # a complete record or its last fragment
            record = wandb_internal_pb2.Record()
            record.ParseFromString(fragments)
            fragments = b""
            yield record


@pytest.mark.parametrize("how", ["wandb", "alone"])
def test_wandb_run_is_separate_from_the_jobs_run(environment: dict[str, str], tmp_path: Path, how: str) -> None:
    run = train(tmp_path, environment | {"WANDB_MODE": "offline"}, "wandb", how)
    assert finish_record(run, 7)["state"] == "done", finish_record(run, 7)
    records = [
        record for file in sorted(run.glob("step_*/wandb/offline-run-*/*.wandb")) for record in read_records(file)
    ]
    runs = {
        (record.run.run_id, record.run.project, record.run.run_group)
        for record in records
        if record.WhichOneof("record_type") == "run"
    }
    about = json.loads((run / "wandb.json").read_text())
    project = ("the project", "the group") if how == "wandb" else ("profdeck", "")
    assert runs == {(about["id"], *project)}
    step_ms, headlines = {}, {}
    for record in records:
        values = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        if values:
            step_ms[values["_step"]] = values["profdeck/trainer/global_step_ms"]
            headlines[values["_step"]] = values[HEADLINE]
    assert headlines == {step: headline(run, step) for step in (3, 7)}
    assert step_ms == pytest.approx({step: median_step_ms(run, step) for step in (3, 7)})
    assert {record.artifact.name for record in records if record.WhichOneof("record_type") == "artifact"} == {
        f"{about['id']}-step{step}" for step in (3, 7)
    }


@pytest.mark.parametrize("how", ["swanlab", "alone"])
def test_swanlab_runs_are_separate_from_the_jobs_run(environment: dict[str, str], tmp_path: Path, how: str) -> None:
    run = train(tmp_path, environment | {"SWANLAB_MODE": "local"}, "swanlab", how)
    assert finish_record(run, 7)["state"] == "done", finish_record(run, 7)
    log_directory = tmp_path / "swanlog" if how == "swanlab" else run / "swanlog"
    with closing(sqlite3.connect(log_directory / "runs.swanlab")) as database:
        names = dict(database.execute("select run_id, name from experiment"))
        tags = database.execute(
            "select run_id || '/logs/' || folder, tag.name from tag join experiment on experiment.id = experiment_id"
        )
        folders = dict(tags)
    ours = [name for name in names if how == "alone" or not name.endswith("job0")]
    assert len(ours) == 2
    assert len(names) == len(ours) + (how == "swanlab")
    assert any(name.endswith(json.loads((run / "swanlab.json").read_text())["id"]) for name in ours)
    step_ms = {}
    for name in ours:
        for folder in (log_directory / name / "logs").iterdir():
            if folders.get(f"{name}/logs/{folder.name}") == "profdeck/trainer/global_step_ms":
                lines = [json.loads(line) for file in folder.glob("*.log") for line in file.read_text().splitlines()]
                step_ms |= {line["index"]: line["data"] for line in lines}
        (page,) = (log_directory / name / "media").rglob("*.html")
        assert "<title>" in page.read_text()
    assert step_ms == pytest.approx({step: median_step_ms(run, step) for step in (3, 7)})


def test_unreachable_server_is_recorded_without_stopping_the_job(environment: dict[str, str], tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        run = train(tmp_path, environment | {"MLFLOW_TRACKING_URI": address}, "mlflow,tensorboard")
    record = finish_record(run, 3)
    assert record["state"] == "failed"
    problems = {task["name"]: task["problem"] for task in record["parts"]}
    assert problems["listener tensorboard"] is None
    assert "failed with exit status 1" in str(problems["listener mlflow"])
    listed = subprocess.run(
        [sys.executable, "-m", "profdeck", "ls", str(run), "--json"], capture_output=True, check=False
    )
    assert {capture["status"] for capture in json.loads(listed.stdout)["captures"]} == {"complete"}
