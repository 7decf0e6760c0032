"""Device backends of engines on an Ascend NPU.

The plugins read the device type from the engine, and core selects the backend for it. vllm_ascend and SGLang for NPUs
cannot be installed without an NPU, so stubs define the attributes that the plugins read:

- ``NPUWorker`` of vllm_ascend (worker/worker.py and platform.py) extends ``WorkerBase``. The ``device_type`` of its
  ``current_platform`` is ``npu``, and its ``device`` is ``npu:0``.
- ``get_device()`` of SGLang (sglang/srt/utils/common.py) returns ``npu``, which becomes ``server_args.device``.
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
    """Install device backends for the NPU and the CPU."""
    backends = "[profdeck.backends]\ntally-npu = tally_backend:NpuTally\ntally-cpu = tally_backend:CpuTally\n"
    install(tmp_path / "site", "tally-npu", backends)
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name, device_type in (("NpuTally", "npu"), ("CpuTally", "cpu")):
        monkeypatch.setattr(tally, name, _define_backend(tally, device_type), raising=False)
    device.device_backend.cache_clear()
    yield
    assert count_open() == 0


def _define_backend(tally: ModuleType, device_type: str) -> type:
    @attrs.define
    class DeviceTally(tally.TallyBackend):  # type: ignore[name-defined, misc]
        name = f"tally-{device_type}"
        device_types = (device_type,)

    return DeviceTally


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stub of the package vllm whose parallel groups are not initialised."""
    loaded_modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    for name in loaded_modules:
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
    """Stub of a vLLM worker on an NPU."""

    def __init__(self) -> None:
        parallel = SimpleNamespace(
            data_parallel_size=1,
            data_parallel_rank=0,
            data_parallel_index=0,
            world_size=1,
            enable_expert_parallel=False,
        )
        self.vllm_config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=None)
        self.rank = self.local_rank = 0
        self.device = "npu:0"
        self.executed = 0

    def execute_model(self, output: Any) -> str:
        self.executed += 1
        return f"output of {output.total_num_scheduled_tokens} tokens"

    def shutdown(self) -> None:
        pass


class PlatformWorker(Worker):
    """Stub of a vLLM worker with ``current_platform`` and without an initialised device."""

    def __init__(self) -> None:
        super().__init__()
        self.current_platform = SimpleNamespace(device_type="npu", device_name="npu")
        self.device = ""


class Scheduler:
    """Stub of an SGLang scheduler."""

    tp_rank = pp_rank = 0
    forward_ct = 0
    profile_in_progress = profile_by_stage = False
    profiler_start_forward_ct = None

    def run_batch(self, batch: Any) -> str:
        return f"result of {batch.size}"


def make_scheduler_output() -> SimpleNamespace:
    """Return vLLM's scheduler output for one request that has generated one token."""
    cached = SimpleNamespace(req_ids=["a"], resumed_req_ids=set(), num_computed_tokens=[4], num_output_tokens=[1])
    return SimpleNamespace(
        total_num_scheduled_tokens=1,
        num_scheduled_tokens={"a": 1},
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
        scheduled_spec_decode_tokens={},
        finished_req_ids=set(),
    )


def make_request(path: Path) -> CaptureRequest:
    return CaptureRequest(
        id="step1", output=path, run="run", role="rollout", first_step=1, iterations=Iterations(count=2)
    )


def read_recording(recorder: EngineRecorder, path: Path) -> tuple[str, str, int]:
    """Return the backend, the status and the number of recorded iterations from the manifest."""
    wait_for_files(recorder)
    (file,) = path.glob("run/step_000001/rollout/rank_0000*.step1.json")
    manifest = json.loads(file.read_text())
    first, last = manifest["artifacts"][0]["iterations"]
    return manifest["backend"], manifest["status"], last - first + 1


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("worker_class", [Worker, PlatformWorker])
def test_vllm_worker_on_an_npu_records_with_the_npu_backend(tmp_path: Path, worker_class: Callable[[], Worker]) -> None:
    from profdeck_vllm.v1_worker import V1WorkerAgent

    worker: Any = worker_class()
    agent = V1WorkerAgent(worker)
    reply = agent.handle("start", unstructure(make_request(tmp_path)))
    assert reply["error"] is None
    for _ in range(3):
        assert worker.execute_model(make_scheduler_output()) == "output of 1 tokens"
    assert worker.executed == 3
    assert read_recording(agent.recorder, tmp_path) == ("tally-npu", "complete", 2)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("kv_role", "worker_type"), [("kv_producer", "prefill"), ("kv_consumer", "decode"), ("kv_both", None)]
)
def test_vllm_worker_records_its_part_of_disaggregated_prefill(kv_role: str, worker_type: str | None) -> None:
    from profdeck_vllm.v1_worker import V1WorkerAgent

    worker: Any = Worker()
    worker.vllm_config.kv_transfer_config = SimpleNamespace(kv_role=kv_role)
    assert V1WorkerAgent(worker).recorder.identity.worker_type == worker_type


