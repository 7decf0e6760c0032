"""Job that captures data-parallel engines with one frontend."""

from __future__ import annotations

import asyncio
from typing import Any

from _job import ENGINE, OUTPUT, PROMPTS, about, finish, settings
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from profdeck import Profiler
from profdeck_vllm.worker import METHOD


async def main() -> None:
    """Capture both engines, once while the second engine is busy."""
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**ENGINE, data_parallel_size=2))
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)

    async def generate(number: int) -> None:
        async for _ in engine.generate(PROMPTS[number % 2], sampling, str(number)):
            pass

    async def command_second(*arguments: Any) -> None:
        """Send a command to the second engine only."""
        client = engine.engine_core
        second = client.core_engines[1]
        await client._call_utility_async("collective_rpc", METHOD, None, arguments, None, engine=second)

    capture_settings = settings(0, ranks="all", iterations={"count": 4}, options={"merge_profiles": True})
    profiler = Profiler.from_config(settings=capture_settings | {"steps": [0, 2]}, role="rollout", target=engine)
    # A capture of the second engine only, which is unknown to the first engine.
    await command_second(
        "start", {"id": "other", "output": str(OUTPUT), "run": "other", "role": "rollout", "ranks": "all"}
    )
    async with profiler.capture(0) as refused:
        pass
    await command_second("stop", {"request": "other"})
    async with profiler.capture(2) as capture:
        await asyncio.gather(*map(generate, range(8)))
    finish({"refused": about(refused), **about(capture)})
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
