"""Base exceptions for ``profdeck`` and ``profdeck_traces``.

Each message describes the problem, its location, the allowed values and a solution.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, ClassVar, Self


class ProfdeckError(Exception):
    """Base class for profdeck's exceptions. The command line prints only the message, without a traceback.

    Each argument is a message; usually, there is only one.
    """

    exit_code: ClassVar[int] = 4
    """Exit code of the command line."""

    def __init__(self, *arguments: Any) -> None:
        """Remove credentials from the message."""
        super().__init__(*(_redact(item) if isinstance(item, str) else item for item in arguments))

    def __str__(self) -> str:
        """Return the messages, one per line."""
        return "\n".join(map(str, self.args))


class ConfigError(ProfdeckError):
    """The config, an option or a command-line value is invalid."""

    exit_code = 2


class PluginError(ProfdeckError):
    """A plugin or a required library is missing or cannot be used."""

    exit_code = 3


class UnknownPluginError(PluginError):
    """No installed distribution provides a plugin with the requested name."""


class MissingLibraryError(PluginError):
    """A library required for the operation is not installed."""

    @classmethod
    def for_library(cls, feature: str, library: str, extra: str | None = None) -> Self:
        """Return an error whose message includes the ``pip install`` command for the library.

        Args:
            feature: Beginning of the message, such as ``URLs need``.
            library: Name of the missing library.
            extra: profdeck's extra that installs the library. Default: the extra with the name of the library.
        """
        command = f"pip install 'profdeck[{extra or library}]'"
        return cls(f"{feature} {library}, which is not installed. Install it with: {command}")


class BrokenPluginError(PluginError):
    """An installed plugin cannot be imported or does not follow the hook specification."""


class TraceError(ProfdeckError):
    """A trace is missing, unreadable or unsuitable for the requested operation."""


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the most similar allowed word, or an empty string if none is similar."""
    matches = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean '{matches[0]}'?" if matches else ""


def describe_error(error: BaseException) -> str:
    """Return an error's message, prefixed with the exception type unless it is a `ProfdeckError`.

    Credentials are removed.
    """
    message = to_text(error)
    return message if isinstance(error, ProfdeckError) else _redact(f"{type(error).__name__}: {message}".rstrip(": "))


_MAX_TEXT_LENGTH = 10_000
"""Longer texts are truncated. Some errors contain an entire response or array, and end up in manifests and logs."""


def to_text(value: object) -> str:
    """Convert an object to text that can be encoded as UTF-8, even if its ``__str__`` raises.

    Text longer than 10,000 characters is truncated.
    """
    try:
        text = str(value)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  # the class may come from a plugin
        text = "(no message, because __str__ failed)"
    if len(text) > _MAX_TEXT_LENGTH:
        text = f"{text[:_MAX_TEXT_LENGTH]} ... ({len(text) - _MAX_TEXT_LENGTH:,} more characters)"
    return text.encode(errors="backslashreplace").decode()


def _redact(text: str) -> str:
    from profdeck_traces.base.credentials import redact  # slow to import, because it compiles many patterns

    return redact(text)
