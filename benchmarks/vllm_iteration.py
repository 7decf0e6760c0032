"""What profdeck costs a vLLM engine, idle and in a capture, against engines without it and vLLM's own profiler.

python -m benchmarks.vllm_iteration [--forks 30] [--bursts 12] [--rounds 40] [--stops 10] [--json FILE]

It needs the environment of the nox session `vllm` (``.nox/vllm-*/bin/python``), so `run_all`, which runs in the one of
`torch`, leaves it out. The engine is a random Llama of 2 layers: short iterations, of which all that is added is a
large part. Three parts, each with engines in processes of their own:

idle: iterations without and with profdeck in the worker; with it also after a capture. Two processes of the same
program can differ by percents, so the engines are forks of one, into which profdeck is loaded by what vLLM calls for
it. They generate one at a time, in short bursts whose order is drawn anew each time, and are forked anew many times:
the interval is taken over the forks. One without profdeck is there twice.

captured: iterations inside a recording, by profdeck and by vLLM's profiler with the same options, of one engine that
has both. The order is drawn anew for every round, and vLLM's runs twice: that shows what two equal things differ by.

stall: how long running requests wait for their next token around the start and the stop of a capture, by profdeck and
by vLLM's profiler with the same options, of one `AsyncLLM` that has both and serves a few streams without a pause.
profdeck's stop ends when the files are whole, as vLLM's does: its window has all of the writing. The worker is in the
process of the engine's core, as with one GPU; `--executor mp` gives it a process of its own, in which it spins while
it waits, as vLLM does by default on the CPU and with several GPUs.
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
    # Else the executor spins beside the engine; here an engine that rests must not disturb the others.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "KINETO_LOG_LEVEL": "6",
}
PROMPT = [2, 3, 5, 7, 11, 13]
BURST = 100
"""Iterations of a burst in the part `idle`."""
REQUESTS = 4
RECORDED = 100
"""Iterations of a window in the part `captured`; the first `PASSED` are not timed."""
PASSED = 10
MAX_IDLE = 1.005
MAX_CAPTURED = 1.05
PARTS = ("idle", "captured", "stall")


def engine_arguments(model: Path, **more: Any) -> dict[str, Any]:
    """Return the arguments that all engines are built with."""
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
    """Return the config of vLLM's own profiler that records what profdeck does, in the worker alone."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": str(directory),
        "torch_profiler_with_stack": with_stack,
        "ignore_frontend": True,
    }


# The part `idle`.


class Twin:
    """A fork of this process, whose engine it has, too, in the same place in memory."""

    def __init__(self, llm: Any, kind: Callable[[Any], None]) -> None:
        context = get_context("fork")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_generate_on_demand, args=(other, llm, kind))
        self._process.start()
        other.close()

    def burst_ms(self) -> float:
        """Return the milliseconds of an iteration of a burst that it generates now."""
        self._connection.send("burst")
        found: float = self._connection.recv()
        return found

    def end(self) -> float:
        """End it, and return what part of a core it used while it rested."""
        self._connection.send(None)
        rest: float = self._connection.recv()
        self._process.join()
        return rest


def _generate_on_demand(connection: Connection, llm: Any, kind: Callable[[Any], None]) -> None:
    kind(llm)
    _burst_ms(llm)  # the pages that it writes to are its own from now on
    rest_s = rest_cpu_s = 0.0
    while True:
        began_s, began_cpu_s = clock(), time.process_time()
        going_on = connection.recv()
        rest_s, rest_cpu_s = rest_s + clock() - began_s, rest_cpu_s + time.process_time() - began_cpu_s
        if not going_on:
            connection.send(rest_cpu_s / rest_s)
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
    """Do what vLLM does in a process that is to have profdeck."""
    from vllm.v1.worker.worker_base import WorkerBase

    from profdeck_vllm.autoload import register

    os.environ["VLLM_PLUGINS"] = "profdeck"
    register()
    assert hasattr(WorkerBase, "profdeck_command")


def load_and_capture(llm: Any) -> None:
    """Load profdeck and record a burst."""
    load_profdeck(llm)
    with tempfile.TemporaryDirectory() as output:
        profiler = own_profiler(Path(output), "vllm", llm, with_stack=False)
        capture = profiler.start(EVERY)
        _burst_ms(llm)
        profiler.stop()
        check(capture)


