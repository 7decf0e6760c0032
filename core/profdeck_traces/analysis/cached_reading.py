"""Encodes trace readings so that later commands do not have to read the traces again.

Pictures are encoded separately because only reports need them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import attrs
import msgspec
import numpy as np
from isal import isal_zlib

from profdeck_traces.account.arrivals import MAX_SEGMENTS, Arrivals
from profdeck_traces.account.idle_periods import ARRAYS as IDLE_ARRAYS, IdlePeriods
from profdeck_traces.account.model import OwnerKey
from profdeck_traces.analysis.classes import Classifier
from profdeck_traces.analysis.collectives import Collectives
from profdeck_traces.analysis.detail_model import Timeline
from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.analysis.pictures import check_pictures
from profdeck_traces.analysis.rank_reading import RankReading
from profdeck_traces.analysis.step_names import StepNames
from profdeck_traces.analysis.typical_step import candidates
from profdeck_traces.inputs.sources import TraceSource

# isal's stubs declare the class as an instance.
_InflateError: type[Exception] = isal_zlib.error  # type: ignore[assignment]
_T = TypeVar("_T")
_ARRAYS = ("name", "group", "start_ns", "end_ns")
_ARRIVAL_ARRAYS = ("call_key", "counts", "path_call", "path_begin", "path_end")
_VERSION = 5
"""Version of the encoding. Increment it whenever the encoding, calls, arrivals or idle periods change."""
_INTEGER = "<i8"
_MAX_BYTES = 1 << 28
"""Maximum size of a decompressed reading."""
_LEVEL = 6
"""zlib compression level. isal at level 1 is faster, but its output is 25 % larger."""


class _Calls(msgspec.Struct):
    """Collective calls of a trace. Arrays are stored as bytes of 64-bit integers."""

    names: list[str]
    groups: list[str]
    meant: dict[str, str]
    sizes: dict[str, int]
    rank: int | None
    warm_from_ns: int | None
    arrays: list[bytes]
    step: bytes | None


class _Arrivals(msgspec.Struct):
    """Encoded paths to the collective calls. Arrays are stored as the bytes of 64-bit integers."""

    keys: list[OwnerKey]
    is_complete: bool
    packed: bytes
    arrays: list[bytes]


class _Idle(msgspec.Struct):
    """Encoded idle periods. Arrays are stored as the bytes of 64-bit integers."""

    keys: list[OwnerKey]
    arrays: list[bytes]


class _Kept(msgspec.Struct):
    summary: RankSummary
    calls: _Calls
    arrivals: _Arrivals
    idle: _Idle
    origin_ns: int
    base_ns: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Kept).decode
_decode_pictures = msgspec.msgpack.Decoder(tuple[Timeline, ...]).decode


def question(classifier: Classifier, step_names: StepNames) -> list[Any]:
    """Return what a reading depends on besides its trace, as plain data."""
    rules = [(rule.category, rule.pattern.pattern, rule.pattern.flags) for rule in classifier.extra]
    return ["summary", _VERSION, rules, step_names.patterns]


def about(source: TraceSource) -> list[Any]:
    """Return the part of the cache key that depends on a trace's facts and graph captures.

    Facts that `RankReading.with_facts` adds after decoding are not part of the key.
    """
    captures = [(str(path), *_state(path), source.captures is not None) for path in source.graph_captures]
    return [source.cold_first_step, source.last_step, *([captures] if captures else [])]


def _state(path: Path) -> tuple[int, int]:
    """Return a file's size and modification time, or zeros if they cannot be determined."""
    try:
        about = path.stat()
    except OSError:
        return 0, 0
    return about.st_size, about.st_mtime_ns


def to_bytes(reading: RankReading) -> bytes | None:
    """Encode a reading, excluding its pictures and the facts about its source.

    Returns:
        The encoded reading, or ``None`` if it contains text or numbers that cannot be encoded.
    """
    calls, arrivals, idle = reading.collectives, reading.arrivals, reading.idle
    kept = _Kept(
        attrs.evolve(reading.summary, path="", timelines=()),  # no path, so that copies of a trace encode identically
        _Calls(
            list(calls.names),
            list(calls.groups),
            dict(calls.meant),
            dict(calls.sizes),
            calls.rank,
            calls.warm_from_ns,
            [getattr(calls, name).astype(_INTEGER).tobytes() for name in _ARRAYS],
            None if calls.step is None else calls.step.astype(_INTEGER).tobytes(),
        ),
        _Arrivals(
            list(arrivals.keys),
            arrivals.is_complete,
            arrivals.packed,
            [getattr(arrivals, name).astype(_INTEGER).tobytes() for name in _ARRIVAL_ARRAYS],
        ),
        _Idle(list(idle.keys), [getattr(idle, name).astype(_INTEGER).tobytes() for name in IDLE_ARRAYS]),
        reading.origin_ns,
        reading.base_ns,
    )
    return _deflated(kept)


