"""Real SGLang engines on the CPU: a tiny random model, servers, and jobs in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest

HERE = Path(__file__).parent
ENGINE_UP_S = 240


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("sglang")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with random weights, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    path = tmp_path_factory.mktemp("model")
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
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
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


@pytest.fixture(scope="session")
def engine_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of engines; profdeck is not armed in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "SGL_", "PROFDECK"))}
    return kept | {
        # The platform that these tests install. SGLANG_PLUGINS would filter it too if it were not chosen here.
        "SGLANG_PLATFORM": "torchcpu",
        # SGLang asks for one entry per rank where there are more ranks than NUMA nodes. Only its kernels obey them.
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "KINETO_LOG_LEVEL": "6",
        "PROFDECK_LEASE_DIR": str(tmp_path_factory.mktemp("leases")),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }


@attrs.frozen
class Job:
    """What a job left."""

    output: Path
    results: dict[str, Any]
    log: str


@pytest.fixture(scope="session")
def run_job(
    model: Path, engine_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Job]:
    """Run a script of ``jobs/`` to its end; it is given the model, an output directory and a file for results."""

    def run(name: str, *arguments: str, exit_code: int = 0, **environ: str) -> Job:
        directory = tmp_path_factory.mktemp(name)
        results = directory / "results.json"
        command = [sys.executable, HERE / "jobs" / f"{name}.py", model, directory / "profiles", results, *arguments]
        with (directory / "log").open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=directory,
                env=engine_environment | environ,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            ended = process.wait(ENGINE_UP_S)
        except subprocess.TimeoutExpired:
            ended = None
        finally:
            _end_group(process)
        log = (directory / "log").read_text(errors="replace")
        assert ended == exit_code, f"{_what(ended)}:\n{log[-6000:]}"
        return Job(directory / "profiles", json.loads(results.read_text()) if results.exists() else {}, log)

    return run


@attrs.frozen
class Server:
    """A server that answers."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def complete(self, text: str = "hello world", tokens: int = 20, **more: Any) -> str:
        """Let it generate; returns the text."""
        sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
        body = {"text": text, "sampling_params": sampling, **more}
        response = httpx.post(f"{self.url}/generate", json=body, timeout=60, trust_env=False)
        response.raise_for_status()
        return str(response.json()["text"])


@pytest.fixture(scope="session")
def start_server(
    model: Path, engine_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """Start servers; they are ended with the session, if not before."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, **environ: str) -> Server:
        directory = tmp_path_factory.mktemp("server")
        port = _free_port()
        # SGLang finds its other ports itself, below those that the system hands out.
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--load-format", "dummy"]
        command += ["--device", "cpu", "--dtype", "float32", "--disable-cuda-graph", "--grammar-backend", "none"]
        command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        command += ["--context-length", "256", "--max-total-tokens", "2048", "--max-running-requests", "8"]
        # Else each of its ranks keeps a core busy while there is nothing to do.
        command += ["--sleep-on-idle", "--host", "127.0.0.1", "--port", str(port), *arguments]
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=directory,
                env=engine_environment | environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(process)
        server = Server(f"http://127.0.0.1:{port}", process, directory / "log")
        deadline = time.monotonic() + ENGINE_UP_S
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{server.url}/health", timeout=5, trust_env=False).is_success:
                    return server
            time.sleep(0.2)  # there is no event to await outside of the server
        raise AssertionError(f"{_what(process.poll())}:\n{server.log.read_text(errors='replace')[-6000:]}")

    yield start
    for process in started:
        process.send_signal(signal.SIGTERM)
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        _end_group(process)


def _what(exit_code: int | None) -> str:
    """Say what became of a process, above its log."""
    return f"It took more than {ENGINE_UP_S} s" if exit_code is None else f"It ended with {exit_code}"


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what a process that the test started, in a group of its own, has left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
