"""Measure the effect of regular captures on the throughput of a vLLM server under load.

python -m benchmarks.vllm_standing [--rounds 8] [--block 30] [--json FILE]

Run it in the environment of the nox session `vllm`. A few clients continuously stream from one server. In each round,
one time block has a capture of 20 decode iterations and one has none, in random order. The block includes the start,
the stop, the export and the compression. The ratio for blocks of 30 s is therefore the cost of a capture every 30 s.
The number of tokens that a capture costs does not depend on the block length.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from benchmarks.measure import Row, parser, ratio_interval, report
from benchmarks.vllm_iteration import MODEL

from profdeck import Profiler

CLIENTS = 4
TOKENS = 200
TOKEN = secrets.token_hex()
END_S = 30.0
UP_S = 300.0
ITERATIONS = 20


@asynccontextmanager
async def server(directory: Path) -> AsyncIterator[str]:
    """Run a server with profdeck's routes, and yield its URL."""
    (directory / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    config = directory / "profdeck.yaml"
    config.write_text(f"output: {directory / 'profiles'}\nroles:\n  rollout: {{backend: vllm}}\n", encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory)]
    command += ["--served-model-name", "tiny", "--load-format", "dummy", "--dtype", "float32", "--enforce-eager"]
    command += ["--skip-tokenizer-init", "--disable-uvicorn-access-log"]
    command += ["--max-model-len", "256", "--host", "127.0.0.1", "--port", str(port)]
    environ = os.environ | {
        "PROFDECK_TOKEN": TOKEN,
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PROFDECK_CONFIG": str(config), "VLLM_PLUGINS": "profdeck",
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(*command, env=environ, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            until = time.monotonic() + UP_S
            while time.monotonic() < until and process.returncode is None:
                try:
                    if (await client.get(f"{url}/health")).is_success:
                        break
                except httpx.HTTPError:
                    await asyncio.sleep(1)
            else:
                raise SystemExit("The server did not become healthy in time.")
        yield url
    finally:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


class Load:
    """Clients that continuously stream from a server."""

    def __init__(self, url: str) -> None:
        self.tokens = 0
        self._url = url
        self._tasks = [asyncio.ensure_future(self._stream()) for _ in range(CLIENTS)]

    async def _stream(self) -> None:
        request = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        request |= {"temperature": 0, "detokenize": False}
        async with httpx.AsyncClient(trust_env=False, timeout=None) as client:  # noqa: S113  # `stop` cancels the request
            while True:
                async with client.stream("POST", f"{self._url}/v1/completions", json=request) as response:
                    response.raise_for_status()
                    async for line in response.aiter_lines():
                        self.tokens += line.startswith("data: {")

    async def stop(self) -> None:
        """Stop the clients. Raise the error of a client that failed."""
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


async def measure(directory: Path, rounds: int, block_s: float) -> Row:
    """Compare the throughput of blocks with and without a capture."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    generator, step = random.Random(0), 0
    async with server(directory) as url:
        profiler = Profiler.from_config(
            settings={
                "output": str(directory / "profiles"), "run": "standing", "on_error": "raise",
                "steps": [f"0..{2 * rounds + 2}"], "join_steps": False, "roles": {
                    "rollout": {"backend": "vllm", "iterations": {"count": ITERATIONS}, "batch_kinds": ["decode"]}
                },
            },
            role="rollout", target=url,
        )  # fmt: skip
        load = Load(url)
        try:
            for number in range(rounds + 1):
                for captures in generator.sample([True, False], 2):
                    before, began_s = load.tokens, time.perf_counter()
                    if captures:
                        await profiler.astart(step)
                        assert await profiler.await_window(60)
                        await profiler.astop()
                        step += 1
                    await asyncio.sleep(max(0.0, began_s + block_s - time.perf_counter()))
                    if number:  # the first round includes one-time costs
                        rates[captures].append((load.tokens - before) / (time.perf_counter() - began_s))
        finally:
            await load.stop()
        await profiler.aclose()
    ratio, interval = ratio_interval(rates[True], rates[False])
    return Row(
        what=f"a capture of {ITERATIONS} iterations every {block_s:g} s",
        unit="tokens/s",
        measured=statistics.median(rates[True]),
        peer=statistics.median(rates[False]),
        peer_name="no captures",
        ratio=ratio,
        interval=interval,
        detail=f"a capture costs the tokens of {(1 - ratio) * block_s:.2f} s",
    )


def main() -> None:
    """Run the benchmark from the command line."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--block", type=float, default=30.0, metavar="S")
    chosen = options.parse_args()
    os.environ["PROFDECK_TOKEN"] = TOKEN  # for the server and its client
    with tempfile.TemporaryDirectory() as directory:
        row = asyncio.run(measure(Path(directory), chosen.rounds, chosen.block))
    report([row], chosen.json)


if __name__ == "__main__":
    main()
