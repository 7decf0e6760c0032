"""Reader for Ascend's ``communication.json``: times and link usage of collectives and point-to-point operations.

torch_npu groups the results of CANN's msprof by step. Sources: ``CommunicationParser``
(``torch_npu/profiler/analysis/prof_view/_communication_parser.py``, the same from 2.6 to 2.14), and ``op_time_parser``
and ``HcclAnalysisTool`` of msprof (``analysis/msparser/cluster``)::

    {"step10": {"p2p": {},
                "collective": {"hcom_allReduce__445_0_1@13681369207305868445": {
                    "Communication Time Info": {"Start Timestamp(us)": 1713174287407957.0, "Elapse Time(ms)": 0.06086,
                        "Transit Time(ms)": 0.00126, "Wait Time(ms)": 0.01494, "Synchronization Time(ms)": 0.00714,
                        "Idle Time(ms)": 0.04466, ...},
                    "Communication Bandwidth Info": {"HCCS": {"Transit Size(MB)": 0.028576, "Transit Time(ms)": 0.00862,
                        "Large Packet Ratio": 0.0, "Size Distribution": {"0.004224": [6, 0.00736], ...}, ...}, ...}},
                    "Total Op Info": ...}}}

A call's name contains the operation, the last digits of its process group's ID, counters, and the complete ID. The step
key is ``step`` if the recording has no steps. 1 MB is 10^6 bytes. The size distribution maps a packet size to the
packet count and the transit time in ms. Times are for the call's main plane, links for all planes. ``SDMA`` is the sum
of HCCS, PCIE and SIO.
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
from profdeck_traces.reading.columns import MAX_NAME_LENGTH
from profdeck_traces.reading.integrity import file_size

OTHER_OPERATIONS = "(other operations)"
"""Name of the sum of all operations after the first 10,000 distinct operations."""

_MAX_OPERATIONS = 10_000
_MAX_LINKS = 100
_CHUNK_BYTES = 1 << 20
# A call with its links takes about 2 kB. If these bytes contain no complete call, the file has a different format.
_MAX_CALL_BYTES = 16 << 20
# Number of open objects after a complete call: document, step and kind.
_CALL_DEPTH = 3
_TOTAL_PREFIX = "total"  # torch_npu adds sums to the calls; their lower-case names start with this prefix
_NS_PER_US, _NS_PER_MS, _NS_PER_S = 1000, 1_000_000, 1_000_000_000
_BYTES_PER_MB = 1_000_000

# Groups: operation, last digits of the process group's ID, complete ID.
_match_name = re.compile(r"hcom_([A-Za-z]\w*?)_+(\d+)(?:_\d+)*(?:@(.+))?", re.DOTALL).fullmatch


@attrs.frozen
class Communication:
    """Contents of a ``communication.json``, summed over steps."""

    operations: tuple[CommunicationSummary, ...]
    """Sorted by total time, longest first."""
    groups: dict[str, str]
    """IDs of process groups, keyed by their last digits. Ambiguous digits are omitted."""
    problem: str | None
    """First problem in the file, as a sentence; ``None`` if the file is intact."""


# The limits allow 30 years in milliseconds, and keep sums in the range of a float.
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


_Calls = dict[str, dict[str, dict[str, msgspec.Raw]]]
"""JSON text of calls, keyed by step, kind and name."""

_decode_document = msgspec.json.Decoder(_Calls).decode
_decode_call = msgspec.json.Decoder(_Call).decode


class _CorruptFileError(Exception):
    """The remaining text cannot be parsed. The message is a sentence."""


def read_communication(path: Path, on_progress: Progress | None = None) -> Communication:
    """Sum the calls of a ``communication.json`` over its steps.

    For a corrupt file, the sums include the calls before the corruption, except those in the last MiB.

    Memory does not depend on the file size. The parser needs about 10 MB, because it reads 1 MiB of text at a time. The
    sums are limited to 10,000 distinct operations with 100 links each.

    Args:
        path: The file.
        on_progress: Called with the number of bytes read and the size of the file.

    Raises:
        TraceError: The file cannot be opened or read.
    """
    size_bytes = file_size(path)
    sums, problem = _Sums(), None
    try:
        with path.open("rb") as file:
            for kind, name, text in _read_calls(_read_chunks(file, size_bytes, on_progress)):
                call_problem = sums.add(kind, name, text)
                problem = problem or call_problem
    except _CorruptFileError as error:
        problem = str(error)
    except OSError as error:
        raise TraceError(f"Cannot read {path}: {error.strerror or error}.") from error
    return sums.result(problem and f"{path.name}: {problem}")


def _read_chunks(file: BinaryIO, size_bytes: int, on_progress: Progress | None) -> Iterator[bytes]:
    read_bytes = 0
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk
        read_bytes += len(chunk)
        if on_progress:
            on_progress(read_bytes, size_bytes)


def _read_calls(chunks: Iterator[bytes]) -> Iterator[tuple[str, str, msgspec.Raw]]:
    """Yield the kind, name and JSON text of each call.

    The document is split after the last complete call of each chunk. Closing brackets and the enclosing keys are added,
    so that each fragment is a JSON document.

    Raises:
        _CorruptFileError: The document is corrupt or truncated.
    """
    nesting = _Nesting()
    prefix, buffer, buffer_bytes, offset = b"", [], 0, 0
    for chunk in chunks:
        end = nesting.scan(chunk)
        buffer.append(chunk[:end] if end else chunk)
        buffer_bytes += len(buffer[-1])
        if buffer_bytes > _MAX_CALL_BYTES:
            raise _CorruptFileError(f"No call ends within {buffer_bytes:,} bytes after offset {offset:,}.")
        if end:
            document = _decode_fragment(prefix, buffer, b"}" * _CALL_DEPTH, offset)
            yield from _flatten_calls(document)
            step = next(reversed(document))
            prefix = f"{{{json.dumps(step)}:{{{json.dumps(next(reversed(document[step])))}:{{".encode()
            offset += buffer_bytes
            buffer, buffer_bytes = [chunk[end:]], len(chunk) - end
    if not nesting.has_text:
        raise _CorruptFileError("The file is empty.")
    if nesting.is_open:
        raise _CorruptFileError(f"The JSON is truncated at offset {offset + buffer_bytes:,}.")
    yield from _flatten_calls(_decode_fragment(prefix, buffer, b"", offset))


def _decode_fragment(prefix: bytes, buffer: list[bytes], suffix: bytes, offset: int) -> _Calls:
    text = b"".join(buffer)
    if prefix:
        text = text.lstrip().removeprefix(b",")
    try:
        return _decode_document(prefix + text + suffix)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _CorruptFileError(
            f"The text between offsets {offset:,} and {offset + len(text):,} is not JSON with steps, kinds and calls."
        ) from None


def _flatten_calls(document: _Calls) -> Iterator[tuple[str, str, msgspec.Raw]]:
    for kinds in document.values():
        for kind, calls in kinds.items():
            for name, text in calls.items():
                if not name.lower().startswith(_TOTAL_PREFIX):
                    yield kind, name, text


class _Nesting:
    """Tracks the nesting depth of a JSON document that is read in chunks."""

    _change = np.zeros(256, dtype=np.int8)
    _change[list(b"{[")] = 1
    _change[list(b"}]")] = -1

    def __init__(self) -> None:
        self.has_text = False
        self._depth = 0
        self._in_string = np.uint8(0)
        self._ends_in_escape = False

    @property
    def is_open(self) -> bool:
        """True if a string, array or object is still open after the last chunk."""
        return self._depth != 0 or bool(self._in_string)

    def scan(self, chunk: bytes) -> int:
        """Process the next chunk. Return the offset after its last complete call, or 0 if no call ends in it."""
        self.has_text = True
        text = b"_" + chunk[1:] if self._ends_in_escape else chunk
        self._ends_in_escape = False
        if b"\\" in text:
            text = re.sub(rb"\\.", b"__", text, flags=re.DOTALL)
            self._ends_in_escape = text.endswith(b"\\")
        codes = np.frombuffer(text, dtype=np.uint8)
        in_string = np.bitwise_xor.accumulate((codes == ord('"')).view(np.uint8)) ^ self._in_string
        self._in_string = in_string[-1]
        change = self._change[codes]
        brackets = np.flatnonzero(change)
        brackets = brackets[in_string[brackets] == 0]
        depth = self._depth + np.cumsum(change[brackets], dtype=np.int64)
        if len(depth):
            self._depth = int(depth[-1])
        ends = brackets[(depth == _CALL_DEPTH) & (change[brackets] < 0)]
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
    """Sums of calls, grouped by kind, operation and process group."""

    def __init__(self) -> None:
        self._operations: dict[tuple[str, str, str | None], _OperationSums] = {}
        self._groups: dict[str, str | None] = {}
        """Process group IDs, keyed by their last digits; ``None`` if several IDs share these digits."""

    def add(self, kind: str, name: str, text: msgspec.Raw) -> str | None:
        """Add a call. If the call is invalid, return a message."""
        try:
            call = _decode_call(text)
        except msgspec.ValidationError as error:
            return f"Invalid call {name[:MAX_NAME_LENGTH]}: {error}."
        operation, group = name.partition("@")[0].rstrip("_0123456789") or name, None
        if match := _match_name(name):
            operation, group = match[1], (match[3] or match[2])[:MAX_NAME_LENGTH]
            self._add_group(match[2], group)
        key = kind[:MAX_NAME_LENGTH], operation[:MAX_NAME_LENGTH], group
        if key not in self._operations and len(self._operations) >= _MAX_OPERATIONS:
            key = kind[:MAX_NAME_LENGTH], OTHER_OPERATIONS, None
        self._operations.setdefault(key, _OperationSums()).add(call)
        return None

    def result(self, problem: str | None) -> Communication:
        summaries = [sums.summary(*key) for key, sums in self._operations.items()]
        return Communication(
            operations=tuple(sorted(summaries, key=lambda operation: (-operation.total_us, operation.name))),
            groups={digits: group for digits, group in self._groups.items() if group is not None},
            problem=problem,
        )

    def _add_group(self, digits: str, group: str) -> None:
        if digits in self._groups or len(self._groups) < _MAX_OPERATIONS:
            first_group = self._groups.setdefault(digits, group)
            if first_group != group:
                self._groups[digits] = None


def _ns(time_ms: float) -> int:
    return round(time_ms * _NS_PER_MS)


def _us(time_ns: int) -> float:
    return time_ns / _NS_PER_US
