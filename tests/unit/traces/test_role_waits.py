"""Tests for waits between trainers and servers. Each wait is assigned to the other role's activity at that time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_job import Batch, decode, write_events, write_server, write_trainer
from hypothesis import given, settings, strategies as st
from simulated_roles import (
    Label,
    simulate,
    simulate_disaggregated,
    simulate_many_roles,
    waits_of_decode_server,
    waits_of_server,
    waits_of_trainer,
    write,
)

from captured_runs import FIRST_NS
from profdeck.base.identity import Identity
from profdeck_traces import write_result
from profdeck_traces.account.model import Account, OwnerTime
from profdeck_traces.analysis.model import RunSummary
from profdeck_traces.analysis.run_summary import summarise_run
from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.inputs.sources import find_sources
from profdeck_traces.loading import summarise


def summary_of(run: Path, cache: ResultCache | None = None) -> RunSummary:
    summary, errors = summarise_run(find_sources([run]), cache=cache)
    assert not errors
    return summary


def account(run: RunSummary, role: str, replica: int | None = None) -> Account:
    (found,) = (rank.account for rank in run.ranks if (rank.role, rank.replica) == (role, replica))
    assert found is not None
    return found


def waits_us(found: Account) -> Counter[Label]:
    waits: Counter[Label] = Counter()
    for owner in found.owners:
        if owner.kind == "wait for role":
            assert owner.peer is not None
            waits[owner.peer, " ".join(filter(None, [owner.awaited, owner.name]))] += round(owner.time_us)
    return waits


@given(seed=st.integers(0, 10**6), servers=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_waits_are_assigned_like_in_a_brute_force_simulation(
    tmp_path_factory: pytest.TempPathFactory, seed: int, servers: int
) -> None:
    roles = simulate(seed, servers=servers)
    run = summary_of(write(roles, tmp_path_factory.mktemp("job")))

    found = account(run, "trainer")
    duration_ms = roles.trainer[-1].end - roles.trainer[0].begin
    assert sum(round(owner.time_us * 1000) for owner in found.owners) == duration_ms * 10**6
    assert waits_us(found) == Counter({label: 1000 * ms for label, ms in waits_of_trainer(roles).items()})
    for replica, bursts in enumerate(roles.servers):
        if bursts:
            found = account(run, "rollout", replica)
            duration_ms = bursts[-1].end - bursts[0].begin
            assert sum(round(owner.time_us * 1000) for owner in found.owners) == duration_ms * 10**6
            assert waits_us(found) == Counter(
                {label: 1000 * ms for label, ms in waits_of_server(roles, replica).items()}
            )


@given(seed=st.integers(0, 10**6), servers=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_waits_of_many_roles_are_assigned_like_in_a_brute_force_simulation(
    tmp_path_factory: pytest.TempPathFactory, seed: int, servers: int
) -> None:
    roles = simulate_many_roles(seed, servers=servers)
    if not any(roles.servers):
        return
    run = summary_of(write(roles, tmp_path_factory.mktemp("job")))
    found = account(run, "trainer")
    assert waits_us(found) == Counter({label: 1000 * ms for label, ms in waits_of_trainer(roles).items()})
    for replica, bursts in enumerate(roles.servers):
        if bursts:
            found = account(run, "rollout", replica)
            assert waits_us(found) == Counter(
                {label: 1000 * ms for label, ms in waits_of_server(roles, replica).items()}
            )


@given(seed=st.integers(0, 10**6), servers=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_waits_for_prefill_servers_are_assigned_like_in_a_brute_force_simulation(
    tmp_path_factory: pytest.TempPathFactory, seed: int, servers: int
) -> None:
    roles = simulate_disaggregated(seed, prefill_servers=servers)
    run = summary_of(write(roles, tmp_path_factory.mktemp("job")))
    found = account(run, "rollout", servers)
    duration_ms = roles.servers[-1][-1].end - roles.servers[-1][0].begin
    assert sum(round(owner.time_us * 1000) for owner in found.owners) == duration_ms * 10**6
    assert waits_us(found) == Counter({label: 1000 * ms for label, ms in waits_of_decode_server(roles).items()})


# The trainer is idle for the first 600 ms of its step.
TURN = ("generate_sequences", 600.0, False), ("actor_update", 400.0, True)
PREFILL = Batch(ms=20, prefills=4, tokens=400)


def job(run: Path, *servers: list[Batch], stages: tuple[tuple[str, float, bool], ...] = TURN, **more: Any) -> Path:
    for replica, batches in enumerate(servers):
        write_server(run, batches, replica)
    write_trainer(run, stages, **more)
    return run


def edit_manifests(run: Path, pattern: str, **fields: Any) -> None:
    for path in run.glob(pattern):
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def waits(found: Account) -> list[OwnerTime]:
    return [owner for owner in found.owners if owner.kind == "wait for role"]


def state_of(run: Path, cause: str) -> tuple[str, str | None]:
    return next((state.state, state.reason) for state in summarise([run])[0].causes if state.cause == cause)


def test_a_wait_for_servers_names_the_last_one_and_what_it_did(tmp_path: Path) -> None:
    run = job(tmp_path, [PREFILL, *decode(20, 10, 4)], [PREFILL, *decode(40, 10, 4), *decode(10, 10, 1)])
    found = account(summary_of(run), "trainer")

    decodes, tail, prefill = waits(found)
    assert decodes.title == "wait for rollout/1: decode"
    assert decodes.label == "wait for rollout/1: decode batch of 4 to 7"
    assert tail.label == "wait for rollout/1: decode batch of 1"
    assert prefill.label == "wait for rollout/1: prefill"
    assert {wait.annotation for wait in waits(found)} == {"generate_sequences"}
    assert decodes.time_us == pytest.approx(403_000, rel=0.01)
    assert tail.time_us == pytest.approx(100_700, rel=0.01)
    # Without rollout/1, the trainer would still wait for rollout/0, which finishes 303 ms earlier.
    assert decodes.gain_us == pytest.approx(303_600, rel=0.01)
    assert tail.gain_us == tail.time_us
    assert prefill.gain_us == prefill.time_us
    (between,) = (cause for cause in found.causes if cause.cause == "between")
    assert between.time_us == pytest.approx(600_000 - sum(wait.time_us for wait in waits(found)), abs=1)
    assert not [note for note in found.notes if note.startswith("Waits for")]


def test_stored_results_have_the_same_accounts_as_traces(tmp_path: Path) -> None:
    run = job(tmp_path / "run", [PREFILL, *decode(40, 10, 4)])
    direct = summary_of(run)
    assert waits(account(direct, "trainer"))
    cache = ResultCache(tmp_path / "cache", max_bytes=1 << 30)
    assert summary_of(run, cache).ranks == direct.ranks
    assert summary_of(run, cache).ranks == direct.ranks
    for path in run.rglob("*.trace.json.gz"):
        assert write_result(path)
    assert summary_of(run, ResultCache(tmp_path / "empty", max_bytes=1 << 30)).ranks == direct.ranks


def test_servers_that_work_on_while_the_trainer_continues_are_not_awaited(tmp_path: Path) -> None:
    run = job(tmp_path, decode(70, 10, 4))
    found = account(summary_of(run), "trainer")

    assert waits(found) == []
    assert found.notes[-1] == (
        "Waits for rollout are not assigned: in 60% of the time, their work continues outside the idle period, or the "
        "recording ends too early."
    )
    state, reason = state_of(run, "idle-trainer")
    assert (state, reason and reason.startswith("in 60% of the time")) == ("not_judged", True)


def test_a_recording_that_ends_during_the_wait_does_not_show_the_last_server(tmp_path: Path) -> None:
    run = job(tmp_path, [PREFILL, *decode(40, 10, 4)])
    for path in run.glob("*/rollout/*/rank_*.json"):
        manifest = json.loads(path.read_text())
        manifest["artifacts"][0]["anchors"].pop()
        path.write_text(json.dumps(manifest))
    found = account(summary_of(run), "trainer")
    assert waits(found) == []
    assert "the recording ends too early" in found.notes[-1]


def test_servers_without_a_common_clock_are_not_awaited(tmp_path: Path) -> None:
    run = job(tmp_path, [PREFILL, *decode(40, 10, 4)])
    edit_manifests(run, "*/rollout/*/rank_*.json", host="another-host")
    found = account(summary_of(run), "trainer")
    assert waits(found) == []
    assert found.notes[-1] == "Waits for rollout are not assigned: the clocks of the hosts are not aligned."
    assert state_of(run, "idle-trainer") == ("not_judged", "the clocks of the hosts are not aligned")


def test_clocks_of_other_hosts_are_aligned_by_their_servers(tmp_path: Path) -> None:
    """Both hosts' clocks are 50 ms ahead of the driver's, but only the servers' clocks are compared with it."""
    run = job(tmp_path, [PREFILL, *decode(40, 10, 4)])
    edit_manifests(run, "*/*/**/rank_*.json", host="far")
    rank = next(run.glob("*/rollout/*/rank_*.json"))
    clock = {"host": "far", "reference": "head", "offset_ns": -50_000_000, "error_ns": 1_000}
    about = {"target": "http://far", "artifacts": [], "clock": clock, "request_token": "1"}
    rank.with_name("target.step0.json").write_text(json.dumps(json.loads(rank.read_text()) | about))
    assert {wait.peer for wait in waits(account(summary_of(run), "trainer"))} == {"rollout/0"}


