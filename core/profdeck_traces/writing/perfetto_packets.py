"""Encodes the Protocol Buffers messages in Perfetto traces: fields, varints and track descriptors.

Formats: https://protobuf.dev/programming-guides/encoding and google/perfetto, ``protos/perfetto/trace``.
"""

from __future__ import annotations

# Trace
PACKET = 1
# TracePacket
TIMESTAMP, SEQUENCE_ID, TRACK_EVENT, INTERNED_DATA, SEQUENCE_FLAGS, TRACK_DESCRIPTOR = 8, 10, 11, 12, 13, 60
STATE_CLEARED, NEEDS_STATE = 1, 2
# InternedData, EventCategory and EventName
EVENT_CATEGORIES, EVENT_NAMES = 1, 2
IID, STRING = 1, 2
# TrackEvent
CATEGORY_IIDS, TYPE, NAME_IID, TRACK_UUID = 3, 9, 10, 11
SLICE_BEGIN, SLICE_END = 1, 2
# TrackDescriptor
_UUID, _NAME, _PARENT_UUID, _CHILD_ORDERING, _SIBLING_ORDER_RANK, _SIBLING_MERGE_BEHAVIOR = 1, 2, 5, 11, 12, 15
_ORDER_EXPLICIT, _MERGE_NONE = 3, 2

VARINT, _BYTES = 0, 2
VARINT_BITS, MORE = 7, 0x80

ROOT_NAME, ROOT_UUID = "Ranks", 1
UUIDS_PER_SOURCE = 1 << 32
MAX_TIME_NS = 2**63 - 1


def track(uuid: int, parent: int, name: str, rank: int) -> bytes:
    """Return the packet field that describes a track.

    Args:
        uuid: ID of the track.
        parent: ID of the parent track, or 0 if there is none.
        name: Name of the track.
        rank: Sort position among the tracks with the same parent, as a 32-bit integer.
    """
    return field(
        TRACK_DESCRIPTOR,
        field(_UUID, uuid)
        + (field(_PARENT_UUID, parent) if parent else b"")
        + field(_NAME, name)
        + field(_CHILD_ORDERING, _ORDER_EXPLICIT)
        + field(_SIBLING_ORDER_RANK, rank)
        # By default, viewers merge siblings with the same name.
        + field(_SIBLING_MERGE_BEHAVIOR, _MERGE_NONE),
    )


def interned(kind: int, code: int, text: str) -> bytes:
    """Return the field that defines an interned string. The ID of the string is `code` + 1."""
    return field(kind, field(IID, code + 1) + field(STRING, text))


def field(number: int, value: int | bytes | str) -> bytes:
    """Encode a field. An integer becomes a varint. Bytes and strings are prefixed with their length."""
    if isinstance(value, int):
        return key(number, VARINT) + varint(value)
    data = value.encode(errors="replace") if isinstance(value, str) else value
    return key(number, _BYTES) + varint(len(data)) + data


def key(number: int, wire_type: int) -> bytes:
    """Encode the number and wire type of a field."""
    return varint(number << 3 | wire_type)


def varint(value: int, width: int = 1) -> bytes:
    """Encode a varint of at least `width` bytes. Negative numbers are encoded as 64-bit two's complement."""
    rest = value % 2**64
    encoded = bytearray()
    while rest >= MORE or len(encoded) < width - 1:
        encoded.append(rest & (MORE - 1) | MORE)
        rest >>= VARINT_BITS
    encoded.append(rest)
    return bytes(encoded)
