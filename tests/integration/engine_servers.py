"""Real engines on the CPU: a tiny random model, servers, and jobs in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import attrs
import httpx
import plain_http
import pytest

from processes import free_port

ENGINE_UP_S = 400


def write_tiny_model(path: Path) -> Path:
    """Write a Llama of two layers with random weights, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(vocab_size=260, initial_alphabet=alphabet, special_tokens=special)
    tokenizer.train_from_iterator(["hello world"], trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    about = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "model_max_length": 256}
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **about}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def vllm_environment(directory: Path, python: str = sys.executable) -> dict[str, str]:
    """Return the environment of engines of vLLM; profdeck is not armed in it.

    Args:
        directory: for what they leave, such as sockets of an engine that was killed.
        python: the interpreter that they run in.
    """
    return _environment(directory, python, "VLLM_") | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(directory),
    }


def sglang_environment(directory: Path, python: str = sys.executable) -> dict[str, str]:
    """Return the environment of engines of SGLang; see `vllm_environment`."""
    return _environment(directory, python, "SGLANG_", "SGL_") | {
        # The platform that these tests install. SGLANG_PLUGINS would filter it too if it were not chosen here.
        "SGLANG_PLATFORM": "torchcpu",
        # SGLang asks for one entry per rank where there are more ranks than NUMA nodes. Only its kernels obey them.
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    }


def _environment(directory: Path, python: str, *prefixes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith((*prefixes, "PROFDECK"))}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "KINETO_LOG_LEVEL": "6",
        "PROFDECK_LEASE_DIR": str(directory),
        "PATH": os.pathsep.join([str(Path(python).parent), os.environ["PATH"]]),
    }


def vllm_command(model: Path, *arguments: str) -> list[str | Path]:
    """Return the command of a server of vLLM."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", "tiny", "--load-format", "dummy", "--enforce-eager", "--dtype", "float32"]
    return [*command, "--max-model-len", "256", *arguments]


def sglang_command(model: Path, *arguments: str, python: str = sys.executable) -> list[str | Path]:
    """Return the command of a server of SGLang, which finds its other ports below those that the system hands out."""
    command = [python, "-m", "sglang.launch_server", "--model-path", model, "--load-format", "dummy"]
    command += ["--device", "cpu", "--dtype", "float32", "--disable-cuda-graph", "--grammar-backend", "none"]
    command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    command += ["--context-length", "256", "--max-total-tokens", "2048", "--max-running-requests", "8"]
    # Else each of its ranks keeps a core busy while there is nothing to do.
    return [*command, "--sleep-on-idle", *arguments]


def router_command(program: str, *arguments: str) -> list[str | Path]:
    """Return the command of a router, ``vllm-router`` or ``sglang-router``."""
    launch = ["launch"] if program == "sglang-router" else []
    return [Path(sys.executable).parent / program, *launch, "--prometheus-port", str(free_port()), *arguments]


@attrs.frozen
class Server:
    """A server that answers as vLLM's and the routers do."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def complete(self, prompt: str = "hello world", tokens: int = 20) -> str:
        """Let it generate; returns the text."""
        route, body = self.asked(prompt, tokens)
        response = plain_http.post(f"{self.url}/{route}", json=body)
        response.raise_for_status()
        return self.text(response.json())

    def asked(self, prompt: str, tokens: int) -> tuple[str, dict[str, Any]]:
        """Return the route and the body of a request to generate."""
        return "v1/completions", {
            "model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
        }  # fmt: skip

    def text(self, answer: Any) -> str:
        """Return the text of its answer."""
        return str(answer["choices"][0]["text"])

    @property
    def words(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-6000:]


@attrs.frozen
class SglangServer(Server):
    """A server of SGLang."""

    def asked(self, prompt: str, tokens: int) -> tuple[str, dict[str, Any]]:
        """Return the route and the body of a request to generate."""
        sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
        return "generate", {"text": prompt, "sampling_params": sampling}

    def text(self, answer: Any) -> str:
        """Return the text of its answer."""
        return str(answer["text"])


ServerT = TypeVar("ServerT", bound=Server)


