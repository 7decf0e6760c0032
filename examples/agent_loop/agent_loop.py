"""A small RL job with rollouts and training ranks in Ray actors. profdeck captures both at global steps 2 and 3.

In each global step, two rollouts (vLLM engines) answer questions, read a tool's response and answer again. A reward
function scores the answers, and two training ranks update the model. The rollouts sleep while they load the new
weights. The model is tiny and randomly initialized, its tokens are bytes, and the reward is the fraction of digits.

Only `profdeck.yaml`, `VLLM_PLUGINS` and the lines with ``profiler`` are specific to profdeck.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

# Ray reads these variables at import. Its servers listen on loopback only, and usage statistics are off.
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import ray
from ray.exceptions import RayActorError

from profdeck import Profiler

CONFIG = Path(__file__).with_name("profdeck.yaml")
RANKS, REPLICAS = 2, 2
QUESTIONS, ANSWER_TOKENS = 16, 12


@dataclass
class Episode:
    """A tokenized conversation with its reward."""

    tokens: list[int]
    answered: list[bool]
    """For each token, whether the model generated it."""
    reward: float = 0.0

    def add(self, tokens: Sequence[int], *, answer: bool) -> None:
        """Append tokens to the conversation."""
        self.tokens = [*self.tokens, *tokens]
        self.answered += [answer] * len(tokens)


class Rollout:
    """A rollout replica: a vLLM engine and its agent loop. `Profiler` finds the engine in this actor."""

    def __init__(self, model: str) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=model,
                skip_tokenizer_init=True,
                enforce_eager=True,
                max_model_len=128,
                kv_cache_memory_bytes=64 << 20,
                use_tqdm_on_load=False,
            )
        )
        self.requests = itertools.count()

    async def pid(self) -> int:
        """Return the process ID. The call returns after the engine has started."""
        return os.getpid()

    async def episode(self, question: bytes) -> Episode:
        """Generate an answer, append the tool's response, and generate a second answer."""
        episode = Episode([*question], [False] * len(question))
        first = await self.generate(episode.tokens)
        episode.add(first, answer=True)
        episode.add(b" (%02d digits) " % digits(first), answer=False)
        episode.add(await self.generate(episode.tokens), answer=True)
        return episode

    async def generate(self, prompt: list[int]) -> list[int]:
        """Return the tokens that the engine generates for a prompt."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False)
        answer: list[int] = []
        async for output in self.engine.generate({"prompt_token_ids": prompt}, sampling, str(next(self.requests))):
            answer = [*output.outputs[0].token_ids]
        return answer

    async def load(self, model: str) -> None:
        """Load new weights while the engine sleeps. On the CPU, sleeping clears the caches but frees no memory."""
        await self.engine.sleep()
        await self.engine.collective_rpc("reload_weights", kwargs={"weights_path": model})
        await self.engine.wake_up()

    async def close(self) -> None:
        """Shut down the engine."""
        self.engine.shutdown()


class Trainer:
    """A training rank, with the environment variables of torchrun."""

    def __init__(self, rank: int, rendezvous: str) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel
        from transformers import LlamaConfig, LlamaForCausalLM

        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        # A file instead of MASTER_ADDR and MASTER_PORT, because a TCP store listens on all interfaces.
        torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
        torch.manual_seed(0)
        tiny = LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
        )
        self.rank = rank
        self.model = DistributedDataParallel(LlamaForCausalLM(tiny))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)
        self.profiler = Profiler.from_config(CONFIG, role="trainer")

    def update(self, step: int, episodes: list[Episode]) -> float:
        """Train on this rank's share of the episodes with REINFORCE, and return the loss."""
        with self.profiler.capture(step), self.profiler.stage("actor_update"):
            loss = self.loss(episodes[self.rank :: RANKS])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return float(loss)

    def loss(self, episodes: list[Episode]) -> Any:
        """Return the REINFORCE loss: token cross-entropy weighted by the normalized advantage of each episode."""
        import torch

        tokens = torch.tensor([episode.tokens for episode in episodes])
        answered = torch.tensor([episode.answered for episode in episodes])[:, 1:]
        rewards = torch.tensor([episode.reward for episode in episodes])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        logits = self.model(input_ids=tokens[:, :-1]).logits
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        return (advantages[:, None] * losses * answered).sum() / answered.sum()

    def save(self, model: str) -> None:
        """Write the model to the directory from which the rollouts load it."""
        self.model.module.save_pretrained(model)

    def close(self) -> None:
        """Close the profiler and leave the process group."""
        import torch

        self.profiler.close()
        torch.distributed.destroy_process_group()


