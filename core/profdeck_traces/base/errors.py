"""Base exceptions of ``profdeck`` and ``profdeck_traces``.

A message describes the problem, its location, the allowed values and the solution.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar, Self


class ProfdeckError(Exception):
    """Base class of profdeck's exceptions. The command line prints their messages without a traceback."""

    exit_code: ClassVar[int] = 4
    """Exit code of the command line."""


class ConfigError(ProfdeckError):
    """The config, an option or a command-line value is invalid."""

    exit_code = 2


class PluginError(ProfdeckError):
    """A plugin cannot be used. Subclasses identify the cause."""

    exit_code = 3


class UnknownPluginError(PluginError):
    """No installed distribution provides a plugin with the requested name."""


class MissingLibraryError(PluginError):
    """A library that a plugin or a function requires is not installed."""

    @classmethod
    def of(cls, who: str, library: str, extra: str | None = None) -> Self:
        """Return an error whose message has the command that installs the library.

        Args:
            who: subject and verb of the message, such as ``URLs need``.
            library: name of the missing library.
            extra: the extra of profdeck that installs the library, if its name differs.
        """
        how = f"pip install 'profdeck[{extra or library}]'"
        return cls(f"{who} {library}, which is not installed. Install it with: {how}")


class BrokenPluginError(PluginError):
    """An installed plugin cannot be imported or does not follow the hook specification."""


class TraceError(ProfdeckError):
    """A trace is missing, cannot be read or cannot be used for the requested operation."""


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` with the most similar allowed word, or an empty string."""
    found = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean '{found[0]}'?" if found else ""


def describe_error(error: BaseException) -> str:
    """Return the message of an error, with the exception type unless the error is a `ProfdeckError`."""
    if isinstance(error, ProfdeckError):
        return str(error)
    return f"{type(error).__name__}: {error}".rstrip(": ")
