"""The errors that profdeck raises. Every message says what is wrong, where, what is allowed and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Self

from profdeck.base.outcome import Outcome


class ProfdeckError(Exception):
    """Root of all errors that profdeck raises on purpose; the command line prints it without a traceback."""


class ConfigError(ProfdeckError):
    """The config, an option or a command-line value is wrong."""


class PluginError(ProfdeckError):
    """A backend or listener cannot be used. Subclasses identify the cause."""


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


class IncompatibleLibraryError(PluginError):
    """The library is installed in a version that the plugin does not support."""


class BrokenPluginError(PluginError):
    """The plugin is installed and fails to import or does not follow the hook specification."""


class CaptureError(ProfdeckError):
    """A capture could not start, step or stop."""


class TargetError(CaptureError):
    """A target refused the request or could not be reached. `outcome` is the error code; `fix` suggests a solution."""

    def __init__(self, text: str, outcome: Outcome, fix: str | None = None) -> None:
        """Args:
        text: the whole message.
        outcome: how the operation came out.
        fix: what to do, where more is known than `Outcome.fix` says.
        """
        super().__init__(text)
        self.outcome = outcome
        self.fix = outcome.fix if fix is None else fix

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.outcome, self.fix)  # pickled between processes


class LeaseError(CaptureError):
    """Another recording is using the device."""

    def __init__(self, text: str, held: str = "a device") -> None:
        """Args:
        text: the whole message.
        held: what is held and by whom, as the waiting process says it.
        """
        super().__init__(text)
        self.held = held


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


def target_error(error: BaseException) -> TargetError:
    """Return the `TargetError` in an error's chain of causes, or a new `TargetError` with the error's message."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TargetError):
            return cause
        if isinstance(cause, TimeoutError):
            return TargetError(describe_error(error), Outcome.TIMED_OUT)
        cause = cause.__cause__
    return TargetError(describe_error(error), Outcome.REFUSED)
