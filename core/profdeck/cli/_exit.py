"""What the exit codes of the command line mean."""

from __future__ import annotations

from enum import IntEnum

from profdeck.base.errors import CaptureError, ConfigError, PluginError, ProfdeckError


class ExitCode(IntEnum):
    """The exit codes of all commands."""

    OK = 0
    """The command did what was asked, and the answer is yes, if it was a question."""
    INCOMPLETE = 1
    """A recording is not complete: `profdeck ls` found something partial, missing or failed, or none was made."""
    USAGE = 2
    """The command line or the config is wrong."""
    PLUGIN = 3
    """A plugin cannot be used: it is unknown, broken, or its library is missing or of an unsupported version."""
    UNREADABLE = 4
    """A file or directory cannot be read, or is not what the command reads."""
    REGRESSION = 5
    """`profdeck diff --fail-over` found that something got slower."""
    INTERRUPTED = 130
    """Ended by Ctrl-C."""
    BROKEN_PIPE = 141
    """Whoever read the output went away, as in ``profdeck ls RUN | head -1``."""


def exit_code(error: ProfdeckError) -> ExitCode:
    """Return the exit code that an error ends the command line with."""
    match error:
        case ConfigError():
            return ExitCode.USAGE
        case PluginError():
            return ExitCode.PLUGIN
        case CaptureError():
            return ExitCode.INCOMPLETE
        case _:
            return ExitCode.UNREADABLE
