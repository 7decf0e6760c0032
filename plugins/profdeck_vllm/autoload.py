"""What vLLM calls in each of its processes, through its entry-point group ``vllm.general_plugins``.

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


def armed(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the workers of engines in this environment shall be able to record."""
    return (
        bool(environ.get("PROFDECK_CONFIG"))
        or any(name.startswith("PROFDECK__") for name in environ)
        or NAME in environ.get("VLLM_PLUGINS", "").split(",")
    )


def register() -> None:
    """Make the workers able to record, if profdeck is armed."""
    if not armed():
        return
    try:
        from profdeck_vllm.worker import install

        install()
    except Exception:  # the engine must start whatever is wrong here
        logger.exception("profdeck is not available in this vLLM process (%d)", os.getpid())
