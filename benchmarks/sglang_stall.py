"""Compare how long a capture blocks running requests of an SGLang engine with SGLang's own profiler.

python -m benchmarks.sglang_stall [--stops 10] [--json FILE]

Run it in the environment of the nox session `sglang` (``.nox/sglang-*/bin/python``). One engine with a random Llama of
2 layers continuously serves a few streams. Captures alternate between profdeck and SGLang's own profiler, with the same
options. The figures are the longest wait of a running request for its next token around start and stop, and the time
until the files are complete. Both stops return when the files are complete.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.measure import Row, parser, report
from benchmarks.stall import TOKENS, Child, Stop, observe_all, own_profiler, stall_rows

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 260,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}
ENVIRONMENT = {
    "SGLANG_PLUGINS": "profdeck,torchcpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "KINETO_LOG_LEVEL": "6",
}
PROMPT = [2, 3, 5, 7, 11, 13]


def engine_arguments(model: Path) -> dict[str, Any]:
    """Return the arguments of the engine. Without CUDA, the engine uses the tests' CPU platform."""
    import torch

    arguments = {
        "model_path": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "disable_cuda_graph": True,
        "grammar_backend": "none",
        "context_length": MODEL["max_position_embeddings"],
        "max_total_tokens": 2048,
        "max_running_requests": 8,
        "log_level": "warning",
    }
    cpu = {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"}
    return arguments if torch.cuda.is_available() else arguments | cpu


async def observe_engine(model: Path, output: Path, stops: int, *, with_stack: bool) -> dict[str, list[Stop]]:
    """Measure captures of an `Engine`. Return the figures by profiler."""
    import sglang
    import torch
    from sglang.srt.managers.io_struct import ProfileReq

    engine = sglang.Engine(**engine_arguments(model))
    activities = ["CPU", "GPU"] if torch.cuda.is_available() else ["CPU"]
    manager = engine.tokenizer_manager

    async def generate(stream: int, number: int) -> AsyncIterator[object]:  # noqa: ARG001  # the engine names the requests
        # Different lengths prevent all streams from ending at the same time.
        parameters = {"max_new_tokens": TOKENS - 16 * stream, "ignore_eos": True, "temperature": 0}
        async for result in await engine.async_generate(input_ids=PROMPT, sampling_params=parameters, stream=True):
            yield result

    async def start() -> None:
        await manager.start_profile(
            ProfileReq(
                output_dir=str(output / "native"), activities=activities, with_stack=with_stack, record_shapes=False
            )
        )

    profiler = own_profiler(output, "sglang", manager, with_stack=with_stack)
    try:
        return await observe_all(generate, profiler, (start, manager.stop_profile), stops)
    finally:
        engine.shutdown()


def stalled_engine(connection: Connection, model: Path, output: Path, stops: int, with_stack: bool) -> None:  # noqa: FBT001  # passed through a process
    """Run in the child process and send the figures to the parent."""
    connection.send(asyncio.run(observe_engine(model, output, stops, with_stack=with_stack)))


def main() -> None:
    """Run the benchmark from the command line."""
    options = parser(__doc__)
    options.add_argument("--stops", type=int, default=10, help="number of captures per profiler")
    chosen = options.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        output, model = Path(directory), Path(directory, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        for with_stack in (False, True):
            name = f"with_stack {str(with_stack).lower()}"
            arguments = (model, output / name, chosen.stops, with_stack)
            with Child(output / f"{name}.log", ENVIRONMENT, stalled_engine, *arguments) as child:
                rows += stall_rows(child.answer(), name)
    report(rows, chosen.json)


if __name__ == "__main__":
    main()