@pytest.mark.parametrize(("mode", "worker_type"), [("prefill", "prefill"), ("decode", "decode"), ("null", None)])
def test_sglang_scheduler_records_its_part_of_disaggregated_prefill(mode: str, worker_type: str | None) -> None:
    from profdeck_sglang.scheduler import SchedulerAgent

    arguments: Any = SimpleNamespace(device="npu", tp_size=1, pp_size=1, dp_size=1, disaggregation_mode=mode)
    scheduler: Any = Scheduler()
    assert SchedulerAgent(scheduler, arguments).recorder.identity.worker_type == worker_type


def start_sglang_capture(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Start a capture in an SGLang scheduler on an NPU. Return the scheduler and its agent."""
    from profdeck_sglang import guard, scheduler

    monkeypatch.setattr(guard, "_is_v2", lambda: False)  # reads SGLang's environment
    sglang_scheduler: Any = Scheduler()
    arguments: Any = SimpleNamespace(device="npu", tp_size=1, pp_size=1, dp_size=1)
    agent = scheduler.SchedulerAgent(sglang_scheduler, arguments)
    agent.start(make_request(path))
    return sglang_scheduler, agent


def test_sglang_scheduler_on_an_npu_records_with_the_npu_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, agent = start_sglang_capture(tmp_path, monkeypatch)
    for _ in range(3):
        assert scheduler.run_batch(make_decode_batch()) == "result of 2"
    assert read_recording(agent.recorder, tmp_path) == ("tally-npu", "complete", 2)


@pytest.mark.usefixtures("vllm")
def test_vllm_worker_defers_a_stop_from_another_thread(tmp_path: Path) -> None:
    from profdeck_vllm.v1_worker import V1WorkerAgent

    worker: Any = Worker()
    agent = V1WorkerAgent(worker)
    agent.handle("start", unstructure(make_request(tmp_path)))
    worker.execute_model(make_scheduler_output())
    with ThreadPoolExecutor(1) as executor:
        reply = executor.submit(agent.handle, "stop", {"request": "step1"}).result()
    assert (reply["state"], "deferred" in reply["problems"][0]) == ("recording", True)
    worker.execute_model(make_scheduler_output())
    assert read_recording(agent.recorder, tmp_path)[1:] == ("partial", 1)
    assert "execute_model" not in vars(worker)


def test_sglang_scheduler_defers_a_stop_from_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, agent = start_sglang_capture(tmp_path, monkeypatch)
    scheduler.run_batch(make_decode_batch())
    with ThreadPoolExecutor(1) as executor:
        executor.submit(agent.stop, None).result()
    assert agent.recorder.active
    scheduler.run_batch(make_decode_batch())
    assert read_recording(agent.recorder, tmp_path)[1:] == ("partial", 1)
    assert "run_batch" not in vars(scheduler)


def test_frontend_ignores_options_of_the_device_backend(tmp_path: Path) -> None:
    frontend = FrontendRecorder("frontend")
    # The CPU backend also supports the option `fail_at`.
    options = {"with_stack": True, "level": "level1", "fail_at": "start"}
    frontend_request = attrs.evolve(make_request(tmp_path), options=options, engine={"frontend": True})
    reply = frontend.command("start", unstructure(frontend_request))
    assert reply is not None
    assert reply.error is None
    assert frontend.command("stop", {"request": "step1"}) is not None
    wait_for_files(frontend._recorder)
    (file,) = tmp_path.glob("run/step_000001/rollout-frontend/rank_0000*.step1.json")
    assert json.loads(file.read_text())["options"]["with_stack"] is True


def make_decode_batch() -> SimpleNamespace:
    """Return an SGLang batch of two requests in the decode phase."""
    kinds = ("is_idle", "is_prebuilt", "is_mixed", "is_target_verify", "is_extend", "is_prefill")
    mode = SimpleNamespace(is_decode=lambda: True, **dict.fromkeys(kinds, lambda *_: False))
    return SimpleNamespace(forward_mode=mode, size=2, batch_size=lambda: 2)


def test_error_names_a_device_type_without_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "installed", lambda _: {})
    with pytest.raises(UnknownPluginError, match="No installed backend records the device type 'npu'"):
        EngineRecorder(Identity(), "npu", {}).start(make_request(tmp_path))