def write_fleet_manifest(run: Path, *worker_types: str | None, found: int | None = None) -> None:
    """Write a fleet manifest with one target per worker type."""
    rank = next(run.glob("*/rollout/*/rank_*.json"))
    targets = [
        {"name": f"http://{number}", "replica": number, "worker_type": kind} for number, kind in enumerate(worker_types)
    ]
    about = {"target": f"fleet of {len(targets)}", "replica": None, "targets": targets, "found": found, "artifacts": []}
    path = rank.parents[1] / "target.step0.json"
    path.write_text(json.dumps(json.loads(rank.read_text()) | about))


@pytest.mark.parametrize(
    ("targets", "found", "reason"),
    [
        ((None, None), None, "there is no readable trace of rollout/1"),
        ((None,), 2, "there are traces of only 1 of 2 servers"),
    ],
    ids=["failed", "not selected"],
)
def test_a_server_that_was_not_recorded_may_be_the_last(
    tmp_path: Path, targets: tuple[None, ...], found: int | None, reason: str
) -> None:
    run = job(tmp_path, [PREFILL, *decode(40, 10, 4)])
    write_fleet_manifest(run, *targets, found=found)
    trainer = account(summary_of(run), "trainer")
    assert waits(trainer) == []
    assert trainer.notes[-1] == f"Waits for rollout are not assigned: {reason}."


