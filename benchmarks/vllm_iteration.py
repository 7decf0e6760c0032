"""Measure the overhead of profdeck in a vLLM engine, relative to no profiler and to vLLM's own profiler.

python -m benchmarks.vllm_iteration [--forks 30] [--bursts 12] [--rounds 40] [--stops 10] [--json FILE]

Run it in the environment of the nox session `vllm` (``.nox/vllm-*/bin/python``). `run_all` runs in the environment of
`torch` and therefore excludes it. The engine is a random Llama of 2 layers: its short iterations make the overhead
visible. There are three parts, each with engines in their own processes:

idle: iterations without profdeck, with profdeck, and with profdeck after a capture. Two processes of the same program
can differ by several percent, so the engines are forks of one process, and profdeck is loaded in the fork. The forks
generate in short bursts, one at a time and in random order, and are created many times. The interval is computed over
the forks. A second fork without profdeck shows the noise.

captured: recorded iterations, by profdeck and by vLLM's profiler with the same options, in one engine with both. The
order is random in each round. vLLM's profiler runs twice to show the noise.

stall: wait of running requests for their next token around the start and stop of a capture, by profdeck and by vLLM's
profiler with the same options, in one `AsyncLLM` that continuously serves a few streams. Both stops return when the
files are complete. By default, the worker runs in the process of the engine core, as with one GPU. With
`--executor mp`, it has its own process and spins while it waits, as is vLLM's default on the CPU and with several GPUs.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.measure import Row, parser, ratio_interval, report
from benchmarks.stall import EVERY, TOKENS, Child, Stop, check, clock, observe_all, own_profiler, row, stall_rows

from profdeck import Capture

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 260,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}
ENVIRONMENT = {
    "VLLM_PLUGINS": "profdeck",
    # A separate executor spins, and an idle engine would disturb the others.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "KINETO_LOG_LEVEL": "6",
}
PROMPT = [2, 3, 5, 7, 11, 13]
BURST = 100
"""Iterations per burst in the part `idle`."""
REQUESTS = 4
RECORDED = 100
"""Iterations per recording in the part `captured`. The first `PASSED` are not timed."""
PASSED = 10
MAX_IDLE = 1.005
MAX_CAPTURED = 1.05
PARTS = ("idle", "captured", "stall")


def engine_arguments(model: Path, **more: Any) -> dict[str, Any]:
    """Return the common arguments of all engines, and `more`."""
    return {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": MODEL["max_position_embeddings"],
        "kv_cache_memory_bytes": 1 << 26,
        **more,
    }


def native_profiler(directory: Path, *, with_stack: bool) -> dict[str, Any]:
    """Return a config of vLLM's profiler that records the same as profdeck, in the worker only."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": str(directory),
        "torch_profiler_with_stack": with_stack,
        "ignore_frontend": True,
    }


# Part `idle`.


class Twin:
    """Fork of this process that uses the inherited engine on request."""

    def __init__(self, llm: Any, kind: Callable[[Any], None]) -> None:
        context = get_context("fork")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_generate_on_demand, args=(other, llm, kind))
        self._process.start()
        other.close()

    def burst_ms(self) -> float:
        """Run a burst in the fork. Return the milliseconds per iteration."""
        self._connection.send("burst")
        iteration_ms: float = self._connection.recv()
        return iteration_ms

    def end(self) -> float:
        """End the fork. Return the fraction of a core that it used while idle."""
        self._connection.send(None)
        idle_share: float = self._connection.recv()
        self._process.join()
        return idle_share


def _generate_on_demand(connection: Connection, llm: Any, kind: Callable[[Any], None]) -> None:
    kind(llm)
    _burst_ms(llm)  # copies the shared pages to which it writes
    idle_s = idle_cpu_s = 0.0
    while True:
        began_s, began_cpu_s = clock(), time.process_time()
        message = connection.recv()
        idle_s, idle_cpu_s = idle_s + clock() - began_s, idle_cpu_s + time.process_time() - began_cpu_s
        if message is None:
            connection.send(idle_cpu_s / idle_s)
            return
        connection.send(_burst_ms(llm))


def _burst_ms(llm: Any) -> float:
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=BURST, ignore_eos=True, temperature=0, detokenize=False)
    gc.collect()
    began_s = clock()
    llm.generate([{"prompt_token_ids": PROMPT}], parameters, use_tqdm=False)
    return (clock() - began_s) / BURST * 1e3


