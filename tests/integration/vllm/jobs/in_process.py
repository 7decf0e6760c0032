"""Job with an engine in its own process. It records the worker's patched methods and the names of batches."""

from __future__ import annotations

import contextlib

from _job import ENGINE, OUTPUT, PROMPTS, about, finish, settings
from vllm import LLM, SamplingParams

from profdeck import Profiler
from profdeck_vllm.iterations import IterationReader


class NamingProfiler:
    """Replacement for vLLM's own profiler that stores the worker's names of iterations."""

    should_annotate = True

    def __init__(self) -> None:
        self.names: list[str] = []

    def step(self) -> None:
        """Do nothing."""

    def annotate_context_manager(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Store the name."""
        self.names.append(name)
        return contextlib.nullcontext()


if __name__ == "__main__":
    llm = LLM(**ENGINE, max_num_batched_tokens=16, max_num_seqs=4)
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
    prompts = [*PROMPTS, "a prompt that is read in several pieces, since they are small here", "b", "c", "d"]
    results: dict[str, object] = {}

    def patched_methods() -> list[str]:
        return sorted({"execute_model", "sample_tokens", "shutdown"} & vars(worker).keys())

    # profdeck must use the same iteration names as vLLM, for all batch kinds.
    ours: list[list[str]] = []
    kinds = []
    for detailed in (False, True):
        worker.vllm_config.profiler_config.detailed_trace_annotation = detailed
        naming, names = NamingProfiler(), []
        original, reader = worker.model_runner.execute_model, IterationReader(detailed=detailed)

        def execute(output, *args, names=names, reader=reader, original=original, **kwargs):  # vLLM's
            if output.total_num_scheduled_tokens:
                batch, name = reader.describe(output)
                names.append(name)
                kinds.append(str(batch))
            return original(output, *args, **kwargs)

        worker.profiler, worker.model_runner.execute_model = naming, execute
        llm.generate(prompts, sampling, use_tqdm=False)
        worker.profiler = None
        del worker.model_runner.execute_model
        ours.append([names, naming.names])
    results["names"] = ours
    results["kinds"] = sorted(set(kinds))

    results["idle_before"] = patched_methods()
    profiler = Profiler.from_config(settings=settings(0, iterations={"count": 2}), role="rollout", target=llm)
    capture = profiler.start(0)
    results["armed"] = patched_methods()
    llm.generate(prompts, sampling, use_tqdm=False)
    results["idle_after_window"] = patched_methods()
    profiler.stop()
    results["capture"] = about(capture)

    # Torch supports one recording per process, so a trainer in the same process must wait.
    together = {"output": str(OUTPUT), "run": "together", "steps": [1, 3], "trainer.backend": "torch"}
    trainer = Profiler.from_config(settings=together)
    role = settings(0, iterations={"count": 3}) | {"run": "together", "steps": [1, 3]}
    rollout = Profiler.from_config(settings=role, role="rollout", target=llm)
    trainer.start(1)
    rollout.start(1)
    llm.generate(prompts, sampling, use_tqdm=False)
    trainer.stop()
    llm.generate(prompts, sampling, use_tqdm=False)
    rollout.stop()
    rollout.start(3)
    output = llm.llm_engine
    output.add_request("one", prompts[0], sampling)
    output.step()
    trainer.start(3)  # while the engine records
    while output.has_unfinished_requests():
        output.step()
        trainer.step(0, "mini_batch")
    rollout.stop()
    trainer.stop()
    finish(results)
