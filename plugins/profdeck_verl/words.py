"""What the modules of this package share: the tool's name, the keys of what trainers leave for workers, plain data."""

from __future__ import annotations

import sys
from typing import Any

TOOL = "profdeck"
CONFIG, ROLE = "config", "role"
"""Keys of ``tool_config.profdeck``: the whole config as plain data, and whose role the worker has."""
TRAINER, ROLLOUT, REWARD = "trainer", "rollout", "reward"
"""Roles: of training workers, and of the engines."""
ENGINES = {"vllm": "engine", "sglang": "tokenizer_manager"}
"""By backend: the attribute of verl's server actors that holds the engine (0.6.1 to 0.9.1)."""


def plain(config: Any) -> Any:
    """Return a config of OmegaConf as plain data, with what is missing in it as ``???``; anything else as it is."""
    omegaconf = sys.modules.get("omegaconf")  # who has such a config has imported it
    if omegaconf is not None and omegaconf.OmegaConf.is_config(config):
        return omegaconf.OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    return config
