"""A driver that captures engines of vLLM which actors hold. Its results are JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from profdeck import Profiler
from profdeck.base.errors import CaptureError
from profdeck.records.capture import CaptureRecord

OUTPUT, RESULTS, ADDRESS, MODEL = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
ENGINE = {
    "model": str(MODEL),
    "load_format": "dummy",
    "enforce_eager": True,
    "max_model_len": 256,
    "dtype": "float32",
}


class Rollout:
    """Holds an `AsyncLLM`, as the servers of RL frameworks do; these have methods of that name as well."""

    async def launch(self) -> int:
        """Make the engine, whose workers load profdeck."""
        os.environ["VLLM_PLUGINS"] = "profdeck"
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**ENGINE))
        return os.getpid()

    async def start_profile(self) -> None:
        """Be in the way."""
        raise AssertionError

    stop_profile = start_profile

    async def serve(self) -> None:
        """Generate until `rest` is called."""
        self.serving = True
        while self.serving:
            await self.generate(4, 16)

    async def rest(self) -> None:
        """End that."""
        self.serving = False

    async def generate(self, prompts: int, tokens: int) -> int:
        """Return how many tokens came."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)

        async def one(number: int) -> int:
            async for output in self.engine.generate(f"prompt {number}", sampling, os.urandom(8).hex()):
                last = output
            return len(last.outputs[0].token_ids)

        return sum(await asyncio.gather(*map(one, range(prompts))))


class Batches:
    """Holds an `LLM`, whose workers do not load profdeck: its own profiler records."""

    def launch(self, directory: str) -> int:
        """Make the engine."""
        from vllm import LLM

        os.environ.pop("VLLM_PLUGINS", None)
        profiler = {"profiler": "torch", "torch_profiler_dir": directory}
        self.llm = LLM(**ENGINE, profiler_config=profiler)
        return os.getpid()

    def generate(self, prompts: int, tokens: int) -> int:
        """Return how many tokens came."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
        outputs = self.llm.generate([f"prompt {number}" for number in range(prompts)], sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def is_under_way(self, prompts: int) -> bool:
        """Wait until the engine has so many requests; False if that does not come."""
        pause, until_s = threading.Event(), time.monotonic() + 60
        while self.llm.llm_engine.get_num_unfinished_requests() < prompts and time.monotonic() < until_s:
            pause.wait(0.001)
        return time.monotonic() < until_s


def settings(step: int, **own: Any) -> dict[str, Any]:
    """Config values; dots in keys are written ``__``."""
    role = {f"rollout.{key.replace('__', '.')}": value for key, value in own.items()}
    whole = {"output": str(OUTPUT), "run": "run", "steps": [step], "on_error": "raise", "on_demand": False}
    return {**whole, "rollout.backend": "vllm", **role}


def about(capture: CaptureRecord | None) -> dict[str, Any]:
    """Return what a test wants to know of a capture."""
    assert capture is not None
    found: dict[str, Any] = {"status": str(capture.status), "problems": capture.problems, "notes": capture.notes}
    if capture.fleet is not None:
        found["targets"] = [[one.name, str(one.outcome), one.reason] for one in capture.fleet.targets]
        found["skew_ms"] = capture.fleet.start_skew_ms
    return found


def main() -> None:
    """Run it."""
    group = placement_group([{"CPU": 1}] * 2)
    ray.get(group.ready())
    options = {"num_cpus": 1, "scheduling_strategy": PlacementGroupSchedulingStrategy(group)}
    rollouts = [ray.remote(Rollout).options(name=f"rollout_{number}", **options).remote() for number in range(2)]
    batches = ray.remote(Batches).options(num_cpus=0, max_concurrency=2).remote()
    traces = OUTPUT.parent / "traces"
    launched = ray.get([*(actor.launch.remote() for actor in rollouts), batches.launch.remote(str(traces))])
    results: dict[str, Any] = {}

    # Under load, with a window; the host is sync.
    loads = [actor.serve.remote() for actor in rollouts]
    window = settings(1, iterations={"count": 4})
    with Profiler.from_config(role="rollout", settings=window, target=rollouts).capture(1) as capture:
        tokens = ray.get([actor.generate.remote(2, 16) for actor in rollouts])
    ray.get([*(actor.rest.remote() for actor in rollouts), *loads])
    results["handles"] = about(capture) | {"tokens": tokens}

    # The group; the host is async.
    async def step() -> CaptureRecord | None:
        profiler = Profiler.from_config(settings=settings(2), role="rollout", target=group)
        async with profiler.capture(2) as capture:
            await asyncio.gather(*(actor.generate.remote(2, 8) for actor in rollouts))
        return capture

    results["group"] = about(asyncio.run(step()))

    # vLLM's own profiler, in an actor that blocks; then in the midst of a call, as it has two threads.
    for step_, before in ((3, False), (4, True)):
        profiler = Profiler.from_config(settings=settings(step_), role="rollout", target=batches)
        running = [batches.generate.remote(32, 64)] if before else []
        if before:  # not while it sends requests: vLLM sends from any thread, by a socket that is for one
            assert ray.get(batches.is_under_way.remote(32))
        with profiler.capture(step_) as capture:
            tokens = ray.get([*running, batches.generate.remote(2, 8)] if not before else running)
        results["busy" if before else "own"] = about(capture) | {"tokens": tokens}

    # One is killed in mid-capture.
    profiler = Profiler.from_config(role="rollout", settings=settings(5), target=rollouts)
    try:
        with profiler.capture(5) as capture:
            ray.get([actor.generate.remote(2, 8) for actor in rollouts])
            os.kill(launched[1], signal.SIGKILL)
    except CaptureError as error:
        results["error"] = str(error)
    results["killed"] = about(capture)
    results["serves"] = ray.get(rollouts[0].generate.remote(1, 3))
    RESULTS.write_text(json.dumps(results))


if __name__ == "__main__":
    logging.getLogger("profdeck").addHandler(logging.StreamHandler())
    ray.init(address=ADDRESS, log_to_driver=False, logging_level="ERROR")
    main()
