"""Decodes events in the form in which Kineto writes them, which is that of most traces.

Format: ``libkineto/src/output_json.cpp``. Times are microseconds with three digits behind the point. Since 2024 they
count from a base in the head of the file; some releases before counted from 1970, which is more than a float can tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from profdeck.traces.reading.phases import any_with


class Complete(msgspec.Struct, tag_field="ph", tag="X", gc=False):
    """A complete event."""

    cat: str
    name: str
    pid: int | str
    tid: int | str
    ts: float
    dur: float = 0.0


class CompleteOnDevice(Complete, tag_field="ph", tag="X", gc=False):
    """The same with a duration, which every event on a device has."""

    dur: float


class CompleteAsWritten(msgspec.Struct, tag_field="ph", tag="X", gc=False):
    """A complete event with the text of its times."""

    cat: str
    name: str
    pid: int | str
    tid: int | str
    ts: msgspec.Raw
    dur: msgspec.Raw = msgspec.Raw(b"0")


class CompleteOnDeviceAsWritten(CompleteAsWritten, tag_field="ph", tag="X", gc=False):
    """The same with a duration."""

    dur: msgspec.Raw


KinetoEvent = Complete | CompleteAsWritten
KinetoType = type[Complete] | type[CompleteAsWritten]
AS_WRITTEN: dict[KinetoType, KinetoType] = {
    Complete: CompleteAsWritten,
    CompleteOnDevice: CompleteOnDeviceAsWritten,
}
"""Types that lose no digit, by those that may."""


def _decoder(complete: KinetoType) -> Callable[[memoryview | bytes], list[Any]]:
    events: Any = list[any_with(complete)]  # type: ignore[misc]
    return msgspec.json.Decoder(events).decode


DECODERS = {kind: _decoder(kind) for pair in AS_WRITTEN.items() for kind in pair}
"""What decodes an array of events of any phase, by the type of complete ones.

It raises `msgspec.DecodeError`, `UnicodeDecodeError` or `RecursionError` where one has another form.
"""