def idle_engine(connection: Connection, model: Path, forks: int, bursts: int) -> None:
    """Send the times of the bursts of each kind of twin, a list for each time that they were forked, and their rest."""
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
    rests: list[float] = []
    order, chance = list(kinds), random.Random(0)
    for _ in range(forks):
        chance.shuffle(order)
        twins = {name: Twin(llm, kinds[name]) for name in order}
        for found in times.values():
            found.append([])
        for _ in range(bursts):
            chance.shuffle(order)
            for name in order:
                times[name][-1].append(twins[name].burst_ms())
        rests += [twin.end() for twin in twins.values()]
    connection.send((times, statistics.fmean(rests)))


def idle_row(
    what: str, times: dict[str, list[list[float]]], names: tuple[str, str], rest: float, max_ratio: float | None = None
) -> Row:
    """Compare the bursts that ran next to each other, fork by fork."""
    one, other = (times[name] for name in names)
    ratios = [
        statistics.median(mine / its for mine, its in zip(*pair, strict=True)) for pair in zip(one, other, strict=True)
    ]
    ratio, interval = ratio_interval(ratios, [1.0] * len(ratios))
    medians = [[statistics.median(bursts) for bursts in forks] for forks in (one, other)]
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
        f"a resting engine used {rest:.2%} of a core",
    )


def idle_rows(times: dict[str, list[list[float]]], rest: float) -> list[Row]:
    """Compare the kinds of twins."""
    return [
        idle_row("idle iteration", times, ("profdeck", "without"), rest, MAX_IDLE),
        idle_row("idle iteration, after a capture", times, ("profdeck after a capture", "without"), rest, MAX_IDLE),
        idle_row("iteration without, again", times, ("without again", "without"), rest),
    ]


# The part `captured`.


class Windows:
    """Runs the same iterations within recordings of several kinds."""

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
        """Record with profdeck."""
        captures: list[Capture | None] = []
        found = self._run(lambda: captures.append(self._profiler.start(self._number * EVERY)), self._profiler.stop)
        check(captures[0])
        return found

    def native(self) -> float:
        """Record with vLLM's profiler."""
        return self._run(lambda: self._llm.start_profile(f"w{self._number}"), self._llm.stop_profile)

    def plain(self) -> float:
        """Record nothing."""
        return self._run(lambda: None, lambda: None)

    def _run(self, start: Callable[[], None], stop: Callable[[], None]) -> float:
        """Return the milliseconds of an iteration within the window."""
        self._number += 1
        engine = self._llm.llm_engine
        for number in range(REQUESTS):
            engine.add_request(f"{self._number}-{number}", {"prompt_token_ids": PROMPT}, self._parameters)
        for _ in range(PASSED):
            engine.step()
        gc.collect()  # what the last recording left is not this one's to clean up
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
    """Send the times of every round but the first, which pays for what a process does once."""
    windows = Windows(model, output)
    kinds = {
        "profdeck": windows.profdeck,
        "native": windows.native,
        "native again": windows.native,
        "plain": windows.plain,
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    order, chance = list(kinds), random.Random(0)
    for _ in range(rounds + 1):
        chance.shuffle(order)
        for name in order:
            times[name].append(kinds[name]())
    connection.send({name: found[1:] for name, found in times.items()})


def captured_rows(times: dict[str, list[float]]) -> list[Row]:
    """Compare the rounds."""
    return [
        row("captured iteration", "ms", times, ("profdeck", "native"), MAX_CAPTURED),
        row("native iteration, again", "ms", times, ("native again", "native")),
        row("native iteration", "ms", times, ("native", "plain")),
    ]


# The part `stall`.


async def observe_engine(model: Path, output: Path, stops: int, *, with_stack: bool) -> dict[str, list[Stop]]:
    """Observe an `AsyncLLM`."""
    from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    native = native_profiler(output / "native", with_stack=with_stack)
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**engine_arguments(model, profiler_config=native)))

    def generate(stream: int, number: int) -> AsyncIterator[object]:
        parameters = SamplingParams(
            max_tokens=TOKENS - 16 * stream,  # so that they end at different times
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
    """Send what was seen."""
    connection.send(asyncio.run(observe_engine(model, output, stops, with_stack=with_stack)))


def main() -> None:
    """Measure and report."""
    options = parser(__doc__)
    options.add_argument("--forks", type=int, default=30, help="of the part idle")
    options.add_argument("--bursts", type=int, default=12, help="of the part idle, of each fork")
    options.add_argument("--rounds", type=int, default=40, help="of the part captured")
    options.add_argument("--stops", type=int, default=10, help="of each kind of the part stall")
    options.add_argument("--executor", choices=("uni", "mp"), default="uni", help="of the part stall (default: uni)")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
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
