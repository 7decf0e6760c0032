"""Real engines on the CPU: a tiny random model, servers, and jobs in child processes."""

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
    """Write the config of a two-layer Llama and a byte tokenizer. The engines use random weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(vocab_size=260, initial_alphabet=alphabet, special_tokens=special)
    tokenizer.train_from_iterator(["hello world"], trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "model_max_length": 256}
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer_config})
    )
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
    """Return the environment of vLLM engines. It does not arm profdeck.

    Args:
        directory: directory for temporary files, such as the sockets of a killed engine.
        python: the interpreter of the engines.
    """
    return _environment(directory, python, "VLLM_") | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(directory),
    }


def sglang_environment(directory: Path, python: str = sys.executable) -> dict[str, str]:
    """Return the environment of SGLang engines. See `vllm_environment`."""
    return _environment(directory, python, "SGLANG_", "SGL_") | {
        # The platform that these tests install. SGLANG_PLUGINS does not filter a platform that is selected here.
        "SGLANG_PLATFORM": "torchcpu",
        # SGLang requires one entry per rank if there are more ranks than NUMA nodes. Only its kernels use the entries.
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    }


def _environment(directory: Path, python: str, *prefixes: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith((*prefixes, "PROFDECK"))}
    return inherited | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "KINETO_LOG_LEVEL": "6",
        "PROFDECK_LEASE_DIR": str(directory),
        "PATH": os.pathsep.join([str(Path(python).parent), os.environ["PATH"]]),
    }


def vllm_command(model: Path, *arguments: str) -> list[str | Path]:
    """Return the command of a vLLM server."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", "tiny", "--load-format", "dummy", "--enforce-eager", "--dtype", "float32"]
    return [*command, "--max-model-len", "256", *arguments]


def sglang_command(model: Path, *arguments: str, python: str = sys.executable) -> list[str | Path]:
    """Return the command of an SGLang server. It selects its other ports below the ephemeral port range."""
    command = [python, "-m", "sglang.launch_server", "--model-path", model, "--load-format", "dummy"]
    command += ["--device", "cpu", "--dtype", "float32", "--disable-cuda-graph", "--grammar-backend", "none"]
    command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    command += ["--context-length", "256", "--max-total-tokens", "2048", "--max-running-requests", "8"]
    # Without this option, each idle rank keeps a core busy.
    return [*command, "--sleep-on-idle", *arguments]


def router_command(program: str, *arguments: str) -> list[str | Path]:
    """Return the command of ``vllm-router`` or ``sglang-router``."""
    launch = ["launch"] if program == "sglang-router" else []
    return [Path(sys.executable).parent / program, *launch, "--prometheus-port", str(free_port()), *arguments]


