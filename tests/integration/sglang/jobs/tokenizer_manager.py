"""Job that captures a tokenizer manager while its event loop serves requests, as RL frameworks do.

The job creates the engine inside the event loop. Requests and responses contain only tokens.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import sglang
from _job import ENGINE, OUTPUT, about, finish, sampling, settings
from sglang.srt.managers.io_struct import GenerateReqInput

from profdeck import Profiler

REQUESTS = 100
TOKENS = 6

Generate = Callable[[int], Awaitable[list[int]]]


def through_manager(manager: Any) -> Generate:
    """Return a function that generates tokens from tokens, like verl."""

    async def generate(number: int) -> list[int]:
        request = GenerateReqInput(input_ids=[3 + number, 4, 5], sampling_params=sampling(TOKENS))
        output = await anext(manager.generate_request(request, None))
        return list(output["output_ids"])

    return generate


def is_recording(step: int) -> bool:
    """Return whether a process is still recording or writing a step."""
    manifests = OUTPUT.glob(f"run/step_{step:06d}/*/rank_*[!e].json")
    return any(json.loads(path.read_text())["status"] == "recording" for path in manifests)


class Loop:
    """Measures the longest time for which the event loop is blocked."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.005)
            self.longest_s = max(self.longest_s, time.monotonic() - began)

    async def blocked_s(self, work: Awaitable[Any]) -> float:
        """Await `work` and return the longest time for which the loop was blocked, in seconds."""
        self.longest_s = 0.0
        await work
        return self.longest_s


async def main(target: Any, generate: Generate) -> dict[str, Any]:
    """Run captures under load, and captures with a cancelled start."""
    results: dict[str, Any] = {}
    # Outputs of separate requests. Rounding can differ with the batch size, so outputs under load can differ.
    expected = [await generate(number) for number in range(REQUESTS)]
    loop = Loop()

    def profiler(step: int, **role: Any) -> Profiler:
        return Profiler.from_config(settings=settings(step, **role), role="rollout", target=target)

    async def load() -> list[list[int] | BaseException]:
        return await asyncio.gather(*map(generate, range(REQUESTS)), return_exceptions=True)

    async def captures() -> list[dict[str, Any]]:
        results = []
        for step, stages, ignore_frontend in ((0, [], True), (1, ["decode"], True), (2, [], False)):
            role = {"iterations": {"count": 4}, "batch_kinds": stages, "options": {"ignore_frontend": ignore_frontend}}
            step_profiler = profiler(step, **role)
            # The first capture of a process also imports the recorder.
            starting = await loop.blocked_s(step_profiler.astart(step))
            capture = step_profiler.active
            await step_profiler.await_window(30)
            stopping = await loop.blocked_s(step_profiler.astop())
            results.append({**about(capture), "blocked_s": [starting, stopping]})
        return results

    running = asyncio.create_task(captures())
    outputs: list[list[int] | BaseException] = []
    while not running.done() or not outputs:
        outputs = await load()
        results.setdefault("failed", []).extend(repr(item) for item in outputs if isinstance(item, BaseException))
    results["captures"] = await running
    results["same"] = sum(output == expectation for output, expectation in zip(outputs, expected, strict=True))
    again = await load()
    results["same_without_capture"] = sum(
        output == expectation for output, expectation in zip(again, expected, strict=True)
    )

    # Cancel a start before and after the request is sent. No process must continue to record.
    for step, sent in ((10, False), (12, True)):
        step_profiler = profiler(step, options={"ignore_frontend": False})
        starting = asyncio.create_task(step_profiler.astart(step))
        await asyncio.sleep(0)
        while sent and not [*OUTPUT.glob("run/.replies-*")]:  # noqa: ASYNC110  # other processes cannot set an event
            await asyncio.sleep(0)
        starting.cancel()
        results[f"cancelled_{step}"] = [type((await asyncio.gather(starting, return_exceptions=True))[0]).__name__]
        async with profiler(step + 1).capture(step + 1) as capture:
            await generate(0)
        results[f"after_cancelled_{step}"] = about(capture)
        # The frontends must write their traces before they can record again.
        while is_recording(step):  # noqa: ASYNC110  # other processes cannot set an event
            await asyncio.sleep(0.01)

    # Sync calls work in another thread.
    step_profiler = profiler(15, iterations={"count": 2})
    capture = await asyncio.to_thread(step_profiler.start, 15)
    await generate(0)
    await asyncio.to_thread(step_profiler.stop)
    results["other_thread"] = about(capture)

    async with profiler(16, options={"ignore_frontend": False}).capture(16) as capture:
        await generate(0)
    results["after_all"] = about(capture)
    return results


async def run_all() -> dict[str, Any]:
    """Run all captures, and shut down the engine during the last one."""
    engine = sglang.Engine(**ENGINE, skip_tokenizer_init=True)
    generate = through_manager(engine.tokenizer_manager)
    results = await main(engine.tokenizer_manager, generate)
    last_profiler = Profiler.from_config(settings=settings(20), role="rollout", target=engine)
    capture = await last_profiler.astart(20)
    await generate(0)
    engine.shutdown()
    began = time.monotonic()
    await last_profiler.astop()
    return results | {"shut_down": {**about(capture), "stop_s": time.monotonic() - began}}


if __name__ == "__main__":
    finish(asyncio.run(run_all()))
