"""Capture a vLLM engine that uses async scheduling on the CPU.

With async scheduling, vLLM schedules a batch before it has sampled the previous batch. vLLM disables async scheduling
on the CPU, where CUDA streams are unavailable. This job enables it with stubs for CUDA streams and events. The stubs
do nothing, because CPU operators are synchronous.
"""

from __future__ import annotations

import contextlib

import torch
from _job import ENGINE, PROMPTS, about, finish, settings
from vllm import LLM, SamplingParams
from vllm.platforms.cpu import CpuPlatform

from profdeck import Profiler


class Event:
    """Stub of a CUDA event that is always complete."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, *_: object) -> None:
        pass

    synchronize = wait = record

    def query(self) -> bool:
        return True


class Stream:
    """Stub of a CUDA stream."""

    def wait_stream(self, _: object) -> None:
        pass

    wait_event = wait_stream


if __name__ == "__main__":
    torch.Event = torch.cuda.Event = Event
    torch.cuda.Stream = torch.cuda.current_stream = Stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    configure = CpuPlatform.check_and_update_config

    def check_and_update_config(config) -> None:  # replaces vLLM's method
        configure(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)

    llm = LLM(**ENGINE, async_scheduling=True)
    core = llm.llm_engine.engine_core.engine_core
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
    results: dict[str, object] = {"batches_at_once": core.batch_queue_size}

    def generate() -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, sampling, use_tqdm=False)]

    expected = generate()
    for step, (name, role) in enumerate(
        {
            "all": {},
            "window": {"iterations": {"count": 3, "skip": 2}},
            "decode": {"batch_kinds": ["decode"], "iterations": {"count": 5}},
        }.items()
    ):
        profiler = Profiler.from_config(settings=settings(step, **role), role="rollout", target=llm)
        capture = profiler.start(step)
        same = generate() == expected
        profiler.stop()
        results[name] = {**about(capture), "same_tokens": same}
    finish(results)
