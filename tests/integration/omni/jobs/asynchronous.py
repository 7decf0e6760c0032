"""Job that captures a single-stage pipeline in an event loop. The stage runs in the job's process."""

from __future__ import annotations

import asyncio

from _job import ENGINE, about, finish, picture, settings
from vllm_omni.entrypoints.async_omni import AsyncOmni

from profdeck import Profiler


async def main() -> None:
    """Capture two steps."""
    omni = AsyncOmni(**ENGINE)

    async def draw(number: int) -> None:
        async for _ in omni.generate("hello", f"{number}", sampling_params_list=[picture()]):
            pass

    capture_settings = settings(1, iterations={"skip": 1, "count": 2})
    async with Profiler.from_config(settings=capture_settings, role="rollout", target=omni) as profiler:
        async with profiler.capture(1) as capture:
            await asyncio.gather(*map(draw, range(4)))
        results = {"capture": about(capture)}
    capture_settings = settings(2, options={"ignore_frontend": False})
    async with Profiler.from_config(settings=capture_settings, role="rollout", target=omni) as profiler:
        async with profiler.capture(2) as capture:
            await draw(4)
        results["frontend"] = about(capture)
    finish(results)
    omni.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
