"""Encodes trace readings, so that later commands do not need to read the traces again."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec
import numpy as np
from isal import isal_zlib

from profdeck_traces.analysis.classes import Classifier
from profdeck_traces.analysis.collectives import Collectives
from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.analysis.rank_reading import RankReading
from profdeck_traces.analysis.step_names import StepNames
from profdeck_traces.analysis.typical_step import candidates
from profdeck_traces.inputs.sources import TraceSource

# isal's stubs declare the class as an instance.
_InflateError: type[Exception] = isal_zlib.error  # type: ignore[assignment]
_ARRAYS = ("name", "group", "start_ns", "end_ns")
_INTEGER = "<i8"
_MAX_BYTES = 1 << 28
"""Maximum size of a decompressed reading."""


class _Calls(msgspec.Struct):
    """Collective calls of a trace. Arrays are stored as bytes of 64-bit integers."""

    names: list[str]
    groups: list[str]
    meant: dict[str, str]
    rank: int | None
    warm_from_ns: int | None
    arrays: list[bytes]


class _Kept(msgspec.Struct):
    summary: RankSummary
    calls: _Calls
    origin_ns: int
    base_ns: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Kept).decode


def question(classifier: Classifier, step_names: StepNames) -> list[Any]:
    """Return what a reading depends on besides its trace, as plain data."""
    rules = [(rule.category, rule.pattern.pattern, rule.pattern.flags) for rule in classifier.extra]
    return ["summary", rules, step_names.patterns]


def about(source: TraceSource) -> list[Any]:
    """Return the part of the cache key that comes from a trace's facts.

    Other facts are not part of the key, because `RankReading.with_facts` adds them after decoding.
    """
    return [source.cold_first_step, source.last_step]


def to_bytes(reading: RankReading) -> bytes | None:
    """Encode a reading without source facts. Return ``None`` if it has text or numbers that cannot be encoded."""
    calls = reading.collectives
    kept = _Kept(
        attrs.evolve(reading.summary, path=""),  # so that copies of a trace have equal results
        _Calls(
            list(calls.names),
            list(calls.groups),
            dict(calls.meant),
            calls.rank,
            calls.warm_from_ns,
            [getattr(calls, name).astype(_INTEGER).tobytes() for name in _ARRAYS],
        ),
        reading.origin_ns,
        reading.base_ns,
    )
    try:
        return isal_zlib.compress(_encode(kept), 1)
    except (ValueError, OverflowError):  # half a pair of surrogates, or more than 64 bits
        return None


def from_bytes(content: bytes, source: TraceSource) -> RankReading:
    """Decode a reading and add the path and facts of a source.

    The content may come from a file that other users can write, so inconsistent content is rejected.

    Raises:
        ValueError: The content is not an encoded reading.
    """
    try:
        inflater = isal_zlib.decompressobj()
        data = inflater.decompress(content, _MAX_BYTES)
        if not inflater.eof:
            raise ValueError("truncated, or too large")
        kept = _decode(data)
    except (_InflateError, msgspec.MsgspecError, UnicodeError) as error:
        raise ValueError(str(error)) from error
    summary, calls = kept.summary, kept.calls
    name, group, start_ns, end_ns = (np.frombuffer(data, dtype=_INTEGER) for data in calls.arrays)
    if not len(name) == len(group) == len(start_ns) == len(end_ns):
        raise ValueError("arrays of different lengths")
    for codes, texts in ((name, calls.names), (group, calls.groups)):
        if len(codes) and not 0 <= codes.min() <= codes.max() < len(texts):
            raise ValueError("a code without a text")
    if summary.timelines and len(summary.timelines) != 1 + len(candidates(summary)):
        raise ValueError("a step without a picture")
    return RankReading(
        summary,
        Collectives(
            path=summary.path,
            rank=calls.rank,
            warm_from_ns=calls.warm_from_ns,
            names=calls.names,
            groups=calls.groups,
            meant=calls.meant,
            name=name,
            group=group,
            start_ns=start_ns,
            end_ns=end_ns,
        ),
        kept.origin_ns,
        kept.base_ns,
    ).with_facts(source)