def test_traces_of_a_part_of_the_servers_do_not_show_the_last_one(tmp_path: Path) -> None:
    run = job(tmp_path, [PREFILL, *decode(40, 10, 4)], [PREFILL, *decode(50, 10, 4)])
    write_fleet_manifest(run, None, None)
    for servers, is_known in (("replica_000", False), ("replica_*", True)):
        traces = [*run.glob("*/trainer/*.trace.json.gz"), *run.glob(f"*/rollout/{servers}/*.trace.json.gz")]
        summary, _ = summarise_run(find_sources(traces))
        assert bool(waits(account(summary, "trainer"))) is is_known


def two_servers(run: Path) -> Path:
    return job(run, [PREFILL, *decode(40, 10, 4)], [PREFILL, *decode(50, 10, 4)])


def unassigned(run: Path, role: str, replica: int | None = None) -> list[tuple[tuple[str, ...], str]]:
    """Return the roles and reasons of unassigned waits. Traces that can't be read are ignored."""
    summary, _ = summarise_run(find_sources([run]))
    found = account(summary, role, replica)
    assert waits(found) == []
    assert all(each.note in found.notes for each in found.unassigned_waits)
    return [(each.roles, each.reason) for each in found.unassigned_waits]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (Path.unlink, "*.trace.json.gz"),
        (lambda path: path.write_bytes(b"not a trace"), "*.trace.json.gz"),
        (truncate, "*.trace.json.gz"),
        (lambda path: path.write_text("{"), "rank_*.step0.json"),
    ],
    ids=["no trace", "no Chrome trace", "truncated trace", "corrupt manifest"],
)
def test_a_server_without_a_readable_trace_may_be_the_last(
    tmp_path: Path, damage: Callable[[Path], None], file: str
) -> None:
    run = two_servers(tmp_path)
    assert {wait.peer for wait in waits(account(summary_of(run), "trainer"))} == {"rollout/1"}
    (path,) = run.glob(f"*/rollout/replica_001/{file}")
    damage(path)
    assert unassigned(run, "trainer") == [(("rollout",), "there is no readable trace of rollout/1")]


def test_servers_outside_the_input_paths_may_be_the_last(tmp_path: Path) -> None:
    run = two_servers(tmp_path)
    traces = [*run.glob("*/trainer/*.trace.json.gz"), *run.glob("*/rollout/replica_000/*.trace.json.gz")]
    summary, _ = summarise_run(find_sources(traces))
    assert waits(account(summary, "trainer")) == []


