"""Decodes events in the form in which Kineto writes them, which is that of most traces.

Format: ``libkineto/src/output_json.cpp``. Times are microseconds with three digits behind the point. Since 2024 they
count from a base in the head of the file; some releases before counted from 1970, which is more than a float can tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from profdeck_traces.reading.phases import any_with


class Complete(msgspec.Struct, tag_field="ph", tag="X", gc=False):
    """A complete event."""

    cat: str
    name: str
    pid: int | str
    tid: int | str
    ts: float
    dur: float = math.nan


class CompleteOnDevice(Complete, tag_field="ph", tag="X", gc=False):
    """The same with a duration, which every event on a device has."""

    dur: float


class CompleteAsWritten(msgspec.Struct, tag_field="ph", tag="X", gc=False):
    """A complete event with the text of its time, which may be more than a float can tell."""

    cat: str
    name: str
    pid: int | str
    tid: int | str
    ts: msgspec.Raw
    dur: float = math.nan


class CompleteOnDeviceAsWritten(CompleteAsWritten, tag_field="ph", tag="X", gc=False):
    """The same with a duration."""

    dur: float


class OperatorArgs(msgspec.Struct, gc=False):
    """What the args of an operator say of its inputs."""

    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b""))


class CompleteWithArgs(Complete, tag_field="ph", tag="X", gc=False):
    """A complete event with its args."""

    args: OperatorArgs | None = None


class CompleteWithArgsAsWritten(CompleteAsWritten, tag_field="ph", tag="X", gc=False):
    """The same with the text of its time."""

    args: OperatorArgs | None = None


KinetoEvent = Complete | CompleteAsWritten
EventWithArgs = CompleteWithArgs | CompleteWithArgsAsWritten
KinetoType = type[Complete] | type[CompleteAsWritten]
AS_WRITTEN: dict[KinetoType, KinetoType] = {
    Complete: CompleteAsWritten,
    CompleteOnDevice: CompleteOnDeviceAsWritten,
}
"""Types that lose no digit, by those that may."""
WITH_ARGS: dict[KinetoType, type[EventWithArgs]] = {
    Complete: CompleteWithArgs,
    CompleteAsWritten: CompleteWithArgsAsWritten,
}
"""Types that have args, by those that have none: to decode them takes a tenth longer."""


def _decoder(complete: KinetoType) -> Callable[[memoryview | bytes], list[Any]]:
    events: Any = list[any_with(complete)]  # type: ignore[misc]
    return msgspec.json.Decoder(events).decode


DECODERS = {kind: _decoder(kind) for pairs in (AS_WRITTEN, WITH_ARGS) for pair in pairs.items() for kind in pair}
"""What decodes an array of events of any phase, by the type of complete ones.

It raises `msgspec.DecodeError`, `UnicodeDecodeError` or `RecursionError` where one has another form.
"""