@attrs.define
class Servers:
    """Starts servers, and ends them together.

    Each has a process group of its own and no session: kernels share cores between sessions first, and then one whose
    workers spin on `sched_yield`, as vLLM's do for a second after each call, leaves next to nothing to the others.
    """

    new_directory: Callable[[str], Path]
    _started: list[subprocess.Popen[bytes]] = attrs.field(factory=list, init=False)
    _ports: list[socket.socket] = attrs.field(factory=list, init=False)

    def begin(self, kind: type[ServerT], command: Sequence[str | Path], environ: Mapping[str, str]) -> ServerT:
        """Start one; it need not be up yet. Its port is appended to the command."""
        directory, port = self.new_directory("server"), self._port()
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                cwd=directory,
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self._started.append(process)
        return kind(f"http://127.0.0.1:{port}", process, directory / "log")

    def _port(self) -> int:
        """Return a port that nobody is given until the server has it, which may be minutes later."""
        # Bound, and not listening: only who asks for this very port may have it as well.
        self._ports.append(socket.socket())
        self._ports[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._ports[-1].bind(("127.0.0.1", 0))
        return int(self._ports[-1].getsockname()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end_servers(self._started)
        for port in self._ports:
            port.close()


def up(server: ServerT, path: str = "/health") -> ServerT:
    """Wait until a server serves, as one of its routes says, and return it."""
    deadline = time.monotonic() + ENGINE_UP_S
    while time.monotonic() < deadline and server.process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if plain_http.get(f"{server.url}{path}", timeout=5).is_success:
                return server
        time.sleep(0.2)  # there is no event to await outside of the server
    raise AssertionError(f"{_what(server.process.poll())}:\n{server.words}")


@attrs.frozen
class Job:
    """What a job left."""

    output: Path
    results: dict[str, Any]
    log: str


def run_to_its_end(script: Path, model: Path, directory: Path, environ: Mapping[str, str], *arguments: str) -> Job:
    """Run a job, which is given the model, an output directory and a file for results.

    Args:
        script: the job.
        model: see `write_tiny_model`.
        directory: where it runs.
        environ: its environment.
        arguments: what else it is given.
    """
    results = directory / "results.json"
    with (directory / "log").open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, script, model, directory / "profiles", results, *arguments],
            cwd=directory,
            env=environ,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        ended = process.wait(ENGINE_UP_S)
        wait_for_others(process)
    except subprocess.TimeoutExpired:
        ended = None
    finally:
        end_group(process)
    log = (directory / "log").read_text(errors="replace")
    assert ended == 0, f"{_what(ended)}:\n{log[-6000:]}"
    return Job(directory / "profiles", json.loads(results.read_text()) if results.exists() else {}, log)


def runner(
    jobs: Path, model: Path, environ: Mapping[str, str], new_directory: Callable[[str], Path]
) -> Callable[..., Job]:
    """Return what runs a script of a directory to its end by its name; see `run_to_its_end`.

    It is given the model, an output directory and a file for results; keywords are variables of its environment.
    """

    def run(name: str, *arguments: str, **own: str) -> Job:
        return run_to_its_end(jobs / f"{name}.py", model, new_directory(name), {**environ, **own}, *arguments)

    return run


def end_servers(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """End servers, each of which leads a process group, with all that they have started."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
            wait_for_others(process)
        end_group(process)


def end_group(process: subprocess.Popen[Any]) -> None:
    """End what a process that the test started, in a group of its own, has left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for_others(process: subprocess.Popen[Any], limit_s: float = 5) -> None:
    """Let the rest of the group of a process that has ended do the same: it removes shared memory at last."""
    deadline = time.monotonic() + limit_s
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)  # they are no children of this process, so there is nothing to wait on


def _what(exit_code: int | None) -> str:
    """Say what became of a process, above its log."""
    return f"It took more than {ENGINE_UP_S} s" if exit_code is None else f"It ended with {exit_code}"


def skipping_crashes_of_torch(item: pytest.Item) -> Generator[None, Any, Any]:
    """Skip what was to be seen at a server that torch has ended in a capture by SGLang's own profiler.

    It is a ``pytest_runtest_call`` for wrappers to yield from.
    """
    try:
        return (yield)
    except httpx.TransportError:
        servers = [value for value in item.funcargs.values() if isinstance(value, SglangServer)]
        if any(map(_torch_crashed_in_its_own_profiler, servers)):
            pytest.skip("torch crashed in a recording by SGLang's own profiler, as it does at times")
        raise


def _torch_crashed_in_its_own_profiler(server: SglangServer) -> bool:
    """Tell by a server's log whether a scheduler died in torch's profiler in a recording of SGLang, and not of ours."""
    log = server.log.read_text(errors="replace")
    before, _, crash = log.partition("Fatal Python error: Segmentation fault")
    _, _, stack = crash.partition("Current thread")
    stack, _, native = stack.partition("Extension modules:")
    # The frames below the handler of the signal: where it came from.
    _, _, native = native.partition("libc_sigaction.c")
    recording = before.rfind("Profiling starts") > before.rfind("Profiling done")
    return recording and "/profdeck_torch/" not in stack and "torch::profiler::impl::" in native[:1000]
