"""Tests of captures of simulated engines in actors on a real Ray cluster, including actor failures.

The driver `jobs/actors.py` runs the captures, and the tests check its results. `test_agent_loop` tests vLLM engines in
actors.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest
from fleet.clusters import Cluster, ray_cluster, ray_environment

from namespaces import own_network
from profdeck.base.outcome import Outcome
from profdeck.records.manifest import read_manifest
from profdeck.records.status import Status
from profdeck.verification.report_model import CaptureReport, TargetReport
from profdeck.verification.run_report import read_run

HERE = Path(__file__).parent
DRIVER_S = 500


@attrs.frozen
class Driven:
    """The run and the results of the driver."""

    run: Path
    results: dict[str, Any]

    def captures(self, step: int) -> list[CaptureReport]:
        return [one for one in read_run(self.run).captures if one.first_step == step]

    def targets(self, step: int) -> list[TargetReport]:
        return [one for one in read_run(self.run).targets if one.first_step == step]

    def outcomes(self, name: str) -> list[str]:
        return [outcome for _, outcome, _, _ in self.results[name]["targets"].values()]

    def names(self, name: str) -> list[str]:
        return [said for said, _, _, _ in self.results[name]["targets"].values()]


@pytest.fixture(scope="module")
def environ(tally_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of the cluster and its drivers, with the backends `held` and `tally`."""
    site = tmp_path_factory.mktemp("site")
    about = site / "held-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: held\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[profdeck.backends]\nheld = held_engines:HeldBackend\n")
    leases = {"PROFDECK_LEASE_DIR": str(tmp_path_factory.mktemp("leases"))}
    return ray_environment(site, HERE, *tally_path.split(os.pathsep)) | leases


