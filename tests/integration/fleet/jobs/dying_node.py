"""Reads on a Ray cluster of two nodes of which one dies; to be run in a network namespace of its own.

python dying_node.py DIRECTORY

It prints what came of each item, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from fleet.clusters import ray_cluster, ray_environment, ray_node, session_of

DRIVER = """
import json, sys
from parallel_jobs import obey
from profdeck_ray.executor import RayExecutor
address, *orders = sys.argv[1:]
found = RayExecutor(address)(obey, orders, [1] * len(orders), on_progress=lambda *_: None)
print(json.dumps([str(one) if isinstance(one, Exception) else one[0].split()[0] for one in found]))
"""


def main(directory: Path) -> None:
    """Kill a node while it reads."""
    environ = ray_environment(nodes=2)
    (directory / "ray").mkdir()
    at = directory / "at"
    with (
        ray_cluster(directory / "ray", environ, cpus=0) as cluster,
        ray_node(cluster, environ, "127.0.0.2") as first,
        ray_node(cluster, environ, "127.0.0.3") as second,
    ):
        orders = ["a", f"wait_once {at}", "b", "c", "d"]
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, cluster.address, *orders], env=environ, stdout=subprocess.PIPE, text=True
        )
        while not (waiting := [int(path.suffix[1:]) for path in directory.glob("at.*")]):
            assert driver.poll() is None
            threading.Event().wait(0.05)
        (session,) = [session for session in (first, second) if waiting[0] in session_of(session)]
        for pid in session_of(session):
            os.kill(pid, signal.SIGKILL)
        answer, _ = driver.communicate(timeout=120)
    sys.stdout.write(json.dumps({"found": json.loads(answer), "waited": len(list(directory.glob("at.*")))}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
