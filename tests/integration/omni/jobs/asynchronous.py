"""A capture of a pipeline that serves an event loop, in whose process its one stage is."""

from __future__ import annotations

import asyncio

from _job import ENGINE, about, finish, picture, settings
from vllm_omni.entrypoints.async_omni import AsyncOmni

from profdeck import Profiler


async def main() -> None:
    """Run it."""
    omni = AsyncOmni(**ENGINE)

    async def draw(number: int) -> None:
        async for _ in omni.generate("hello", f"{number}", sampling_params_list=[picture()]):
            pass

    own = settings(1, iterations={"skip": 1, "count": 2})
    async with Profiler.from_config(settings=own, role="rollout", target=omni) as profiler:
        async with profiler.capture(1) as capture:
            await asyncio.gather(*map(draw, range(4)))
        results = {"capture": about(capture)}
    own = settings(2, options={"ignore_frontend": False})
    async with Profiler.from_config(settings=own, role="rollout", target=omni) as profiler:
        async with profiler.capture(2) as capture:
            await draw(4)
        results["frontend"] = about(capture)
    finish(results)
    omni.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
