"""What SGLang calls in each of its processes, through its entry-point group ``sglang.srt.plugins``.

Only the standard library is imported until profdeck is armed, and nothing is ever raised.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

logger = logging.getLogger("profdeck")

NAME = "profdeck"
"""Our entry point in SGLang's group, and what to write into ``SGLANG_PLUGINS``."""


def armed(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the processes of engines in this environment shall be able to record."""
    return (
        bool(environ.get("PROFDECK_CONFIG"))
        or any(name.startswith("PROFDECK__") for name in environ)
        or NAME in map(str.strip, environ.get("SGLANG_PLUGINS", "").split(","))
    )


def register() -> None:
    """Make the process able to record, if profdeck is armed."""
    if not armed():
        return
    try:
        from profdeck_sglang.hooks import register

        register()
    except Exception:  # the engine must start whatever is wrong here
        logger.exception("profdeck is not available in this SGLang process (%d)", os.getpid())
