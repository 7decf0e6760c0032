"""Collectives that ranks run on their hosts: gloo's, which torch shows as annotations of gloo's own threads.

They are called ``gloo:all_reduce`` and the like, and say nothing of their process group (``ProcessGroupGloo.cpp`` in
pytorch). So they count where torch says that there is one group alone.
"""

from __future__ import annotations

import re

import numpy as np

from profdeck_traces.reading.columns import ANNOTATION, Columns
from profdeck_traces.reading.trace import Trace

ONLY_GROUP = "gloo"
"""What the process group is called."""
# Of these no rank can leave one before all have come; the root of a broadcast can.
_MEETS_ALL = re.compile(r"gloo:(?:(?:sparse_)?all_?(?:reduce|gather|to_all)\w*|_?reduce_scatter\w*|barrier)")


def host_collectives(trace: Trace) -> Columns:
    """Return the collectives of hosts in a trace; none where they may be of several process groups."""
    annotations = trace.annotations
    if trace.process_groups != 1:
        return annotations[:0]
    meets = trace.tables.names_of_categories(frozenset({ANNOTATION}))
    meets[meets] = [_MEETS_ALL.fullmatch(trace.tables.names[code]) is not None for code in np.flatnonzero(meets)]
    return annotations[meets[annotations.name]]
