"""Determines which operator, annotation, module and Python frame caused each event."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.attribution.forward import backward_operators, forward_rows
from profdeck_traces.attribution.frames import is_user_frame, module_class
from profdeck_traces.attribution.launches import launch_rows
from profdeck_traces.reading.columns import ANNOTATION, DEVICE_WORK, OPERATOR, PYTHON
from profdeck_traces.reading.events import Events, Mask
from profdeck_traces.reading.intervals import Int, parents

Rows = NDArray[np.int32]
_MAX_MODULE_DEPTH = 64
_SEPARATOR = " > "


class CapturedCalls(NamedTuple):
    """Calls that captured graph nodes, and the device events recorded when those nodes ran."""

    first: int
    """First row of the events that were recorded during graph captures."""
    work: Int
    """Rows of the device events."""
    call: Int
    """Row of the captured call of each event in `work`."""


class Attribution:
    """Attributes each complete event to an operator, annotation, module and Python frame.

    Most properties are arrays that hold, for each complete event, the row of another event, or -1. These arrays are
    computed on first use and take 4 bytes per event. A host event belongs to the innermost operator (or annotation,
    module or frame) that is open on its thread when it starts. A device event belongs to the same events as its launch.
    """

    def __init__(self, events: Events, is_step: Callable[[str], bool], captured: CapturedCalls | None = None) -> None:
        """Prepare the attribution.

        Args:
            events: Events of the trace.
            is_step: Returns whether the name of an annotation or operator denotes a step. Events never belong to steps.
            captured: Captured calls of the device events inside graphs. The events around such a call take precedence
                over those around the graph launch.
        """
        self.events = events
        self._captured = captured
        self.first_captured = events.complete if captured is None else captured.first
        """First row of the events that were recorded during graph captures."""
        is_annotation, is_operator = events.has_category({ANNOTATION}), events.has_category({OPERATOR})
        self._is_step = step = events.with_name(is_annotation | is_operator, is_step)
        self._is_annotation: Mask = is_annotation & ~step
        self.is_operator: Mask = is_operator & ~step
        """True for each operator that is not a step."""
        self.is_device: Mask = events.has_category(DEVICE_WORK)
        """True for each kernel, copy and fill."""

    @functools.cached_property
    def launch(self) -> Rows:
        """The host event that launched each device event."""
        return self.events.storage.stored(launch_rows(self.events))

    @functools.cached_property
    def host(self) -> Rows:
        """For a device event, its launch; for any other event, the event itself.

        If a device event has no launch, the operator with the same ``External id`` is used, unless the ids of other
        device events contradict their launches.
        """
        return self.events.storage.stored(self._find_hosts())

    def _find_hosts(self) -> Rows:
        events = self.events
        host = np.where(self.is_device, self.launch, np.arange(events.complete, dtype=np.int32))
        external = events.arg("External id")
        operators = np.flatnonzero(self.is_operator & (external > 0))
        work = np.flatnonzero(self.is_device & (external > 0))
        # In some Kineto versions, "External id" is a copy of the correlation.
        if not len(operators) or not len(work) or (external == events.arg("correlation"))[work].all():
            return host
        operators = operators[np.argsort(external[operators], kind="stable")]
        keys = external[operators]
        index = np.minimum(np.searchsorted(keys, external[work]), len(keys) - 1)
        matches = keys[index] == external[work]
        work, stated = work[matches], operators[index[matches]]
        nested = values_at(self._open_operator, self.launch[work])
        if ((nested >= 0) & (nested != stated)).any():
            return host
        host[work] = np.where(self.launch[work] >= 0, self.launch[work], stated)
        return host

    @functools.cached_property
    def operator(self) -> Rows:
        """The innermost operator around the event."""
        return self._at_host(self._open_operator)

    def innermost(self, kind: Mask) -> Rows:
        """Return the innermost event of the given kind that encloses each event."""
        return self._at_host(self.events.innermost(kind))

    @functools.cached_property
    def annotation(self) -> Rows:
        """The innermost annotation around the event, ignoring step annotations; -1 for steps."""
        # A step can start inside an annotation of the previous step, such as the optimizer's annotation.
        around = self.events.innermost(self._is_annotation)
        around[self._is_step] = -1
        return self._at_host(around)

    @functools.cached_property
    def forward(self) -> Rows:
        """The forward operator that corresponds to the innermost backward operator around the event."""
        backward = self.events.innermost(self.is_backward)
        return self._at_host(values_at(forward_rows(self.events, self.is_operator, self.is_backward), backward))

    @functools.cached_property
    def module(self) -> Rows:
        """The innermost ``nn.Module`` frame around the event, or around its forward operator if it has one."""
        return self._at_source(self.events.innermost(self._is_module))

    @functools.cached_property
    def frame(self) -> Rows:
        """The innermost user-code frame around the event, or around its forward operator if it has one."""
        return self._at_source(self.events.innermost(self.events.with_name(self._is_python, is_user_frame)))

    @functools.cached_property
    def module_paths(self) -> tuple[Rows, list[str]]:
        """The module path of each event as a code, or -1, and the path for each code, such as ``GPT > Block > Linear``.

        Paths contain class names without instance numbers, so that different runs can be compared.
        """
        events = self.events
        rows = np.flatnonzero(self._is_module)
        starts = events.start_ns[rows]
        above = parents(events.track[rows], starts, starts + events.duration_ns[rows]).tolist()
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
        return events.storage.stored(values_at(code_of_row, self.module)), [_SEPARATOR.join(path) for path in paths]

    @functools.cached_property
    def is_backward(self) -> Mask:
        """True for each backward operator with a sequence number."""
        return backward_operators(self.events, self.is_operator)

    @property
    def has_frames(self) -> bool:
        """True if Python frames were recorded, other than during graph captures."""
        return bool(self._is_python[: self.first_captured].any())

    @functools.cached_property
    def _open_operator(self) -> Rows:
        return self.events.storage.stored(self.events.innermost(self.is_operator))

    @functools.cached_property
    def _is_python(self) -> Mask:
        return self.events.has_category({PYTHON})

    @functools.cached_property
    def _is_module(self) -> Mask:
        return self.events.with_name(self._is_python, lambda name: module_class(name) is not None)

    def _at_host(self, values: Rows) -> Rows:
        found = values_at(values, self.host)
        if self._captured is not None:
            work, of_call = self._captured.work, values[self._captured.call]
            found[work] = np.where(of_call >= 0, of_call, found[work])
        return self.events.storage.stored(found)

    def _at_source(self, values: Rows) -> Rows:
        """Return the value at each event's forward operator, or at its `host` if it has no forward operator."""
        found = self._at_host(values)
        has_forward = np.flatnonzero(self.forward >= 0)
        found[has_forward] = values[self.forward[has_forward]]
        return found


def values_at(values: Rows, rows: NDArray[np.integer[Any]]) -> Rows:
    """Return the values at the given rows, or -1 where the row is -1."""
    if not len(values):
        return np.full(len(rows), -1, np.int32)
    found: Rows = values[rows]
    found[rows < 0] = -1
    return found
