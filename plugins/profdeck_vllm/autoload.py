"""What vLLM calls in each of its processes, through its entry-point group ``vllm.general_plugins``, and vLLM-Omni.

Only the standard library is imported until profdeck is armed, and nothing is ever raised: vLLM loads plugins guarded
and calls them unguarded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

logger = logging.getLogger("profdeck")

NAME = "profdeck"
"""Our entry points in vLLM's groups, and what to write into ``VLLM_PLUGINS``."""
SELECTION = "VLLM_PLUGINS"
_OMNI, _OMNI_GROUPS = "vllm-omni", ("vllm.general_plugins", "vllm_omni.general_plugins")


def armed(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the workers of engines in this environment shall be able to record."""
    return (
        bool(environ.get("PROFDECK_CONFIG"))
        or any(name.startswith("PROFDECK__") for name in environ)
        or NAME in environ.get(SELECTION, "").split(",")
    )


def register() -> None:
    """Make the workers able to record, if profdeck is armed."""
    if not armed():
        return
    try:
        from profdeck_vllm.v1_worker import install

        install()
    except Exception:  # the engine must start whatever is wrong here
        logger.exception("profdeck is not available in this vLLM process (%d)", os.getpid())


def register_omni() -> None:
    """Do the same in a process of vLLM-Omni, for diffusion stages, too (``vllm_omni.general_plugins``)."""
    register()
    if not armed():
        return
    try:
        from profdeck_vllm.diffusion_worker import install

        install()
        if left_out := own_plugins_left_out():
            logger.warning(
                "%s=%s leaves out plugins of vLLM-Omni itself: %s. Add them, separated by commas.",
                SELECTION, os.environ.get(SELECTION), ", ".join(left_out),
            )  # fmt: skip
    except Exception:  # as above
        logger.exception("profdeck is not available in this vLLM-Omni process (%d)", os.getpid())


def own_plugins_left_out() -> list[str]:
    """Return the plugins of vLLM-Omni itself that ``VLLM_PLUGINS`` leaves out."""
    from importlib.metadata import entry_points

    chosen = os.environ.get(SELECTION)
    if chosen is None:
        return []
    own = [one for group in _OMNI_GROUPS for one in entry_points(group=group) if one.dist and one.dist.name == _OMNI]
    return sorted({one.name for one in own} - set(chosen.split(",")))
