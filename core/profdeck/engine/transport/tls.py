"""TLS to servers of engines: who is believed, and how this process proves who it is."""

from __future__ import annotations

import functools
import os
import ssl
from pathlib import Path

from profdeck_traces.base.errors import ConfigError

AUTHORITY_VARIABLE = "PROFDECK_TLS_AUTHORITY"
CERTIFICATE_VARIABLE = "PROFDECK_TLS_CERTIFICATE"
KEY_VARIABLE = "PROFDECK_TLS_KEY"

_File = tuple[str, int] | None
"""Its path, and when it was modified."""


def tls_context() -> ssl.SSLContext:
    """Return what connections are made with: the same one until a file that the environment names is replaced.

    Raises:
        ConfigError: such a file cannot be read, or holds something else.
    """
    certificate, key = _file(CERTIFICATE_VARIABLE), _file(KEY_VARIABLE)
    if key is not None and certificate is None:
        raise ConfigError(f"{KEY_VARIABLE} is the key of a certificate: name that by {CERTIFICATE_VARIABLE}.")
    return _context(_file(AUTHORITY_VARIABLE), certificate, key)


def _file(variable: str) -> _File:
    path = os.environ.get(variable)
    if not path:
        return None
    try:
        return path, Path(path).stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(f"{variable}: {path} cannot be read: {error.strerror}.") from None


@functools.lru_cache(maxsize=1)
def _context(authority: _File, certificate: _File, key: _File) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if authority is not None:
        try:
            context.load_verify_locations(authority[0])
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(_wrong(AUTHORITY_VARIABLE, authority[0], "certificates", error)) from None
    if certificate is not None:
        try:
            context.load_cert_chain(certificate[0], key[0] if key else None, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            what = f"a certificate{'' if key else ' and its key'}"
            raise ConfigError(_wrong(CERTIFICATE_VARIABLE, certificate[0], what, error)) from None
    return context


def _no_password() -> str:
    """Answer what else would be asked for at the terminal."""
    return ""


def _wrong(variable: str, path: str, what: str, error: OSError) -> str:
    why = error.reason if isinstance(error, ssl.SSLError) and error.reason else error.strerror or str(error)
    return f"{variable}: {path} does not hold {what} in PEM that can be used: {why}."
