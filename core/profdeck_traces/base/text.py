"""Formatting for messages, and escaping of untrusted text."""

from __future__ import annotations

import os
import re
import shlex
from contextlib import suppress
from pathlib import Path

CONTROL_CHARACTERS = "\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
"""Character class of control and bidirectional formatting characters, except tabs and line feeds."""
_UNSAFE = re.compile(f"[\n{CONTROL_CHARACTERS}\ud800-\udfff]")
# CI systems interpret `::error::text` at the start of a line and `##[error]text` anywhere in a log as commands. See
# https://github.com/actions/runner/blob/main/src/Runner.Common/ActionCommand.cs
_COMMAND = re.compile(r"^(\s*):(?=:[a-z-]+(?:\s.*)?::)|#(?=#(?:vso)?\[)", re.IGNORECASE)


def plural(count: int, noun: str) -> str:
    """Format a count with its noun, such as ``1 trace`` or ``1,000 traces``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """Escape untrusted text for one line of output.

    Line breaks, other control characters, bidirectional formatting characters, surrogates and the first character of a
    CI command are replaced by their escape sequences. Tabs are kept.
    """
    text = _UNSAFE.sub(lambda match: repr(match[0])[1:-1], text)
    return _COMMAND.sub(lambda match: f"{match[1] or ''}\\x{ord(match[0][-1]):x}", text)


def short_path(path: Path) -> str:
    """Return a path relative to the current directory, or unchanged if it is outside that directory."""
    with suppress(OSError, ValueError):  # OSError: the current directory was deleted
        return str(path.relative_to(Path.cwd()))
    return str(path)


def shell_word(text: str) -> str:
    """Quote a path or URL for a command that the user pastes into bash or zsh."""
    if text.startswith(("~", "-")):  # profdeck expands ~ even if it is quoted; a leading - would be an option
        text = f"./{text}"
    if printable(text) == text:
        return shlex.quote(text)
    return "$'{}'".format("".join(map(_ansi_c, os.fsencode(text))))


def shell_path(path: Path) -> str:
    """Return `short_path`, quoted for a command that the user pastes into a shell."""
    return shell_word(short_path(path))


def _ansi_c(byte: int) -> str:
    """Escape a byte in bash's ANSI-C quoting."""
    character = chr(byte)
    return character if character.isascii() and character.isprintable() and character not in "\\'" else f"\\x{byte:02x}"
