"""The errors that profdeck raises. Every message says what is wrong, where, what is allowed and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ProfdeckError(Exception):
    """Root of all errors that profdeck raises on purpose; the command line prints it without a traceback."""


class ConfigError(ProfdeckError):
    """The config, an option or a command-line value is wrong."""


class PluginError(ProfdeckError):
    """A backend or listener cannot be used; subclasses say why."""


class UnknownPluginError(PluginError):
    """No installed distribution offers a plugin of that name."""


class MissingLibraryError(PluginError):
    """The plugin is there, but the library that it drives is not installed."""


class IncompatibleLibraryError(PluginError):
    """The library is installed in a version that the plugin does not support."""


class BrokenPluginError(PluginError):
    """The plugin is installed and fails to import or does not follow the hook specification."""


class CaptureError(ProfdeckError):
    """A capture could not start, step or stop."""


class LeaseError(CaptureError):
    """Another recording holds the device."""


class TraceError(ProfdeckError):
    """A trace file cannot be read."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest allowed word, or an empty string."""
    found = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean '{found[0]}'?" if found else ""


def describe(error: BaseException) -> str:
    """Say an error in one line: our own as they are, others with their type."""
    if isinstance(error, ProfdeckError):
        return str(error)
    return f"{type(error).__name__}: {error}".rstrip(": ")
