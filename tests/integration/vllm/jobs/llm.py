"""Job that captures a vLLM `LLM` with two ranks.

The workers load profdeck. During the last capture, the job kills one worker.
"""

from __future__ import annotations

import json
import os
import signal
import time

from _job import ENGINE, OUTPUT, PROMPTS, about, finish, settings
from vllm import LLM, SamplingParams

from profdeck import Profiler

if __name__ == "__main__":
    llm = LLM(**ENGINE, tensor_parallel_size=2)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
    results = {}

    def generate() -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, sampling, use_tqdm=False)]

    def capture(name: str, step: int, **role: object) -> None:
        profiler = Profiler.from_config(settings=settings(step, **role), role="rollout", target=llm)
        capture = profiler.start(step)
        tokens = generate()
        profiler.stop()
        results[name] = {**about(capture), "same_tokens": tokens == expected}

    expected = generate()
    capture("whole", 0)
    capture("window", 1, ranks="all", iterations={"count": 3, "skip": 2}, options={"record_shapes": True})
    capture("decode", 2, ranks="all", batch_kinds=["decode"], iterations={"count": 5})
    by_stage = {"profile_by_stage": True, "ignore_frontend": False, "merge_profiles": True, "with_stack": True}
    capture("by_stage", 3, ranks="all", iterations={"count": 1}, options=by_stage)
    capture("too_long", 4, iterations={"count": 500})
    capture("too_late", 5, iterations={"count": 5, "skip": 500})
    capture("detailed", 6, iterations={"count": 2}, options={"detailed_trace_annotation": True, "rpc_timeout_s": 60})

    # Unsupported captures are refused, and the engine continues to serve.
    capture("no_cuda", 10, options={"activities": ["cuda"]})
    capture("no_rank", 11, ranks=[7])
    capture("omni", 13, options={"stages": [0]})
    OUTPUT.joinpath("file").write_text("in the way")
    blocked = settings(14) | {"output": str(OUTPUT / "file")}
    profiler = Profiler.from_config(settings=blocked, role="rollout", target=llm)
    results["unwritable"] = {**about(profiler.start(14)), "same_tokens": generate() == expected}
    profiler.stop()

    if small_disk := os.environ.get("SMALL_DISK"):
        profiler = Profiler.from_config(settings=settings(15) | {"output": small_disk}, role="rollout", target=llm)
        full = profiler.start(15)
        same = generate() == expected
        profiler.stop()
        results["full_disk"] = {**about(full), "same_tokens": same}

    # The second start is refused, and the first capture continues.
    first = Profiler.from_config(settings=settings(20), role="rollout", target=llm)
    second = Profiler.from_config(settings=settings(21), role="rollout", target=llm)
    running = first.start(20)
    results["second"] = about(second.start(21))
    generate()
    second.stop()
    first.stop()
    results["first"] = about(running)

    # The time limit stops this capture.
    limited = Profiler.from_config(settings=settings(22, options={"max_capture_s": 0.2}), role="rollout", target=llm)
    running = limited.start(22)
    while limited.active is not None:
        generate()
        limited.step(0, "mini_batch")
    results["limited"] = about(running)
    capture("after_all", 23, ranks="all")

    # Kill one worker between two iterations.
    killed = settings(0, ranks="all") | {"run": "killed"}
    profiler = Profiler.from_config(settings=killed, role="rollout", target=llm)
    running = profiler.start(0)
    generate()
    (manifest,) = OUTPUT.rglob("killed/**/rank_0001_tp1.step0.json")
    os.kill(json.loads(manifest.read_text())["pid"], signal.SIGKILL)
    # vLLM then stops the other worker. Poll that worker's manifest, because only its parent process can wait for it.
    (remaining_manifest,) = OUTPUT.rglob("killed/**/rank_0000_tp0.step0.json")
    deadline = time.monotonic() + 30
    while json.loads(remaining_manifest.read_text())["status"] == "recording" and time.monotonic() < deadline:
        time.sleep(0.1)
    profiler.stop()
    results["killed"] = about(running)
    finish(results)
    os._exit(0)  # a normal exit would wait for the killed worker
