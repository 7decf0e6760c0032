"""Protocol Buffers messages of Perfetto traces: fields, varints and track descriptors.

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
        uuid: Id of the track.
        parent: Id of the track above; 0 for none.
        name: Name of the track.
        rank: Position among the tracks with the same parent, in 32 bits.
    """
    return field(
        TRACK_DESCRIPTOR,
        field(_UUID, uuid)
        + (field(_PARENT_UUID, parent) if parent else b"")
        + field(_NAME, name)
        + field(_CHILD_ORDERING, _ORDER_EXPLICIT)
        + field(_SIBLING_ORDER_RANK, rank)
        # By default viewers show siblings of the same name as one.
        + field(_SIBLING_MERGE_BEHAVIOR, _MERGE_NONE),
    )


def interned(kind: int, code: int, text: str) -> bytes:
    """Return the field that defines a string. Its id is the code plus 1."""
    return field(kind, field(IID, code + 1) + field(STRING, text))


def field(number: int, value: int | bytes | str) -> bytes:
    """Encode a field: an integer as a varint, other values with their length."""
    if isinstance(value, int):
        return key(number, VARINT) + varint(value)
    data = value.encode(errors="replace") if isinstance(value, str) else value
    return key(number, _BYTES) + varint(len(data)) + data


def key(number: int, wire_type: int) -> bytes:
    """Encode the number and type of a field."""
    return varint(number << 3 | wire_type)


def varint(value: int, width: int = 1) -> bytes:
    """Return a varint of at least this width; negative numbers are those of 64 bits."""
    rest = value % 2**64
    encoded = bytearray()
    while rest >= MORE or len(encoded) < width - 1:
        encoded.append(rest & (MORE - 1) | MORE)
        rest >>= VARINT_BITS
    encoded.append(rest)
    return bytes(encoded)
