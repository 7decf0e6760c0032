"""Tests of verl: fine-tuning with two ranks, and reinforcement learning with a real vLLM engine."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verl_jobs import LIMIT_S, PPO, SFT, Cluster, VerlJob, profdeck

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run

Start = Callable[..., VerlJob]
SGLANG = "PROFDECK_TEST_VERL_SGLANG_PYTHON"


def names(path: Path) -> set[str]:
    """Return the names of all complete events in a trace."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return {event["name"] for event in events if event.get("ph") == "X"}


def traces(run: Path, role: str) -> list[Path]:
    return [
        artifact.path
        for capture in read_run(run).captures
        if capture.role == role
        for rank in capture.ranks
        for artifact in rank.artifacts
    ]


def config(path: Path, text: str) -> dict[str, str]:
    """Write profdeck's config and return the environment that names it."""
    path.write_text(text)
    return {"PROFDECK_CONFIG": str(path)}


def test_fine_tuning_is_captured_on_two_ranks(job: Start, tmp_path: Path) -> None:
    environ = config(
        tmp_path / "profdeck.yaml",
        f"output: {tmp_path / 'profiles'}\nrun: sft\nsteps: ['2..3', 5]\nfinal_step: 5\n"
        "roles: {trainer: {backend: torch, ranks: all}}\n",
    )
    log = job(SFT, "profiler.tool=profdeck", **environ).wait()
    assert "[finish_hook]" not in log
    report = read_run(tmp_path / "profiles" / "sft")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    assert [
        (capture.first_step, capture.last_step, [rank.rank for rank in capture.ranks]) for capture in report.captures
    ] == [
        (2, 3, [0, 1]),
        (5, 5, [0, 1]),
    ]
    step_names = [
        sorted(name for name in names(path) if name.startswith("Prof")) for path in traces(report.path, "trainer")
    ]
    assert step_names == [["ProfilerStep#2", "ProfilerStep#3"]] * 2 + [["ProfilerStep#5"]] * 2
    assert "train_batch" in names(traces(report.path, "trainer")[0])


def test_verl_keys_select_captures_without_a_config(job: Start, tmp_path: Path) -> None:
    """Only ``profiler.tool`` differs from a job that uses verl's profiler."""
    keys = ["profiler.enable=True", "profiler.ranks=[1]", f"profiler.save_path={tmp_path / 'traces'}"]
    job(SFT, "profiler.tool=profdeck", *keys, "trainer.profile_interval=[3,4]").wait()
    (run,) = (tmp_path / "traces").iterdir()
    report = read_run(run)
    assert report.status is Status.COMPLETE
    assert [
        (capture.first_step, capture.last_step, [rank.rank for rank in capture.ranks]) for capture in report.captures
    ] == [(3, 4, [1])]


def check_ppo(run: Path, steps: list[int]) -> None:
    """Check the captures of a trainer and of its rollouts."""
    report = read_run(run)
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    captures = sorted((capture.first_step, capture.role, capture.replica) for capture in report.captures)
    assert captures == sorted((step, *process) for step in steps for process in (("trainer", None), ("rollout", 0)))
    for path in traces(run, "trainer"):
        stages = {"actor_update", "actor_compute_log_prob", "ref_compute_log_prob"}
        stages |= {"mini_batch0", "mini_batch1", "micro_batch0"}
        assert stages <= names(path)
    for path in traces(run, "rollout"):
        assert any(re.match(r"execute_context_\d+\(\d+\)_generation_\d+", name) for name in names(path))


def test_trainer_and_engine_are_captured_by_config_and_on_demand(job: Start, tmp_path: Path) -> None:
    environ = config(
        tmp_path / "profdeck.yaml",
        f"output: {tmp_path / 'profiles'}\nrun: rl\nsteps: [2]\n"
        "roles: {trainer: {backend: torch}, rollout: {backend: vllm}}\n",
    )
    running = job(PPO, "global_profiler.tool=profdeck", "trainer.total_training_steps=7", **environ)
    run = tmp_path / "profiles" / "rl"
    running.wait_for(run / "step_000002" / "rollout" / "target.step2.json")
    on_demand = profdeck("capture", "job", str(run), "--in", "2", "--steps", "1", cwd=tmp_path)
    log = running.wait()
    assert on_demand["complete"], (on_demand, log[-3000:])
    first = on_demand["first_step"]
    assert sorted((process["role"], process["captures"]) for process in on_demand["processes"]) == [
        ("rollout", [f"step{first}"]),
        ("trainer", [f"step{first}"]),
    ]
    check_ppo(run, [2, first])


@pytest.mark.long
def test_verl_keys_capture_two_ranks_and_two_replicas(job: Start, tmp_path: Path) -> None:
    """The finish hook of verl runs after all files are complete."""
    keys = [
        f"actor_rollout_ref.{worker}.profiler.{key}=True"
        for worker in ("actor", "rollout")
        for key in ("enable", "all_ranks")
    ]
    hook = f"'cp $PROFDECK_FINISH_MANIFEST {tmp_path}/input && ls $VERL_PROFILE_SAVE_PATH > {tmp_path}/listing'"
    keys += ["global_profiler.steps=[2]", f"global_profiler.save_path={tmp_path / 'traces'}"]
    keys += ["trainer.n_gpus_per_node=2", "trainer.total_training_steps=3", f"global_profiler.finish_hook_cmd={hook}"]
    running = job(PPO, "global_profiler.tool=profdeck", *keys)
    running.wait()
    (run,) = (tmp_path / "traces").iterdir()
    report = read_run(run)
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    ranks = {(capture.role, capture.replica): [rank.rank for rank in capture.ranks] for capture in report.captures}
    assert ranks == {("trainer", None): [0, 1], ("rollout", 0): [0], ("rollout", 1): [0]}
    running.wait_for(tmp_path / "listing")
    finish_input = json.loads((tmp_path / "input").read_text())
    assert (finish_input["status"], finish_input["missing"]) == ("complete", [])
    assert len(traces(run, "trainer")) == len(traces(run, "rollout")) == 2
    assert {str(path) for role in ("trainer", "rollout") for path in traces(run, role)} <= set(finish_input["files"])


