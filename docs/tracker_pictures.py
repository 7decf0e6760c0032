"""Makes the pictures of trackers that the docs show: MLflow and TensorBoard with the captures of a job.

Run ``python docs/tracker_pictures.py`` in the environment of the nox session `trackers`, with Chromium. The job is
synthetic, and gets slower with every capture.
"""  # noqa: INP001  # a script, not a package

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pictures import IMAGES, ROOT, with_digest

_UP_S = 120.0
_DRAWN_S = 15.0
_SIZE = (1280, 1060)
_JOB = """
import mlflow
from profdeck import Profiler
from profdeck.after_capture.finish_child import await_own_finishes

mlflow.set_experiment("grpo")
mlflow.start_run(run_name="training")
settings = {"output": "profiles", "run": "job", "steps": ["every 50 for 3"], "trainer.backend": "replaying",
            "listeners": ["mlflow", "tensorboard"]}
with Profiler.from_config(settings=settings, role="trainer") as profiler:
    for step in range(460):
        with profiler.capture(step):
            pass
await_own_finishes()
"""


@contextmanager
def _server(environ: dict[str, str], directory: Path, *command: str) -> Iterator[str]:
    """Run a server of this Python until the block ends; its URL. It takes a port as the last argument."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", *command, str(port)], cwd=directory, env=environ, start_new_session=True
    )
    try:
        url, until_s = f"http://127.0.0.1:{port}", time.monotonic() + _UP_S
        while True:
            try:
                urllib.request.urlopen(url, timeout=2).close()
                break
            except OSError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.3)
        yield url
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def _site(directory: Path) -> str:
    about = directory / "site" / "replaying-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: replaying\nVersion: 1.0\n", encoding="utf-8")
    entry_point = "[profdeck.backends]\nreplaying = replaying_backend:ReplayingBackend\n"
    (about / "entry_points.txt").write_text(entry_point, encoding="utf-8")
    return os.pathsep.join([str(about.parent), str(ROOT / "tests")])


def _run_of(mlflow: str) -> str:
    asked = urllib.request.Request(  # noqa: S310 - of this machine
        f"{mlflow}/api/2.0/mlflow/runs/search",
        data=json.dumps({"experiment_ids": ["1"]}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=10) as answer:  # noqa: S310 - as above
        return str(json.load(answer)["runs"][0]["info"]["run_id"])


async def _picture(url: str) -> bytes:
    from browsers import browse

    async with browse("chromium") as browser:
        await browser.open(url)
        await asyncio.sleep(_DRAWN_S)  # neither says when it has drawn
        png: bytes = await browser.screenshot(*_SIZE)
        return png


def _main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    with ExitStack() as opened:
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        environ = os.environ | {
            "PYTHONPATH": _site(directory), "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }  # fmt: skip
        stores = ["--backend-store-uri", "sqlite:///db", "--artifacts-destination", "artifacts", "--workers", "1"]
        mlflow = opened.enter_context(_server(environ, directory, "mlflow", "server", *stores, "--port"))
        job = environ | {"MLFLOW_TRACKING_URI": mlflow}
        subprocess.run([sys.executable, "-c", _JOB], cwd=directory, env=job, check=True)
        shown = ["tensorboard.main", "--logdir", "profiles", "--host", "127.0.0.1", "--port"]
        tensorboard = opened.enter_context(_server(environ, directory, *shown))
        pictures = {
            "mlflow.png": asyncio.run(_picture(f"{mlflow}/#/experiments/1/runs/{_run_of(mlflow)}/model-metrics")),
            "tensorboard.png": asyncio.run(_picture(f"{tensorboard}/#timeseries")),
        }
    for name, png in pictures.items():
        (IMAGES / name).write_bytes(with_digest(png, name))


if __name__ == "__main__":
    _main()
