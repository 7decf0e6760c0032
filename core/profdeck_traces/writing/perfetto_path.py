"""Encodes the critical path of a trace as a Perfetto track. The args of each slice describe its owner.

Formats: ``debug_annotation.proto`` and ``interned_data.proto`` of google/perfetto, in addition to the messages in
:mod:`profdeck_traces.writing.perfetto_packets`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from profdeck_traces.account.model import OwnerIdentity
from profdeck_traces.account.owned_path import ARGS, OwnedPath, args_of
from profdeck_traces.analysis.critical_path import PATH_CATEGORY, PATH_NAME
from profdeck_traces.base.errors import TraceError
from profdeck_traces.reading.intervals import Int
from profdeck_traces.writing import perfetto_packets as packets
from profdeck_traces.writing.perfetto import PerfettoSource
from profdeck_traces.writing.perfetto_packets import field, interned, key, track

# InternedData
_ARG_NAMES, _ARG_VALUES = 3, 29
# TrackEvent, DebugAnnotation
_DEBUG_ANNOTATIONS, _ARG_NAME_IID, _ARG_VALUE_IID = 4, 1, 17

_FIRST_SEQUENCE = 1 << 16  # IDs up to this number are reserved for the events of the sources
_TIME_WIDTH = 9
_FIRST_RANK = -1
_BLOCK = 1 << 14


def encode_path(source: PerfettoSource, path: OwnedPath) -> Iterator[bytes]:
    """Yield a Perfetto trace with one track, ``Ranks / label / critical path``, and one slice per segment.

    The ``label`` track is the one that `profdeck_traces.writing.perfetto.encode_source` creates for the source.

    Args:
        source: Metadata of the trace.
        path: The critical path.

    Raises:
        TraceError: After the shift, a time is negative or at least 2**63 ns, which the format cannot represent.
    """
    if not len(path):
        return
    begin_ns, end_ns = path.begin_ns + source.shift_ns, path.end_ns + source.shift_ns
    if int(begin_ns[0]) < 0 or int(path.end_ns[-1]) + source.shift_ns > packets.MAX_TIME_NS:
        raise TraceError(f"{source.label}: its critical path has times outside the range of a Perfetto trace.")
    parent = (source.index + 1) * packets.UUIDS_PER_SOURCE
    uuid = parent + packets.UUIDS_PER_SOURCE // 2
    sequence = field(packets.SEQUENCE_ID, _FIRST_SEQUENCE + source.index + 1)
    yield b"".join(
        field(packets.PACKET, sequence + content)
        for content in (
            field(packets.SEQUENCE_FLAGS, packets.STATE_CLEARED),
            track(packets.ROOT_UUID, 0, packets.ROOT_NAME, 0),
            track(parent, packets.ROOT_UUID, source.label, source.sort_index),
            track(uuid, parent, PATH_NAME, _FIRST_RANK),
            field(packets.INTERNED_DATA, _interned_strings(path)),
        )
    )
    values = {text: code for code, text in enumerate(_texts(path))}
    head = sequence + field(packets.SEQUENCE_FLAGS, packets.NEEDS_STATE)
    starts = [_split(head, _begin(uuid, number, owner, values)) for number, owner in enumerate(path.owners)]
    before_end, after_end = _split(head, field(packets.TYPE, packets.SLICE_END) + field(packets.TRACK_UUID, uuid))
    for first in range(0, len(path), _BLOCK):
        block = slice(first, first + _BLOCK)
        pieces: list[bytes] = []
        of_block = zip(_varints(begin_ns[block]), _varints(end_ns[block]), path.owner[block].tolist(), strict=True)
        for begin, end, owner in of_block:
            before, after = starts[owner]
            pieces += (before, begin, after, before_end, end, after_end)
        yield b"".join(pieces)


def _varints(times_ns: Int) -> list[bytes]:
    """Encode times as varints of the same width."""
    shifts = np.arange(_TIME_WIDTH) * packets.VARINT_BITS
    digits = (times_ns[:, None] >> shifts & (packets.MORE - 1)).astype(np.uint8)
    digits[:, :-1] |= packets.MORE
    data = digits.tobytes()
    return [data[at : at + _TIME_WIDTH] for at in range(0, len(data), _TIME_WIDTH)]


def _begin(uuid: int, number: int, owner: OwnerIdentity, values: dict[str, int]) -> bytes:
    """Encode the event that starts a slice, with the fields of its owner as args."""
    args = b"".join(
        field(_DEBUG_ANNOTATIONS, field(_ARG_NAME_IID, ARGS.index(name) + 1) + field(_ARG_VALUE_IID, values[value] + 1))
        for name, value in args_of(owner).items()
    )
    event = (
        field(packets.CATEGORY_IIDS, 1)
        + field(packets.NAME_IID, number + 1)
        + field(packets.TYPE, packets.SLICE_BEGIN)
        + field(packets.TRACK_UUID, uuid)
    )
    return event + args


def _split(head: bytes, event: bytes) -> tuple[bytes, bytes]:
    """Return the bytes of an event's packet before and after the timestamp."""
    time = key(packets.TIMESTAMP, packets.VARINT)
    after = head + field(packets.TRACK_EVENT, event)
    length = len(time) + _TIME_WIDTH + len(after)
    return field(packets.PACKET, bytes(length))[:-length] + time, after


def _texts(path: OwnedPath) -> list[str]:
    return sorted({value for owner in path.owners for value in args_of(owner).values()})


def _interned_strings(path: OwnedPath) -> bytes:
    return b"".join(
        [
            interned(packets.EVENT_CATEGORIES, 0, PATH_CATEGORY),
            *(interned(packets.EVENT_NAMES, number, owner.label) for number, owner in enumerate(path.owners)),
            *(interned(_ARG_NAMES, code, name) for code, name in enumerate(ARGS)),
            *(interned(_ARG_VALUES, code, text) for code, text in enumerate(_texts(path))),
        ]
    )
