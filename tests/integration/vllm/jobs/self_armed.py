"""An engine that nobody asks for a capture: the config does."""

from __future__ import annotations

from _job import ENGINE, PROMPTS, finish
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(**ENGINE, tensor_parallel_size=2)
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
    finish({"tokens": [len(llm.generate(PROMPTS, sampling, use_tqdm=False)) for _ in range(4)]})
