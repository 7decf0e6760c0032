"""TLS settings for connections to servers: trusted certificate authorities and the client certificate."""

from __future__ import annotations

import functools
import os
import ssl

from profdeck_traces.base.errors import ConfigError
from profdeck_traces.base.files import user_path

AUTHORITY_VARIABLE = "PROFDECK_TLS_AUTHORITY"
CERTIFICATE_VARIABLE = "PROFDECK_TLS_CERTIFICATE"
KEY_VARIABLE = "PROFDECK_TLS_KEY"

_FileVersion = tuple[str, int] | None
"""Path and modification time in nanoseconds; None if the variable is not set."""


def tls_context() -> ssl.SSLContext:
    """Return the TLS context for connections. It is cached until a file named in the environment is replaced.

    Raises:
        ConfigError: a file named in the environment cannot be read or is invalid.
    """
    certificate, key = _file(CERTIFICATE_VARIABLE), _file(KEY_VARIABLE)
    if key is not None and certificate is None:
        raise ConfigError(f"{KEY_VARIABLE} is set without its certificate. Set {CERTIFICATE_VARIABLE}, too.")
    return _context(_file(AUTHORITY_VARIABLE), certificate, key)


def _file(variable: str) -> _FileVersion:
    setting = os.environ.get(variable)
    if not setting:
        return None
    path = user_path(setting, variable)
    try:
        return str(path), path.stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(f"{variable}: {path} cannot be read: {error.strerror}.") from None


@functools.lru_cache(maxsize=1)
def _context(authority: _FileVersion, certificate: _FileVersion, key: _FileVersion) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if authority is not None:
        try:
            context.load_verify_locations(authority[0])
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(_describe_invalid(AUTHORITY_VARIABLE, authority[0], "certificates", error)) from None
    if certificate is not None:
        try:
            context.load_cert_chain(certificate[0], key[0] if key else None, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            expected = f"a certificate{'' if key else ' and its key'}"
            raise ConfigError(_describe_invalid(CERTIFICATE_VARIABLE, certificate[0], expected, error)) from None
    return context


def _no_password() -> str:
    """Return an empty password for encrypted keys, which prevents a prompt on the terminal."""
    return ""


def _describe_invalid(variable: str, path: str, expected: str, error: OSError) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else error.strerror or str(error)
    return f"{variable}: {path} does not contain {expected} in a usable PEM format: {reason}."
