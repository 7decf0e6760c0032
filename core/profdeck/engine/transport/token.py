"""The token by which the routes of a server know their clients."""

from __future__ import annotations

import os
from pathlib import Path

from profdeck.base.json_files import read_regular_file
from profdeck_traces.base.errors import ConfigError

TOKEN_VARIABLE = "PROFDECK_TOKEN"  # noqa: S105  # its name
FILE_VARIABLE = "PROFDECK_TOKEN_FILE"


def accepted_tokens() -> tuple[str, ...]:
    """Return the tokens that a server takes: those of the lines of the file, or that of the environment; maybe none.

    The file is read at each call, so that a token can be replaced while servers and clients run: add the new one as
    first line, and remove the old one when all clients send the new one.

    Raises:
        ConfigError: the file cannot be read.
    """
    file = os.environ.get(FILE_VARIABLE)
    if not file:
        token = os.environ.get(TOKEN_VARIABLE)
        return (token,) if token else ()
    try:
        lines = read_regular_file(Path(file)).decode("ascii").splitlines()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no small text of ASCII"
        raise ConfigError(f"{FILE_VARIABLE}: {file} cannot be read: {why}.") from None
    return tuple(line.strip() for line in lines if line.strip())


def own_token() -> str | None:
    """Return the token that a client sends, the first one; None if it has none.

    Raises:
        ConfigError: the file cannot be read.
    """
    return next(iter(accepted_tokens()), None)