def main() -> None:
    """Parse the arguments and run the job on a local Ray cluster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default=5, type=int, help="number of global steps (default: %(default)s)")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory(prefix="agent_loop_", ignore_cleanup_errors=True) as scratch, cluster(scratch):
        job(steps, scratch)


def job(steps: int, scratch: str) -> None:
    """Generate, score, train and update the weights in each global step."""
    model = f"{scratch}/model"
    trainers = [ray.remote(Trainer).remote(rank, f"file://{scratch}/rendezvous") for rank in range(RANKS)]
    ray.get(trainers[0].save.remote(model))
    rollouts = [ray.remote(Rollout).remote(model) for _ in range(REPLICAS)]
    for replica, pid in enumerate(ray.get([rollout.pid.remote() for rollout in rollouts])):
        print(f"rollout {replica}: process {pid}", flush=True)
    with Profiler.from_config(CONFIG, role="rollout", target=rollouts) as profiler:
        for step in range(1, steps + 1):
            with profiler.capture(step) as capture:
                episodes = generate(rollouts, questions(step))
                for episode in episodes:
                    episode.reward = score(episode)
                losses = ray.get([trainer.update.remote(step, episodes) for trainer in trainers])
                ray.get(trainers[0].save.remote(model))
                gather(rollouts, [(rollout, rollout.load.remote(model)) for rollout in rollouts])
            reward = mean(episode.reward for episode in episodes)
            note = f", in capture {capture.id}" if capture else ""
            print(f"step {step}: reward {reward:.3f}, loss {mean(losses):.3f}{note}", flush=True)
    ray.get([actor.close.remote() for actor in [*trainers, *rollouts]])


def generate(rollouts: list[Any], pending: list[bytes]) -> list[Episode]:
    """Return one episode per question. If a rollout fails, the remaining rollouts answer its questions."""
    episodes: list[Episode] = []
    while pending:
        assigned = zip(itertools.cycle(rollouts), pending)
        results = gather(rollouts, [(rollout, rollout.episode.remote(question)) for rollout, question in assigned])
        episodes += filter(None, results)
        pending = [question for question, episode in zip(pending, results, strict=True) if episode is None]
    return episodes


def gather(rollouts: list[Any], calls: list[tuple[Any, Any]]) -> list[Any]:
    """Wait for calls of rollouts and return the results. If a rollout has died, its result is None.

    Dead rollouts are removed from `rollouts`.

    Raises:
        RayActorError: no rollout is left.
    """
    results: list[Any] = []
    for rollout, call in calls:
        try:
            results.append(ray.get(call))
        except RayActorError:
            results.append(None)
            if rollout in rollouts:
                rollouts.remove(rollout)
                print(f"a rollout has died, {len(rollouts)} left", flush=True)
            if not rollouts:
                raise
    return results


def questions(step: int) -> list[bytes]:
    """Return the questions of a global step."""
    numbers = random.Random(step)
    return [b"%02d * %02d = " % (numbers.randrange(100), numbers.randrange(100)) for _ in range(QUESTIONS)]


def score(episode: Episode) -> float:
    """Return the fraction of answer tokens that are digits."""
    answer = [token for token, answered in zip(episode.tokens, episode.answered, strict=True) if answered]
    return digits(answer) / len(answer)


def digits(tokens: list[int]) -> int:
    """Return the number of tokens that are digits."""
    return sum(token in b"0123456789" for token in tokens)


@contextlib.contextmanager
def cluster(scratch: str) -> Iterator[None]:
    """Run a local Ray cluster. To use an existing cluster, pass its address, with the same ``env_vars``."""
    env_vars = {
        "VLLM_PLUGINS": "profdeck",  # loads profdeck in the engine's workers
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": f"{scratch}/vllm",
        "TMPDIR": scratch,
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
    }
    ray.init(
        address="local",
        num_cpus=RANKS + REPLICAS,
        include_dashboard=False,
        object_store_memory=80_000_000,
        runtime_env={"env_vars": env_vars},
        _node_ip_address="127.0.0.1",
        _temp_dir=scratch,
    )
    try:
        yield
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
