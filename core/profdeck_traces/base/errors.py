"""Errors of both packages. A message says what is wrong, where, what is allowed and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar, Self


class ProfdeckError(Exception):
    """Root of all errors that profdeck raises on purpose; the command line prints it without a traceback."""

    exit_code: ClassVar[int] = 4
    """Exit code of the command line."""


class ConfigError(ProfdeckError):
    """The config, an option or a command-line value is wrong."""

    exit_code = 2


class PluginError(ProfdeckError):
    """A plugin cannot be used. Subclasses identify the cause."""

    exit_code = 3


class UnknownPluginError(PluginError):
    """No installed distribution offers a plugin of that name."""


class MissingLibraryError(PluginError):
    """A library that a plugin requires is not installed."""

    @classmethod
    def of(cls, who: str, library: str, extra: str | None = None) -> Self:
        """Say so.

        Args:
            who: who needs it, as in ``URLs need``.
            library: what is not installed.
            extra: that of profdeck which brings it, if it has another name.
        """
        how = f"pip install 'profdeck[{extra or library}]'"
        return cls(f"{who} {library}, which is not installed. Install it with: {how}")


class BrokenPluginError(PluginError):
    """The plugin is installed and fails to import or does not follow the hook specification."""


class TraceError(ProfdeckError):
    """A trace file cannot be read."""


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest allowed word, or an empty string."""
    found = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean '{found[0]}'?" if found else ""


def describe_error(error: BaseException) -> str:
    """Return a one-line message for an error. Messages of other libraries' errors include the exception type."""
    if isinstance(error, ProfdeckError):
        return str(error)
    return f"{type(error).__name__}: {error}".rstrip(": ")