@pytest.mark.long
def test_replica_killed_during_a_capture_is_missing(job: Start, tmp_path: Path) -> None:
    environ = config(
        tmp_path / "profdeck.yaml",
        f"output: {tmp_path / 'profiles'}\nrun: rl\nsteps: ['2..9']\n"
        "roles: {trainer: {backend: torch}, rollout: {backend: vllm, ranks: all}}\n",
    )
    options = ("trainer.n_gpus_per_node=2", "trainer.total_training_steps=9")
    running = job(PPO, "global_profiler.tool=profdeck", *options, **environ)
    run = tmp_path / "profiles" / "rl"
    manifest = run / "step_000002" / "rollout" / "replica_001" / "rank_0000.step2.json"
    running.wait_for(manifest)
    os.kill(json.loads(manifest.read_text())["pid"], signal.SIGKILL)
    code = running.process.wait(LIMIT_S)  # verl 0.9.1 fails with its engine; it must not hang
    report = read_run(run)
    killed = [capture for capture in report.captures if (capture.role, capture.replica) == ("rollout", 1)]
    assert [rank.status for capture in killed for rank in capture.ranks] == [Status.MISSING], (
        code,
        running.output[-3000:],
    )
    (problem,) = killed[0].ranks[0].problems
    assert "exited without ending the capture" in problem
    assert report.status is not Status.COMPLETE


@pytest.mark.long
def test_verl_keys_capture_stages_of_a_resumed_job(job: Start, tmp_path: Path) -> None:
    keys = ["actor_rollout_ref.actor.profiler.enable=True", "global_profiler.steps=[2,3]", "trainer.save_freq=1"]
    keys += [f"global_profiler.save_path={tmp_path / 'traces'}", "trainer.use_v1=False", "trainer.resume_mode=auto"]
    keys += ["actor_rollout_ref.actor.profiler.tool_config.torch.discrete=True"]
    for last in (2, 3):
        job(
            PPO, "global_profiler.tool=profdeck", *keys, f"trainer.total_training_steps={last}", PROFDECK__RUN="rl"
        ).wait()
    report = read_run(tmp_path / "traces" / "rl")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    stages = {(capture.first_step, capture.role, capture.stage) for capture in report.captures}
    expected = {("trainer", "actor_update"), ("trainer", "actor_compute_log_prob"), ("rollout", None)}
    assert stages >= {(step, *stage) for step in (2, 3) for stage in expected}
    assert {(capture.first_step, capture.last_step) for capture in report.captures} == {(2, 2), (3, 3)}


@pytest.mark.long
def test_sglang_engine_is_captured(job: Start, cluster: Cluster, tmp_path: Path) -> None:
    if SGLANG not in os.environ:
        pytest.skip(f"{SGLANG} names no interpreter of an environment with verl and SGLang")
    cluster.python = os.environ[SGLANG]
    environ = config(
        tmp_path / "profdeck.yaml",
        f"output: {tmp_path / 'profiles'}\nrun: rl\nsteps: [2]\n"
        "roles: {trainer: {backend: torch}, rollout: {backend: sglang}}\n",
    )
    engine_options = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
    }
    engine_options |= {"enable_memory_saver": "False", "disable_cuda_graph": "True", "max_total_tokens": "2048"}
    keys = [f"+actor_rollout_ref.rollout.engine_kwargs.sglang.{key}={value}" for key, value in engine_options.items()]
    keys += ["actor_rollout_ref.rollout.name=sglang", "trainer.total_training_steps=3"]
    environ |= {"SGLANG_PLATFORM": "torchcpu", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    job(PPO, "global_profiler.tool=profdeck", *keys, **environ).wait()
    report = read_run(tmp_path / "profiles" / "rl")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    assert [(capture.role, capture.replica) for capture in report.captures] == [("rollout", 0), ("trainer", None)]
    (path,) = traces(report.path, "rollout")
    assert {"step[DECODE bs=", "step[EXTEND bs="} <= {name[:15] for name in names(path)}


def test_check_reports_whether_verl_loads_profdeck(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "c.yaml").write_text("steps: [2]\nroles: {trainer: {backend: torch}}\n")

    def host_check() -> Any:
        document = profdeck("check", "c.yaml", "--host", "verl", cwd=tmp_path)
        (check,) = [check for check in document["checks"] if check["what"] == "host verl"]
        return check

    assert host_check() == {
        "what": "host verl",
        "ok": True,
        "warning": False,
        "detail": "verl 0.9.1 loads profdeck; select it with global_profiler.tool=profdeck",
    }
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "cpu")
    check = host_check()
    assert (check["ok"], "excludes profdeck" in check["detail"]) == (False, True)
