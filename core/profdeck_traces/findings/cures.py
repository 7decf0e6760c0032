"""Cures that name the options of an engine. The plugins of the engines provide them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

from profdeck_traces.base.entry_points import installed, load
from profdeck_traces.base.errors import PluginError

logger = logging.getLogger("profdeck")

ENGINE_CURES = "profdeck.engine_cures"
"""Entry-point group of mappings from a cause, such as ``prefill-next-to-decode``, to its cure in one engine. The names
are those of the group ``profdeck.trace_names``."""


def engine_cure(engine: str | None, cause: str, default: str) -> str:
    """Return an engine's cure for a cause, or a default that applies to any engine."""
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
