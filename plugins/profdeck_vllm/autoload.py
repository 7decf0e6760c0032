"""Entry points that vLLM and vLLM-Omni call in each of their processes (``vllm.general_plugins``).

Unless profdeck is enabled, this module imports only the standard library. The functions never raise, because vLLM does
not catch exceptions of plugin functions.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

logger = logging.getLogger("profdeck")

NAME = "profdeck"
"""Name of profdeck's entry points, which ``VLLM_PLUGINS`` can list."""
SELECTION = "VLLM_PLUGINS"
_OMNI, _OMNI_GROUPS = "vllm-omni", ("vllm.general_plugins", "vllm_omni.general_plugins")


def is_enabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment enables profdeck in engine workers."""
    return (
        bool(environ.get("PROFDECK_CONFIG"))
        or any(name.startswith("PROFDECK__") for name in environ)
        or NAME in environ.get(SELECTION, "").split(",")
    )


def register() -> None:
    """Patch the worker base class, if profdeck is enabled."""
    if not is_enabled():
        return
    try:
        from profdeck_vllm.v1_worker import install

        install()
    except Exception:  # An error must not prevent the engine from starting.
        logger.exception("profdeck is not available in this vLLM process (%d)", os.getpid())


def register_omni() -> None:
    """Patch the worker classes of vLLM-Omni, including diffusion workers (``vllm_omni.general_plugins``)."""
    register()
    if not is_enabled():
        return
    try:
        from profdeck_vllm.diffusion_worker import install

        install()
        if excluded := excluded_omni_plugins():
            logger.warning(
                "%s=%s excludes plugins that vLLM-Omni requires: %s. Add them, separated by commas.",
                SELECTION, os.environ.get(SELECTION), ", ".join(excluded),
            )  # fmt: skip
    except Exception:  # An error must not prevent the engine from starting.
        logger.exception("profdeck is not available in this vLLM-Omni process (%d)", os.getpid())


def excluded_omni_plugins() -> list[str]:
    """Return the names of vLLM-Omni's own plugins that ``VLLM_PLUGINS`` excludes."""
    from importlib.metadata import entry_points

    selection = os.environ.get(SELECTION)
    if selection is None:
        return []
    plugins = (plugin for group in _OMNI_GROUPS for plugin in entry_points(group=group))
    omni_names = {plugin.name for plugin in plugins if plugin.dist and plugin.dist.name == _OMNI}
    return sorted(omni_names - set(selection.split(",")))
