"""Creates the pictures of MLflow and TensorBoard in the docs.

Run ``python docs/tracker_pictures.py`` in the environment of the nox session `trackers`, with Chromium. The job is
synthetic and becomes slower with every capture.
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
    """Run a server with this Python, and yield its URL. The port is its last argument."""
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
    dist_info = directory / "site" / "replaying-1.0.dist-info"
    dist_info.mkdir(parents=True)
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: replaying\nVersion: 1.0\n", encoding="utf-8")
    entry_point = "[profdeck.backends]\nreplaying = replaying_backend:ReplayingBackend\n"
    (dist_info / "entry_points.txt").write_text(entry_point, encoding="utf-8")
    return os.pathsep.join([str(dist_info.parent), str(ROOT / "tests")])


def _first_run_id(mlflow: str) -> str:
    request = urllib.request.Request(  # noqa: S310 - a local server
        f"{mlflow}/api/2.0/mlflow/runs/search",
        data=json.dumps({"experiment_ids": ["1"]}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as response:  # noqa: S310 - a local server
        return str(json.load(response)["runs"][0]["info"]["run_id"])


async def _screenshot(url: str) -> bytes:
    from browsers import browse

    async with browse("chromium") as browser:
        await browser.open(url)
        await asyncio.sleep(_DRAWN_S)  # neither page reports when it is complete
        png: bytes = await browser.screenshot(*_SIZE)
        return png


def _main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        environ = os.environ | {
            "PYTHONPATH": _site(directory), "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }  # fmt: skip
        stores = ["--backend-store-uri", "sqlite:///db", "--artifacts-destination", "artifacts", "--workers", "1"]
        mlflow = stack.enter_context(_server(environ, directory, "mlflow", "server", *stores, "--port"))
        job = environ | {"MLFLOW_TRACKING_URI": mlflow}
        subprocess.run([sys.executable, "-c", _JOB], cwd=directory, env=job, check=True)
        command = ["tensorboard.main", "--logdir", "profiles", "--host", "127.0.0.1", "--port"]
        tensorboard = stack.enter_context(_server(environ, directory, *command))
        pictures = {
            "mlflow.png": asyncio.run(
                _screenshot(f"{mlflow}/#/experiments/1/runs/{_first_run_id(mlflow)}/model-metrics")
            ),
            "tensorboard.png": asyncio.run(_screenshot(f"{tensorboard}/#timeseries")),
        }
    for name, png in pictures.items():
        (IMAGES / name).write_bytes(with_digest(png, name))


if __name__ == "__main__":
    _main()
