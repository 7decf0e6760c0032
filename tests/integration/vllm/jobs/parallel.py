"""Captures of engines with pipeline stages, and of data-parallel engines behind one frontend."""

from __future__ import annotations

import asyncio
import sys

from _job import ENGINE, PROMPTS, about, finish, settings
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from profdeck import Profiler


async def main(dimension: str) -> None:
    """Run it."""
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**ENGINE, **{dimension: 2}))
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)

    async def generate(number: int) -> None:
        async for _ in engine.generate(PROMPTS[number % 2], sampling, str(number)):
            pass

    profiler = Profiler.from_config(
        settings=settings(0, ranks="all", iterations={"count": 4}), role="rollout", target=engine
    )
    async with profiler.capture(0) as capture:
        await asyncio.gather(*map(generate, range(8)))
    finish(about(capture))
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[4]))