@attrs.frozen
class Server:
    """A server with the API of vLLM, or a router."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def complete(self, prompt: str = "hello world", tokens: int = 20) -> str:
        """Send a completion request and return the generated text."""
        route, body = self.completion_request(prompt, tokens)
        response = plain_http.post(f"{self.url}/{route}", json=body)
        response.raise_for_status()
        return self.text(response.json())

    def completion_request(self, prompt: str, tokens: int) -> tuple[str, dict[str, Any]]:
        """Return the route and the body of a completion request."""
        return "v1/completions", {
            "model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
        }  # fmt: skip

    def text(self, answer: Any) -> str:
        """Return the generated text of a reply."""
        return str(answer["choices"][0]["text"])

    @property
    def log_tail(self) -> str:
        """Last 6000 characters of the log."""
        return self.log.read_text(errors="replace")[-6000:]


@attrs.frozen
class SglangServer(Server):
    """An SGLang server."""

    def completion_request(self, prompt: str, tokens: int) -> tuple[str, dict[str, Any]]:
        """Return the route and the body of a completion request."""
        sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
        return "generate", {"text": prompt, "sampling_params": sampling}

    def text(self, answer: Any) -> str:
        """Return the generated text of a reply."""
        return str(answer["text"])


ServerT = TypeVar("ServerT", bound=Server)


@attrs.define
class Servers:
    """Starts servers, and stops them together.

    Each server has its own process group, but all are in one session. With autogroups, the kernel divides CPU time
    between sessions first. A server whose workers spin on `sched_yield`, as vLLM's workers do for a second after each
    call, would then starve the others.
    """

    new_directory: Callable[[str], Path]
    _started: list[subprocess.Popen[bytes]] = attrs.field(factory=list, init=False)
    _ports: list[socket.socket] = attrs.field(factory=list, init=False)

    def start(self, kind: type[ServerT], command: Sequence[str | Path], environ: Mapping[str, str]) -> ServerT:
        """Start a server without waiting until it is ready. The port is appended to the command."""
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
        """Reserve a port until the server binds it, which can take minutes."""
        # A bound socket that does not listen prevents automatic assignment, but allows an explicit bind of this port.
        self._ports.append(socket.socket())
        self._ports[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._ports[-1].bind(("127.0.0.1", 0))
        return int(self._ports[-1].getsockname()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        stop_servers(self._started)
        for port in self._ports:
            port.close()


def wait_until_ready(server: ServerT, path: str = "/health") -> ServerT:
    """Wait until a route of the server succeeds, and return the server."""
    deadline = time.monotonic() + ENGINE_UP_S
    while time.monotonic() < deadline and server.process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if plain_http.get(f"{server.url}{path}", timeout=5).is_success:
                return server
        time.sleep(0.2)  # another process cannot wait for an event of the server
    raise AssertionError(f"{_exit_message(server.process.poll())}:\n{server.log_tail}")


@attrs.frozen
class Job:
    """Output directory, results and log of a finished job."""

    output: Path
    results: dict[str, Any]
    log: str


def run_job_script(script: Path, model: Path, directory: Path, environ: Mapping[str, str], *arguments: str) -> Job:
    """Run a job script and wait until it exits with status 0.

    Args:
        script: the job. Its first arguments are the model, an output directory and a file for results.
        model: the model's directory. See `write_tiny_model`.
        directory: the working directory of the job.
        environ: the environment of the job.
        arguments: further arguments of the job.
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
        exit_code = process.wait(ENGINE_UP_S)
        wait_for_others(process)
    except subprocess.TimeoutExpired:
        exit_code = None
    finally:
        kill_group(process)
    log = (directory / "log").read_text(errors="replace")
    assert exit_code == 0, f"{_exit_message(exit_code)}:\n{log[-6000:]}"
    return Job(directory / "profiles", json.loads(results.read_text()) if results.exists() else {}, log)


def runner(
    jobs: Path, model: Path, environ: Mapping[str, str], new_directory: Callable[[str], Path]
) -> Callable[..., Job]:
    """Return a function that runs a script of a directory by name. See `run_job_script`.

    Keyword arguments of the function are environment variables of the job.
    """

    def run(name: str, *arguments: str, **variables: str) -> Job:
        return run_job_script(jobs / f"{name}.py", model, new_directory(name), {**environ, **variables}, *arguments)

    return run


def stop_servers(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """Stop servers with their process groups."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
            wait_for_others(process)
        kill_group(process)


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill the remaining processes in the process group of a child process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for_others(process: subprocess.Popen[Any], limit_s: float = 5) -> None:
    """Wait until the remaining processes of a group exit, because the last of them removes shared memory."""
    deadline = time.monotonic() + limit_s
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)  # only parent processes can wait for an exit


def _exit_message(exit_code: int | None) -> str:
    return f"Still running after {ENGINE_UP_S} s" if exit_code is None else f"Exited with {exit_code}"


def skip_if_torch_crashed(item: pytest.Item) -> Generator[None, Any, Any]:
    """Skip the test if torch crashed the server in a capture with SGLang's own profiler.

    Implementation of a ``pytest_runtest_call`` wrapper, to use with ``yield from``.
    """
    try:
        return (yield)
    except httpx.TransportError:
        servers = [value for value in item.funcargs.values() if isinstance(value, SglangServer)]
        if any(map(_has_torch_crashed, servers)):
            pytest.skip("torch crashed in a recording with SGLang's own profiler, which is a known problem")
        raise


def _has_torch_crashed(server: SglangServer) -> bool:
    """Return whether the log shows a scheduler crash in torch's profiler during a recording that SGLang started."""
    log = server.log.read_text(errors="replace")
    before, _, crash = log.partition("Fatal Python error: Segmentation fault")
    _, _, stack = crash.partition("Current thread")
    stack, _, native = stack.partition("Extension modules:")
    # The frames after the signal handler show the location of the crash.
    _, _, native = native.partition("libc_sigaction.c")
    recording = before.rfind("Profiling starts") > before.rfind("Profiling done")
    return recording and "/profdeck_torch/" not in stack and "torch::profiler::impl::" in native[:1000]