def pictures_to_bytes(reading: RankReading) -> bytes | None:
    """Encode a reading's pictures in the same way as `to_bytes`."""
    return _deflated(reading.summary.timelines)


def _deflated(value: Any) -> bytes | None:
    try:
        return zlib.compress(_encode(value), _LEVEL)
    except (ValueError, OverflowError):  # half a pair of surrogates, or more than 64 bits
        return None


def _inflated(content: bytes, decode: Callable[[bytes], _T]) -> _T:
    """Decode the result of `_deflated`.

    Raises:
        ValueError: The content is invalid or too large.
    """
    try:
        inflater = isal_zlib.decompressobj()
        data = inflater.decompress(content, _MAX_BYTES)
        if not inflater.eof:
            raise ValueError("truncated, or too large")
        return decode(data)
    except (_InflateError, msgspec.MsgspecError, UnicodeError) as error:
        raise ValueError(str(error)) from error


def from_bytes(content: bytes, source: TraceSource, pictures: bytes | None = None) -> RankReading:
    """Decode a reading, and add the path of its source and the facts about the source.

    Inconsistent content is rejected because other users may be able to write the file that it comes from.

    Args:
        content: Result of `to_bytes`.
        source: The trace that was read.
        pictures: Result of `pictures_to_bytes`. Default: return a reading without pictures.

    Raises:
        ValueError: The content is not an encoded reading.
    """
    kept = _inflated(content, _decode)
    summary, calls = kept.summary, kept.calls
    if pictures is not None:
        summary = attrs.evolve(summary, timelines=_inflated(pictures, _decode_pictures))
    name, group, start_ns, end_ns = (np.frombuffer(data, dtype=_INTEGER) for data in calls.arrays)
    step = None if calls.step is None else np.frombuffer(calls.step, dtype=_INTEGER)
    if not len(name) == len(group) == len(start_ns) == len(end_ns) or (step is not None and len(step) != len(name)):
        raise ValueError("arrays of different lengths")
    for codes, texts in ((name, calls.names), (group, calls.groups)):
        if len(codes) and not 0 <= codes.min() <= codes.max() < len(texts):
            raise ValueError("a code without a text")
    if summary.timelines and len(summary.timelines) != 1 + len(candidates(summary)):
        raise ValueError("a step without a picture")
    check_pictures(summary.timelines)
    return RankReading(
        summary,
        Collectives(
            path=summary.path,
            rank=calls.rank,
            warm_from_ns=calls.warm_from_ns,
            names=calls.names,
            groups=calls.groups,
            meant=calls.meant,
            sizes=calls.sizes,
            name=name,
            group=group,
            start_ns=start_ns,
            end_ns=end_ns,
            step=step,
        ),
        _arrivals(kept.arrivals, len(name)),
        _idle(kept.idle),
        kept.origin_ns,
        kept.base_ns,
    ).with_facts(source)


def _arrivals(kept: _Arrivals, calls: int) -> Arrivals:
    """Decode the paths to `calls` collective calls.

    Raises:
        ValueError: The arrays are inconsistent.
    """
    arrays = [np.frombuffer(data, dtype=_INTEGER) for data in kept.arrays]
    call_key, counts, path_call, path_begin, path_end = arrays
    if not len(call_key) == len(counts) == calls or not len(path_call) == len(path_begin) == len(path_end):
        raise ValueError("arrays of different lengths")
    if calls and not (-1 <= call_key.min() <= call_key.max() < len(kept.keys) and counts.min() >= 0):
        raise ValueError("a call without an owner")
    if counts.sum() > MAX_SEGMENTS or (len(path_call) and not 0 <= path_call.min() <= path_call.max() < calls):
        raise ValueError("invalid paths")
    if len(path_call) and call_key[path_call].min() < 0:
        raise ValueError("a path without an owner")
    arrivals = Arrivals(
        keys=kept.keys,
        call_key=call_key,
        counts=counts,
        packed=kept.packed,
        path_call=path_call,
        path_begin=path_begin,
        path_end=path_end,
        is_complete=kept.is_complete,
    )
    _ = arrivals.segments  # raises ValueError if the compressed data is invalid
    return arrivals


def _idle(kept: _Idle) -> IdlePeriods:
    """Decode the idle periods.

    Raises:
        ValueError: The arrays are inconsistent.
    """
    begin, end, owner, segment_begin, segment_end = (np.frombuffer(data, dtype=_INTEGER) for data in kept.arrays)
    if len(begin) != len(end) or not len(owner) == len(segment_begin) == len(segment_end):
        raise ValueError("arrays of different lengths")
    if len(owner) and not 0 <= owner.min() <= owner.max() < len(kept.keys):
        raise ValueError("a segment without an owner")
    return IdlePeriods(
        keys=kept.keys,
        begin=begin,
        end=end,
        segment_owner=owner,
        segment_begin=segment_begin,
        segment_end=segment_end,
    )
