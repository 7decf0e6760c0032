"""Ascend's ``communication.json``: how long each call of a collective or message took, and what it sent over links.

Format: ``CommunicationParser`` in torch_npu (``torch_npu/profiler/analysis/prof_view/_communication_parser.py``, the
same from 2.6 to 2.14), which splits by step what CANN's msprof worked out (``op_time_parser``, ``HcclAnalysisTool`` in
``analysis/msparser/cluster``)::

    {"step10": {"p2p": {},
                "collective": {"hcom_allReduce__445_0_1@13681369207305868445": {
                    "Communication Time Info": {"Start Timestamp(us)": 1713174287407957.0, "Elapse Time(ms)": 0.06086,
                        "Transit Time(ms)": 0.00126, "Wait Time(ms)": 0.01494, "Synchronization Time(ms)": 0.00714,
                        "Idle Time(ms)": 0.04466, ...},
                    "Communication Bandwidth Info": {"HCCS": {"Transit Size(MB)": 0.028576, "Transit Time(ms)": 0.00862,
                        "Large Packet Ratio": 0.0, "Size Distribution": {"0.004224": [6, 0.00736], ...}, ...}, ...}},
                    "Total Op Info": ...}}}

The name ends in the last digits of the process group's number, counters, and the number in full. The key is ``step``
where the recording has no steps. MB are 10^6 bytes; a size comes with how many packets had it and their time in
ms. Times are those of the call's main plane, links those of all planes. ``SDMA`` is the sum of HCCS, PCIE and SIO.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import attrs
import msgspec
import numpy as np

from profdeck.plugin import TraceError
from profdeck_traces import CommunicationSummary, LinkSummary, Progress
from profdeck_traces.reading.column_builder import MAX_NAME_LENGTH
from profdeck_traces.reading.integrity import file_size

OTHER_OPERATIONS = "(other operations)"
"""Stands for the operations beyond the first 10,000 distinct ones."""

_MAX_OPERATIONS = 10_000
_MAX_LINKS = 100
_CHUNK_BYTES = 1 << 20
# One call with its links takes 2 kB; where none ends within so much, this is another file.
_MAX_CALL_BYTES = 16 << 20
# A call lies in the document, its step and its kind, which have to be closed behind it.
_DEPTH_OF_CALLS = 3
_TOTAL = "total"  # in small letters, how the name of the sums begins that torch_npu adds to the calls
_NS_PER_US, _NS_PER_MS, _NS_PER_S = 1000, 1_000_000, 1_000_000_000
_BYTES_PER_MB = 1_000_000

# The operation, the last digits of the number of the process group, counters, the number in full.
_match_name = re.compile(r"hcom_([A-Za-z]\w*?)_+(\d+)(?:_\d+)*(?:@(.+))?", re.DOTALL).fullmatch


@attrs.frozen
class Communication:
    """What a ``communication.json`` says."""

    operations: tuple[CommunicationSummary, ...]
    """By total time, longest first."""
    groups: dict[str, str]
    """The numbers of process groups by their last digits, where only one ends in them."""
    problem: str | None
    """Where the file ends to be readable, or what is odd in it, in one sentence; ``None`` if it is whole."""


# 30 years of milliseconds: sums of such numbers stay within those of a float.
_Number = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]


class _Times(msgspec.Struct, gc=False):
    elapse: _Number = msgspec.field(default=0.0, name="Elapse Time(ms)")
    transit: _Number = msgspec.field(default=0.0, name="Transit Time(ms)")
    wait: _Number = msgspec.field(default=0.0, name="Wait Time(ms)")
    synchronisation: _Number = msgspec.field(default=0.0, name="Synchronization Time(ms)")
    idle: _Number = msgspec.field(default=0.0, name="Idle Time(ms)")


class _Link(msgspec.Struct, gc=False):
    size: _Number = msgspec.field(default=0.0, name="Transit Size(MB)")
    time: _Number = msgspec.field(default=0.0, name="Transit Time(ms)")
    large: _Number = msgspec.field(default=0.0, name="Large Packet Ratio")
    packets: dict[str, list[_Number]] = msgspec.field(default_factory=dict, name="Size Distribution")


class _Call(msgspec.Struct, gc=False):
    times: _Times = msgspec.field(name="Communication Time Info")
    links: dict[str, _Link] = msgspec.field(default_factory=dict, name="Communication Bandwidth Info")


_decode_part = msgspec.json.Decoder(dict[str, dict[str, dict[str, msgspec.Raw]]]).decode
_decode_call = msgspec.json.Decoder(_Call).decode


class _DamagedError(Exception):
    """The text ends to be what it should be; the message is a sentence."""


def read_communication(path: Path, on_progress: Progress | None = None) -> Communication:
    """Add up the calls of a ``communication.json`` over its steps.

    Of a damaged file counts what comes before the damage, but for the last MiB. Memory is bounded, whatever the size
    of the file: some 10 MB for 1 MiB of its text at a time, and up to 10,000 distinct operations of process groups
    with 100 links each.

    Args:
        path: The file.
        on_progress: Called with the bytes read so far and the size of the file.

    Raises:
        TraceError: The file cannot be opened or read.
    """
    size_bytes = file_size(path)
    sums, problem = _Sums(), None
    try:
        with path.open("rb") as file:
            for kind, name, text in _calls(_chunks(file, size_bytes, on_progress)):
                odd = sums.add(kind, name, text)
                problem = problem or odd
    except _DamagedError as error:
        problem = str(error)
    except OSError as error:
        raise TraceError(f"Cannot read {path}: {error.strerror or error}.") from error
    return sums.result(problem and f"{path.name}: {problem}")


def _chunks(file: BinaryIO, size_bytes: int, on_progress: Progress | None) -> Iterator[bytes]:
    read = 0
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk
        read += len(chunk)
        if on_progress:
            on_progress(read, size_bytes)


def _calls(chunks: Iterator[bytes]) -> Iterator[tuple[str, str, msgspec.Raw]]:
    """Yield kind, name and text of all calls, from parts of the document that are documents of their own.

    A part ends behind the last call of a chunk; then what encloses the call is closed, and opened again for the next.

    Raises:
        _DamagedError: The document is broken, or ends too early.
    """
    nesting = _Nesting()
    opened, held, held_bytes, offset = b"", [], 0, 0
    for chunk in chunks:
        end = nesting.follow(chunk)
        held.append(chunk[:end] if end else chunk)
        held_bytes += len(held[-1])
        if held_bytes > _MAX_CALL_BYTES:
            raise _DamagedError(f"No call ends in the {held_bytes:,} bytes from offset {offset:,} on.")
        if end:
            part = _decoded(opened, held, b"}" * _DEPTH_OF_CALLS, offset)
            yield from _calls_of(part)
            step = next(reversed(part))
            opened = f"{{{json.dumps(step)}:{{{json.dumps(next(reversed(part[step])))}:{{".encode()
            offset += held_bytes
            held, held_bytes = [chunk[end:]], len(chunk) - end
    if not nesting.seen:
        raise _DamagedError("The file is empty.")
    if nesting.open:
        raise _DamagedError(f"The JSON is not closed: it ends at offset {offset + held_bytes:,}.")
    yield from _calls_of(_decoded(opened, held, b"", offset))


def _decoded(
    opened: bytes, held: list[bytes], closing: bytes, offset: int
) -> dict[str, dict[str, dict[str, msgspec.Raw]]]:
    text = b"".join(held)
    if opened:
        text = text.lstrip().removeprefix(b",")
    try:
        return _decode_part(opened + text + closing)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _DamagedError(
            f"There is no JSON of steps, kinds and calls between the offsets {offset:,} and {offset + len(text):,}."
        ) from None


def _calls_of(part: dict[str, dict[str, dict[str, msgspec.Raw]]]) -> Iterator[tuple[str, str, msgspec.Raw]]:
    for kinds in part.values():
        for kind, calls in kinds.items():
            for name, text in calls.items():
                if not name.lower().startswith(_TOTAL):
                    yield kind, name, text


class _Nesting:
    """Follows how deep JSON is nested that arrives in pieces."""

    _change = np.zeros(256, dtype=np.int8)
    _change[list(b"{[")] = 1
    _change[list(b"}]")] = -1

    def __init__(self) -> None:
        self.seen = False
        self._depth = 0
        self._in_string = np.uint8(0)
        self._escapes = False

    @property
    def open(self) -> bool:
        """Whether something is open at the end of the pieces so far."""
        return self._depth != 0 or bool(self._in_string)

    def follow(self, piece: bytes) -> int:
        """Take the next piece; return where in it the last call ends, 0 if none does."""
        self.seen = True
        text = b"_" + piece[1:] if self._escapes else piece
        self._escapes = False
        if b"\\" in text:
            text = re.sub(rb"\\.", b"__", text, flags=re.DOTALL)
            self._escapes = text.endswith(b"\\")
        codes = np.frombuffer(text, dtype=np.uint8)
        in_string = np.bitwise_xor.accumulate((codes == ord('"')).view(np.uint8)) ^ self._in_string
        self._in_string = in_string[-1]
        change = self._change[codes]
        brackets = np.flatnonzero(change)
        brackets = brackets[in_string[brackets] == 0]
        depth = self._depth + np.cumsum(change[brackets], dtype=np.int64)
        if len(depth):
            self._depth = int(depth[-1])
        ends = brackets[(depth == _DEPTH_OF_CALLS) & (change[brackets] < 0)]
        return int(ends[-1]) + 1 if len(ends) else 0


@attrs.define
class _LinkSums:
    size_bytes: int = 0
    time_ns: int = 0
    packets: int = 0
    large_packets: int = 0


@attrs.define
class _OperationSums:
    count: int = 0
    max_ns: int = 0
    elapse_ns: int = 0
    transit_ns: int = 0
    wait_ns: int = 0
    synchronisation_ns: int = 0
    idle_ns: int = 0
    links: dict[str, _LinkSums] = attrs.field(factory=dict)

    def add(self, call: _Call) -> None:
        times = call.times
        elapse_ns = _ns(times.elapse)
        self.count += 1
        self.max_ns = max(self.max_ns, elapse_ns)
        self.elapse_ns += elapse_ns
        self.transit_ns += _ns(times.transit)
        self.wait_ns += _ns(times.wait)
        self.synchronisation_ns += _ns(times.synchronisation)
        self.idle_ns += _ns(times.idle)
        for name, link in call.links.items():
            if (link.size or link.time or link.packets) and (name in self.links or len(self.links) < _MAX_LINKS):
                sums = self.links.setdefault(name[:MAX_NAME_LENGTH], _LinkSums())
                packets = sum(int(size[0]) for size in link.packets.values() if size)
                sums.size_bytes += round(link.size * _BYTES_PER_MB)
                sums.time_ns += _ns(link.time)
                sums.packets += packets
                sums.large_packets += round(link.large * packets)

    def summary(self, kind: str, operation: str, group: str | None) -> CommunicationSummary:
        return CommunicationSummary(
            name=operation,
            kind=kind,
            group=group,
            count=self.count,
            total_us=_us(self.elapse_ns),
            max_us=_us(self.max_ns),
            transit_us=_us(self.transit_ns),
            wait_us=_us(self.wait_ns),
            synchronisation_us=_us(self.synchronisation_ns),
            idle_us=_us(self.idle_ns),
            links=tuple(
                LinkSummary(
                    link=link,
                    size_bytes=sums.size_bytes,
                    transit_us=_us(sums.time_ns),
                    bytes_per_s=sums.size_bytes * _NS_PER_S / sums.time_ns if sums.time_ns > 0 else None,
                    packets=sums.packets or None,
                    large_packet_share=sums.large_packets / sums.packets if sums.packets else None,
                )
                for link, sums in sorted(self.links.items(), key=lambda item: (-item[1].size_bytes, item[0]))
            ),
        )


class _Sums:
    """Adds up calls by kind, operation and process group."""

    def __init__(self) -> None:
        self._operations: dict[tuple[str, str, str | None], _OperationSums] = {}
        self._groups: dict[str, str | None] = {}  # by their last digits; None where several end in them

    def add(self, kind: str, name: str, text: msgspec.Raw) -> str | None:
        """Take a call; return what is wrong with it."""
        try:
            call = _decode_call(text)
        except msgspec.ValidationError as error:
            return f"{name[:MAX_NAME_LENGTH]} is not as torch_npu writes it: {error}."
        operation, group = name.partition("@")[0].rstrip("_0123456789") or name, None
        if found := _match_name(name):
            operation, group = found[1], (found[3] or found[2])[:MAX_NAME_LENGTH]
            self._add_group(found[2], group)
        key = kind[:MAX_NAME_LENGTH], operation[:MAX_NAME_LENGTH], group
        if key not in self._operations and len(self._operations) >= _MAX_OPERATIONS:
            key = kind[:MAX_NAME_LENGTH], OTHER_OPERATIONS, None
        self._operations.setdefault(key, _OperationSums()).add(call)
        return None

    def result(self, problem: str | None) -> Communication:
        """Return the sums."""
        found = [sums.summary(*key) for key, sums in self._operations.items()]
        return Communication(
            operations=tuple(sorted(found, key=lambda operation: (-operation.total_us, operation.name))),
            groups={digits: group for digits, group in self._groups.items() if group is not None},
            problem=problem,
        )

    def _add_group(self, digits: str, group: str) -> None:
        if digits in self._groups or len(self._groups) < _MAX_OPERATIONS:
            known = self._groups.setdefault(digits, group)
            if known != group:
                self._groups[digits] = None


def _ns(time_ms: float) -> int:
    return round(time_ms * _NS_PER_MS)


def _us(time_ns: int) -> float:
    return time_ns / _NS_PER_US
