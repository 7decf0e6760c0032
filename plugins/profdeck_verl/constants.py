"""Names that this package shares with verl's config and actors."""

from __future__ import annotations

TOOL = "profdeck"
"""Value of ``global_profiler.tool``, and key of profdeck's config in configs of verl."""
CONFIG, ROLE = "config", "role"
"""Keys of ``tool_config.profdeck``: the complete profdeck config as plain data, and the worker's role."""
TRAINER, ROLLOUT, REWARD = "trainer", "rollout", "reward"
"""Roles of training workers, of rollout engines and of reward model engines."""
ENGINE_ATTRIBUTES = {"vllm": "engine", "sglang": "tokenizer_manager"}
"""Attribute of verl's server actors that holds the engine, by backend (verl 0.6.1 to 0.9.1)."""