def load_profdeck(_: Any) -> None:
    """Load profdeck in the same way as vLLM."""
    from vllm.v1.worker.worker_base import WorkerBase

    from profdeck_vllm.autoload import register

    os.environ["VLLM_PLUGINS"] = "profdeck"
    register()
    assert hasattr(WorkerBase, "profdeck_command")


def load_and_capture(llm: Any) -> None:
    """Load profdeck and capture one burst."""
    load_profdeck(llm)
    with tempfile.TemporaryDirectory() as output:
        profiler = own_profiler(Path(output), "vllm", llm, with_stack=False)
        capture = profiler.start(EVERY)
        _burst_ms(llm)
        profiler.stop()
        check(capture)


def idle_engine(connection: Connection, model: Path, forks: int, bursts: int) -> None:
    """Send the burst times of each kind of fork, one list per fork, and the mean CPU usage of idle forks."""
    from vllm import LLM

    llm = LLM(**engine_arguments(model))
    _burst_ms(llm)
    kinds: dict[str, Callable[[Any], None]] = {
        "profdeck": load_profdeck,
        "profdeck after a capture": load_and_capture,
        "without": lambda _: None,
        "without again": lambda _: None,
    }
    times: dict[str, list[list[float]]] = {name: [] for name in kinds}
    idle_shares: list[float] = []
    order, generator = list(kinds), random.Random(0)
    for _ in range(forks):
        generator.shuffle(order)
        twins = {name: Twin(llm, kinds[name]) for name in order}
        for bursts_by_fork in times.values():
            bursts_by_fork.append([])
        for _ in range(bursts):
            generator.shuffle(order)
            for name in order:
                times[name][-1].append(twins[name].burst_ms())
        idle_shares += [twin.end() for twin in twins.values()]
    connection.send((times, statistics.fmean(idle_shares)))


def idle_row(
    what: str,
    times: dict[str, list[list[float]]],
    names: tuple[str, str],
    idle_share: float,
    max_ratio: float | None = None,
) -> Row:
    """Compare two kinds of forks, paired by burst and fork."""
    measured, peer = (times[name] for name in names)
    ratios = [
        statistics.median(burst_ms / peer_ms for burst_ms, peer_ms in zip(*bursts, strict=True))
        for bursts in zip(measured, peer, strict=True)
    ]
    ratio, interval = ratio_interval(ratios, [1.0] * len(ratios))
    medians = [[statistics.median(bursts) for bursts in forks] for forks in (measured, peer)]
    return Row(
        what=what,
        unit="ms",
        measured=statistics.median(medians[0]),
        peer=statistics.median(medians[1]),
        peer_name=names[1],
        ratio=ratio,
        interval=interval,
        goal=f"ratio <= {max_ratio}" if max_ratio else "",
        met=ratio <= max_ratio if max_ratio else None,
        detail=f"ratios of {len(ratios)} forks {min(ratios):.4g}..{max(ratios):.4g}; "
        f"an idle engine used {idle_share:.2%} of a core",
    )


def idle_rows(times: dict[str, list[list[float]]], idle_share: float) -> list[Row]:
    """Return the result rows of the part `idle`."""
    return [
        idle_row("idle iteration", times, ("profdeck", "without"), idle_share, MAX_IDLE),
        idle_row(
            "idle iteration, after a capture", times, ("profdeck after a capture", "without"), idle_share, MAX_IDLE
        ),
        idle_row("iteration without profdeck, repeated", times, ("without again", "without"), idle_share),
    ]


# Part `captured`.


class Windows:
    """Runs the same iterations in recordings of several profilers."""

    def __init__(self, model: Path, output: Path) -> None:
        from vllm import LLM, SamplingParams

        native = native_profiler(output / "native", with_stack=False)
        self._llm = LLM(**engine_arguments(model, profiler_config=native))
        self._profiler = own_profiler(output, "vllm", self._llm, with_stack=False)
        self._parameters = SamplingParams(
            max_tokens=PASSED + RECORDED + PASSED, ignore_eos=True, temperature=0, detokenize=False
        )
        self._number = 0

    def profdeck(self) -> float:
        """Record with profdeck. Return the milliseconds per iteration."""
        captures: list[Capture | None] = []
        iteration_ms = self._run(
            lambda: captures.append(self._profiler.start(self._number * EVERY)), self._profiler.stop
        )
        check(captures[0])
        return iteration_ms

    def native(self) -> float:
        """Record with vLLM's profiler. Return the milliseconds per iteration."""
        return self._run(lambda: self._llm.start_profile(f"w{self._number}"), self._llm.stop_profile)

    def plain(self) -> float:
        """Run without a recording. Return the milliseconds per iteration."""
        return self._run(lambda: None, lambda: None)

    def _run(self, start: Callable[[], None], stop: Callable[[], None]) -> float:
        """Return the milliseconds per recorded iteration."""
        self._number += 1
        engine = self._llm.llm_engine
        for number in range(REQUESTS):
            engine.add_request(f"{self._number}-{number}", {"prompt_token_ids": PROMPT}, self._parameters)
        for _ in range(PASSED):
            engine.step()
        gc.collect()  # collect garbage of the previous recording now, not during this one
        start()
        for _ in range(PASSED):
            engine.step()
        began_s = clock()
        for _ in range(RECORDED - PASSED):
            engine.step()
        iteration_ms = (clock() - began_s) / (RECORDED - PASSED) * 1e3
        stop()
        while engine.has_unfinished_requests():
            engine.step()
        return iteration_ms


