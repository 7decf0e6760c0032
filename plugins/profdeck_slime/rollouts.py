"""The rollouts: what slime calls through ``--rollout-function-path``, in the process that knows the router."""

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
"""Names the function that generates, if it is not the host's own."""
ROLE = "rollout"
_ENGINES = ("sglang", "vllm")
_OWN = {
    "slime": ("slime.rollout.sglang_rollout",),
    "vime": ("vime.rollout.vllm_rollout", "vime.rollout.sglang_rollout"),
}
"""By host, the modules whose `generate_rollout` is the default of ``--rollout-function-path``."""


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:  # noqa: FBT001, FBT002  # as slime calls it
    """Capture the engines while the host's own function generates, for ``--rollout-function-path``.

    Evaluations are not captured.

    Raises:
        ConfigError: profdeck's config is wrong, or no function is found that generates.
    """
    generate = own_function()
    if evaluation or (profiler := profiler_of(args)) is None:
        return generate(args, rollout_id, data_source, evaluation=evaluation)
    profiler.start(int(rollout_id))
    try:
        return generate(args, rollout_id, data_source, evaluation=evaluation)
    finally:
        profiler.stop()


_of_routers: dict[str, Profiler | None] = {}
"""By router, what captures its engines; None if nothing can."""


def profiler_of(args: Any) -> Profiler | None:
    """Return what captures the engines; None if the config has no such role, or they cannot be captured (logged)."""
    router = router_of(args)
    if router not in _of_routers:
        config = load_config().config
        _of_routers[router] = _profiler(config, router) if ROLE in config.roles else None
    return _of_routers[router]


def _profiler(config: Config, router: str) -> Profiler | None:
    role = config.roles[ROLE]
    where = role.targets or TargetsConfig()
    if not where.discovers:
        where = attrs.evolve(where, router=router or None)
    try:
        roles = {**config.roles, ROLE: attrs.evolve(role, targets=where)}
        # Generating is one stage, also where each stage of the training is a capture.
        return Profiler.of(attrs.evolve(config, roles=roles, mode=Mode.CONTINUOUS), role=ROLE)
    except ProfdeckError as error:
        logger.warning("profdeck: no rollout is captured: %s", describe_error(error))
        return None


def router_of(args: Any) -> str:
    """Return the URL of the router that the host has started; empty if there is none."""
    for engine in _ENGINES:
        host, port = getattr(args, f"{engine}_router_ip", None), getattr(args, f"{engine}_router_port", None)
        if host and port:
            return f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"
    return ""


def own_function() -> Any:
    """Return what generates: that which ``PROFDECK_ROLLOUT_FUNCTION`` names, or the host's own.

    Raises:
        ConfigError: there is none.
    """
    modules = [module for host in _OWN if host in sys.modules for module in _OWN[host]]
    named = os.environ.get(VARIABLE)
    paths = [named] if named else [f"{module}.generate_rollout" for module in modules]
    tried = []
    for path in paths:
        module, _, name = path.rpartition(".")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            tried.append(f"{path} ({describe_error(error)})")
    raise ConfigError(
        f"There is no function that generates rollouts: tried {', '.join(tried) or 'slime and vime'}. Name it by "
        f"{VARIABLE}, such as package.module.generate_rollout."
    )
