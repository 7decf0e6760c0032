"""Merge the traces of several processes into one trace for Perfetto and chrome://tracing, in bounded memory.

Formats: events, phases, flows and metadata follow "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Top-level members are Kineto's
(``libkineto/src/output_json.cpp`` in pytorch/kineto). Perfetto (``src/trace_processor/importers/json``) accepts 32-bit
pids, and flow ids that are numbers or hexadecimal strings.

Each source is read twice. In each pass, several sources can be read in parallel:

1. Plan each source (:mod:`.plan`): select the events to keep, and determine their processes, ids and lanes. Arrays
   with one value per event are stored as files in the temporary directory of the merge.
2. Once all plans are complete, assign pids and ids that are unique across sources, and copy the text of the events
   with these changes (:mod:`.segment`).

Deflate segments that end with a full flush can be concatenated into one gzip member (RFC 1951, RFC 1952). Several
processes can therefore write segments in any order without affecting the merged file.
"""

from __future__ import annotations

from profdeck_traces.merge.merging import merge_traces
from profdeck_traces.merge.source import EventFilter, MergeSource

__all__ = ["EventFilter", "MergeSource", "merge_traces"]
