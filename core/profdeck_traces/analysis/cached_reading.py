"""A reading of a trace as bytes and back, so that the next question needs no trace."""

from __future__ import annotations

from collections.abc import Sequence
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
from profdeck_traces.inputs.sources import TraceSource

# isal's stubs declare the class as an instance.
_InflateError: type[Exception] = isal_zlib.error  # type: ignore[assignment]
_ARRAYS = ("name", "group", "start_ns", "end_ns")


class _Calls(msgspec.Struct):
    """The communication of a trace, its arrays as types and bytes."""

    names: list[str]
    groups: list[str]
    meant: dict[str, str]
    rank: int | None
    anchor_offset_ns: int | None
    warm_from_ns: int | None
    arrays: list[tuple[str, bytes]]


class _Kept(msgspec.Struct):
    summary: RankSummary
    calls: _Calls


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Kept).decode


def question(classifier: Classifier, step_names: StepNames) -> list[Any]:
    """Return what a reading depends on besides its trace, as plain data."""
    rules = [(rule.category, rule.pattern.pattern, rule.pattern.flags) for rule in classifier.extra]
    return ["summary", rules, step_names.patterns]


def about(source: TraceSource) -> list[Any]:
    """Return the part of the cache key that comes from a trace's facts.

    The run's path is excluded, so that a cached reading stays valid after the run is moved.
    """
    return [None if source.facts is None else repr(attrs.evolve(source.facts, run=""))]


def to_bytes(reading: RankReading) -> bytes | None:
    """Write a reading; ``None`` of one with a text or a number that no profiler writes."""
    calls = reading.collectives
    arrays: Sequence[np.ndarray[Any, Any]] = [np.ascontiguousarray(getattr(calls, name)) for name in _ARRAYS]
    kept = _Kept(
        reading.summary,
        _Calls(
            list(calls.names),
            list(calls.groups),
            dict(calls.meant),
            calls.rank,
            calls.anchor_offset_ns,
            calls.warm_from_ns,
            [(array.dtype.str, array.tobytes()) for array in arrays],
        ),
    )
    try:
        return isal_zlib.compress(_encode(kept), 1)
    except (ValueError, OverflowError):  # half a pair of surrogates, or more than 64 bits
        return None


def from_bytes(content: bytes, source: TraceSource) -> RankReading:
    """Return what was written, as of a source: files may be known by other paths than when they were read.

    Raises:
        ValueError: That is none.
    """
    try:
        kept = _decode(isal_zlib.decompress(content))
    except (_InflateError, msgspec.MsgspecError, UnicodeError) as error:
        raise ValueError(str(error)) from error
    summary = attrs.evolve(kept.summary, path=str(source.path), run=source.facts.run if source.facts else None)
    calls = kept.calls
    arrays = {name: np.frombuffer(data, dtype=kind) for name, (kind, data) in zip(_ARRAYS, calls.arrays, strict=True)}
    return RankReading(
        summary,
        Collectives(
            path=summary.path,
            rank=calls.rank,
            role=summary.role,
            replica=summary.replica,
            capture=summary.capture,
            run=summary.run,
            host=summary.host,
            anchor_offset_ns=calls.anchor_offset_ns,
            warm_from_ns=calls.warm_from_ns,
            names=calls.names,
            groups=calls.groups,
            meant=calls.meant,
            **arrays,
        ),
    )
