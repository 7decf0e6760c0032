"""Events as members whose values stay JSON text, so that none of them changes unless it has to."""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

import msgspec

Event = dict[str, msgspec.Raw]

# Beyond these a number is no time, and to add to it exactly could take any amount of memory.
_MAX_TIME_DIGITS = 40
_MAX_INTEGER = 2**64 - 1

_decode_events = msgspec.json.Decoder(list[Event]).decode
# The values are only measured, and Python refuses to read integers of more than 4,300 digits.
_measure = json.JSONDecoder(parse_int=len, parse_float=len).raw_decode
_skip_space = re.compile(r"[ \t\n\r]*").match
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


def split_array(data: bytes) -> list[Event] | None:
    """Return the objects in a JSON array, with the text of their members; ``None``: it is not JSON, or too deep."""
    try:
        return _decode_events(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return _split_array_loosely(data.decode("utf-8", "surrogatepass"))
    except (ValueError, IndexError, RecursionError):
        return None


def _split_array_loosely(text: str) -> list[Event]:
    """Do the same for elements that are no objects, for ``NaN`` and ``Infinity`` and for lone surrogates."""
    _, end = _measure(text)
    if text[end:].strip(" \t\n\r"):
        raise ValueError(text[end:])
    events: list[Event] = []
    at = _space(text, 1)
    while text[at] != "]":
        if text[at] == "{":
            event, at = _split_object(text, at)
            events.append(event)
        else:
            _, at = _measure(text, at)
        at = _space(text, at)
        if text[at] == ",":
            at = _space(text, at + 1)
    return events


def _split_object(text: str, at: int) -> tuple[Event, int]:
    """Return the members of the object at ``at``, which is known to be one, and where it ends."""
    event: Event = {}
    at = _space(text, at + 1)
    while text[at] != "}":
        key, at = _measure(text, at)
        at = _space(text, _space(text, at) + 1)  # the colon
        _, end = _measure(text, at)
        event[key] = msgspec.Raw(text[at:end].encode("utf-8", "surrogatepass"))
        at = _space(text, end)
        if text[at] == ",":
            at = _space(text, at + 1)
    return event, at + 1


def _space(text: str, at: int) -> int:
    found = _skip_space(text, at)
    return found.end() if found else at


def members_of(text: msgspec.Raw | None) -> Event | None:
    """Return the members, if it is an object."""
    objects = None if text is None else split_array(b"[%b]" % bytes(text))
    return objects[0] if objects else None


def value_of(text: bytes) -> Any:
    """Return the value of JSON text; ``None`` if there is none."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return json.loads(text.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None


def text_of(text: bytes) -> str:
    """Return what a JSON string says, and the text of any other value."""
    value = value_of(text)
    return value if isinstance(value, str) else text.decode("utf-8", "surrogatepass")


def number_of(text: bytes) -> Decimal | None:
    """Return the value of a JSON number of a sensible length."""
    if len(text) > _MAX_TIME_DIGITS or not _NUMBER.fullmatch(text):
        return None
    try:
        number = Decimal(text.decode())
    except InvalidOperation:  # the exponent is beyond all bounds
        return None
    return number if not number or abs(number.adjusted()) <= _MAX_TIME_DIGITS else None


def integer_of(text: bytes) -> int | None:
    """Return a JSON number that is whole and has 64 bits at most; Python's tools may have written 5 as 5.0."""
    number = number_of(text)
    if number is None or abs(number) > _MAX_INTEGER or number != int(number):
        return None
    return int(number)


def later(text: bytes, shift_us: Decimal) -> bytes:
    """Return a time, a JSON number or a string with one, moved exactly; anything else as it is."""
    quote = text[:1] if text[:1] == b'"' else b""
    number = number_of(text.strip(b'"'))
    if number is None:
        return text
    with localcontext(prec=4 * _MAX_TIME_DIGITS):
        return b"%b%b%b" % (quote, format(number + shift_us, "f").encode(), quote)


def labelled(label: str, name: str) -> str:
    """Return the name of a process with the label of its source."""
    return f"{label}: {name}" if name else label


def encoded(value: Any) -> bytes:
    """Return JSON text."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # lone surrogates: JSON has escapes for them
        return json.dumps(value).encode()


def encoded_all(events: list[Event], between: bytes, inside: bytes) -> bytes:
    """Return JSON objects with commas between them.

    Args:
        events: The members of each.
        between: A comma, and white space.
        inside: White space in front of the first member.
    """
    return between.join(b"{%b%b" % (inside, encoded_event(event)[1:]) for event in events)


def encoded_event(event: Event) -> bytes:
    """Return a JSON object."""
    try:
        return msgspec.json.encode(event)
    except UnicodeEncodeError:  # in a key
        return b"{%b}" % b",".join(b"%b:%b" % (encoded(key), bytes(value)) for key, value in event.items())


def metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    """Return a metadata event."""
    members = {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}
    return {key: msgspec.Raw(encoded(value)) for key, value in members.items()}