def test_servers_may_wait_for_a_trainer_rank_without_a_trace(tmp_path: Path) -> None:
    run = job(tmp_path, [PREFILL, Batch(ms=10, decodes=4, pause_ms=580), PREFILL], stages=(("a", 90.0, False), TURN[1]))
    assert {wait.peer for wait in waits(account(summary_of(run), "rollout", 0))} == {"trainer"}
    edit_manifests(run, "*/trainer/rank_*.json", world_size=2)
    assert unassigned(run, "rollout", 0) == [(("trainer",), "there is no readable trace of trainer rank 1")]


def test_a_role_without_traces_may_explain_the_wait(tmp_path: Path) -> None:
    run = job(tmp_path, [PREFILL, *decode(40, 10, 4)])
    (manifest,) = run.glob("*/trainer/rank_*.json")
    reward = run / "step_000000" / "reward" / manifest.name
    reward.parent.mkdir()
    reward.write_text(json.dumps(json.loads(manifest.read_text()) | {"role": "reward"}))
    reason = "there is no readable trace of reward"
    assert unassigned(run, "trainer") == [(("reward", "rollout"), reason)]
    assert state_of(run, "idle-trainer") == ("not_judged", reason)


def test_a_configured_role_without_captures_may_explain_the_wait(tmp_path: Path) -> None:
    run = job(tmp_path, [PREFILL, *decode(40, 10, 4)])
    (run / "run.json").write_text(json.dumps({"roles": ["trainer", "rollout", "reward"]}))
    assert unassigned(run, "trainer") == [(("reward", "rollout"), "there is no readable trace of reward")]


def test_a_trainer_without_any_trace_of_its_servers_states_it(tmp_path: Path) -> None:
    run = two_servers(tmp_path)
    for trace in run.glob("*/rollout/*/*.trace.json.gz"):
        trace.unlink()
    reason = "there is no readable trace of rollout/0 and rollout/1"
    assert unassigned(run, "trainer") == [(("rollout",), reason)]


def test_a_missing_prefill_server_may_be_awaited(tmp_path: Path) -> None:
    run = disaggregated(tmp_path, 200, 210)
    for replica, kind in enumerate(("prefill", "prefill", "decode")):
        edit_manifests(run, f"*/rollout/replica_{replica:03d}/rank_*.json", worker_type=kind)
    next(run.glob("*/rollout/replica_001/*.trace.json.gz")).unlink()
    assert unassigned(run, "rollout", 2) == [(("rollout",), "there is no readable trace of rollout/1")]


def test_members_of_another_capture_do_not_explain_a_wait(tmp_path: Path) -> None:
    run = two_servers(tmp_path)
    (manifest,) = run.glob("*/rollout/replica_001/rank_*.json")
    other = json.loads(manifest.read_text()) | {"replica": 2, "capture": "step0-2"}
    file = run / "step_000000/rollout/replica_002" / manifest.name.replace("step0", "step0-2")
    file.parent.mkdir()
    file.write_text(json.dumps(other))
    assert {wait.peer for wait in waits(account(summary_of(run), "trainer"))} == {"rollout/1"}


def test_other_tensor_parallel_ranks_of_a_server_are_not_needed(tmp_path: Path) -> None:
    run = job(tmp_path, [PREFILL, *decode(40, 10, 4)])
    edit_manifests(run, "*/rollout/*/rank_*.json", world_size=2, parallel={"tp": 0})
    (manifest,) = run.glob("*/rollout/*/rank_*.json")
    manifest.rename(manifest.with_name("rank_0000_tp0.step0.json"))
    assert {wait.peer for wait in waits(account(summary_of(run), "trainer"))} == {"rollout/0"}


def test_every_data_parallel_rank_of_a_server_may_be_the_last(tmp_path: Path) -> None:
    run = job(tmp_path, [PREFILL, *decode(40, 10, 4)])
    edit_manifests(run, "*/rollout/*/rank_*.json", world_size=2, parallel={"dp": 0})
    (manifest,) = run.glob("*/rollout/*/rank_*.json")
    manifest.rename(manifest.with_name("rank_0000_dp0.step0.json"))
    assert unassigned(run, "trainer") == [(("rollout",), "there is no readable trace of rollout/0 rank 1")]


