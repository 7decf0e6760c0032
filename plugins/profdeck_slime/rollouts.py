"""Rollout function for slime and vime, set with ``--rollout-function-path``.

It captures the engines of the router that the host has started.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any

import attrs

from profdeck import ProfdeckError, Profiler
from profdeck.plugin import Config, ConfigError, Mode, TargetsConfig, describe_error, load_config

logger = logging.getLogger("profdeck")

VARIABLE = "PROFDECK_ROLLOUT_FUNCTION"
"""Environment variable with the import path of a custom rollout function."""
ROLE = "rollout"
_ENGINES = ("sglang", "vllm")
_DEFAULT_MODULES = {
    "slime": ("slime.rollout.sglang_rollout",),
    "vime": ("vime.rollout.vllm_rollout", "vime.rollout.sglang_rollout"),
}
"""Modules whose `generate_rollout` is the default of ``--rollout-function-path``, keyed by host."""


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:  # noqa: FBT001, FBT002  # as slime calls it
    """Capture the engines while the original rollout function runs. Evaluations are not captured.

    Raises:
        ConfigError: profdeck's config is invalid, or no rollout function was found.
    """
    generate = find_rollout_function()
    if evaluation or (profiler := find_profiler(args)) is None:
        return generate(args, rollout_id, data_source, evaluation=evaluation)
    profiler.start(int(rollout_id))
    try:
        return generate(args, rollout_id, data_source, evaluation=evaluation)
    finally:
        profiler.stop()


_profilers: dict[str, Profiler | None] = {}
"""Profilers of engines, keyed by router URL; ``None`` if the engines cannot be captured."""


def find_profiler(args: Any) -> Profiler | None:
    """Return the profiler of the engines, or ``None`` if the config has no role ``rollout``.

    If the profiler cannot be created, log a warning and return ``None``.
    """
    router = router_url(args)
    if router not in _profilers:
        config = load_config().config
        _profilers[router] = _create_profiler(config, router) if ROLE in config.roles else None
    return _profilers[router]


def _create_profiler(config: Config, router: str) -> Profiler | None:
    role = config.roles[ROLE]
    targets = role.targets or TargetsConfig()
    if not targets.discovers:
        targets = attrs.evolve(targets, router=router or None)
    try:
        roles = {**config.roles, ROLE: attrs.evolve(role, targets=targets)}
        # Generation is a single stage, so it is never captured in discrete mode.
        return Profiler.of(attrs.evolve(config, roles=roles, mode=Mode.CONTINUOUS), role=ROLE)
    except ProfdeckError as error:
        logger.warning("profdeck: rollouts are not captured: %s", describe_error(error))
        return None


def router_url(args: Any) -> str:
    """Return the URL of the host's router, or an empty string if the host has not started a router."""
    for engine in _ENGINES:
        host, port = getattr(args, f"{engine}_router_ip", None), getattr(args, f"{engine}_router_port", None)
        if host and port:
            return f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"
    return ""


def find_rollout_function() -> Any:
    """Return the function at the path in ``PROFDECK_ROLLOUT_FUNCTION``, by default the host's rollout function.

    Raises:
        ConfigError: the function cannot be imported.
    """
    default_modules = [module for host in _DEFAULT_MODULES if host in sys.modules for module in _DEFAULT_MODULES[host]]
    custom_path = os.environ.get(VARIABLE)
    paths = [custom_path] if custom_path else [f"{module}.generate_rollout" for module in default_modules]
    errors = []
    for path in paths:
        module, _, name = path.rpartition(".")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            errors.append(f"{path} ({describe_error(error)})")
    raise ConfigError(
        f"No rollout function found; tried {', '.join(errors) or 'slime and vime'}. Set {VARIABLE} to its import path, "
        "such as package.module.generate_rollout."
    )
