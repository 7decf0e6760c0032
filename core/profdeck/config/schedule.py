"""Selection of the global steps to capture, and of the iterations to record inside a capture."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from enum import StrEnum

import attrs
from attrs import validators

_RANGE = re.compile(r"\s*(\d+)\s*\.\.\s*(\d+)\s*")
_EVERY = re.compile(r"\s*every\s+(\d+)(?:\s+for\s+(\d+))?(?:\s+from\s+(\d+))?(?:\s+to\s+(\d+))?\s*")

_TIMED = re.compile(r"\s*every\s+(\d{1,6})\s*(s|min|h)(?:\s+for\s+(\d{1,6}))?\s*")
_UNITS_S = {"s": 1, "min": 60, "h": 3600}

_OTHER_RANGE = re.compile(r"\s*(\d+)\s*[-:,]\s*(\d+)\s*")
"""Ranges in the notation of other tools, recognized to suggest the correct notation."""
GRAMMAR = (
    "a step number such as 10, a range such as '20..22' (both ends included), 'every 500', "
    "'every 500 for 3' (three steps each), 'every 500 from 7', 'every 500 for 3 from 7 to 5000', "
    "'every 10 min' or 'every 10 min for 3' (of time: s, min or h)"
)


@attrs.frozen
class StepSpan:
    """Global steps ``first``, ``first + every``, ... and the ``count - 1`` steps after each of them, up to ``last``."""

    first: int
    last: int | None
    """Last selected step; None if the span has no end."""
    every: int = 1
    count: int = 1
    """Number of consecutive steps per interval. Less than ``every``, unless both are 1."""

    @property
    def spec(self) -> int | str:
        """Entry of ``steps`` in the config."""
        if self.first == self.last:
            return self.first
        if self.every == 1 and self.last is not None:
            return f"{self.first}..{self.last}"
        end = "" if self.last is None else f" to {self.last}"
        count = "" if self.count == 1 else f" for {self.count}"
        return f"every {self.every}{count} from {self.first}{end}"

    def __contains__(self, step: int) -> bool:
        return self.first <= step <= (step if self.last is None else self.last) and self._offset(step) < self.count

    def after(self, step: int) -> int | None:
        """Return the first selected step after ``step``, or None."""
        if step < self.first:
            return self.first
        next_offset = self._offset(step) + 1
        next_step = step + (1 if next_offset < self.count else self.every - next_offset + 1)
        return next_step if self.last is None or next_step <= self.last else None

    def _offset(self, step: int) -> int:
        """Return the position of a step in its interval."""
        return (step - self.first) % self.every


def parse_span(spec: int | str) -> StepSpan:
    """Parse one entry of ``steps``.

    Raises:
        ValueError: the entry does not conform to `GRAMMAR`.
        TypeError: the entry is neither an integer nor a string.
    """
    if isinstance(spec, bool) or not isinstance(spec, int | str):
        raise TypeError(f"{spec!r} is not a step: expected {GRAMMAR}")
    if isinstance(spec, int) or spec.strip().isdecimal():
        number = int(spec)
        if number < 0:
            raise ValueError(f"{number} is not a step: steps count from 0")
        return StepSpan(number, number)
    if match := _RANGE.fullmatch(spec):
        first, last = int(match[1]), int(match[2])
        if last < first:
            raise ValueError(f"the range {spec!r} is empty, because its end is less than its start")
        return StepSpan(first, last)
    if match := _EVERY.fullmatch(spec):
        every = int(match[1])
        if every == 0:
            raise ValueError(f"{spec!r}: the interval must be at least 1")
        count = int(match[2]) if match[2] else 1
        if not 1 <= count < max(every, 2):
            raise ValueError(
                f"{spec!r}: {count} steps do not fit in an interval of {every}; expected 1 to {max(every - 1, 1)}"
            )
        first = int(match[3]) if match[3] else every
        end = int(match[4]) if match[4] else None
        if end is not None and end < first:
            raise ValueError(f"{spec!r} selects no steps, because its end is less than its start")
        return StepSpan(first, end, 1 if first == end else every, 1 if first == end else count)
    other_range = _OTHER_RANGE.fullmatch(spec)
    hint = f". Write {other_range[1]}..{other_range[2]}" if other_range else ""
    raise ValueError(f"{spec!r} is not a step: expected {GRAMMAR}{hint}")


@attrs.frozen
class TimedSteps:
    """Steps selected by elapsed time. The processes of the job agree on the step numbers while the job runs."""

    every: int
    unit: str
    """``s``, ``min`` or ``h``."""
    count: int = 1
    """Number of consecutive steps."""

    @property
    def every_s(self) -> float:
        """Interval between captures, in seconds."""
        return self.every * _UNITS_S[self.unit]

    @property
    def spec(self) -> str:
        """Entry of ``steps`` in the config."""
        return f"every {self.every} {self.unit}" + ("" if self.count == 1 else f" for {self.count}")


def parse_timed(spec: int | str) -> TimedSteps | None:
    """Parse an entry of ``steps`` with an interval of time. Return None for all other entries.

    Raises:
        ValueError: the interval or the number of steps is 0.
    """
    match = _TIMED.fullmatch(spec) if isinstance(spec, str) else None
    if match is None:
        return None
    every, count = int(match[1]), int(match[3] or 1)
    if not every or not count:
        raise ValueError(f"{spec!r}: the interval and the number of steps must be at least 1")
    return TimedSteps(every, match[2], count)


@attrs.frozen
class Schedule:
    """Selected global steps: the union of all entries of ``steps``."""

    spans: tuple[StepSpan, ...] = ()
    timed: tuple[TimedSteps, ...] = ()
    """Entries with an interval of time. Most methods ignore them, because their step numbers are not known in advance.
    """

    @classmethod
    def from_list(cls, specs: Sequence[int | str]) -> Schedule:
        """Create a schedule from the entries of ``steps``.

        Raises:
            ValueError: an entry does not conform to `GRAMMAR`.
            TypeError: an entry is neither an integer nor a string.
        """
        entries = [parse_timed(spec) or parse_span(spec) for spec in specs]
        spans = tuple(entry for entry in entries if isinstance(entry, StepSpan))
        return cls(spans, tuple(entry for entry in entries if isinstance(entry, TimedSteps)))

    def to_list(self) -> list[int | str]:
        """Return the entries of ``steps``."""
        return [span.spec for span in self.spans] + [timed.spec for timed in self.timed]

    def __contains__(self, step: int) -> bool:
        return any(step in span for span in self.spans)

    def after(self, step: int) -> int | None:
        """Return the first selected step after ``step``, or None."""
        candidates = (span.after(step) for span in self.spans)
        return min((candidate for candidate in candidates if candidate is not None), default=None)

    def is_endless_at(self, step: int) -> bool:
        """Return whether only entries without an end select a step. The job may end before such a step."""
        return all(span.last is None for span in self.spans if step in span)

    def is_last(self, step: int, final_step: int | None = None) -> bool:
        """Return whether no step is selected after ``step``.

        The result does not depend on earlier captures, so it is also valid in a resumed job.

        Args:
            step: the current step.
            final_step: last step of the job; None if it is unknown.
        """
        next_step = self.after(step)
        return next_step is None or (final_step is not None and next_step > final_step)

    def steps(self, first: int, final_step: int) -> Iterator[int]:
        """Yield the selected steps from ``first`` to ``final_step`` (inclusive) in ascending order."""
        step = self.after(first - 1)
        while step is not None and step <= final_step:
            yield step
            step = self.after(step)

    def runs(self, first: int, final_step: int, *, joined: bool = True) -> Iterator[tuple[int, int]]:
        """Yield the first and last step of each capture from ``first`` to ``final_step`` (inclusive).

        Args:
            first: first step to consider.
            final_step: last step to consider.
            joined: whether adjacent steps share one capture.
        """
        start = previous = None
        for step in self.steps(first, final_step):
            if previous is not None and start is not None and (not joined or step != previous + 1):
                yield start, previous
                start = step
            start = step if start is None else start
            previous = step
        if start is not None and previous is not None:
            yield start, previous

    def adjacent(self) -> Iterator[tuple[int, int | None]]:
        """Yield the first and last step of each range of adjacent steps. If a range has no end, its last step is None.

        If an entry selects repeated intervals, only the first interval is considered.
        """
        first, last = 0, -2.0
        for span in sorted(self.spans, key=lambda span: span.first):
            if span.first > last + 1:
                if last >= first:
                    yield first, int(last)
                first, last = span.first, -2.0
            end = math.inf if span.last is None else span.last
            last = max(last, end if span.every == 1 else min(end, span.first + span.count - 1))
        if last >= first:
            yield first, None if last == math.inf else int(last)

    @property
    def last(self) -> int | None:
        """Last selected step; -1 if no step is selected, and None if the schedule has no end."""
        if self.timed:
            return None
        ends = [span.last for span in self.spans]
        return None if None in ends else max((end for end in ends if end is not None), default=-1)


@attrs.define(eq=False)
class OnDemandSteps:
    """Global steps of one on-demand request, from ``first`` to ``last`` (inclusive)."""

    token: str
    """Token of the request."""
    first: int
    last: int
    begun: bool = False
    """True if the capture has begun or, in discrete mode, the first step."""
    captures: list[str] = attrs.field(factory=list)
    """IDs of the captures that were started for the request."""
    incomplete: list[str] = attrs.field(factory=list)
    """The ID of each incomplete capture, with the reason."""


@attrs.define
class PlannedSteps:
    """Global steps that a process captures: the scheduled steps of the config, and the steps of on-demand requests.

    Each request has a capture of its own. A scheduled capture ends before the first requested step and continues as a
    new capture after the last one. Therefore, all processes record the same captures, no matter when they received the
    request.
    """

    schedule: Schedule
    final_step: int | None = None
    warmup_steps: int = 0
    joined: bool = True
    """True if adjacent scheduled steps share one capture."""
    demands: list[OnDemandSteps] = attrs.field(factory=list)
    """Steps of unfinished requests. Modified only by `add` and `remove`."""
    idle_range: tuple[float, float] = attrs.field(default=(0, 0), init=False)
    """Half-open range of steps at which no capture begins. Cached, so that idle steps do not call `begins`."""
    _skipped: tuple[int, int] | None = attrs.field(default=None, init=False)
    """First and last step of the range that is skipped because its capture exceeded a limit."""
    _skips_adjacent: bool = attrs.field(default=False, init=False)
    """True if the skipped range also includes all scheduled steps that are adjacent to it."""

    def skip_after(self, step: int, demand: OnDemandSteps | None) -> None:
        """Skip the remaining steps of a capture that exceeded a limit, so that all processes record the same captures.

        Args:
            step: the last captured step.
            demand: the request for the capture; None for a scheduled capture.
        """
        self._skipped = (step, max(step, demand.last) if demand else step)
        self._skips_adjacent = self.joined and demand is None
        self.idle_range = (0, 0)

    def _is_skipped(self, step: int) -> bool:
        if self._skipped is None:
            return False
        first, last = self._skipped
        if self._skips_adjacent and step == last + 1 and self.configures(step):
            self._skipped = first, step
        elif not first <= step <= last:
            self._skipped = None  # the step is not adjacent, or the host's step numbers restarted
        return self._skipped is not None

    def add(self, demand: OnDemandSteps) -> None:
        """Add the steps of a request."""
        self.demands.append(demand)
        self.idle_range = (0, 0)

    def remove(self, demand: OnDemandSteps) -> None:
        """Remove the steps of a request that is finished or cancelled."""
        self.demands = [other for other in self.demands if other is not demand]
        self.idle_range = (0, 0)

    def configures(self, step: int) -> bool:
        """Return whether the config selects a step."""
        return step in self.schedule and (self.final_step is None or step <= self.final_step)

    def demand_at(self, step: int) -> OnDemandSteps | None:
        """Return the request that a step belongs to, if any."""
        return next((demand for demand in self.demands if demand.first <= step <= demand.last), None)

    def selects(self, step: int) -> bool:
        """Return whether a step is captured."""
        return self.configures(step) or self.demand_at(step) is not None

    def begins(self, step: int) -> tuple[int, OnDemandSteps | None] | None:
        """Return the capture that must begin at a step, either with its warm-up or with its first recorded step.

        Returns:
            The first recorded step, and the request, if any. None if no capture begins at ``step``.
        """
        if self.idle_range[0] <= step < self.idle_range[1]:
            return None
        candidates: list[tuple[int, OnDemandSteps | None]] = [
            (demand.first, demand) for demand in self.demands if not demand.begun and step <= demand.first
        ]
        selected = self.schedule.after(step - 1)
        if self._is_skipped(step):
            selected = None
            if not candidates:
                return None  # no idle range is cached, because `_is_skipped` must check every step
        if selected is not None and self.configures(selected):
            candidates.append((selected, None))
        # min() returns the first minimum, so a request takes precedence over a scheduled step.
        first, demand = min(candidates, key=lambda candidate: candidate[0], default=(None, None))
        if first is None or step < first - self.warmup_steps:
            self.idle_range = (step, math.inf if first is None else first - self.warmup_steps)
            return None
        return first, demand

    def continues(self, first_step: int, current_step: int, token: str | None) -> bool:
        """Return whether the next step belongs to the running capture.

        Args:
            first_step: first recorded step of the capture.
            current_step: the step in progress.
            token: token of the capture's request; None for a scheduled capture.
        """
        next_step = current_step + 1
        if any(demand.first == next_step and not demand.begun for demand in self.demands):
            return False
        if next_step <= first_step:
            return True
        if token is None:
            return self.joined and self.configures(next_step)
        return any(demand.token == token and next_step <= demand.last for demand in self.demands)

    def is_one_capture(self, first: int, last: int) -> bool:
        """Return whether the steps from ``first`` to ``last`` are exactly one scheduled capture."""
        if not self.joined:
            return first == last and self.configures(first)
        return not self.configures(first - 1) and not self.configures(last + 1) and self.are_all_configured(first, last)

    def are_all_configured(self, first: int, last: int) -> bool:
        """Return whether the config selects all steps from ``first`` to ``last`` (inclusive)."""
        return all(map(self.configures, range(first, last + 1)))


class WindowPhase(StrEnum):
    """State of the recorder during one iteration of a window."""

    OFF = "off"
    WARMUP = "warmup"
    RECORD = "record"
    RECORD_LAST = "record_last"
    """Record, and write the trace of the cycle at the end of the iteration."""


@attrs.frozen(kw_only=True)
class Window:
    """Iterations to record inside a capture: ``skip_first``, then cycles of ``wait``, ``warmup``, ``active``.

    The fields have the same meaning as in ``torch.profiler.schedule``. Each cycle produces one trace.
    """

    active: int = attrs.field(validator=validators.ge(1))
    """Iterations recorded per cycle."""
    wait: int = attrs.field(default=0, validator=validators.ge(0))
    """Iterations not recorded at the start of each cycle. Default: 0."""
    warmup: int = attrs.field(default=0, validator=validators.ge(0))
    """Warm-up iterations per cycle. They are recorded and discarded, to exclude start-up overhead. Default: 0."""
    repeat: int = attrs.field(default=1, validator=validators.ge(0))
    """Cycles per capture; 0 repeats until the capture ends. Default: 1."""
    skip_first: int = attrs.field(default=0, validator=validators.ge(0))
    """Iterations skipped once, before the first cycle. Default: 0."""

    @property
    def cycle(self) -> int:
        """Number of iterations per cycle."""
        return self.wait + self.warmup + self.active

    def count_recorded(self, iterations: int) -> int:
        """Return the number of recorded iterations among the first ``iterations``."""
        recorded = {WindowPhase.RECORD, WindowPhase.RECORD_LAST}
        return sum(self.phase(iteration) in recorded for iteration in range(iterations))

    def phase(self, iteration: int) -> WindowPhase:
        """Return the phase of an iteration, counted from 0 at the start of the capture."""
        position = iteration - self.skip_first
        if position < 0 or (self.repeat and position >= self.repeat * self.cycle):
            return WindowPhase.OFF
        offset = position % self.cycle
        if offset < self.wait:
            return WindowPhase.OFF
        if offset < self.wait + self.warmup:
            return WindowPhase.WARMUP
        return WindowPhase.RECORD_LAST if offset == self.cycle - 1 else WindowPhase.RECORD


@attrs.frozen(kw_only=True)
class Iterations:
    """Engine iterations to record. An iteration is a scheduler step that runs at least one token.

    ``skip`` counts from the start of the capture, and ``first`` counts from the start of the engine. If batch kinds are
    recorded separately, the iterations of each kind are counted separately.
    """

    count: int = attrs.field(validator=validators.ge(1))
    """Number of iterations to record. The recording then ends automatically."""
    skip: int = attrs.field(default=0, validator=validators.ge(0))
    """Number of iterations to skip before the recording. Default: 0."""
    first: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(0)))
    """First iteration to record, counted from 0 at the start of the engine. The engine then makes one capture
    automatically, without a request. Default: none."""

    @first.validator
    def _check_first(self, _: object, first: int | None) -> None:
        if first is not None and self.skip:
            raise ValueError("first and skip cannot both be set")
