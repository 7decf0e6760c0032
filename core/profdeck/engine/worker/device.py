"""Selection of the backend that records the device of an engine process."""

from __future__ import annotations

import functools

from profdeck.backends.api import Backend
from profdeck.backends.plugins import BACKENDS, load_backend, require_libraries
from profdeck_traces.base.entry_points import installed
from profdeck_traces.base.errors import MissingLibraryError, PluginError, UnknownPluginError


@functools.cache  # reading the entry points of an engine's environment takes about 0.1 s
def device_backend(device_type: str) -> type[Backend]:
    """Return a backend for a torch device type, such as ``cuda``, whose libraries are installed.

    Raises:
        PluginError: no installed backend supports the device, or its libraries are missing or unsupported.
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
        except PluginError as error:  # continue: another plugin may support the device
            reasons.append(str(error))
    raise UnknownPluginError(" ".join([f"No installed backend records the device type '{device_type}'.", *reasons]))