def captured_engine(connection: Connection, model: Path, output: Path, rounds: int) -> None:
    """Send the times of all rounds except the first, which includes one-time costs."""
    windows = Windows(model, output)
    kinds = {
        "profdeck": windows.profdeck,
        "native": windows.native,
        "native again": windows.native,
        "plain": windows.plain,
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    order, generator = list(kinds), random.Random(0)
    for _ in range(rounds + 1):
        generator.shuffle(order)
        for name in order:
            times[name].append(kinds[name]())
    connection.send({name: rounds_ms[1:] for name, rounds_ms in times.items()})


def captured_rows(times: dict[str, list[float]]) -> list[Row]:
    """Return the result rows of the part `captured`."""
    return [
        row("captured iteration", "ms", times, ("profdeck", "native"), MAX_CAPTURED),
        row("native iteration, repeated", "ms", times, ("native again", "native")),
        row("native iteration", "ms", times, ("native", "plain")),
    ]


# Part `stall`.


async def observe_engine(model: Path, output: Path, stops: int, *, with_stack: bool) -> dict[str, list[Stop]]:
    """Measure captures of an `AsyncLLM`. Return the figures by profiler."""
    from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    native = native_profiler(output / "native", with_stack=with_stack)
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**engine_arguments(model, profiler_config=native)))

    def generate(stream: int, number: int) -> AsyncIterator[object]:
        parameters = SamplingParams(
            max_tokens=TOKENS - 16 * stream,  # different lengths, so that the streams end at different times
            ignore_eos=True,
            temperature=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        results: AsyncIterator[object] = engine.generate({"prompt_token_ids": PROMPT}, parameters, f"{stream}-{number}")
        return results

    profiler = own_profiler(output, "vllm", engine, with_stack=with_stack)
    try:
        return await observe_all(generate, profiler, (engine.start_profile, engine.stop_profile), stops)
    finally:
        engine.shutdown()


def stalled_engine(connection: Connection, model: Path, output: Path, stops: int, with_stack: bool) -> None:  # noqa: FBT001  # passed through a process
    """Run in the child process and send the figures to the parent."""
    connection.send(asyncio.run(observe_engine(model, output, stops, with_stack=with_stack)))


def main() -> None:
    """Run the benchmark from the command line."""
    options = parser(__doc__)
    options.add_argument("--forks", type=int, default=30, help="part idle: number of sets of forks")
    options.add_argument("--bursts", type=int, default=12, help="part idle: bursts per fork")
    options.add_argument("--rounds", type=int, default=40, help="part captured: number of rounds")
    options.add_argument("--stops", type=int, default=10, help="part stall: captures per profiler")
    options.add_argument(
        "--executor", choices=("uni", "mp"), default="uni", help="part stall: executor of the engine (default: uni)"
    )
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to run (default: all)")
    chosen = options.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        output, model = Path(directory), Path(directory, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        if "idle" in chosen.parts:
            arguments = (model, chosen.forks, chosen.bursts)
            with Child(output / "idle.log", ENVIRONMENT | {"VLLM_PLUGINS": ""}, idle_engine, *arguments) as child:
                rows += idle_rows(*child.answer())
        if "captured" in chosen.parts:
            with Child(
                output / "captured.log", ENVIRONMENT, captured_engine, model, output / "captured", chosen.rounds
            ) as child:
                rows += captured_rows(child.answer())
        if "stall" in chosen.parts:
            environment = ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(chosen.executor == "mp"))}
            for with_stack in (False, True):
                name = f"with_stack {str(with_stack).lower()}"
                log, here = output / f"{name}.log", output / name
                with Child(log, environment, stalled_engine, model, here, chosen.stops, with_stack) as child:
                    rows += stall_rows(child.answer(), name)
    report(rows, chosen.json)


if __name__ == "__main__":
    main()
