"""verl: fine-tuning with two ranks, and reinforcement learning with a real engine of vLLM."""

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
    """Return the names of all that took time in a trace."""
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


def test_fine_tuning_with_two_ranks(job: Start, tmp_path: Path) -> None:
    environ = config(
        tmp_path / "profdeck.yaml",
        f"output: {tmp_path / 'profiles'}\nrun: sft\nsteps: ['2..3', 5]\nfinal_step: 5\n"
        "roles: {trainer: {backend: torch, ranks: all}}\n",
    )
    log = job(SFT, "profiler.tool=profdeck", **environ).wait()
    assert "[finish_hook]" not in log
    report = read_run(tmp_path / "profiles" / "sft")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    assert [(one.first_step, one.last_step, [rank.rank for rank in one.ranks]) for one in report.captures] == [
        (2, 3, [0, 1]),
        (5, 5, [0, 1]),
    ]
    marks = [sorted(name for name in names(path) if name.startswith("Prof")) for path in traces(report.path, "trainer")]
    assert marks == [["ProfilerStep#2", "ProfilerStep#3"]] * 2 + [["ProfilerStep#5"]] * 2
    assert "train_batch" in names(traces(report.path, "trainer")[0])


def test_a_switch_by_one_word(job: Start, tmp_path: Path) -> None:
    """Without a config of profdeck, verl's own keys say what to record."""
    own = ["profiler.enable=True", "profiler.ranks=[1]", f"profiler.save_path={tmp_path / 'traces'}"]
    job(SFT, "profiler.tool=profdeck", *own, "trainer.profile_interval=[3,4]").wait()
    (run,) = (tmp_path / "traces").iterdir()
    report = read_run(run)
    assert report.status is Status.COMPLETE
    assert [(one.first_step, one.last_step, [rank.rank for rank in one.ranks]) for one in report.captures] == [
        (3, 4, [1])
    ]


def check_ppo(run: Path, steps: list[int]) -> None:
    """Check the captures of a trainer and of its rollouts."""
    report = read_run(run)
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    found = sorted((one.first_step, one.role, one.replica) for one in report.captures)
    assert found == sorted((step, *who) for step in steps for who in (("trainer", None), ("rollout", 0)))
    for path in traces(run, "trainer"):
        stages = {"actor_update", "actor_compute_log_prob", "ref_compute_log_prob"}
        stages |= {"mini_batch0", "mini_batch1", "micro_batch0"}
        assert stages <= names(path)
    for path in traces(run, "rollout"):
        assert any(re.match(r"execute_context_\d+\(\d+\)_generation_\d+", name) for name in names(path))


def test_the_trainer_and_a_real_engine_by_config_and_on_demand(job: Start, tmp_path: Path) -> None:
    environ = config(
        tmp_path / "profdeck.yaml",
        f"output: {tmp_path / 'profiles'}\nrun: rl\nsteps: [2]\n"
        "roles: {trainer: {backend: torch}, rollout: {backend: vllm}}\n",
    )
    running = job(PPO, "global_profiler.tool=profdeck", "trainer.total_training_steps=7", **environ)
    run = tmp_path / "profiles" / "rl"
    running.wait_for(run / "step_000002" / "rollout" / "target.step2.json")
    asked = profdeck("capture", "job", str(run), "--in", "2", "--steps", "1", cwd=tmp_path)
    log = running.wait()
    assert asked["complete"], (asked, log[-3000:])
    first = asked["first_step"]
    assert sorted((process["role"], process["captures"]) for process in asked["processes"]) == [
        ("rollout", [f"step{first}"]),
        ("trainer", [f"step{first}"]),
    ]
    check_ppo(run, [2, first])


@pytest.mark.long
def test_two_ranks_and_two_replicas_by_own_keys(job: Start, tmp_path: Path) -> None:
    """A job of verl's own keys changes one word; its finish hook runs once all files are whole."""
    keys = [
        f"actor_rollout_ref.{worker}.profiler.{key}=True"
        for worker in ("actor", "rollout")
        for key in ("enable", "all_ranks")
    ]
    hook = f"'cp $PROFDECK_FINISH_MANIFEST {tmp_path}/given && ls $VERL_PROFILE_SAVE_PATH > {tmp_path}/there'"
    keys += ["global_profiler.steps=[2]", f"global_profiler.save_path={tmp_path / 'traces'}"]
    keys += ["trainer.n_gpus_per_node=2", "trainer.total_training_steps=3", f"global_profiler.finish_hook_cmd={hook}"]
    running = job(PPO, "global_profiler.tool=profdeck", *keys)
    running.wait()
    (run,) = (tmp_path / "traces").iterdir()
    report = read_run(run)
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    found = {(one.role, one.replica): [rank.rank for rank in one.ranks] for one in report.captures}
    assert found == {("trainer", None): [0, 1], ("rollout", 0): [0], ("rollout", 1): [0]}
    running.wait_for(tmp_path / "there")
    handed_over = json.loads((tmp_path / "given").read_text())
    assert (handed_over["status"], handed_over["missing"]) == ("complete", [])
    assert len(traces(run, "trainer")) == len(traces(run, "rollout")) == 2
    assert {str(path) for role in ("trainer", "rollout") for path in traces(run, role)} <= set(handed_over["files"])


