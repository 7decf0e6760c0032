"""A worker that is killed in mid-capture, between two iterations."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from _job import ENGINE, OUTPUT, PROMPTS, about, finish, settings
from vllm import LLM, SamplingParams

from profdeck import Profiler

if __name__ == "__main__":
    llm = LLM(**ENGINE, tensor_parallel_size=2)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
    profiler = Profiler.from_config(settings=settings(0, ranks="all"), role="rollout", target=llm)
    capture = profiler.start(0)
    llm.generate(PROMPTS, sampling, use_tqdm=False)
    (manifest,) = Path(OUTPUT).rglob("rank_0001_tp1.step0.json")
    os.kill(json.loads(manifest.read_text())["pid"], signal.SIGKILL)
    # vLLM now ends the other worker, which no process but vLLM's own could wait for.
    (other,) = Path(OUTPUT).rglob("rank_0000_tp0.step0.json")
    deadline = time.monotonic() + 30
    while json.loads(other.read_text())["status"] == "recording" and time.monotonic() < deadline:
        time.sleep(0.1)
    profiler.stop()
    finish({"capture": about(capture)})
    os._exit(0)  # vLLM waits for workers that it has lost
