"""The token with which clients authenticate to a server's routes."""

from __future__ import annotations

import os

from profdeck.base.json_files import read_regular_file
from profdeck_traces.base.errors import ConfigError
from profdeck_traces.base.files import user_path

TOKEN_VARIABLE = "PROFDECK_TOKEN"  # noqa: S105  # the name of a variable
FILE_VARIABLE = "PROFDECK_TOKEN_FILE"


def accepted_tokens() -> tuple[str, ...]:
    """Return the tokens that a server accepts: one per line of the token file, or the token in the environment.

    The file is read at each call, so a token can be replaced while servers and clients run. Add the new token as the
    first line. Remove the old token when all clients send the new one.

    Raises:
        ConfigError: the file cannot be read.
    """
    file = os.environ.get(FILE_VARIABLE)
    if not file:
        token = os.environ.get(TOKEN_VARIABLE)
        return (token,) if token else ()
    try:
        lines = read_regular_file(user_path(file, FILE_VARIABLE)).decode("ascii").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not a small ASCII text file"
        raise ConfigError(f"{FILE_VARIABLE}: {file} cannot be read: {reason}.") from None
    return tuple(line.strip() for line in lines if line.strip())


def own_token() -> str | None:
    """Return the token that this process sends as a client, or None. If there are several, it is the first.

    Raises:
        ConfigError: the file cannot be read.
    """
    return next(iter(accepted_tokens()), None)