@pytest.fixture(scope="module")
def cluster(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray"), environ, cpus=8) as started:
        yield started


@pytest.fixture(scope="module")
def ours(cluster: Cluster, environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Driven:
    """Results from the driver, which runs once for all tests in this module."""
    directory = tmp_path_factory.mktemp("ours")
    results = directory / "results.json"
    command = [sys.executable, HERE / "jobs" / "actors.py", directory / "profiles", results, cluster.address]
    # Modules in the tests' directory would shadow other modules.
    done = subprocess.run(
        command, cwd=directory, env=environ, capture_output=True, text=True, timeout=DRIVER_S, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return Driven(directory / "profiles" / "run", json.loads(results.read_text()))


# Files on another host.


def test_files_on_a_node_without_shared_files_are_downloaded(
    environ: dict[str, str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (output := tmp_path / "profiles").mkdir()
    command = [
        *own_network(),
        sys.executable,
        HERE / "jobs" / "actors_elsewhere.py",
        output,
        tmp_path_factory.mktemp("ray"),
    ]
    own = {"PYTHONPATH": os.pathsep.join([environ["PYTHONPATH"], str(HERE.parent)])}
    done = subprocess.run(
        command, env=environ | own, capture_output=True, text=True, timeout=DRIVER_S, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-6000:]
    first, second, *collected = json.loads(done.stdout.splitlines()[-1])
    assert first["status"] == "complete"
    run = Driven(output / "run", {})
    for capture in run.captures(1):
        (rank,) = capture.ranks
        assert (rank.status, rank.host, rank.events > 0) == (Status.COMPLETE, "elsewhere", True)
        assert rank.manifest is not None
        assert read_manifest(rank.manifest).collected_from == f"elsewhere:{rank.manifest}"
    assert len(run.captures(1)) == 2
    assert second["status"] == "partial"
    for outcome, reason in second["targets"].values():
        assert outcome == "files_missing"
        assert "Files of rank 0 are on elsewhere, in " in reason
        assert "The option collect is off." in reason
    assert [one["code"] for one in collected] == [1, 0, 0]
    assert collected[0]["said"].count("is a Ray actor. To fetch its files, use --ray on a node of its cluster.") == 2
    assert "2 of 2 engine captures are complete." in collected[1]["said"]
    assert "No file is missing" in collected[2]["said"]
    assert read_run(run.run).status is Status.COMPLETE


# Successful captures.


def test_all_kinds_of_actors_are_one_capture(ours: Driven) -> None:
    found = ours.results["all"]
    assert (found["status"], ours.outcomes("all")) == ("complete", ["flushed"] * 5)
    assert [name.partition(", ")[0] for name in ours.names("all")] == [
        "Actor(AsyncActor",
        "Actor(AsyncActor",
        "Actor(SyncActor",
        "Actor(SyncActor",
        "Actor(Itself",
    ]
    captures = ours.captures(1)
    assert {(one.replica, one.status, len(one.ranks)) for one in captures} == {
        (replica, Status.COMPLETE, 1) for replica in range(5)
    }


def test_single_actor_and_async_host(ours: Driven) -> None:
    assert ours.results["single"]["status"] == "complete"
    assert ours.results["loop"] == {"rollout": "complete"}
    (single,) = ours.targets(2)
    assert single.target is not None
    assert single.target.startswith("Actor(AsyncActor, ")


def test_actor_attribute_is_the_path_of_the_engine(ours: Driven) -> None:
    assert ours.results["deep"]["status"] == "complete"
    unsaid = ours.results["deep_unsaid"]
    assert unsaid["outcome"] == Outcome.REFUSED
    assert "Its attributes: worker (Worker)." in unsaid["error"]
    assert "actor_attribute" in unsaid["fix"]


# Discovery in the cluster.


def test_placement_group_selects_its_actors_with_engines(ours: Driven) -> None:
    found = ours.results["group"]
    assert found["status"] == "complete"
    assert ours.names("group") == ["Actor(AsyncActor, replica_9)", "Actor(AsyncActor, replica_10)"]
    no_engine, no_name = found["notes"]
    assert no_engine.startswith("Skipped actors without an engine (PlacementGroup(")
    assert no_engine.endswith(": Actor(SyncActor, trainer).")
    assert no_name.endswith("which cannot be looked up: 1.")


def test_placement_group_is_looked_up_for_each_capture(ours: Driven) -> None:
    found = ours.results["group_changed"]
    assert found["status"] == "complete"
    assert ours.names("group_changed")[1:] == ["Actor(AsyncActor, replica_7)", "Actor(AsyncActor, replica_10)"]


def test_actors_by_name(ours: Driven) -> None:
    found = ours.results["named"]
    assert ours.names("named") == ["replica_1", "Actor(AsyncActor, replica_8)", "Actor(AsyncActor, replica_10)"]
    assert ours.outcomes("named") == ["unreachable", "flushed", "flushed"]
    assert found["targets"]["0"][2] == "There is no Ray actor named 'replica_1' in the namespace of this process."
    assert "actor_namespace" in found["targets"]["0"][3]
    assert "Only 0 of 3 targets are ready" in ours.results["other_namespace"]["error"]


def test_invalid_targets_are_rejected(ours: Driven) -> None:
    assert "no named actor with an engine" in ours.results["empty_group"]["error"]
    assert "both the host and the config specify targets" in ours.results["both"]["config_error"]
    assert "target: the list contains " in ours.results["group_twice"]["config_error"]


def test_next_driver_stops_the_capture_of_a_killed_driver(ours: Driven) -> None:
    assert ours.results["first_driver"] == "started"
    living = ours.results["living_owner"]
    assert (living["outcome"], "which is running" in living["error"]) == (Outcome.ALREADY_ACTIVE, True)
    assert ours.results["orphan"]["status"] == "complete"
    (note,) = ours.results["orphan"]["notes"]
    assert note.startswith("Stopped abandoned captures whose owner has exited: step30 of process ")


def test_driver_that_exits_stops_its_capture(ours: Driven) -> None:
    assert (ours.results["last_driver"], ours.results["ended"]["state"]) == ("started", "ended")
    (capture,) = ours.captures(33)
    (rank,) = capture.ranks
    assert (rank.status, rank.events > 0) == (Status.PARTIAL, True)


# Failures.


def test_each_lost_actor_has_its_outcome(ours: Driven) -> None:
    found = ours.results["lost"]
    assert found["status"] == "partial"
    assert ours.outcomes("lost") == ["flushed", "unreachable", "unreachable", "refused", "not_enabled", "unreachable"]
    reasons = [reason for _, _, reason, _ in found["targets"].values()]
    assert "it was killed by `ray.kill`" in reasons[1]
    assert "its worker process has died" in reasons[2]
    assert "Its attributes: none." in reasons[3]
    assert "cannot import profdeck" in reasons[4]
    assert "ValueError: it does not work" in reasons[5]
    assert not any("\x1b" in reason or "common causes" in reason for reason in reasons if reason)
    fixes = [fix for _, _, _, fix in found["targets"].values()]
    assert "runtime_env" in fixes[4]
    states = {one.replica: one.status for one in ours.captures(40)}
    assert (states[0], states[2]) == (Status.COMPLETE, Status.MISSING)


def test_actor_that_restarts_during_a_capture(ours: Driven) -> None:
    assert ours.results["restarted"]["status"] == "partial"
    assert ours.outcomes("restarted") == ["flushed", "files_missing"]
    assert "Its process may have been restarted." in ours.results["restarted"]["targets"]["1"][2]
    assert ours.results["restarted_after"]["status"] == "complete"


def test_late_start_is_stopped(ours: Driven) -> None:
    late = ours.results["late"]
    assert "did not answer within rpc_timeout_s=0.5 seconds" in late["error"]
    assert late["about"]["state"] in {"idle", "ended"}
    assert ours.results["after"]["status"] == "complete"


# Captures of running jobs by `profdeck capture`. These tests are last, because the jobs run until the end.


@attrs.frozen
class RayJob:
    """A job of the cluster with busy engines."""

    namespace: str
    names: tuple[str, ...]


@pytest.fixture(scope="module")
def ray_jobs(cluster: Cluster, environ: dict[str, str]) -> Iterator[tuple[RayJob, RayJob]]:
    """Two concurrent jobs in separate namespaces. Both have an actor `rollout_0`, and the first has a second engine."""
    with ExitStack() as until_done:
        found = []
        for names in (("rollout_0", "rollout_1"), ("rollout_0",)):
            command = [sys.executable, HERE / "jobs" / "ray_job.py", cluster.address, *names]
            job = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            until_done.enter_context(job)  # closes its stdin and waits for the exit
            assert job.stdout is not None
            found.append(RayJob(job.stdout.readline().strip(), names))
        yield found[0], found[1]


def captured_from_outside(
    cluster: Cluster, environ: dict[str, str], directory: Path, *options: str, names: str = "*"
) -> tuple[int, dict[str, Any], str]:
    """Run `profdeck capture servers --ray NAMES`. Return its exit code, JSON output and stderr."""
    given = ["--ray", names, "--iterations", "3", "--output", str(directory / "profiles")]
    given += ["--set", "server.options.device_options.thread_bound=false", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "profdeck", "capture", "servers", *given, *options],
        cwd=directory,
        env=environ | {"RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=DRIVER_S,
        check=False,
    )
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def test_one_of_several_jobs_must_be_selected(
    cluster: Cluster, environ: dict[str, str], ray_jobs: tuple[RayJob, RayJob], tmp_path: Path
) -> None:
    code, _, said = captured_from_outside(cluster, environ, tmp_path)
    assert code == 2
    assert "Several Ray jobs have engines. Select one with --set server.targets.actor_namespace=NAME" in said
    assert {f"{job.namespace} ({len(job.names)})" in " ".join(said.split()) for job in ray_jobs} == {True}
    assert not (tmp_path / "profiles").exists()


def test_only_the_selected_job_is_captured(
    cluster: Cluster, environ: dict[str, str], ray_jobs: tuple[RayJob, RayJob], tmp_path: Path
) -> None:
    job = ray_jobs[0]
    code, found, said = captured_from_outside(
        cluster, environ, tmp_path, "--set", f"server.targets.actor_namespace={job.namespace}"
    )
    assert (code, found["complete"]) == (0, True), said
    assert [one["url"] for one in found["servers"]] == [f"Actor(AsyncActor, {name})" for name in job.names]
    assert {(one["state"], one["backend"]) for one in found["servers"]} == {("ready", "held")}
    assert "without an engine (actors matching *): Actor(SyncActor, trainer)" in " ".join(said.split())
    captures = read_run(Path(found["run"])).captures
    assert {(one.replica, one.status) for one in captures} == {
        (number, Status.COMPLETE) for number in range(len(job.names))
    }


def test_actor_name_that_is_unique_to_a_job_selects_it(
    cluster: Cluster, environ: dict[str, str], ray_jobs: tuple[RayJob, RayJob], tmp_path: Path
) -> None:
    code, found, said = captured_from_outside(cluster, environ, tmp_path, names="rollout_1*")
    assert (code, found["complete"]) == (0, True), said
    assert [one["url"] for one in found["servers"]] == ["Actor(AsyncActor, rollout_1)"]


def test_cluster_without_matching_actors(
    cluster: Cluster, environ: dict[str, str], ray_jobs: tuple[RayJob, RayJob], tmp_path: Path
) -> None:
    code, _, said = captured_from_outside(cluster, environ, tmp_path, names="reward_*")
    assert code == 1
    assert "No engine found in the actors named reward_*" in said


def test_unreachable_cluster(environ: dict[str, str], tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        code, _, said = captured_from_outside(Cluster(address, 0), environ, tmp_path)
    assert code == 1
    assert f"Cannot join the Ray cluster at RAY_ADDRESS={address}: " in " ".join(said.split())
