"""A training process that calls profdeck's hooks and `TrainProfiler` like slime.

Arguments: number of the first rollout, number of rollouts, and a JSON object with other arguments of slime.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
from slime.utils.profile_utils import TrainProfiler

from profdeck_slime import training


def main() -> None:
    """Run the rollouts."""
    first, rollouts = int(sys.argv[1]), int(sys.argv[2])
    defaults = {
        "use_pytorch_profiler": False,
        "record_memory_history": False,
        "profile_target": [],
        "start_rollout_id": first,
    }
    overrides = {"start_rollout_id": first} | json.loads(sys.argv[3])
    hooks = overrides.pop("hooks", True)
    args = SimpleNamespace(**defaults | overrides)
    training.init(args)
    profiler = TrainProfiler(args)
    profiler.on_init_end()
    weight = torch.ones(8, 8, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    for rollout in range(first, first + rollouts):
        for prefix in ("ref_", ""):
            if hooks:
                training.before_log_prob(args, weight, prefix)
            (weight @ weight).detach()
        for mini_batch in range(3):
            if hooks:
                training.before_train_step(args, rollout, mini_batch, weight, optimizer, None)
            torch.nn.functional.softmax(weight @ weight, dim=0).sum().backward()
            optimizer.step()
        profiler.step(rollout_id=rollout)


if __name__ == "__main__":
    main()
