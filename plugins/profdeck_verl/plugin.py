"""What verl imports in each of its processes, by its entry points ``verl.plugins`` (0.9.0 on).

Nothing changes unless a job says ``global_profiler.tool=profdeck``. What is put in place then, each as verl imports it:

- the actors of a job get an environment in which engines load profdeck (`profdeck_verl.environment`);
- a trainer that is built prepares its config (`profdeck_verl.trainers`): its workers find profdeck's in their own;
- `DistProfiler`, which workers call, gets an implementation for the tool (`profdeck_verl.workers`);
- the manager of rollout servers captures them as a fleet (`profdeck_verl.rollouts`).
"""

from __future__ import annotations

import functools
import importlib

from profdeck.plugin import after_import

SEAMS = {
    "verl.utils.profiler.profile": "profdeck_verl.workers:put_in_place",
    "verl.trainer.constants_ppo": "profdeck_verl.environment:put_in_place",
    "verl.trainer.ppo.ray_trainer": "profdeck_verl.trainers:prepare_in",
    "verl.trainer.ppo.v1.trainer_base": "profdeck_verl.trainers:prepare_in",
    "verl.experimental.separation.ray_trainer": "profdeck_verl.trainers:prepare_in",
    "verl.experimental.one_step_off_policy.ray_trainer": "profdeck_verl.trainers:prepare_in",
    "verl.experimental.fully_async_policy.fully_async_trainer": "profdeck_verl.trainers:prepare_in",
    "verl.experimental.fully_async_policy.fully_async_rollouter": "profdeck_verl.trainers:prepare_in",
    "verl.workers.rollout.llm_server": "profdeck_verl.rollouts:put_in_place",
    "verl.experimental.agent_loop.agent_loop": "profdeck_verl.rollouts:put_in_place",
}
"""What is called with a module of verl once it has been imported."""


def _put_in_place(target: str, module: object) -> None:
    name, _, function = target.partition(":")
    getattr(importlib.import_module(name), function)(module)


for _name, _target in SEAMS.items():
    after_import(_name, functools.partial(_put_in_place, _target))
