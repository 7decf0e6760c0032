"""Captures by SGLang's own profiler, of an engine whose processes have not loaded profdeck."""

from __future__ import annotations

import os
from typing import Any

import sglang
from _job import ENGINE, Host, about, finish, sampling, settings

from profdeck import Profiler


async def through_manager(host: Host) -> None:
    """Capture with the tokenizer manager, in the engine's event loop."""

    async def generate() -> list[list[int]]:
        output = await host.engine.async_generate("hello", sampling(10))
        return [output["output_ids"]]

    for name, step, role in (("manager_whole", 30, {}), ("manager_window", 31, {"iterations": {"count": 3}})):
        profiler = Profiler.from_config(
            settings=settings(step, **role), role="rollout", target=host.engine.tokenizer_manager
        )
        async with profiler.capture(step) as capture:
            tokens = await generate()
        host.results[name] = {**about(capture), "same_tokens": tokens == host.expected}


def refusals(host: Host) -> None:
    """Ask for what cannot be done; after each refusal a capture tells whether anything was sent."""
    asked: dict[str, dict[str, Any]] = {
        "stages": {"batch_kinds": ["decode"], "iterations": {"count": 2}},
        "by_stage": {"options": {"profile_by_stage": True}, "iterations": {"count": 2}},
        "skip": {"iterations": {"count": 2, "skip": 1}},
        "memory": {"options": {"profile_memory": True}},
        "snapshot": {"options": {"device_options": {"memory_snapshot": True}}},
        "frontends": {"options": {"ignore_frontend": False}},
        "start_step": {"options": {"start_step": 1000}, "iterations": {"count": 2}},
        "cuda": {"options": {"activities": ["cuda"]}},
    }
    for number, (name, role) in enumerate(asked.items()):
        host.capture(name, 10 + number, **role)
    # The schedulers were started without it; who asks believes this process's environment.
    os.environ["SGLANG_PROFILE_V2"] = "1"
    host.capture("v2", 20)
    del os.environ["SGLANG_PROFILE_V2"]


if __name__ == "__main__":
    host = Host(sglang.Engine(**ENGINE, tp_size=2))
    host.capture("whole", 0)
    host.capture("window", 1, iterations={"count": 3}, options={"record_shapes": True})
    host.capture("all_ranks", 2, ranks="all", iterations={"count": 4}, options={"merge_profiles": True})
    host.capture("too_long", 3, iterations={"count": 500})
    refusals(host)
    host.capture("after_refusals", 21, ranks="all", options={"with_stack": True})
    host.engine.loop.run_until_complete(through_manager(host))
    host.engine.shutdown()
    finish(host.results)
