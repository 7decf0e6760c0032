"""verl jobs on the CPU."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import attrs

LIMIT_S = 540
LAST_S = 60
PPO, SFT = "verl.trainer.main_ppo", "verl.trainer.sft_trainer"

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VERL_ENGINE_DEVICE": "cuda",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    # Disable Ray's memory monitor, which would kill workers because of the memory of other tests.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_SFT = """
    model.path={model} +model.override_config.attn_implementation=eager model.use_remove_padding=False
    model.enable_gradient_checkpointing=False engine.strategy=fsdp2 engine.use_torch_compile=False engine.dtype=float32
    data.train_files={data}/sft.parquet data.train_batch_size=8 data.micro_batch_size_per_gpu=4
    data.use_dynamic_bsz=False data.max_length=64 data.num_workers=0 data.truncation=right
    trainer.device=cpu trainer.logger=[console] trainer.total_training_steps=5 trainer.total_epochs=1
    trainer.resume_mode=disable trainer.save_freq=-1 trainer.default_local_dir={directory}/checkpoints
"""
_PPO = """
    algorithm.adv_estimator=grpo
    data.train_files={data}/rl.parquet data.val_files={data}/rl.parquet data.train_batch_size=4
    data.max_prompt_length=64 data.max_response_length=16 data.dataloader_num_workers=0
    actor_rollout_ref.model.path={model} +actor_rollout_ref.model.override_config.attn_implementation=eager
    actor_rollout_ref.model.use_remove_padding=False actor_rollout_ref.model.enable_gradient_checkpointing=False
    actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
    actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.actor.fsdp_config.dtype=float32
    actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.ref.fsdp_config.use_torch_compile=False
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=2
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
    actor_rollout_ref.rollout.gpu_memory_utilization=0.1 actor_rollout_ref.rollout.enforce_eager=True
    actor_rollout_ref.rollout.free_cache_engine=False +actor_rollout_ref.rollout.enable_sleep_mode=False
    actor_rollout_ref.rollout.max_model_len=128 actor_rollout_ref.rollout.max_num_seqs=16
    actor_rollout_ref.rollout.max_num_batched_tokens=256 actor_rollout_ref.rollout.dtype=float32
    actor_rollout_ref.rollout.agent.num_workers=1
    actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16
    reward.custom_reward_function.path={data}/reward.py reward.custom_reward_function.name=compute_score
    reward.num_workers=1
    trainer.device=cpu trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger=[console] trainer.total_epochs=1
    trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1 trainer.resume_mode=disable
    trainer.default_local_dir={directory}/checkpoints
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1
    ray_kwargs.ray_init.num_cpus=20 +ray_kwargs.ray_init.num_gpus=2 +ray_kwargs.ray_init.include_dashboard=False
"""


@attrs.frozen
class Material:
    """Model and data of verl jobs."""

    model: Path
    data: Path


def make_material(directory: Path) -> Material:
    """Write a two-layer Llama with random weights, a byte tokenizer, questions, answers and a reward function."""
    import pandas as pd
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    model, data = directory / "model", directory / "data"
    data.mkdir()
    special = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
    vocabulary = {text: index for index, text in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=special[3:], **names)
    fast.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    fast.save_pretrained(model)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(model)
    questions = [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": f"What is {i}+{i + 1}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i + 1)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(64)
    ]
    pd.DataFrame(questions).to_parquet(data / "rl.parquet")
    talks = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i}+{i}?"},
                {"role": "assistant", "content": str(2 * i)},
            ]
        }
        for i in range(64)
    ]
    pd.DataFrame(talks).to_parquet(data / "sft.parquet")
    (data / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kw):\n"
        "    return float(len(set(solution_str)) % 7) / 7\n"
    )
    return Material(model, data)


@attrs.frozen
class VerlJob:
    """A started job."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        """Contents of the job's log."""
        return self.log.read_text(errors="replace")

    def wait(self) -> str:
        """Wait until the job exits with status 0 and return its output."""
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        assert code == 0, f"The job exited with {code}:\n{self.output[-8000:]}"
        return self.output

    def wait_for(self, path: Path) -> None:
        """Wait until the job, or a process that outlives it, has created a file."""
        deadline = time.monotonic() + LIMIT_S
        while not path.exists():
            if (code := self.process.poll()) is not None:
                deadline = min(deadline, time.monotonic() + LAST_S)
            assert not code, self.output[-8000:]
            assert time.monotonic() < deadline, self.output[-8000:]
            time.sleep(0.1)  # another process cannot wait for an event of the job


class Cluster:
    """Starts jobs, and stops them with their Ray clusters."""

    def __init__(self, directory: Path) -> None:
        self.python = sys.executable
        """Python interpreter of the jobs."""
        self._directory = directory
        self._started: list[subprocess.Popen[bytes]] = []
        self._ray = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # its sockets have long names

    def start(self, material: Material, module: str, overrides: Sequence[str], environ: Mapping[str, str]) -> VerlJob:
        """Start a job.

        Args:
            material: the model and the data of the job.
            module: `PPO` or `SFT`. `SFT` has two ranks.
            overrides: overrides of verl's config. Later overrides take precedence.
            environ: environment variables of the job.
        """
        fields = {"model": material.model, "data": material.data, "directory": self._directory}
        arguments = [argument.format(**fields) for argument in (_SFT if module == SFT else _PPO).split()]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if module == SFT else []
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("PROFDECK", "VLLM_", "RAY_"))
        }
        bin_directory = str(Path(self.python).parent)
        variables = {"RAY_TMPDIR": str(self._ray), "PATH": os.pathsep.join([bin_directory, os.environ["PATH"]])}
        log = self._directory / f"log{len(self._started)}"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [self.python, *launcher, "-m", module, *arguments, *overrides],
                cwd=self._directory,
                env=inherited | _ENVIRONMENT | variables | dict(environ),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return VerlJob(process, log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT if process.poll() is None else signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for pid in self._cluster_pids():  # Ray processes are in other sessions
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._ray, ignore_errors=True)

    def _cluster_pids(self) -> list[int]:
        """Return the processes with this cluster's unique directory in their environment."""
        pids, variable = [], f"RAY_TMPDIR={self._ray}".encode()
        for directory in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if variable in (directory / "environ").read_bytes():
                    pids.append(int(directory.name))
        return [pid for pid in pids if pid != os.getpid()]


def profdeck(*arguments: str, cwd: Path) -> Any:
    """Run a command of profdeck and return its JSON document."""
    command = [sys.executable, "-m", "profdeck", *arguments, "--json"]
    result = subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.stdout, result.stderr
    return json.loads(result.stdout)
