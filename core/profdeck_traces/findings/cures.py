"""Engine-specific cures: suggested actions that name engine options. Engine plugins provide them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

from profdeck_traces.base.entry_points import installed, load
from profdeck_traces.base.errors import PluginError

logger = logging.getLogger("profdeck")

ENGINE_CURES = "profdeck.engine_cures"
"""Entry-point group for engine cures. Each entry point is a mapping from causes, such as ``prefill-next-to-decode``, to
cures for one engine. Its name is the engine's name in the group ``profdeck.trace_names``."""


def engine_cure(engine: str | None, cause: str, default: str) -> str:
    """Return an engine's cure for a cause, or `default` if it has none."""
    return default if engine is None else _cures(engine).get(cause, default)


@functools.cache
def _cures(engine: str) -> Mapping[str, str]:
    if engine not in installed(ENGINE_CURES):
        return {}
    try:
        cures = load(ENGINE_CURES, engine)
    except PluginError as error:
        logger.warning("%s The cures of '%s' are not used.", error, engine)
        return {}
    return {str(cause): str(cure) for cause, cure in cures.items()} if isinstance(cures, Mapping) else {}
