"""Conversion of OmegaConf configs."""

from __future__ import annotations

import sys
from typing import Any


def to_plain(config: Any) -> Any:
    """Convert an OmegaConf config to plain data, with missing values as ``???``. Returns other objects unchanged."""
    omegaconf = sys.modules.get("omegaconf")  # A process with an OmegaConf config has imported the library.
    if omegaconf is not None and omegaconf.OmegaConf.is_config(config):
        return omegaconf.OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    return config
