"""Entry point that SGLang calls in each of its processes (``sglang.srt.plugins``).

Unless profdeck is enabled, this module imports only the standard library. The functions never raise.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

logger = logging.getLogger("profdeck")

NAME = "profdeck"
"""Name of profdeck's entry point, which ``SGLANG_PLUGINS`` can list."""


def is_enabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment enables profdeck in engine processes."""
    return (
        bool(environ.get("PROFDECK_CONFIG"))
        or any(name.startswith("PROFDECK__") for name in environ)
        or NAME in map(str.strip, environ.get("SGLANG_PLUGINS", "").split(","))
    )


def register() -> None:
    """Register the hooks of this process, if profdeck is enabled."""
    if not is_enabled():
        return
    try:
        from profdeck_sglang.hooks import register

        register()
    except Exception:  # An error must not prevent the engine from starting.
        logger.exception("profdeck is not available in this SGLang process (%d)", os.getpid())
