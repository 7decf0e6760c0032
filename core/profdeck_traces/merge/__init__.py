"""Merge the traces of several processes into one that Perfetto and chrome://tracing open, in bounded memory.

Formats: events, phases, flows and metadata are those of "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Top-level members are Kineto's
(``libkineto/src/output_json.cpp`` in pytorch/kineto). What ids Perfetto takes is in its
``src/trace_processor/importers/json``: the pid is a 32-bit number, the id of a flow a number or a hexadecimal string.

Each source becomes a segment, which knows of the others only its place and what :class:`~.rewriter.Place` says; so
segments can be written in any order and by several processes, and the new file is the same. Deflate segments that
end with a full flush can stand behind each other, as one gzip member (RFC 1951, RFC 1952).

Two ways through the events give the same answer, as in :mod:`profdeck_traces.reading.scanner`:

- whole batches, in which the text of the values is substituted where a decoder and the number of times that their
  keys occur prove each occurrence to be a member of an event (:mod:`.substitution`);
- event by event, as members whose values stay text, for all that the first way cannot prove (:mod:`.texts`).
"""

from __future__ import annotations

from profdeck_traces.merge.merging import merge_traces
from profdeck_traces.merge.source import EventFilter, MergeSource

__all__ = ["EventFilter", "MergeSource", "merge_traces"]
