"""Text helpers for messages."""

from __future__ import annotations

from profdeck_traces.base.text import printable


def describe_value(value: object) -> str:
    """Describe an invalid value from the host or a plugin.

    Objects other than strings and floats are described by their type, because their `repr` can fail or be long. No
    method of the value or its class is called, because subclasses of `str` and lazy proxies can raise exceptions.
    """
    cls = type(value)
    if issubclass(cls, str):
        return str.__repr__(value)[:100]  # not isinstance above: it reads `__class__`
    if issubclass(cls, float):
        return float.__repr__(value)  # as above
    return f"an object of type {printable(type.__getattribute__(cls, '__qualname__'))}"


def sentence(text: str) -> str:
    """Capitalize the first word and end the text with a full stop, unless it ends with other punctuation.

    A first word that is a name, such as a URL or a config key, is not changed.
    """
    first = text.partition(" ")[0].rstrip(",.")
    capitalized = text[:1].upper() + text[1:] if first.isalpha() else text
    return capitalized if capitalized.endswith((".", "?", "!")) else f"{capitalized}."
