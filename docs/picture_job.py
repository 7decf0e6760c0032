"""The job shown in the README's first image. It trains a small language model on two ranks.

`pictures.py` runs this script with torchrun. Each rank tokenises its batches in the main process, and the report should
point this out.
"""  # noqa: INP001  # a script, not a package

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from profdeck import Profiler

TEXT = "the quick brown fox jumps over the lazy dog and runs back into the deep forest " * 12
MERGES = {pair: 256 + rank for rank, pair in enumerate(pairwise(TEXT))}
WORDS, LENGTH, BATCH = 1024, 64, 8


def encode(text: str) -> list[int]:
    """Encode a text: repeatedly merge the adjacent tokens with the lowest rank, until `LENGTH` tokens are left."""
    tokens = [*text]
    while len(tokens) > LENGTH:
        ranks = [MERGES.get((left[-1], right[0]), WORDS) for left, right in pairwise(tokens)]
        best = ranks.index(min(ranks))
        tokens[best : best + 2] = [tokens[best] + tokens[best + 1]]
    return [sum(map(ord, token)) % WORDS for token in tokens]


def collate(texts: list[str]) -> torch.Tensor:
    """Return the tokens of a batch, with shape (texts, `LENGTH`)."""
    return torch.tensor([encode(text) for text in texts])


class Model(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A small transformer without a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 128)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True) for _ in range(4))
        self.head = nn.Linear(128, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the next-token logits, with shape (texts, tokens, `WORDS`)."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def main() -> None:
    """Train for 13 steps and record five of them."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {
        "run": "finetune",
        "steps": ["6..10"],
        "trainer.backend": "torch",
        "trainer.ranks": "all",
        "trainer.options.with_stack": True,
    }
    profiler = Profiler.from_config(settings=settings)
    texts = [TEXT[start : start + 128] for start in range(400)]
    batches = iter(DataLoader(texts, batch_size=BATCH, shuffle=True, collate_fn=collate))
    for step in range(13):
        with profiler.capture(step):
            with profiler.stage("data"):
                tokens = next(batches)
            with profiler.stage("forward_backward"):
                logits = model(tokens[:, :-1])
                nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            with profiler.stage("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