@pytest.mark.long
def test_a_replica_that_is_killed_in_mid_capture(job: Start, tmp_path: Path) -> None:
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
    killed = [one for one in report.captures if (one.role, one.replica) == ("rollout", 1)]
    assert [rank.status for one in killed for rank in one.ranks] == [Status.MISSING], (code, running.words[-3000:])
    (problem,) = killed[0].ranks[0].problems
    assert "exited without ending the capture" in problem
    assert report.status is not Status.COMPLETE


@pytest.mark.long
def test_stages_by_own_keys_and_a_job_that_resumes(job: Start, tmp_path: Path) -> None:
    own = ["actor_rollout_ref.actor.profiler.enable=True", "global_profiler.steps=[2,3]", "trainer.save_freq=1"]
    own += [f"global_profiler.save_path={tmp_path / 'traces'}", "trainer.use_v1=False", "trainer.resume_mode=auto"]
    own += ["actor_rollout_ref.actor.profiler.tool_config.torch.discrete=True"]
    for last in (2, 3):
        job(
            PPO, "global_profiler.tool=profdeck", *own, f"trainer.total_training_steps={last}", PROFDECK__RUN="rl"
        ).wait()
    report = read_run(tmp_path / "traces" / "rl")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    stages = {(one.first_step, one.role, one.stage) for one in report.captures}
    own = {("trainer", "actor_update"), ("trainer", "actor_compute_log_prob"), ("rollout", None)}
    assert stages >= {(step, *one) for step in (2, 3) for one in own}
    assert {(one.first_step, one.last_step) for one in report.captures} == {(2, 2), (3, 3)}


@pytest.mark.long
def test_a_real_engine_of_sglang(job: Start, cluster: Cluster, tmp_path: Path) -> None:
    if SGLANG not in os.environ:
        pytest.skip(f"{SGLANG} names no interpreter of an environment with verl and SGLang")
    cluster.python = os.environ[SGLANG]
    environ = config(
        tmp_path / "profdeck.yaml",
        f"output: {tmp_path / 'profiles'}\nrun: rl\nsteps: [2]\n"
        "roles: {trainer: {backend: torch}, rollout: {backend: sglang}}\n",
    )
    own = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
    }
    own |= {"enable_memory_saver": "False", "disable_cuda_graph": "True", "max_total_tokens": "2048"}
    keys = [f"+actor_rollout_ref.rollout.engine_kwargs.sglang.{key}={value}" for key, value in own.items()]
    keys += ["actor_rollout_ref.rollout.name=sglang", "trainer.total_training_steps=3"]
    environ |= {"SGLANG_PLATFORM": "torchcpu", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    job(PPO, "global_profiler.tool=profdeck", *keys, **environ).wait()
    report = read_run(tmp_path / "profiles" / "rl")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    assert [(one.role, one.replica) for one in report.captures] == [("rollout", 0), ("trainer", None)]
    (path,) = traces(report.path, "rollout")
    assert {"step[DECODE bs=", "step[EXTEND bs="} <= {name[:15] for name in names(path)}


def test_check_says_whether_verl_loads_it(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "c.yaml").write_text("steps: [2]\nroles: {trainer: {backend: torch}}\n")

    def found() -> Any:
        document = profdeck("check", "c.yaml", "--host", "verl", cwd=tmp_path)
        (one,) = [check for check in document["checks"] if check["what"] == "host verl"]
        return one

    assert found() == {
        "what": "host verl",
        "ok": True,
        "detail": "verl 0.9.1 loads profdeck; select it with global_profiler.tool=profdeck",
    }
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "cpu")
    assert (found()["ok"], "excludes profdeck" in found()["detail"]) == (False, True)
