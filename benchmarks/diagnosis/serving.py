"""Starts vLLM and SGLang servers on the CPU, sends them requests, and captures them with `profdeck capture`.

Each server runs a small model with random weights and no tokenizer. Consecutive recipes with the same server arguments
share a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import attrs
import httpx
from benchmarks.diagnosis.recipe import Kind, Recipe, Truth

UP_S, END_S, CAPTURE_S = 400.0, 30.0, 120.0
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}
_ENVIRONMENT = {
    Kind.VLLM: {
        "VLLM_PLUGINS": "profdeck", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    },
    Kind.SGLANG: {"SGLANG_PLUGINS": "profdeck,torchcpu", "SGLANG_PLATFORM": "torchcpu"},
}  # fmt: skip


@attrs.define(eq=False)
class Load:
    """Client load on a server. A recipe starts clients that run until the capture ends."""

    url: str
    kind: Kind
    random: random.Random
    client: httpx.AsyncClient
    _clients: list[asyncio.Task[None]] = attrs.field(factory=list)

    async def generate(self, prompt: int, tokens: int, **sampling: Any) -> None:
        """Request `tokens` output tokens for a random prompt of `prompt` tokens."""
        ids = [self.random.randrange(3, 4000) for _ in range(prompt)]
        if self.kind is Kind.VLLM:
            path = "v1/completions"
            body = {"model": "tiny", "prompt": ids, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
            body |= {"temperature": 0, **sampling}
        else:
            parameters = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0, **sampling}
            path, body = "generate", {"input_ids": ids, "sampling_params": parameters}
        (await self.client.post(f"{self.url}/{path}", json=body)).raise_for_status()

    def keep(self, request: Callable[[], Awaitable[None]], pause_s: float = 0.0) -> None:
        """Start a client that sends requests in a loop, pausing for `pause_s` seconds after each request."""

        async def client() -> None:
            while True:
                await request()
                await asyncio.sleep(pause_s)

        self._clients.append(asyncio.create_task(client()))

    async def stop(self) -> None:
        """Stop all clients.

        Raises:
            httpx.HTTPError: A request failed.
        """
        for task in self._clients:
            task.cancel()
        for result in await asyncio.gather(*self._clients, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


@attrs.define(eq=False)
class Servers:
    """Runs one server at a time, and reuses it if the next recipe has the same server arguments."""

    pythons: Mapping[Kind, str]
    """Path of the Python interpreter for each engine."""
    output: Path
    """Directory that contains all recordings."""
    _directory: tempfile.TemporaryDirectory[str] = attrs.field(factory=tempfile.TemporaryDirectory)
    _token: str = attrs.field(factory=secrets.token_hex)
    _key: tuple[object, ...] = ()
    _url: str = ""
    _process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._directory.cleanup()

    def record(self, recipe: Recipe, directory: Path, seed: int) -> Truth:
        """Capture a server under a recipe's load.

        A recipe can set these options: ``arguments`` (server arguments) and ``iterations`` (number to capture).

        Raises:
            RuntimeError: The server did not start, or the capture failed.
        """
        self._use(recipe.kind, tuple(recipe.options.get("arguments", ())))
        return asyncio.run(self._capture(recipe, directory, seed))

    async def _capture(self, recipe: Recipe, directory: Path, seed: int) -> Truth:
        generator = recipe.generator(seed)
        async with httpx.AsyncClient(trust_env=False, timeout=CAPTURE_S) as client:
            load = Load(self._url, recipe.kind, generator, client)
            recipe.plant(load)
            await asyncio.sleep(3)
            command = [sys.executable, "-m", "profdeck", "capture", "servers", "--url", self._url]
            command += ["--iterations", str(recipe.options.get("iterations", 60)), "--timeout", "60"]
            command += ["--set", f"output={directory}", "--set", "run=run"]
            process = await asyncio.create_subprocess_exec(
                *command,
                env=os.environ | {"PROFDECK_TOKEN": self._token},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            output, _ = await process.communicate()
            await load.stop()
        if process.returncode:
            raise RuntimeError(f"The capture exited with {process.returncode}: {output.decode()[-2000:]}")
        return Truth(cost_us=None, step_us=0.0)

    def _use(self, kind: Kind, arguments: Sequence[str]) -> None:
        if self._key == (kind, *arguments):
            return
        self._stop()
        directory = Path(self._directory.name)
        (directory / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        config = directory / "profdeck.yaml"
        config.write_text(f"output: {self.output}\nroles:\n  rollout: {{backend: {kind}}}\n", encoding="utf-8")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PROFDECK")}
        environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6", **_ENVIRONMENT[kind]}
        environ |= {"PROFDECK_TOKEN": self._token, "PROFDECK_CONFIG": str(config)}
        command = [*_command(kind, self.pythons[kind], directory), *arguments, "--port", str(port)]
        with (directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=directory
            )
        self._url = f"http://127.0.0.1:{port}"
        until_s = time.monotonic() + UP_S
        while time.monotonic() < until_s and self._process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self._url}/health", trust_env=False, timeout=5).is_success:
                    self._key = (kind, *arguments)
                    return
            time.sleep(0.5)
        log_tail = (directory / "log").read_text(errors="replace")[-3000:]
        self._stop()
        raise RuntimeError(f"The server did not start. Its log ends with:\n{log_tail}")

    def _stop(self) -> None:
        self._key = ()
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None


def _command(kind: Kind, python: str, model: Path) -> list[str]:
    if kind is Kind.VLLM:
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "tiny", "--enforce-eager", "--disable-uvicorn-access-log"]
        command += ["--max-model-len", "2048", "--no-enable-prefix-caching"]
    else:
        command = [python, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"]
        command += ["--disable-cuda-graph", "--grammar-backend", "none", "--attention-backend", "torch_native"]
        command += ["--sampling-backend", "pytorch", "--context-length", "2048", "--sleep-on-idle"]
        command += ["--disable-radix-cache"]
    return [*command, "--load-format", "dummy", "--dtype", "float32", "--skip-tokenizer-init", "--host", "127.0.0.1"]
