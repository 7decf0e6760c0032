"""Removes credentials from text that is printed, logged, recorded or raised."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

MASK = "***"
"""Text that replaces a credential."""

_SHORTEST = 4
"""Minimum length for a part of a URL to be masked in other text. Shorter parts also occur in ordinary words."""
_PORT = r"""(?!:|\d*(?:[/\s?\#'",;)\]}]|$))"""
_USER = re.compile(
    rf"""
    (?<=://)(?:
        [^\s/@]*:{_PORT}(?:(?!://)[^\s@])*@(?:(?!://)\S)*@  # a slash and an @ in the password
        |[^\s/]*@                                          # the last @ before the path ends the password
        |[^\s/@:]*:{_PORT}(?:(?!://)[^\s@])*@               # a slash in the password; a port has only digits
    )
    |(?<=(?<!:)//)[^\s/@:]+:{_PORT}(?:(?!//)[^\s@])*@(?:[^\s/@]*@)*  # a URL without its scheme
    |(?<=:/)[^\s/@:]+:[^\s/]*@                             # pathlib removes the second slash of a URL
    """,
    re.VERBOSE,
)
_ENCODED_USER = re.compile(r"(?<=:)%2F%2F[^\s/]*%40|(?<=%3A)%2F%2F[^\s/]*%40", re.IGNORECASE)
"""User and password of a URL that is percent-encoded inside another URL."""
_QUERY = re.compile(
    r"""((?<=[a-z0-9+.-])://(?:(?!://)[^\s?#"'<>])*)(?:\?[^\s"'<>]*?|\#[^\s"'<>]*=[^\s"'<>]*?)(?=[.,:;)\]}]*(?:[\s"'<>]|$))""",
    re.IGNORECASE,
)
_PATH = re.compile(r"""(?<=:/)[^\s?#"'<>]+""")  # pathlib removes the second slash of a URL
_KEYS = r"pass(?:word|wd|phrase)|secret|token|signature|credential|(?:api|access|account|private|storage)[_-]?key|_pwd"
# The lookbehind keeps matching time linear in word length. Words in error messages can be many kilobytes long.
_KEY = rf"(?<![\w-])[\w-]*(?:{_KEYS})"
_VALUE = r"""(?:b(?=["']))?(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|(?!\d+\b|\$)["']?[^\s"'&,;)]+)"""
_PATH_PARAMETER = re.compile(
    rf""";[\w.-]*(?:{_KEYS}|sig|sas|jwt|auth|session(?:id)?|key)=[^\s;/?#"'<>]*[^\s;/?#"'<>.,:)\]}}]""",
    re.IGNORECASE,
)
"""Path segment parameter (RFC 3986, section 3.3) whose name suggests a credential."""
_WORD = r"""(?![a-z]+(?:'s)?[ ]+[^\s=]|(?:none|null|true|false)\b|//|[()\[\]{}<*])"""
"""Lookahead that rejects prose, such as ``token: expected a string``, and values that cannot be credentials."""
_ASSIGNMENTS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"""({_KEY}(?:["']?\s?=|["']\s?:)\s?)({_VALUE})""",
        rf"""({_KEY}[ ]?:[ \t]{{0,4}})({_WORD}{_VALUE})""",
        rf"""((?<![\w-])--[\w-]*(?:{_KEYS})(?:["'],)?[ ])({_WORD}{_VALUE})""",
    )
)
_SCHEME = r"""(?:(?:bearer|basic|digest|token|[a-z][\w-]*(?=[ ]+[^\s"',;]{6}))[ ]+)?"""
_PARAMETERS = r"""(?:[;,][ ]?[\w-]+=(?:"[^"\n]*"|[^\s"',;]+))*"""
_HEADER = re.compile(
    r"""((?:authorization|cookie|(?<![a-z-])x-[a-z-]*(?:key|token))["']?\s*[:=]\s*(?:b(?=["']))?["']?"""
    rf"""{_SCHEME})[^\s"',;]+(?:"[^"\n]*")?{_PARAMETERS}|(bearer\s+)[^\s"',;]{{8,}}""",
    re.IGNORECASE,
)
_KNOWN_FORMATS = re.compile(
    r"""(?<![\w-])(?:
        hf_(?=[a-z]*\d)[a-z0-9]{10,}|hf_[a-z]{30,}  # Hugging Face
        |sk-(?=[a-z_-]*\d)[\w-]{16,}                # OpenAI, Anthropic and others
        |gh[oprsu]_[a-z0-9]{16,}|github_pat_\w{16,}
        |glpat-[\w-]{16,}
        |(?-i:(?:AKIA|ASIA)[A-Z0-9]{16})              # AWS
        |AIza[\w-]{30,}                              # Google
        |xox[abeprs]-[\w-]{10,}                      # Slack
        |eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*          # JSON Web Token
    )(?![\w-])""",
    re.IGNORECASE | re.VERBOSE,
)
_SECRET_KEY = re.compile(rf"(?:^|[_.-])(?:{_KEYS}|authorization)$", re.IGNORECASE)


def redact(text: str, *secrets: str) -> str:
    """Remove credentials from text: users, passwords and queries of URLs, and values of headers and variables.

    In URL paths, only parameters whose name suggests a credential are removed, such as ``;sig=abc``.

    Args:
        text: The text.
        secrets: Known credentials, or URLs that contain some. They are removed in any encoding.
    """
    for secret in sorted(secrets, key=len, reverse=True):
        if secret in text and "://" in secret:
            text = text.replace(secret, redact_url(secret))
    parts = {form for secret in secrets for part in _secret_parts(secret) for form in (part, unquote(part))}
    for part in sorted(parts, key=len, reverse=True):
        if len(part) >= _SHORTEST:
            text = text.replace(part, MASK)
    if "@" in text or "%40" in text:
        text = _ENCODED_USER.sub(f"%2F%2F{MASK}%40", _USER.sub(f"{MASK}@", text))
    if "://" in text:
        text = _QUERY.sub(r"\1", text)
    if ";" in text:
        text = _PATH.sub(_remove_parameters, text)
    for assignment in _ASSIGNMENTS:
        text = assignment.sub(_mask_value, text)
    return _KNOWN_FORMATS.sub(MASK, _HEADER.sub(_mask_header, text))


def redact_url(url: str) -> str:
    """Remove credentials from a URL.

    The user and password are replaced with ``***``. The query, the fragment and path parameters with credentials are
    removed.

    In a chained URL, such as ``simplecache::ftp://host/file``, every URL is processed.
    """
    # `_USER` stops at whitespace, but a password that was read from a file can end with a line break.
    for match in reversed([*_USER.finditer(re.sub(r"\s", "_", url))]):
        url = f"{url[: match.start()]}{MASK}@{url[match.end() :]}"
    return _PATH.sub(_remove_parameters, re.sub(r"[?#].*$", "", url, flags=re.DOTALL))


def redact_values(data: Any, key: str = "") -> Any:
    """Return a copy of plain data without credentials.

    Args:
        data: Mappings, lists and scalars.
        key: Key under which the data is stored. If it is a key such as ``api_key``, the data is a credential.
    """
    match data:
        case str():
            return MASK if data and _SECRET_KEY.search(key) else redact(data)
        case Mapping():
            return {name: redact_values(value, str(name)) for name, value in data.items()}
        case list() | tuple():
            return type(data)(redact_values(value, key) for value in data)
    return data


def contains_credentials(data: Any) -> bool:
    """Return whether `redact_values` would change the data."""
    return bool(redact_values(data) != data)


def _secret_parts(secret: str) -> Iterable[str]:
    """Return the user, password, path parameters and query values of a URL. Return any other text unchanged."""
    if "://" not in secret:
        return [secret]
    found = [match[0] for match in _USER.finditer(secret)]
    found += re.findall(r"[?#].*$", _USER.sub("", secret), re.DOTALL)
    found += [match[0][1:] for match in _PATH_PARAMETER.finditer(secret)]
    return [value for text in found for part in re.split(r"[?#&]", text) for value in _values(part)]


def _values(part: str) -> Iterable[str]:
    """Return the credentials in ``user:password@`` or ``key=value``: the text, and its parts between separators."""
    text = part.removesuffix("@")
    complete = text.partition("=" if "=" in text else ":")[2]
    return [complete, *re.split(r"[@:=]", text)]


def _remove_parameters(path: re.Match[str]) -> str:
    return _PATH_PARAMETER.sub("", path[0])


def _mask_value(match: re.Match[str]) -> str:
    value = match[2].removeprefix("b")
    quote = value[0] if value[0] in "\"'" else ""
    prefix = match[2][: len(match[2]) - len(value)] if quote else ""
    return f"{match[1]}{prefix}{quote}{MASK}{quote if value.endswith(quote, 1) else ''}"


def _mask_header(match: re.Match[str]) -> str:
    return f"{match[1] or match[2]}{MASK}"
