"""Job that captures an SGLang `Engine` with two ranks.

The job has no event loop. The engine's scheduler processes load profdeck.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import sglang
from _job import ENGINE, PROMPTS, Host, about, finish, settings

from profdeck import Identity, Profiler

LONG = "a prompt that is read in several pieces, since they are small here; others go on meanwhile"


def windows(host: Host) -> None:
    """Capture parts of a generation."""
    host.capture("whole", 0)
    host.capture("window", 1, ranks="all", iterations={"count": 3}, options={"record_shapes": True})
    host.capture("later_window", 2, ranks="all", iterations={"count": 3, "skip": 2})


def kinds(host: Host) -> None:
    """Record batch kinds separately, include the tokenizer and the detokenizer, and merge all traces."""
    options = {"profile_by_stage": True, "ignore_frontend": False, "merge_profiles": True, "with_stack": True}
    profiler = host.profiler(4, ranks="all", iterations={"count": 1}, options=options)
    running = profiler.start(4)
    host.generate(PROMPTS[0], LONG)
    profiler.stop()
    host.results["by_stage"] = about(running)


def refusals(host: Host) -> None:
    """Request captures that the engine cannot record."""
    host.capture("no_rank", 11, ranks=[7])
    host.capture("memory", 13, options={"device_options": {"memory_snapshot": True}})
    host.capture("cuda_profiler", 14, options={"device_options": {"cuda_profiler_range": True}})


def second_start(host: Host, name: str, step: int, *, frontends: bool) -> None:
    """Start a second capture during a capture. Only one of them includes the tokenizer and the detokenizer."""
    first = host.profiler(step, options={"ignore_frontend": not frontends})
    second = host.profiler(step + 1, options={"ignore_frontend": frontends})
    running = first.start(step)
    host.results[f"{name}_second"] = about(second.start(step + 1))
    host.generate()
    second.stop()
    began = time.monotonic()
    first.stop()
    host.results[name] = {**about(running), "stop_s": time.monotonic() - began}


def train(host: Host, name: str, config: dict[str, Any]) -> bool:
    """Run five global steps in which one engine acts as both replicas. Return True if all tokens are as expected."""
    values = settings(*config["steps"], **config["role"]) | {"run": name, **config["top"]}
    profilers = [
        Profiler.from_config(settings=values, identity=Identity(role="rollout", replica=replica), target=host.engine)
        for replica in range(2)
    ]
    same = True
    for global_step in range(5):
        for profiler in profilers:
            profiler.start(global_step)
            with profiler.stage("generate_sequences"):
                same = [host.generate(), host.generate()] == [host.expected] * 2 and same
            profiler.stop()
    return same


def shut_down(host: Host) -> None:
    """Shut down the engine during a capture."""
    last = host.profiler(26, ranks="all", options={"ignore_frontend": False})
    running = last.start(26)
    host.generate()
    host.engine.shutdown()
    began = time.monotonic()
    last.stop()
    host.results["shut_down"] = {**about(running), "stop_s": time.monotonic() - began}


def main(configs: dict[str, Any]) -> None:
    """Run all captures."""
    # Prompts are processed in chunks of 16 tokens, together with decode batches.
    engine = sglang.Engine(**ENGINE, tp_size=2, chunked_prefill_size=16, enable_mixed_chunk=True)
    # At this point, the tokenizer manager has no event loop for its replies.
    early = Profiler.from_config(settings=settings(40), role="rollout", target=engine.tokenizer_manager)
    early.start(40)
    host = Host(engine)
    host.capture("manager", 41, engine.tokenizer_manager, ranks="all")
    windows(host)
    kinds(host)
    refusals(host)
    second_start(host, "first", 20, frontends=True)
    second_start(host, "first_alone", 22, frontends=False)
    few_tokens = Host(engine, tokens=4)  # a prefill and three decodes
    host.results["same_tokens"] = {name: train(few_tokens, name, config) for name, config in configs.items()}
    host.capture("after_all", 25, ranks="all")
    shut_down(host)
    finish(host.results)


if __name__ == "__main__":
    main(json.loads(sys.argv[4]))
