"""Merge the traces of several processes into one that Perfetto and chrome://tracing open, in bounded memory.

Formats: events, phases, flows and metadata are those of "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Top-level members are Kineto's
(``libkineto/src/output_json.cpp`` in pytorch/kineto). Perfetto accepts these ids
(``src/trace_processor/importers/json``): a pid of 32 bits, and a number or a hexadecimal string as the id of a flow.

Each source is read twice, both times in parallel with other sources:

1. The columns of a source become its plan (:mod:`.plan`): the events to keep, their processes, ids and lanes. Arrays
   with one value for each event are files in the temporary directory of the merge.
2. When all plans are known, pids and ids get numbers that no other source has, and the text of the events is copied
   with these changes (:mod:`.segment`).

Deflate segments that end with a full flush can be concatenated into one gzip member (RFC 1951, RFC 1952). Therefore
segments are written in any order and by several processes, and the new file is the same.
"""

from __future__ import annotations

from profdeck_traces.merge.merging import merge_traces
from profdeck_traces.merge.source import EventFilter, MergeSource

__all__ = ["EventFilter", "MergeSource", "merge_traces"]
