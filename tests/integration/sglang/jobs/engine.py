"""Captures of an `Engine` that is used without an event loop, with profdeck in its schedulers; one after the other."""

from __future__ import annotations

import re
import sys
import time

import sglang
from _job import ENGINE, OUTPUT, PROMPTS, Host, about, finish, settings

from profdeck import Profiler

LONG = "a prompt that is read in several pieces, since they are small here; others go on meanwhile"


def windows(host: Host) -> None:
    """Capture parts of a generation."""
    host.capture("whole", 0)
    host.capture("window", 1, ranks="all", iterations={"count": 3}, options={"record_shapes": True})
    host.capture("later_window", 2, ranks="all", iterations={"count": 3, "skip": 2})
    host.capture("decode", 3, ranks="all", batch_kinds=["decode"], iterations={"count": 5})
    host.capture("merged", 5, ranks="all", iterations={"count": 4}, options={"merge_profiles": True})
    host.capture("too_long", 6, iterations={"count": 500})
    host.capture("too_late", 7, iterations={"count": 5, "skip": 500})
    host.capture("detailed", 8, iterations={"count": 2}, options={"detailed_annotations": True})
    host.capture("undetailed", 9, iterations={"count": 2})


def kinds(host: Host) -> None:
    """Record kinds of batches apart, the processes beside the schedulers too, and merge all of it."""
    options = {"profile_by_stage": True, "ignore_frontend": False, "merge_profiles": True, "with_stack": True}
    profiler = host.profiler(4, ranks="all", iterations={"count": 1}, options=options)
    running = profiler.start(4)
    host.generate(PROMPTS[0], LONG)
    profiler.stop()
    host.results["by_stage"] = about(running)


def counts_of_sglang(host: Host) -> None:
    """Count forward passes from the launch on: a number that is over is refused, with the present one."""
    host.capture("passed", 30, iterations={"count": 2}, options={"start_step": 1})
    (manifest,) = OUTPUT.glob("run/step_000030/rollout/target.*.json")
    done = int(re.findall(r"has done (\d+) forward passes", manifest.read_text())[0]) + len(host.expected[0])
    host.capture("start_step", 31, iterations={"count": 2}, options={"start_step": done + 4})
    host.capture("min_batch", 32, batch_kinds=["decode"], iterations={"count": 2}, options={"stage_min_batch_size": 2})


def refusals(host: Host) -> None:
    """Ask for what cannot be done."""
    host.capture("no_cuda", 10, options={"activities": ["cuda"]})
    host.capture("no_rank", 11, ranks=[7])
    host.capture("memory", 13, options={"device_options": {"memory_snapshot": True}})
    host.capture("cuda_profiler", 14, options={"device_options": {"cuda_profiler_range": True}})
    OUTPUT.joinpath("file").write_text("in the way")
    blocked = settings(15) | {"output": str(OUTPUT / "file")}
    profiler = Profiler.from_config(settings=blocked, role="rollout", target=host.engine)
    host.results["unwritable"] = {**about(profiler.start(15)), "same_tokens": host.generate() == host.expected}
    profiler.stop()


def second_start(host: Host, name: str, step: int, *, frontends: bool) -> None:
    """Start a second capture in mid-capture; only one of both asks for the processes beside the schedulers."""
    first = host.profiler(step, options={"ignore_frontend": not frontends})
    second = host.profiler(step + 1, options={"ignore_frontend": frontends})
    running = first.start(step)
    host.results[f"{name}_second"] = about(second.start(step + 1))
    host.generate()
    second.stop()
    began = time.monotonic()
    first.stop()
    host.results[name] = {**about(running), "stop_s": time.monotonic() - began}


def ends(host: Host) -> None:
    """Let captures end that nobody stops: by the time limit, and with the engine."""
    limited = host.profiler(24, options={"max_capture_s": 0.2})
    running = limited.start(24)
    while limited.active is not None:
        host.generate()
        limited.step(0, "mini_batch")
    host.results["limited"] = about(running)
    host.capture("after_all", 25, ranks="all")

    last = host.profiler(26, ranks="all", options={"ignore_frontend": False})
    running = last.start(26)
    host.generate()
    host.engine.shutdown()
    began = time.monotonic()
    last.stop()
    host.results["shut_down"] = {**about(running), "stop_s": time.monotonic() - began}


def main(tp_size: int) -> None:
    """Run it."""
    # Prompts are read 16 tokens at a time, together with what others generate.
    chunks = {"chunked_prefill_size": 16, "enable_mixed_chunk": True}
    engine = sglang.Engine(**ENGINE, tp_size=tp_size, **chunks)
    # A tokenizer manager alone does not know yet in which event loop it will get its answers.
    early = Profiler.from_config(settings=settings(40), role="rollout", target=engine.tokenizer_manager)
    early.start(40)
    host = Host(engine)
    host.capture("manager", 41, engine.tokenizer_manager, ranks="all")
    windows(host)
    kinds(host)
    counts_of_sglang(host)
    refusals(host)
    second_start(host, "first", 20, frontends=True)
    second_start(host, "first_alone", 22, frontends=False)
    ends(host)
    finish(host.results)


if __name__ == "__main__":
    main(int(sys.argv[4]))
