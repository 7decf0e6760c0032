"""Recipes for real vLLM and SGLang servers on the CPU, under load from concurrent clients."""

from __future__ import annotations

import asyncio

from benchmarks.diagnosis.recipe import Kind, Recipes
from benchmarks.diagnosis.serving import Load

VLLM, SGLANG = Recipes(Kind.VLLM), Recipes(Kind.SGLANG)
_LARGE = ("--max-num-batched-tokens", "2048", "--max-num-seqs", "32")
_FEW = ("--max-num-batched-tokens", "256", "--max-num-seqs", "2")
_SMALL_CACHE = ("--max-num-batched-tokens", "256", "--block-size", "128", "--num-gpu-blocks-override", "17")
_OPEN = ("--max-total-tokens", "8192", "--max-running-requests", "16")
_CLOSED = ("--max-total-tokens", "8192", "--max-running-requests", "2")
_RESERVED = ("--max-total-tokens", "1400", "--max-running-requests", "12")
_NEXT: dict[str, str] = {
    "rules": "prefill-next-to-decode mixed-iterations",
    "cure": "max.num.batched.tokens|prefill tokens|chunk",
}
_QUEUE: dict[str, str] = {
    "rules": "request-queue queueing",
    "cure": "max.num.seqs|running requests|add servers|limit",
}


def decode(load: Load, clients: int, tokens: int = 200) -> None:
    """Start clients that send short prompts."""
    for _ in range(clients):
        load.keep(lambda: load.generate(8, tokens))


@VLLM.planted("long-prompts", arguments=_LARGE, iterations=200, **_NEXT)
@SGLANG.planted("long-prompts", arguments=_OPEN, iterations=200, **_NEXT)
def ash(load: Load) -> None:
    """Send long prompts while other requests decode."""
    decode(load, 6)
    load.keep(lambda: load.generate(load.random.randint(1500, 1900), 2), 0.05)


# With such a small model, scheduling takes a considerable share of each iteration.
@VLLM.control("steady-decode", arguments=_LARGE, iterations=40, tolerates="host-between-iterations")
@SGLANG.control("steady-decode", arguments=_OPEN, iterations=40)
def beech(load: Load) -> None:
    """Decode a few requests."""
    decode(load, 4, 1500)


@VLLM.planted("few-sequences", arguments=_FEW, **_QUEUE)
@SGLANG.planted("few-sequences", arguments=_CLOSED, **_QUEUE)
def chestnut(load: Load) -> None:
    """Start many clients on a server that runs two requests at a time."""
    decode(load, load.random.randint(8, 14), 40)


_CACHE: dict[str, str] = {"rules": "kv-pressure preemption", "cure": "KV cache|memory|mem-fraction|preempt"}


@VLLM.planted("small-cache", arguments=_SMALL_CACHE, iterations=300, **_CACHE)
@SGLANG.planted("small-cache", arguments=_RESERVED, **_CACHE)
def dogwood(load: Load) -> None:
    """Start more requests than fit into the KV cache."""
    for _ in range(8):
        load.keep(lambda: load.generate(100, 300))


@SGLANG.planted("waves", rules="long-tail", cure="longest|partial", arguments=_RESERVED, iterations=250)
def elder(load: Load) -> None:
    """Send waves of requests. In each wave, one request generates for much longer than the others."""

    async def wave() -> None:
        await asyncio.gather(*(load.generate(8, tokens) for tokens in (15, 18, 20, 20, 22, 90)))

    load.keep(wave)