def test_a_server_without_iterations_is_no_trainer(tmp_path: Path) -> None:
    """rollout/1 runs operators, for example to load weights, but no iterations."""
    run = job(tmp_path, [PREFILL, *decode(40, 10, 4)], [])
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::copy_", "pid": 1, "tid": 1, "ts": ts, "dur": 1000.0, "args": {}}
        for ts in (1000.0, 590_000.0)
    ]
    identity = Identity(role="rollout", replica=1)
    write_events(run / "step_000000/rollout/replica_001", events, identity, FIRST_NS)
    summary = summary_of(run)
    assert {wait.peer for wait in waits(account(summary, "rollout", 1))} <= {"trainer"}
    assert {wait.peer for wait in waits(account(summary, "rollout", 0))} <= {"trainer"}
    assert waits(account(summary, "trainer"))[0].label == "wait for rollout/0: decode batch of 4 to 7"
    assert {wait.awaited for wait in waits(account(summary, "trainer")) if wait.peer == "rollout/1"} == {
        "work",
        "no batch",
    }


@pytest.mark.parametrize("first", [PREFILL, *decode(1, 20, 4)], ids=["prefill", "decode"])
def test_a_server_with_requests_at_the_start_of_its_recording_may_have_worked_before(
    tmp_path: Path, first: Batch
) -> None:
    run = tmp_path
    write_server(run, [first, *decode(40, 10, 4)], 0, first_ns=FIRST_NS + 50_000_000)
    write_trainer(run, TURN)
    if first == PREFILL:
        found = waits(account(summary_of(run), "trainer"))
        assert sum(wait.time_us for wait in found) == pytest.approx(422_000, rel=0.01)
    else:
        ((_, reason),) = unassigned(run, "trainer")
        assert "outside the idle period" in reason


@pytest.mark.parametrize("kind", ["turns", "async trainer", "async server"])
def test_a_trainer_that_works_from_its_first_step_on_is_awaited_if_roles_take_turns(tmp_path: Path, kind: str) -> None:
    """The server is idle when the recording of the trainer starts, and the trainer is busy right away."""
    run = tmp_path
    last = Batch(ms=10, decodes=4, pause_ms=200)
    write_server(run, [PREFILL, *decode(3, 10, 4), last, PREFILL, *decode(20, 10, 4)], 0)
    more = ("actor_update", 300.0, True), ("generate_sequences", 200.0, False)
    stages = ("actor_update", 100.0, True), ("generate_sequences", 200.0, False)
    stages = (*stages, *(more if kind == "async trainer" else ()))
    if kind == "async server":
        write_server(run, [PREFILL, *decode(60, 10, 4)], 1)
    write_trainer(run, stages, first_ns=FIRST_NS + 100_000_000)
    # The recording of the other rank starts 3 ms later.
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 4000, "tid": 100, "args": {}}
    events = [event | {"ts": 1000.0, "dur": 50_000.0}]
    identity = Identity(role="trainer", rank=1, world_size=2)
    write_events(run / "step_000000/trainer", events, identity, FIRST_NS + 103_000_000)
    found = account(summary_of(run), "rollout", 0)
    if kind == "turns":
        (wait,) = waits(found)
        assert (wait.peer, wait.awaited) == ("trainer", "actor_update")
        assert wait.time_us == pytest.approx(100_000, rel=0.03)
    else:
        assert waits(found) == []
        ((_, reason),) = [(one.roles, one.reason) for one in found.unassigned_waits]
        assert "outside the idle period" in reason


def test_another_trainer_that_finishes_last_is_awaited(tmp_path: Path) -> None:
    """The trainer waits for the reward role. A faster server wouldn't make the wait shorter."""
    run = job(tmp_path, [PREFILL, *decode(30, 10, 4)])
    write_trainer(run, (("rollout", 100.0, False), ("score", 450.0, True), ("idle", 450.0, False)), role="reward")
    found = waits(account(summary_of(run), "trainer"))
    assert found[0].label == "wait for reward: score"
    assert found[0].time_us == pytest.approx(450_000, rel=0.01)
    assert sum(wait.gain_us or 0 for wait in found if wait.peer == "rollout/0") == 0


def test_a_trainer_alone_waits_for_no_role(tmp_path: Path) -> None:
    write_trainer(tmp_path, TURN)
    found = account(summary_of(tmp_path), "trainer")
    assert waits(found) == []
    assert not [note for note in found.notes if note.startswith("Waits for")]


