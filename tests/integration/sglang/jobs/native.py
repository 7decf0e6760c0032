"""Job that captures an engine with SGLang's own profiler. The engine's processes do not load profdeck."""

from __future__ import annotations

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


if __name__ == "__main__":
    host = Host(sglang.Engine(**ENGINE, tp_size=2))
    host.capture("whole", 0)
    host.capture("window", 1, iterations={"count": 3}, options={"record_shapes": True})
    host.capture("all_ranks", 2, ranks="all", iterations={"count": 4}, options={"merge_profiles": True})
    host.capture("stacks", 21, ranks="all", options={"with_stack": True})
    host.engine.loop.run_until_complete(through_manager(host))
    host.engine.shutdown()
    finish(host.results)
