"""Tests for the names of engine iterations: batches, preempted requests, draft tokens, queues and KV caches."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest

from profdeck.engines import BatchKind
from profdeck_sglang import iterations as sglang
from profdeck_vllm import scheduler_state
from profdeck_vllm.iterations import IterationReader
from profdeck_vllm.scheduler_state import read_state


@attrs.frozen
class Cached:
    """A request that vLLM has scheduled before."""

    computed: int
    output: int = 1
    resumed: bool = False


def scheduler_output(
    tokens: Mapping[str, int],
    new: Mapping[str, int] | None = None,
    cached: Mapping[str, Cached] | None = None,
    drafts: Mapping[str, int] | None = None,
    finished: Sequence[str] = (),
) -> Any:
    """Return a vLLM scheduler output.

    Args:
        tokens: Number of scheduled tokens of each request.
        new: Number of already computed tokens of each new request.
        cached: Requests that were scheduled before.
        drafts: Number of draft tokens of each request that has any.
        finished: Requests that have finished since the previous output.
    """
    cached = cached or {}
    requests = [
        SimpleNamespace(req_id=name, num_computed_tokens=computed, prompt_token_ids=[0] * 9, prefill_token_ids=None)
        for name, computed in (new or {}).items()
    ]
    return SimpleNamespace(
        scheduled_new_reqs=requests,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[*cached],
            resumed_req_ids={name for name, one in cached.items() if one.resumed},
            num_computed_tokens=[one.computed for one in cached.values()],
            num_output_tokens=[one.output for one in cached.values()],
        ),
        num_scheduled_tokens=dict(tokens),
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_spec_decode_tokens={name: [0] * count for name, count in (drafts or {}).items()},
        finished_req_ids=set(finished),
    )


def install_on_scheduler(monkeypatch: pytest.MonkeyPatch, output: Any) -> Any:
    """Patch and return a scheduler with 3 waiting requests and a KV cache usage of 87.5 %."""

    class Scheduler:
        def __init__(self) -> None:
            self.kv_cache_manager = SimpleNamespace(usage=0.875)

        def get_request_counts(self) -> tuple[int, int]:
            return 2, 3

        def schedule(self, **_: object) -> Any:
            return output

    module = ModuleType("vllm.v1.core.sched.scheduler")
    module.Scheduler = Scheduler  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    scheduler_state.install()
    return Scheduler()


@pytest.fixture
def reader() -> IterationReader:
    return IterationReader(detailed=False)


def test_batches_have_vllms_names(reader: IterationReader) -> None:
    prefill = scheduler_output({"a": 9, "b": 5}, new={"a": 0, "b": 4})
    decode = scheduler_output({"a": 1, "b": 1}, cached={"a": Cached(9), "b": Cached(9)})
    mixed = scheduler_output({"a": 1, "c": 20}, new={"c": 0}, cached={"a": Cached(10)})

    assert reader.describe(prefill) == (BatchKind.PREFILL, "execute_context_2(14)_generation_0(0)")
    assert reader.describe(decode) == (BatchKind.DECODE, "execute_context_0(0)_generation_2(2)")
    assert reader.describe(mixed) == (BatchKind.MIXED, "execute_context_1(20)_generation_1(1)")


def test_detailed_name_contains_the_attention_work() -> None:
    mixed = scheduler_output({"a": 1, "c": 6}, new={"c": 0}, cached={"a": Cached(9)})
    _, label = IterationReader(detailed=True).describe(mixed)
    assert label == "execute_7_context_1(sq6sk6sqsq36sqsk36)_generation_1(sq1sk10sqsq1sqsk10)"


def test_resumed_request_is_named_with_its_tokens(reader: IterationReader) -> None:
    output = scheduler_output({"a": 1, "b": 40}, cached={"a": Cached(9), "b": Cached(0, output=31, resumed=True)})
    assert reader.describe(output) == (BatchKind.MIXED, "execute_context_1(40)_generation_1(1)_resumed_1(40)")


def test_state_of_the_scheduler_is_part_of_the_name(monkeypatch: pytest.MonkeyPatch, reader: IterationReader) -> None:
    scheduler = install_on_scheduler(monkeypatch, scheduler_output({"a": 1}, cached={"a": Cached(10)}))
    output = scheduler.schedule(throttle_prefills=True)
    assert reader.describe(output)[1] == "execute_context_0(0)_generation_1(1)_waiting_3_kv_87"
    assert read_state(pickle.loads(pickle.dumps(output))) == (3, 87)  # noqa: S301 - as vLLM's executors do


def test_scheduler_without_a_queue_still_schedules(
    monkeypatch: pytest.MonkeyPatch, reader: IterationReader, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = install_on_scheduler(monkeypatch, scheduler_output({"a": 1}, cached={"a": Cached(10)}))
    del scheduler.kv_cache_manager
    for _ in range(2):
        assert reader.describe(scheduler.schedule())[1] == "execute_context_0(0)_generation_1(1)"
    assert len(caplog.records) == 1


def test_resumed_request_can_be_scheduled_as_a_new_one(reader: IterationReader) -> None:
    output = scheduler_output({"a": 12}, new={"a": 0})
    output.scheduled_new_reqs[0].prefill_token_ids = [0] * 12  # the prompt and three generated tokens
    assert reader.describe(output)[1].endswith("_resumed_1(12)")


def test_rejected_drafts_are_counted_one_iteration_later(reader: IterationReader) -> None:
    names = [
        reader.describe(output)[1].partition(")_generation_")[2]
        for output in (
            scheduler_output({"a": 4}, cached={"a": Cached(10)}, drafts={"a": 3}),
            scheduler_output({"a": 4}, cached={"a": Cached(12)}, drafts={"a": 3}),  # two of four tokens were kept
            scheduler_output({"a": 4}, cached={"a": Cached(16)}, drafts={"a": 3}),  # all were kept
            scheduler_output({"a": 1}, cached={"a": Cached(17)}),  # one was kept
        )
    ]
    assert names == ["1(4)_draft_3", "1(4)_draft_3_rejected_2", "1(4)_draft_3", "1(1)_rejected_3"]


def test_preemption_is_not_a_rejection(reader: IterationReader) -> None:
    reader.describe(scheduler_output({"a": 4}, cached={"a": Cached(10)}, drafts={"a": 3}))
    output = scheduler_output({"a": 14}, cached={"a": Cached(0, resumed=True)})
    assert "rejected" not in reader.describe(output)[1]


def test_reader_knows_unfinished_requests(reader: IterationReader) -> None:
    assert not reader.has_unfinished_requests
    reader.describe(scheduler_output({"a": 9, "b": 9}, new={"a": 0, "b": 0}))
    reader.read_finished(scheduler_output({}, finished=["a"]))
    assert reader.has_unfinished_requests
    reader.read_finished(scheduler_output({}, finished=["b", "unknown"]))
    assert not reader.has_unfinished_requests


# Tests for SGLang.


def sglang_batch(mode: str, requests: Sequence[Any], decoding: Sequence[Any] = (), *, speculative: bool = False) -> Any:
    """Return an SGLang batch in which each prefill request has 20 tokens."""
    checks = ("is_idle", "is_prebuilt", "is_mixed", "is_decode", "is_target_verify", "is_extend")
    true = {"extend": {"is_extend"}, "mixed": {"is_extend", "is_mixed"}, "decode": {"is_decode"}}[mode]
    lengths = [1 if request in decoding else 20 for request in requests]
    return SimpleNamespace(
        forward_mode=SimpleNamespace(**{check: lambda check=check: check in true for check in checks}),
        reqs=list(requests),
        decoding_reqs=list(decoding) or None,
        extend_lens=lengths,
        extend_num_tokens=sum(lengths),
        batch_size=lambda: len(requests),
        spec_algorithm=SimpleNamespace(is_none=lambda: not speculative),
    )


def sglang_scheduler(running: int = 0, waiting: int = 0, kv: float | None = None) -> Any:
    """Return an SGLang scheduler with the given numbers of requests and KV cache usage."""
    scheduler = SimpleNamespace(running_batch=SimpleNamespace(reqs=[0] * running), waiting_queue=[0] * waiting)
    if kv is not None:
        stats = SimpleNamespace(get_kv_token_stats=lambda: (0, kv))
        scheduler.pool_stats_observer = SimpleNamespace(get_pool_stats=lambda: stats)
    return scheduler


def request(*, retracted: int = 0, output: int = 0) -> Any:
    return SimpleNamespace(retraction_count=retracted, output_ids=[0] * output)


def test_sglang_batches_are_named_with_the_queue_and_the_kv_cache() -> None:
    first, second, third = request(), request(output=5), request(output=7)
    scheduler = sglang_scheduler(running=3, waiting=2, kv=0.837)

    assert sglang.describe(sglang_batch("extend", [first]), scheduler) == (
        "run_batch[c=1 g=0 c_toks=20 g_toks=0 resumed=0 resumed_toks=0 running=3 waiting=2 kv=83]"
    )
    assert sglang.describe(sglang_batch("mixed", [first, second, third], [second, third]), scheduler) == (
        "run_batch[c=1 g=2 c_toks=20 g_toks=2 resumed=0 resumed_toks=0 waiting=2 kv=83]"
    )
    assert sglang.describe(sglang_batch("decode", [second, third]), scheduler) == (
        "run_batch[c=0 g=2 g_toks=2 waiting=2 kv=83]"
    )


def test_sglang_names_retracted_requests() -> None:
    label = sglang.describe(sglang_batch("extend", [request(retracted=1, output=9), request()]), sglang_scheduler())
    assert label == "run_batch[c=2 g=0 c_toks=40 g_toks=0 resumed=1 resumed_toks=20 running=0 waiting=0]"


def test_sglang_omits_the_tokens_of_speculative_decoding() -> None:
    batch = sglang_batch("decode", [request(output=5)], speculative=True)
    assert sglang.describe(batch, sglang_scheduler(kv=0.1)) == "run_batch[c=0 g=1 waiting=0 kv=10]"


@pytest.mark.parametrize(("stages", "limit"), [(1, 12), (2, 6)])
def test_sglang_states_the_limit_of_a_batch(stages: int, limit: int) -> None:
    scheduler = sglang_scheduler(kv=0.1)
    scheduler.max_running_requests, scheduler.server_args = 12, SimpleNamespace(pp_size=stages)
    label = sglang.describe(sglang_batch("decode", [request(output=5)]), scheduler)
    assert label.endswith(f" kv=10 limit={limit}]")
