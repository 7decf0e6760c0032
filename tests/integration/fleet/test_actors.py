"""Engines that actors of a real Ray cluster hold: engines of ours, with which much can go wrong, and those of vLLM.

Each has a driver, `jobs/actors.py` and `jobs/actors_vllm.py`, whose results these tests judge.
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
from engine_servers import vllm_environment
from fleet.clusters import Cluster, ray_cluster, ray_environment

from namespaces import own_network
from profdeck.base.outcome import Outcome
from profdeck.records.manifest import read_manifest
from profdeck.records.status import Status
from profdeck.verification.report_model import CaptureReport, TargetReport
from profdeck.verification.run_report import read_run

HERE = Path(__file__).parent
DRIVER_S = 500
BUSY = "may be running a blocking call"


@attrs.frozen
class Driven:
    """What a driver left."""

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
    """The environment of the cluster and of its drivers, with the backends `held` and `tally`."""
    site = tmp_path_factory.mktemp("site")
    about = site / "held-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: held\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[profdeck.backends]\nheld = held_engines:HeldBackend\n")
    of_vllm = vllm_environment(tmp_path_factory.mktemp("engines"))
    leases = {"PROFDECK_LEASE_DIR": str(tmp_path_factory.mktemp("leases"))}
    return of_vllm | ray_environment(site, HERE, *tally_path.split(os.pathsep)) | leases


@pytest.fixture(scope="module")
def cluster(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray"), environ, cpus=8) as started:
        yield started


def driven(job: str, environ: dict[str, str], directory: Path, *arguments: str) -> Driven:
    """Run a driver to its end."""
    results = directory / "results.json"
    command = [sys.executable, HERE / "jobs" / f"{job}.py", directory / "profiles", results, *arguments]
    # Not in the tests' directory, whose modules have the names of others.
    done = subprocess.run(
        command, cwd=directory, env=environ, capture_output=True, text=True, timeout=DRIVER_S, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return Driven(directory / "profiles" / "run", json.loads(results.read_text()))


@pytest.fixture(scope="module")
def ours(cluster: Cluster, environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Driven:
    """What came of engines of ours."""
    return driven("actors", environ, tmp_path_factory.mktemp("ours"), cluster.address)


@pytest.fixture(scope="module")
def vllm(cluster: Cluster, environ: dict[str, str], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Driven:
    """What came of engines of vLLM."""
    return driven("actors_vllm", environ, tmp_path_factory.mktemp("vllm"), cluster.address, str(model))


# Where they are on another host.


def test_files_of_actors_on_a_node_that_shares_nothing_are_fetched(
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
    assert "2 of 2 complete." in collected[1]["said"]
    assert "Nothing is missing" in collected[2]["said"]
    assert read_run(run.run).status is Status.COMPLETE


# What works.


def test_actors_of_all_kinds_are_captured_as_one(ours: Driven) -> None:
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


def test_no_start_leaves_before_all_have_been_reached(ours: Driven) -> None:
    about = ours.results["all"]["about"]
    last_reached = max(one["reached"] for one in about)
    assert all(started > last_reached for one in about for started in one["started"])


def test_an_actor_alone_and_an_async_host(ours: Driven) -> None:
    assert ours.results["single"]["status"] == "complete"
    assert ours.results["loop"] == {"rollout": "complete"}
    (single,) = ours.targets(2)
    assert single.target is not None
    assert single.target.startswith("Actor(AsyncActor, ")


def test_a_path_says_where_the_engine_is(ours: Driven) -> None:
    assert ours.results["deep"]["status"] == "complete"
    unsaid, two = ours.results["deep_unsaid"], ours.results["two"]
    assert unsaid["outcome"] == two["outcome"] == Outcome.REFUSED
    assert "Its attributes: worker (Worker)." in unsaid["error"]
    assert "actor_attribute" in unsaid["fix"]
    assert "engine (Blocking), other (Blocking)" in two["error"]
    assert "Deep.worker has no attribute 'motor'" in ours.results["wrong_path"]["error"]
    assert "AsyncActor.words is a string" in ours.results["text"]["error"]


def test_an_engine_of_another_event_loop_is_refused(ours: Driven) -> None:
    assert ours.results["foreign"]["outcome"] == Outcome.REFUSED
    assert "Add async methods to the actor's class" in ours.results["foreign"]["fix"]


def test_one_actor_twice_is_an_error(ours: Driven) -> None:
    assert "is in the list twice" in ours.results["twice"]["config_error"]


# Found in the cluster.


def test_a_placement_group_stands_for_its_actors_with_engines(ours: Driven) -> None:
    found = ours.results["group"]
    assert found["status"] == "complete"
    assert ours.names("group") == ["Actor(AsyncActor, replica_9)", "Actor(AsyncActor, replica_10)"]
    no_engine, no_name = found["notes"]
    assert no_engine.startswith("Skipped actors without an engine (PlacementGroup(")
    assert no_engine.endswith(": Actor(SyncActor, trainer).")
    assert no_name.endswith("which cannot be looked up: 1.")


def test_a_group_is_looked_up_anew_and_keeps_its_numbers(ours: Driven) -> None:
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


def test_what_is_no_target(ours: Driven) -> None:
    assert "no actor with a name and an engine" in ours.results["empty_group"]["error"]
    assert "give one of both" in ours.results["both"]["config_error"]
    assert "is in the list twice" in ours.results["group_twice"]["config_error"]


def test_a_driver_is_killed_and_the_next_one_ends_what_it_left(ours: Driven) -> None:
    assert ours.results["first_driver"] == "started"
    living = ours.results["living_owner"]
    assert (living["outcome"], "which is alive" in living["error"]) == (Outcome.ALREADY_ACTIVE, True)
    assert ours.results["orphan"]["status"] == "complete"
    (note,) = ours.results["orphan"]["notes"]
    assert note.startswith("It ended what was active there, as its owner is gone: step30 of process ")


def test_a_driver_that_ends_stops_its_capture(ours: Driven) -> None:
    assert (ours.results["last_driver"], ours.results["ended"]["state"]) == ("started", "ended")
    (capture,) = ours.captures(33)
    (rank,) = capture.ranks
    assert (rank.status, rank.events > 0) == (Status.PARTIAL, True)


# What goes wrong.


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


def test_an_actor_that_restarts_in_mid_capture(ours: Driven) -> None:
    assert ours.results["restarted"]["status"] == "partial"
    assert ours.outcomes("restarted") == ["flushed", "files_missing"]
    assert "was its process restarted?" in ours.results["restarted"]["targets"]["1"][2]
    assert ours.results["restarted_after"]["status"] == "complete"


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("dead", Outcome.UNREACHABLE), ("bare", Outcome.REFUSED), ("without", Outcome.NOT_ENABLED)],
)
def test_an_actor_alone_that_cannot_be_captured(ours: Driven, name: str, outcome: Outcome) -> None:
    found = ours.results[name]
    assert (found["outcome"], bool(found["fix"])) == (outcome, True)
    assert found["start_s"] < 10


def test_a_busy_actor_does_not_hold_up_the_others(ours: Driven) -> None:
    found = ours.results["busy_fleet"]
    assert ours.outcomes("busy_fleet") == ["timed_out", "flushed"]
    assert BUSY in found["targets"]["0"][3]
    assert found["about"]["started"] == []
    alone = ours.results["busy"]
    assert alone["outcome"] == Outcome.TIMED_OUT
    assert "rpc_timeout_s=1 seconds" in alone["error"]
    assert BUSY in alone["fix"]
    assert alone["start_s"] < 10


def test_a_start_that_comes_too_late_leaves_nothing_recording(ours: Driven) -> None:
    late = ours.results["late"]
    assert "did not answer within rpc_timeout_s=0.5 seconds" in late["error"]
    assert late["about"]["state"] in {"idle", "ended"}
    assert ours.results["after"]["status"] == "complete"


def test_a_host_that_left_the_cluster_joins_no_other(ours: Driven) -> None:
    left = ours.results["left"]
    assert left["status"] == "partial"
    assert "this process has left the Ray cluster" in left["problems"][0]
    assert ours.results["left_start"]["outcome"] == Outcome.UNREACHABLE
    assert ours.results["ray_is_up"] is False


# Engines of vLLM.


@pytest.mark.long
def test_two_engines_of_vllm_under_load(vllm: Driven) -> None:
    found = vllm.results["handles"]
    assert (found["status"], found["problems"], found["tokens"]) == ("complete", [], [32, 32])
    assert [outcome for _, outcome, _ in found["targets"]] == ["ended_by_itself"] * 2
    captures = vllm.captures(1)
    assert {(one.replica, one.status, len(one.ranks)) for one in captures} == {
        (0, Status.COMPLETE, 1),
        (1, Status.COMPLETE, 1),
    }
    events = [artifact.events for one in captures for rank in one.ranks for artifact in rank.artifacts]
    assert all(count is not None and count > 100 for count in events)


@pytest.mark.long
def test_the_placement_group_of_engines_of_vllm(vllm: Driven) -> None:
    found = vllm.results["group"]
    assert (found["status"], found["problems"]) == ("complete", [])
    assert [name for name, _, _ in found["targets"]] == ["Actor(Rollout, rollout_0)", "Actor(Rollout, rollout_1)"]
    assert {one.status for one in vllm.captures(2)} == {Status.COMPLETE}


@pytest.mark.long
def test_the_own_profiler_of_an_engine_in_an_actor(vllm: Driven) -> None:
    found = vllm.results["own"]
    assert (found["status"], found["problems"]) == ("complete", [])
    assert any("vLLM's own profiler" in note for note in found["notes"])
    (capture,) = vllm.captures(3)
    assert capture.status is Status.COMPLETE


@pytest.mark.long
def test_an_actor_with_two_threads_is_captured_in_mid_call(vllm: Driven) -> None:
    found = vllm.results["busy"]
    assert (found["status"], found["tokens"]) == ("complete", [32 * 64])


@pytest.mark.long
def test_an_engine_that_is_killed_costs_its_own_files_only(vllm: Driven) -> None:
    found = vllm.results["killed"]
    assert [outcome for _, outcome, _ in found["targets"]] == ["flushed", "unreachable"]
    assert "its worker process has died" in found["targets"][1][2]
    assert vllm.results["serves"] == 3
    states = {one.replica: one.status for one in vllm.captures(5)}
    assert states[0] is Status.COMPLETE
    assert states[1] is not Status.COMPLETE


# Jobs that run, captured from outside: last, as they work until the end of these tests.


@attrs.frozen
class RayJob:
    """A job of the cluster, with engines at work."""

    namespace: str
    names: tuple[str, ...]


@pytest.fixture(scope="module")
def ray_jobs(cluster: Cluster, environ: dict[str, str]) -> Iterator[tuple[RayJob, RayJob]]:
    """Two jobs at once, in namespaces of their own: one with two engines, one with one of a name that the other has."""
    with ExitStack() as until_done:
        found = []
        for names in (("rollout_0", "rollout_1"), ("rollout_0",)):
            command = [sys.executable, HERE / "jobs" / "ray_job.py", cluster.address, *names]
            job = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            until_done.enter_context(job)  # which closes its input, and waits
            assert job.stdout is not None
            found.append(RayJob(job.stdout.readline().strip(), names))
        yield found[0], found[1]


def captured_from_outside(
    cluster: Cluster, environ: dict[str, str], directory: Path, *options: str, names: str = "*"
) -> tuple[int, dict[str, Any], str]:
    """Run `profdeck capture servers --ray NAMES`. Return its exit code, its JSON document and its messages."""
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


def test_of_several_jobs_one_has_to_be_chosen(
    cluster: Cluster, environ: dict[str, str], ray_jobs: tuple[RayJob, RayJob], tmp_path: Path
) -> None:
    code, _, said = captured_from_outside(cluster, environ, tmp_path)
    assert code == 2
    assert "Several Ray jobs have engines. Select one with --set server.targets.actor_namespace=NAME" in said
    assert {f"{job.namespace} ({len(job.names)})" in " ".join(said.split()) for job in ray_jobs} == {True}
    assert not (tmp_path / "profiles").exists()


@pytest.mark.parametrize("which", [0, 1])
def test_each_job_is_captured_by_itself(
    cluster: Cluster, environ: dict[str, str], ray_jobs: tuple[RayJob, RayJob], tmp_path: Path, which: int
) -> None:
    job = ray_jobs[which]
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


def test_a_name_that_one_job_has_chooses_it(
    cluster: Cluster, environ: dict[str, str], ray_jobs: tuple[RayJob, RayJob], tmp_path: Path
) -> None:
    code, found, said = captured_from_outside(cluster, environ, tmp_path, names="rollout_1*")
    assert (code, found["complete"]) == (0, True), said
    assert [one["url"] for one in found["servers"]] == ["Actor(AsyncActor, rollout_1)"]


def test_a_cluster_without_such_actors(
    cluster: Cluster, environ: dict[str, str], ray_jobs: tuple[RayJob, RayJob], tmp_path: Path
) -> None:
    code, _, said = captured_from_outside(cluster, environ, tmp_path, names="reward_*")
    assert code == 1
    assert "No engine found in the actors named reward_*" in said


def test_no_cluster_to_join(environ: dict[str, str], tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        code, _, said = captured_from_outside(Cluster(address, 0), environ, tmp_path)
    assert code == 1
    assert f"Cannot join the Ray cluster at RAY_ADDRESS={address}: " in " ".join(said.split())
