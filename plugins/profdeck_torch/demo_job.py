"""The job of ``profdeck demo``: a small transformer that learns to write like Python's own documentation.

Run by torchrun. The lines with ``profiler`` are all that profdeck asks of a training loop.
"""

from __future__ import annotations

import argparse
import os
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from profdeck import Profiler

CONTEXT = 128
BATCH = 8
WIDTH = 192
LAYERS = 3


class Transformer(nn.Module):
    """A byte-level language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.place = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens of shape (batch, context) to logits of shape (batch, context, 256)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.layers(self.embed(tokens) + self.place, mask=mask, is_causal=True))


def main() -> None:
    """Train for a few steps and capture those that the config selects."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()

    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(dist.get_rank())
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    model = DistributedDataParallel(Transformer().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    profiler = Profiler.from_config(arguments.config, role="trainer")

    @profiler.stage("forward_backward")
    def forward_backward(batch: Tensor) -> Tensor:
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        return loss

    @profiler.stage("optimizer")
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for step in range(1, arguments.steps + 1):
        with profiler.capture(step):
            starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,))
            batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).to(device)
            loss = forward_backward(batch)
            update()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)  # noqa: T201  # a job tells how it goes
    dist.barrier()  # gloo's threads abort at times in a rank that leaves before the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
