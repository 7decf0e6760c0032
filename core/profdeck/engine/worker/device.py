"""Finds the backend that records the device of an engine's process."""

from __future__ import annotations

import functools

from profdeck.backends.api import Backend
from profdeck.backends.plugins import BACKENDS, load_backend, require_libraries
from profdeck_traces.base.entry_points import installed
from profdeck_traces.base.errors import MissingLibraryError, PluginError, UnknownPluginError


@functools.cache  # reading the entry points of an environment as large as an engine's takes a tenth of a second
def device_backend(device_type: str) -> type[Backend]:
    """Return the backend for a type of device, in torch's words, such as ``cuda``; its library is installed.

    Raises:
        PluginError: no installed backend records such a device, or its library is missing or not supported.
    """
    reasons = []
    for name in installed(BACKENDS):
        try:
            cls = load_backend(name)
            if device_type in cls.device_types:
                require_libraries(cls)
                return cls
        except MissingLibraryError:
            continue
        except PluginError as error:  # a broken plugin of somebody else must not hide the one that fits
            reasons.append(str(error))
    raise UnknownPluginError(" ".join([f"No installed backend records the device type '{device_type}'.", *reasons]))
