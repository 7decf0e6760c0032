"""Rows of the operator, annotation, module and Python frame that caused each event."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.attribution.forward import backward_operators, forward_rows
from profdeck_traces.attribution.frames import is_user_frame, module_class
from profdeck_traces.attribution.launches import launch_rows
from profdeck_traces.reading.columns import ANNOTATION, DEVICE_CATEGORIES, DEVICE_PROCESSES, OPERATOR, PYTHON
from profdeck_traces.reading.events import Events, Mask
from profdeck_traces.reading.intervals import parents

Rows = NDArray[np.int32]
_MAX_MODULE_DEPTH = 64
_SEPARATOR = " > "


class Attribution:
    """Operator, annotation, module and Python frame of each complete event.

    The properties are arrays with a row of the trace's events, or -1, for each complete event. They are computed on
    first use, and each needs 4 bytes per event. A host event belongs to the innermost event of a kind that is open on
    its thread when it starts. A device event belongs to that of its launch.
    """

    def __init__(self, events: Events, marks: NDArray[np.integer[Any]]) -> None:
        """Prepare the attribution.

        Args:
            events: Events of the trace.
            marks: Rows of the annotations, including operators that mark steps.
        """
        self._events = events
        is_mark = np.zeros(events.complete, np.bool_)
        is_mark[marks] = True
        self._is_annotation = is_mark & events.has_category({ANNOTATION, OPERATOR})
        self.is_operator: Mask = events.has_category({OPERATOR}) & ~is_mark
        """True for each operator that is not a step."""
        self.is_device: Mask = events.has_category(DEVICE_CATEGORIES | DEVICE_PROCESSES)
        """True for each kernel, copy and fill."""

    @functools.cached_property
    def launch(self) -> Rows:
        """The runtime call that launched each device event."""
        return launch_rows(self._events)

    @functools.cached_property
    def host(self) -> Rows:
        """The launch of each device event, and each other event itself."""
        return np.where(self.is_device, self.launch, np.arange(self._events.complete, dtype=np.int32))

    @functools.cached_property
    def operator(self) -> Rows:
        """The innermost operator."""
        nested = self._at_host(self._events.innermost(self.is_operator))
        return self._with_external_ids(nested)

    @functools.cached_property
    def annotation(self) -> Rows:
        """The innermost annotation, which can be a step."""
        return self._at_host(self._events.innermost(self._is_annotation))

    @functools.cached_property
    def forward(self) -> Rows:
        """The forward operator of the innermost backward operator."""
        backward = self._events.innermost(backward_operators(self._events, self.is_operator))
        return self._at_host(_taken(forward_rows(self._events, self.is_operator), backward))

    @functools.cached_property
    def module(self) -> Rows:
        """The innermost frame of an ``nn.Module`` around the forward operator, or around the event."""
        return self._at_source(self._events.innermost(self._is_module))

    @functools.cached_property
    def frame(self) -> Rows:
        """The innermost frame of user code around the forward operator, or around the event."""
        return self._at_source(self._events.innermost(self._is_python & self._events.has_name(is_user_frame)))

    @property
    def has_frames(self) -> bool:
        """True if Python frames were recorded."""
        return bool(self._is_python.any())

    @functools.cached_property
    def module_paths(self) -> tuple[Rows, list[str]]:
        """Path of the module of each event, such as ``GPT > Block > Linear``: a code or -1, and the paths.

        Paths have classes without instance numbers, so that runs can be compared.
        """
        events = self._events
        rows = np.flatnonzero(self._is_module)
        above = parents(events.track[rows], events.start_ns[rows], events.end_ns[rows]).tolist()
        codes: dict[tuple[int, int], int] = {}
        paths: list[tuple[str, ...]] = []
        of_row: list[int] = []
        for outer, name in zip(above, events.name[rows].tolist(), strict=True):
            outer_code = of_row[outer] if outer >= 0 else -1
            code = codes.get((outer_code, name))
            if code is None:
                outer_path = paths[outer_code] if outer_code >= 0 else ()
                if len(outer_path) >= _MAX_MODULE_DEPTH:
                    code = outer_code
                else:
                    code = len(paths)
                    paths.append((*outer_path, module_class(events.names[name]) or ""))
                codes[outer_code, name] = code
            of_row.append(code)
        code_of_row = np.full(events.complete, -1, np.int32)
        code_of_row[rows] = of_row
        return _taken(code_of_row, self.module), [_SEPARATOR.join(path) for path in paths]

    @functools.cached_property
    def _is_python(self) -> Mask:
        return self._events.has_category({PYTHON})

    @functools.cached_property
    def _is_module(self) -> Mask:
        return self._is_python & self._events.has_name(lambda name: module_class(name) is not None)

    def _at_host(self, values: Rows) -> Rows:
        return _taken(values, self.host)

    def _at_source(self, values: Rows) -> Rows:
        """Return the values of the forward operators; of events without one, the values of `host`."""
        return np.where(self.forward >= 0, _taken(values, self.forward), self._at_host(values))

    def _with_external_ids(self, nested: Rows) -> Rows:
        """Add the operators that device events state as ``External id``, if their launch is in no operator.

        Some versions of Kineto write other numbers there, such as the ``correlation``. The ids are used only if they
        agree with the nesting of all launches.
        """
        external = self._events.arg("External id")
        operators = np.flatnonzero(self.is_operator & (external > 0))
        work = np.flatnonzero(self.is_device & (external > 0))
        if not len(operators) or not len(work) or (external == self._events.arg("correlation"))[work].all():
            return nested
        operators = operators[np.argsort(external[operators], kind="stable")]
        keys = external[operators]
        index = np.minimum(np.searchsorted(keys, external[work]), len(keys) - 1)
        matches = keys[index] == external[work]
        stated = operators[index[matches]]
        work = work[matches]
        is_nested = nested[work] >= 0
        if (nested[work] != stated)[is_nested].any():
            return nested
        nested[work] = stated
        return nested


def _taken(values: Rows, rows: Rows) -> Rows:
    """Return the values of some rows; -1 for row -1."""
    return np.where(rows >= 0, values[rows], np.int32(-1)) if len(values) else values
