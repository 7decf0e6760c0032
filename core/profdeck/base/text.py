"""Text helpers for messages."""

from __future__ import annotations


def describe_value(value: object) -> str:
    """Describe an invalid value from the host or a plugin.

    Objects other than strings and floats are described by their type, because their `repr` can fail or be long.
    """
    return repr(value)[:100] if isinstance(value, str | float) else f"an object of type {type(value).__qualname__}"


def sentence(text: str) -> str:
    """Capitalize the first word and end the text with a full stop, unless it ends with other punctuation.

    A first word that is a name, such as a URL or a config key, is not changed.
    """
    first = text.partition(" ")[0].rstrip(",.")
    capitalized = text[:1].upper() + text[1:] if first.isalpha() else text
    return capitalized if capitalized.endswith((".", "?", "!")) else f"{capitalized}."
