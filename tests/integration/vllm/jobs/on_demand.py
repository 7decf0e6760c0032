"""Job that captures two engines and their host on demand, from the command line."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from _job import ENGINE, OUTPUT, PROMPTS, finish
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from profdeck import Identity, Profiler

SETTINGS = {
    "output": str(OUTPUT),
    "run": "run",
    "rollout.backend": "vllm",
    "rollout.iterations": {"count": 3},
    "trainer.backend": "torch",
}


async def one_step(rollout: Profiler, engine: AsyncLLM, step: int) -> None:
    """Generate tokens in a global step."""
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    async with rollout.capture(step):
        async for _ in engine.generate(PROMPTS[0], sampling, request_id=str(step)):
            pass


async def main() -> None:
    """Request a capture, and run global steps until the command exits."""
    engines = [AsyncLLM.from_engine_args(AsyncEngineArgs(**ENGINE)) for _ in range(2)]
    rollouts = [
        Profiler.from_config(identity=Identity(role="rollout", replica=number), settings=SETTINGS, target=engine)
        for number, engine in enumerate(engines)
    ]
    trainer = Profiler.from_config(settings=SETTINGS)
    pipe = asyncio.subprocess.PIPE
    arguments = ("-m", "profdeck", "capture", "job", str(OUTPUT / "run"), "--steps", "2", "--json")
    command = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=pipe, stderr=pipe)
    answer = asyncio.ensure_future(command.communicate())
    step = 0
    while not answer.done():
        await asyncio.gather(*(one_step(*pair, step) for pair in zip(rollouts, engines, strict=True)))
        async with trainer.capture(step):
            await asyncio.sleep(0.01)
        step += 1
    stdout, stderr = await answer
    for engine in engines:
        engine.shutdown()
    document: Any = json.loads(stdout) if stdout else None
    finish({"status": command.returncode, "stderr": stderr.decode(), "document": document, "steps": step})


if __name__ == "__main__":
    asyncio.run(main())
