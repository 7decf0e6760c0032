"""Recipes for an agent loop on the CPU. Each training step starts with a rollout that calls tools."""

from __future__ import annotations

import asyncio
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from benchmarks.diagnosis.recipe import Kind, Recipes
from benchmarks.diagnosis.training_job import TrainingJob

RECIPES = Recipes(Kind.AGENT)


def rollout(
    job: TrainingJob, conversations: int, turns: Callable[[int], int], act: Callable[[int], Awaitable[object]]
) -> None:
    """Add a rollout in which several conversations generate tokens and call `act` after each turn.

    Args:
        job: the training job.
        conversations: number of concurrent conversations.
        turns: function that returns a conversation's number of turns, given its index.
        act: tool call, which receives the index of the conversation.
    """
    weights = torch.rand(256, 256)
    ends_ns: list[int] = []

    async def converse(index: int) -> None:
        for _ in range(turns(index)):
            state = torch.rand(8, 256)
            for _ in range(10):
                state = torch.softmax(state @ weights, 1)
                await asyncio.sleep(0)
            await act(index)
        ends_ns.append(time.perf_counter_ns())

    async def together() -> None:
        ends_ns.clear()
        await asyncio.gather(*map(converse, range(conversations)))
        job.tail_ns = ends_ns[-1] - ends_ns[-2]

    job.add(0, lambda: asyncio.run(together()))
    job.place = (job.stages[0],)


@RECIPES.planted(
    "blocking-call", rules="tool-call waiting subprocess", cure="async|concurren|thread|background", stacks=True
)
def anchor(job: TrainingJob) -> None:
    """Run a program synchronously in each turn, which blocks the other conversations."""
    seconds = job.draw(5, 12) / 1000

    async def pull(_: int) -> None:
        program = [sys.executable, "-I", "-S", "-c", f"import time; time.sleep({seconds})"]
        job.timed(lambda: subprocess.run(program, check=True))  # planted

    rollout(job, 3, lambda _: 1, pull)


@RECIPES.planted(
    "long-conversation", rules="long-tail tool-call waiting", cure="partial|earl|longest|concurren|limit", stacks=True
)
def buoy(job: TrainingJob) -> None:
    """Run one conversation for several times as many turns as the others."""
    turns = job.draw(5, 8)

    async def drift(_: int) -> None:
        await asyncio.sleep(0.012)  # planted

    rollout(job, 5, lambda index: turns if index == 3 else 1, drift)
    job.add(0, lambda: job.count(job.tail_ns))


@RECIPES.planted(
    "one-call-at-a-time", rules="tool-call waiting python-code", cure="async|concurren|gather|together", stacks=True
)
def cable(job: TrainingJob) -> None:
    """Call the tools of all conversations one after another."""
    seconds = job.draw(8, 15) / 1000

    def haul() -> None:
        for _ in range(4):
            time.sleep(seconds)  # planted

    rollout(job, 4, lambda _: 1, lambda _: asyncio.sleep(0))
    job.plant(0, haul)


@RECIPES.planted(
    "late-samples",
    rules="idle-trainer waiting lock wait-for-thread",
    cure="async|ahead|background|overlap|rollout",
    stacks=True,
)
def dock(job: TrainingJob) -> None:
    """Wait in each step for samples from another thread."""
    samples: queue.Queue[int] = queue.Queue()
    requests: queue.Queue[float] = queue.Queue()
    seconds = job.draw(25, 50) / 1000

    def ship() -> None:
        while True:
            time.sleep(requests.get())
            samples.put(1)

    threading.Thread(target=ship, daemon=True).start()

    def unload() -> None:
        requests.put(seconds)
        samples.get()  # planted

    job.plant(0, unload)


@RECIPES.planted(
    "weights-by-file",
    rules="weight-sync checkpoint",
    cure="memory|device|bucket|async|less often|background",
    stacks=True,
)
def ferry(job: TrainingJob) -> None:
    """Pass the weights to the rollout through a file in each step."""
    extra = torch.rand(job.draw(3_000_000, 6_000_000))

    def carry() -> None:
        torch.save({"a": job.model.state_dict(), "b": extra}, job.scratch / "cargo")  # planted
        torch.load(job.scratch / "cargo")

    job.plant(3, carry)


@RECIPES.planted(
    "slowest-episode", rules="waiting long-tail", cure="partial|earl|longest|background|ahead", stacks=True
)
def galley(job: TrainingJob) -> None:
    """In each step, wait for all episodes in a thread pool. One of them takes much longer than the others."""
    pool = ThreadPoolExecutor(6)
    seconds = job.draw(40, 70) / 1000

    def voyage(index: int) -> None:
        time.sleep(seconds if index == 2 else 0.004)

    def moor() -> None:
        for episode in [pool.submit(voyage, index) for index in range(6)]:
            episode.result()  # planted

    job.plant(0, moor)


@RECIPES.control("short-calls", stacks=True, tolerates="profiler-overhead profiler")
def gangway(job: TrainingJob) -> None:
    """Run short, concurrent tool calls in steps that spend most of their time on training."""
    job.plant(1, lambda: job.model(torch.rand(job.batch_size * 4, job.features)))
    rollout(job, 2, lambda _: 1, lambda _: asyncio.sleep(0.001))