def test_python_code_of_the_trainer_is_no_wait_for_a_server_without_a_batch(tmp_path: Path) -> None:
    """While the server pauses, the trainer may be running the tool."""
    batches = [*decode(10, 10, 4), Batch(ms=10, decodes=4, pause_ms=200), PREFILL, *decode(10, 10, 4)]
    frames = ("agent.py(7): call_tool", "agent.py(3): search")
    run = job(tmp_path, batches, stacks=frames)
    found = account(summary_of(run), "trainer")
    (python,) = (owner for owner in found.owners if owner.kind == "python" and owner.name == frames[-1])
    assert python.time_us == pytest.approx(200_000 + 600_000 - 434_000, rel=0.02)
    assert {wait.awaited for wait in waits(found)} == {"decode", "prefill"}


# Disaggregated prefill.


def disaggregated(run: Path, *prefill_ms: float, decoders: int = 1) -> Path:
    """Write traces of one prefill server per duration, and of decode servers that pause for 300 ms."""
    for replica, ms in enumerate(prefill_ms):
        write_server(
            run, [Batch(ms=100, prefills=1, tokens=9, pause_ms=50), Batch(ms=ms, prefills=2, tokens=99)], replica
        )
    for replica in range(len(prefill_ms), len(prefill_ms) + decoders):
        pause = Batch(ms=10, decodes=4, pause_ms=300)
        write_server(run, [*decode(10, 10, 4), pause, Batch(ms=5, prefills=2, tokens=2), *decode(9, 10, 4)], replica)
    return run


def test_an_idle_decode_server_waits_for_the_prefill_server(tmp_path: Path) -> None:
    run = disaggregated(tmp_path, 200, 210)
    for replica, kind in enumerate(("prefill", "prefill", "decode")):
        edit_manifests(run, f"*/rollout/replica_{replica:03d}/rank_*.json", worker_type=kind)
    summary = summary_of(run)
    (wait,) = waits(account(summary, "rollout", 2))
    assert wait.label == "wait for rollout/1: prefill"
    assert wait.time_us == pytest.approx(210_000)
    assert waits(account(summary, "rollout", 0)) == []
    (finding,) = (finding for finding in summarise([run])[0].findings if finding.rule == "idle-decode")
    assert finding.text.startswith(
        "rollout/2 runs no batch for 210 ms (41% of the time) while rollout/1 works, mostly "
    )


def test_types_of_servers_come_from_the_fleet_if_the_engines_do_not_state_them(tmp_path: Path) -> None:
    run = disaggregated(tmp_path, 200)
    assert waits(account(summary_of(run), "rollout", 1)) == []
    write_fleet_manifest(run, "prefill", "decode")
    (wait,) = waits(account(summary_of(run), "rollout", 1))
    assert (wait.label, wait.time_us) == ("wait for rollout/0: prefill", pytest.approx(200_000))


def test_a_prefill_may_belong_to_any_of_several_decode_servers(tmp_path: Path) -> None:
    run = disaggregated(tmp_path, 200, decoders=2)
    write_fleet_manifest(run, "prefill", "decode", "decode")
    found = account(summary_of(run), "rollout", 1)
    assert waits(found) == []
    assert found.notes[-1] == (
        "Waits for rollout are not assigned: the traces do not show which decode server continued a prefill."
    )
    assert state_of(run, "idle-decode") == (
        "not_judged",
        "the traces do not show which decode server continued a prefill",
    )


def test_a_decode_server_of_a_job_waits_for_the_trainer_and_then_for_the_prefill(tmp_path: Path) -> None:
    write_server(tmp_path, [PREFILL, Batch(ms=50, prefills=1, tokens=9, pause_ms=530), PREFILL, PREFILL], 0)
    pause = Batch(ms=10, decodes=4, pause_ms=560)
    write_server(tmp_path, [*decode(10, 10, 4), pause, Batch(ms=5, prefills=2, tokens=2), *decode(9, 10, 4)], 1)
    write_trainer(tmp_path, [("generate", 130.0, False), ("actor_update", 400.0, True)])
    write_fleet_manifest(tmp_path, "prefill", "decode")
    found = waits(account(summary_of(tmp_path), "rollout", 1))
    assert [(wait.peer, wait.awaited) for wait in found] == [("trainer", "actor_update"), ("rollout/0", "prefill")]
