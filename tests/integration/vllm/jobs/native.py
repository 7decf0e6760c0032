"""Job that captures an `LLM` with vLLM's own profiler. The workers do not load profdeck."""

from __future__ import annotations

from _job import ENGINE, OUTPUT, PROMPTS, about, finish, settings
from vllm import LLM, SamplingParams

from profdeck import Profiler

if __name__ == "__main__":
    profiler_config = {
        "profiler": "torch",
        "torch_profiler_dir": str(OUTPUT / "native"),
        "torch_profiler_record_shapes": True,
    }
    llm = LLM(
        **ENGINE, profiler_config={**profiler_config, "torch_profiler_with_stack": False, "ignore_frontend": True}
    )
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
    results = {}

    def capture(name: str, step: int, **role: object) -> None:
        profiler = Profiler.from_config(settings=settings(step, **role), role="rollout", target=llm)
        capture = profiler.start(step)
        llm.generate(PROMPTS[:1], sampling, use_tqdm=False)
        profiler.stop()
        results[name] = about(capture)

    capture("whole", 0)
    capture("window", 1, iterations={"count": 3})
    capture("later_window", 2, iterations={"count": 3, "skip": 2})
    capture("as_launched", 3, options={"record_shapes": True})
    finish(results)
