"""Engines on an Ascend NPU: their plugins take the type of the device from the engine, and core finds what records it.

Neither vllm_ascend nor SGLang for NPUs can be installed without its hardware, so what stands here for a worker and a
scheduler has what those have, as far as it is read: ``NPUWorker`` is a ``WorkerBase``, whose ``current_platform`` is
``NPUPlatform`` with the ``device_type`` ``npu`` (vllm_ascend/worker/worker.py and platform.py), and its ``device`` is
``npu:0``. SGLang's ``get_device()`` returns ``npu`` (sglang/srt/utils/common.py), which becomes ``server_args.device``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest

from distributions import install
from open_captures import count_open, wait_for_files
from profdeck.base.identity import Identity
from profdeck.config.schedule import Iterations
from profdeck.config.structuring import unstructure
from profdeck.engine.worker import device
from profdeck.engine.worker.frontend import FrontendRecorder
from profdeck.engine.worker.recorder import EngineRecorder
from profdeck.records.request import CaptureRequest
from profdeck_traces.base.errors import UnknownPluginError

PARALLEL_STATE = """
def _none():
    raise AssertionError("not initialised")

get_pp_group = get_pcp_group = get_tp_group = get_dcp_group = get_ep_group = _none
"""


@pytest.fixture(autouse=True)
def npu(tally: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install backends that record such a device, and the CPU."""
    backends = "[profdeck.backends]\ntally-npu = tally_backend:NpuTally\ntally-cpu = tally_backend:CpuTally\n"
    install(tmp_path / "site", "tally-npu", backends)
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name, device_type in (("NpuTally", "npu"), ("CpuTally", "cpu")):
        monkeypatch.setattr(tally, name, _tally_of(tally, device_type), raising=False)
    device.device_backend.cache_clear()
    yield
    assert count_open() == 0


def _tally_of(tally: ModuleType, device_type: str) -> type:
    @attrs.define
    class DeviceTally(tally.TallyBackend):  # type: ignore[name-defined, misc]
        name = f"tally-{device_type}"
        device_types = (device_type,)

    return DeviceTally


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A vLLM whose parallel groups are not initialised."""
    present = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    for name in present:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "vllm_site" / "vllm" / "distributed"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "parallel_state.py").write_text(PARALLEL_STATE)
    monkeypatch.syspath_prepend(tmp_path / "vllm_site")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


class Worker:
    """A worker of vLLM on an NPU."""

    def __init__(self) -> None:
        parallel = SimpleNamespace(
            data_parallel_size=1,
            data_parallel_rank=0,
            data_parallel_index=0,
            world_size=1,
            enable_expert_parallel=False,
        )
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.rank = self.local_rank = 0
        self.device = "npu:0"
        self.executed = 0

    def execute_model(self, output: Any) -> str:
        self.executed += 1
        return f"output of {output.total_num_scheduled_tokens} tokens"

    def shutdown(self) -> None:
        pass


class WorkerOfPlatform(Worker):
    """One of a release whose workers know their platform; the device is not yet there."""

    def __init__(self) -> None:
        super().__init__()
        self.current_platform = SimpleNamespace(device_type="npu", device_name="npu")
        self.device = ""


class Scheduler:
    """A scheduler of SGLang."""

    tp_rank = pp_rank = 0
    forward_ct = 0
    profile_in_progress = profile_by_stage = False
    profiler_start_forward_ct = None

    def run_batch(self, batch: Any) -> str:
        return f"result of {batch.size}"


def decode_step() -> SimpleNamespace:
    """What vLLM schedules for one request that has put out a token."""
    cached = SimpleNamespace(req_ids=["a"], resumed_req_ids=set(), num_computed_tokens=[4], num_output_tokens=[1])
    return SimpleNamespace(
        total_num_scheduled_tokens=1, num_scheduled_tokens={"a": 1}, scheduled_new_reqs=[], scheduled_cached_reqs=cached
    )


def request(path: Path) -> CaptureRequest:
    return CaptureRequest(
        id="step1", output=path, run="run", role="rollout", first_step=1, iterations=Iterations(count=2)
    )


def recorded_by(recorder: EngineRecorder, path: Path) -> tuple[str, str, int]:
    """Which backend recorded, what came of it, and how many iterations."""
    wait_for_files(recorder)
    (file,) = path.glob("run/step_000001/rollout/rank_0000*.step1.json")
    manifest = json.loads(file.read_text())
    first, last = manifest["artifacts"][0]["iterations"]
    return manifest["backend"], manifest["status"], last - first + 1


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("kind", [Worker, WorkerOfPlatform])
def test_a_worker_of_vllm_on_an_npu_records_with_its_backend(tmp_path: Path, kind: Callable[[], Worker]) -> None:
    from profdeck_vllm.v1_worker import V1WorkerAgent

    worker: Any = kind()
    agent = V1WorkerAgent(worker)
    reply = agent.handle("start", unstructure(request(tmp_path)))
    assert reply["error"] is None
    for _ in range(3):
        assert worker.execute_model(decode_step()) == "output of 1 tokens"
    assert worker.executed == 3
    assert recorded_by(agent.recorder, tmp_path) == ("tally-npu", "complete", 2)


def started_sglang(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A scheduler of SGLang on an NPU and its agent, which has been asked to record."""
    from profdeck_sglang import guard, scheduler

    monkeypatch.setattr(guard, "_is_v2", lambda: False)  # reads SGLang's environment
    owner: Any = Scheduler()
    arguments: Any = SimpleNamespace(device="npu", tp_size=1, pp_size=1, dp_size=1)
    agent = scheduler.SchedulerAgent(owner, arguments)
    agent.start(request(path))
    return owner, agent


