"""Capture a vLLM engine: ``python -m gpu.engine MODE``.

- ``eager``: The engine uses Triton attention and no CUDA graphs.
- ``graphs``: The engine uses torch.compile and CUDA graphs.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from gpu.report import CUDA, OUT, Report, compare, traces

TOKENS = 64


def write_model(path: Path, *, hidden: int, layers: int, dtype: str) -> None:
    """Write the Llama model of the engine tests with different dimensions."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
    from engine_servers import write_tiny_model

    path.mkdir(parents=True, exist_ok=True)
    write_tiny_model(path)
    file = path / "config.json"
    config = json.loads(file.read_text())
    config |= {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "head_dim": 64}
    config |= {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "torch_dtype": dtype}
    file.write_text(json.dumps(config))


def engine_arguments(mode: str) -> dict[str, Any]:
    dtype = "bfloat16" if CUDA else "float32"
    write_model(OUT / "model", hidden=1024 if CUDA else 128, layers=8 if CUDA else 2, dtype=dtype)
    engine: dict[str, Any] = {"model": str(OUT / "model"), "load_format": "dummy", "max_model_len": 256, "dtype": dtype}
    engine["max_num_seqs"] = 16
    if CUDA:
        # Other parts use the GPU at the same time, so vLLM must not measure free memory. A fixed size disables this.
        engine |= {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 4 * 2**30}
    if mode == "eager":
        engine |= {"enforce_eager": True} | ({"attention_backend": "TRITON_ATTN"} if CUDA else {})
    else:
        engine["cudagraph_capture_sizes"] = [1, 2, 4, 8, 16]
    return engine


def main() -> None:
    report = Report()
    mode = sys.argv[1]
    begin = time.perf_counter()
    from vllm import LLM, SamplingParams

    from profdeck import Profiler

    llm = LLM(**engine_arguments(mode))
    report.figure("engine start s", round(time.perf_counter() - begin, 1))
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0)
    prompts = [f"hello world {number}" for number in range(8)]

    def generate() -> tuple[list[list[int]], float]:
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs], time.perf_counter() - start

    generate()
    expected, _ = generate()
    runs = [generate() for _ in range(5)]
    report.figure("iteration ms", round(statistics.median(time_s for _, time_s in runs) / TOKENS * 1e3, 2))
    # The scheduler's batches depend on timing, and on a GPU, their sizes change the results of matrix products.
    is_deterministic = all(tokens == expected for tokens, _ in runs)
    report.figure("same tokens in each run without a capture", is_deterministic)
    device: dict[str, dict[str, Any]] = {
        "device_only": {"options__activities": ["cuda"], "iterations": {"count": 10}},
        "memory": {"options__device_options": {"memory_snapshot": True}, "iterations": {"count": 5}},
    }
    captures: dict[str, dict[str, Any]] = {
        "complete": {},
        "decode": {"batch_kinds": ["decode"], "iterations": {"count": 10}},
        "window": {"iterations": {"count": 5, "skip": 20}, "options__record_shapes": True, "options__with_stack": True},
        "by_stage": {"options__profile_by_stage": True, "iterations": {"count": 1}},
        "detailed": {"options__detailed_trace_annotation": True, "iterations": {"count": 10}},
        **(device if CUDA else {}),
    }
    for step, (run, role) in enumerate(captures.items(), 1):
        with report.attempt(run):
            role_settings = {f"rollout.{key.replace('__', '.')}": value for key, value in role.items()}
            settings = {"output": str(OUT), "run": run, "steps": [step], "rollout.backend": "vllm", **role_settings}
            profiler = Profiler.from_config(settings=settings, role="rollout", target=llm)
            profiler.start(step)
            tokens, _ = generate()
            profiler.stop()
            if is_deterministic:
                report.check(f"{run} does not change tokens", tokens == expected)
            report.check(f"{run} does not change lengths", [*map(len, tokens)] == [*map(len, expected)])
            report.check(f"{run} wrote a trace", bool(traces(run)), [path.name for path in traces(run)])
            compare(report, run)
    report.finish()


if __name__ == "__main__":
    main()
