"""Job that captures an `AsyncLLM` under load, in its event loop."""

from __future__ import annotations

import asyncio
import itertools

from _job import ENGINE, about, finish, settings
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from profdeck import Profiler

REQUESTS = 200


async def main() -> None:
    """Run all captures."""
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**ENGINE))
    numbers = itertools.count()

    async def tokens(prompt: str, count: int = 16) -> list[int]:
        sampling = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0)
        async for output in engine.generate(prompt, sampling, str(next(numbers))):
            last = output
        return list(last.outputs[0].token_ids)

    async def load() -> list[list[int] | BaseException]:
        return await asyncio.gather(*(tokens(f"prompt {number}") for number in range(REQUESTS)), return_exceptions=True)

    results: dict[str, object] = {}
    # Outputs of separate requests. Rounding can differ with the batch size, so outputs under load can differ.
    expected = [await tokens(f"prompt {number}") for number in range(REQUESTS)]

    async def captures() -> list[dict[str, object]]:
        results = []
        for step in range(4):
            stages = ["decode"] if step % 2 else []
            role = settings(step, iterations={"count": 4}, batch_kinds=stages, options={"ignore_frontend": step != 2})
            profiler = Profiler.from_config(settings=role, role="rollout", target=engine)
            async with profiler.capture(step) as capture:
                await profiler.await_window(30)
            results.append(about(capture))
        return results

    async def load_while(task: asyncio.Task[object]) -> list[list[int] | BaseException]:
        outputs: list[list[int] | BaseException] = []
        while not task.done() or not outputs:
            outputs = await load()
            assert not any(isinstance(item, BaseException) for item in outputs), outputs
        return outputs

    running = asyncio.create_task(captures())
    under_load = await load_while(running)
    results["captures"] = await running
    results["failed"] = [repr(item) for item in under_load if isinstance(item, BaseException)]
    results["same"] = sum(output == expectation for output, expectation in zip(under_load, expected, strict=True))
    again = await load()
    results["same_without_capture"] = sum(
        output == expectation for output, expectation in zip(again, expected, strict=True)
    )

    # After a cancelled start, no worker must continue to record.
    profiler = Profiler.from_config(settings=settings(10), role="rollout", target=engine)
    starting = asyncio.create_task(profiler.astart(10))
    await asyncio.sleep(0)
    starting.cancel()
    results["cancelled"] = [type((await asyncio.gather(starting, return_exceptions=True))[0]).__name__]
    next_profiler = Profiler.from_config(settings=settings(11), role="rollout", target=engine)
    async with next_profiler.capture(11) as capture:
        await tokens("after a cancelled start")
    results["after_cancelled"] = about(capture)

    # In the event loop, sync calls are refused with instructions.
    sync = Profiler.from_config(settings=settings(12), role="rollout", target=engine)
    results["sync"] = about(sync.start(12))

    # Shut down the engine during a capture.
    last = Profiler.from_config(settings=settings(20), role="rollout", target=engine)
    capture = await last.astart(20)
    await tokens("the last one")
    engine.shutdown()
    await last.astop()
    results["shut_down"] = about(capture)
    finish(results)


if __name__ == "__main__":
    asyncio.run(main())
