"""Test of on-demand captures on a real Ray cluster without a shared directory. An actor stores the requests."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet.clusters import Cluster, ray_cluster, ray_environment

from processes import ending, until

DRIVER = """
import select, sys
from pathlib import Path
import ray
from profdeck import Identity, Profiler

class Rank:
    def __init__(self, rank, output):
        settings = {"output": f"{output}/host{rank}", "run": "live", "trainer.backend": "tally", "trainer.ranks": "all"}
        identity = Identity(rank=rank, world_size=2)
        self.profiler = Profiler.from_config(identity=identity, settings=settings | {"on_demand": "ray"})
    def step(self, step):
        with self.profiler.capture(step):
            pass

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
ranks = [ray.remote(num_cpus=0)(Rank).remote(rank, sys.argv[2]) for rank in range(2)]
step = 0
while not select.select([sys.stdin], [], [], 0.01)[0]:  # the test ends the job
    ray.get([rank.step.remote(step) for rank in ranks])
    step += 1
    if step == 1:
        print("ready", flush=True)
"""
IS_THERE = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print([one["name"] for one in ray.util.list_named_actors(all_namespaces=True)])
"""
Ask = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def environ(tally_path: str) -> dict[str, str]:
    return ray_environment(Path(tally_path))


@pytest.fixture(scope="module")
def cluster(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray"), environ) as started:
        yield started


@pytest.fixture
def start(environ: dict[str, str]) -> Iterator[Ask]:
    with ending() as started:

        def run(*command: object) -> subprocess.Popen[str]:
            pipe = subprocess.PIPE
            given = [sys.executable, *map(str, command)]
            started.append(subprocess.Popen(given, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
            return started[-1]

        yield run


def captured(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, out + error
    found: dict[str, Any] = json.loads(out)
    return found


def test_capture_of_actors_without_a_shared_directory(cluster: Cluster, start: Ask, tmp_path: Path) -> None:
    job = start("-c", DRIVER, cluster.address, tmp_path)
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    run = tmp_path / "host1" / "live"
    store = f"ray:{cluster.address}"
    found = captured(start("-m", "profdeck", "capture", "job", run, "--steps", 2, "--json"))
    (capture,) = found["ls"]["captures"]
    assert (found["complete"], [(rank["rank"], rank["status"]) for rank in capture["ranks"]]) == (
        True,
        [(1, "complete")],
    )
    assert [(process["directory"], process["files_here"]) for process in found["processes"]] == [
        (str(tmp_path / "host0" / "live"), False),
        (str(run), True),
    ]
    killed = start("-m", "profdeck", "capture", "job", run, "--in", 100_000)
    assert killed.stderr is not None
    assert any("will be captured" in line for line in killed.stderr)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    elsewhere = tmp_path / "elsewhere" / "live"
    found = captured(start("-m", "profdeck", "capture", "job", elsewhere, "--store", store, "--json"))
    assert (found["complete"], found["ls"]) == (True, None)
    job.communicate("end\n", timeout=60)
    assert job.returncode == 0

    none = start("-m", "profdeck", "capture", "job", tmp_path / "other", "--store", store)
    assert "no job of the run 'other' is running" in " ".join(none.communicate(timeout=60)[1].split())
    until(lambda: start("-c", IS_THERE, cluster.address).communicate(timeout=60)[0] == "[]\n", every_s=2)
