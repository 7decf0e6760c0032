"""Train a small model for twelve steps. `profdeck.yaml` captures ten of them."""

import os

import torch
from torch.nn import functional

from profdeck import Profiler

SIZE = int(os.environ.get("SIZE", "256"))

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
profiler = Profiler.from_config("profdeck.yaml", role="trainer")
with profiler:
    for step in range(12):
        with profiler.capture(step):
            with profiler.stage("forward"):
                loss = functional.mse_loss(model(torch.rand(64, SIZE)), torch.rand(64, SIZE))
            with profiler.stage("backward"):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
