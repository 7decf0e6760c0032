"""A loop of global steps as a trainer has it, over an engine that stands for two replicas, under many configs."""

from __future__ import annotations

import json
import sys
from typing import Any

import sglang
from _job import ENGINE, Host, finish, settings

from profdeck import Identity, Profiler

ROUNDS, TOKENS = 2, 4


def rollout(host: Host) -> list[list[list[int]]]:
    """Generate for one global step: a prefill and three decodes, twice."""
    return [host.generate() for _ in range(ROUNDS)]


def train(host: Host, name: str, config: dict[str, Any]) -> bool:
    """Run five global steps; returns whether all of them generated what they should."""
    values = settings(*config["steps"], **config["role"]) | {"run": name, **config.get("top", {})}
    profilers = [
        Profiler.from_config(settings=values, identity=Identity(role="rollout", replica=replica), target=host.engine)
        for replica in range(2)
    ]
    same = True
    for global_step in range(5):
        for profiler in profilers:
            profiler.start(global_step)
            with profiler.stage("generate_sequences"):
                same = rollout(host) == [host.expected] * ROUNDS and same
            profiler.stop()
    return same


def main(configs: dict[str, Any]) -> None:
    """Run it."""
    host = Host(sglang.Engine(**ENGINE, tp_size=2), TOKENS)
    same = {name: train(host, name, config) for name, config in configs.items()}
    host.engine.shutdown()
    finish({"same_tokens": same})


if __name__ == "__main__":
    main(json.loads(sys.argv[4]))
