"""Driver that captures engines in actors on a node without shared files. Run it in its own network namespace.

python actors_elsewhere.py OUTPUT RAY_DIRECTORY

The last line of its output has the status, notes and targets of the captures, and the results of `profdeck collect`, as
JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import held_engines
import ray
from fleet.clusters import LOOPBACK, ray_cluster, ray_environment, ray_node

from namespaces import OTHER_HOST
from profdeck import Profiler
from profdeck.base.errors import CaptureError


def captured(actors: list[Any], step: int, output: Path, **own: Any) -> dict[str, Any]:
    """Capture a step of all actors. Return the status, notes and targets."""
    settings: dict[str, Any] = {"output": str(output), "run": "run", "steps": [step], "on_error": "raise"}
    settings |= {"on_demand": False, "rollout.backend": "held", "rollout.iterations": {"count": 2}}
    options = {"device_options": {"thread_bound": False}, **own}
    profiler = Profiler.from_config(settings=settings | {"rollout.options": options}, role="rollout", target=actors)
    capture = None
    try:
        with profiler.capture(step) as capture:
            ray.get([actor.iterate.remote(2) for actor in actors])
    except CaptureError as error:
        sys.stderr.write(f"{error}\n")
    assert capture is not None
    assert capture.fleet is not None
    told = {one.replica: [str(one.outcome), one.reason] for one in capture.fleet.targets}
    return {"status": str(capture.status), "notes": capture.notes, "targets": told}


def main(output: Path, directory: Path) -> None:
    """Capture actors on a cluster of two nodes. On the second node, another directory is mounted at the output path."""
    for name in LOOPBACK:
        os.environ.pop(name, None)
    environ = ray_environment(nodes=2)
    os.environ.update(environ)
    with (
        ray_cluster(directory, environ, cpus=0) as cluster,
        ray_node(cluster, environ, "127.0.0.2", [*OTHER_HOST, str(output)]),
    ):
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", namespace="rollouts")
        kinds = [held_engines.AsyncActor, held_engines.SyncActor]
        actors = [
            ray.remote(num_cpus=0.5)(kind).options(name=f"rollout_{number}").remote()
            for number, kind in enumerate(kinds)
        ]
        ray.get([actor.make.remote() for actor in actors])
        found = [captured(actors, 1, output), captured(actors, 2, output, collect=False)]
        collect = [sys.executable, "-m", "profdeck", "collect", output / "run"]
        own = os.environ | {"RAY_ADDRESS": cluster.address}
        for options in ([], ["--ray"], ["--ray"]):
            done = subprocess.run([*collect, *options], env=own, capture_output=True, text=True, check=False)
            found.append({"code": done.returncode, "said": done.stdout + done.stderr})
        sys.stdout.write(json.dumps(found) + "\n")
        ray.shutdown()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