def test_a_scheduler_of_sglang_on_an_npu_records_with_its_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, agent = started_sglang(tmp_path, monkeypatch)
    for _ in range(3):
        assert owner.run_batch(batch()) == "result of 2"
    assert recorded_by(agent.recorder, tmp_path) == ("tally-npu", "complete", 2)


@pytest.mark.usefixtures("vllm")
def test_a_worker_of_vllm_carries_out_a_stop_of_another_thread_at_its_next_iteration(tmp_path: Path) -> None:
    from profdeck_vllm.v1_worker import V1WorkerAgent

    worker: Any = Worker()
    agent = V1WorkerAgent(worker)
    agent.handle("start", unstructure(request(tmp_path)))
    worker.execute_model(decode_step())
    with ThreadPoolExecutor(1) as other:
        reply = other.submit(agent.handle, "stop", {"request": "step1"}).result()
    assert (reply["state"], "pending" in reply["problems"][0]) == ("recording", True)
    worker.execute_model(decode_step())
    assert recorded_by(agent.recorder, tmp_path)[1:] == ("partial", 1)
    assert "execute_model" not in vars(worker)


def test_a_scheduler_of_sglang_carries_out_a_stop_of_another_thread_at_its_next_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, agent = started_sglang(tmp_path, monkeypatch)
    owner.run_batch(batch())
    with ThreadPoolExecutor(1) as other:
        other.submit(agent.stop, None).result()
    assert agent.recorder.active
    owner.run_batch(batch())
    assert recorded_by(agent.recorder, tmp_path)[1:] == ("partial", 1)
    assert "run_batch" not in vars(owner)


def test_a_frontend_passes_over_the_options_of_the_workers_device(tmp_path: Path) -> None:
    frontend = FrontendRecorder("frontend")
    asked = attrs.evolve(request(tmp_path), options={"with_stack": True, "level": "level1"}, engine={"frontend": True})
    reply = frontend.command("start", unstructure(asked))
    assert reply is not None
    assert reply.error is None
    assert frontend.command("stop", {"request": "step1"}) is not None
    wait_for_files(frontend._recorder)
    (file,) = tmp_path.glob("run/step_000001/rollout-frontend/rank_0000*.step1.json")
    assert json.loads(file.read_text())["options"]["with_stack"] is True


def batch() -> SimpleNamespace:
    """A batch of SGLang, of two requests that decode."""
    kinds = ("is_idle", "is_prebuilt", "is_mixed", "is_target_verify", "is_extend", "is_prefill")
    mode = SimpleNamespace(is_decode=lambda: True, **dict.fromkeys(kinds, lambda *_: False))
    return SimpleNamespace(forward_mode=mode, size=2, batch_size=lambda: 2)


def test_without_such_a_backend_the_answer_names_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "installed", lambda _: {})
    with pytest.raises(UnknownPluginError, match="No installed backend records the device type 'npu'"):
        EngineRecorder(Identity(), "npu", {}).start(request(tmp_path))
