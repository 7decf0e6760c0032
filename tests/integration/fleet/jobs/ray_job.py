"""Ray job in its own namespace, with busy engines and a trainer without an engine. It runs until stdin is closed."""

from __future__ import annotations

import sys
import threading
from typing import Any

import held_engines
import ray


def make(kind: type, name: str) -> Any:
    return ray.remote(num_cpus=0)(kind).options(name=name).remote()


ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
rollouts = [make(held_engines.AsyncActor, name) for name in sys.argv[2:]]
ray.get([actor.make.remote() for actor in rollouts])
trainer = make(held_engines.SyncActor, "trainer")
ray.get(trainer.pid.remote())
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
sys.stdout.write(f"{ray.get_runtime_context().namespace}\n")
sys.stdout.flush()
while not over.is_set():
    ray.get([actor.iterate.remote(1) for actor in rollouts])
