"""Which global steps are captured, and which iterations inside a capture. Pure functions, no I/O."""

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
"""How others write ranges."""
GRAMMAR = (
    "a step number such as 10, a range such as '20..22' (both ends included), 'every 500', "
    "'every 500 for 3' (three steps each), 'every 500 from 7', 'every 500 for 3 from 7 to 5000', "
    "'every 10 min' or 'every 10 min for 3' (of time: s, min or h)"
)


@attrs.frozen
class StepSpan:
    """Global steps ``first``, ``first + every``, ... up to ``last`` (None: without end), each with those behind it."""

    first: int
    last: int | None
    every: int = 1
    count: int = 1
    """How many steps in a row, less than ``every`` where that is more than 1."""

    @property
    def spec(self) -> int | str:
        """The entry of ``steps`` that gives this span."""
        if self.first == self.last:
            return self.first
        if self.every == 1 and self.last is not None:
            return f"{self.first}..{self.last}"
        end = "" if self.last is None else f" to {self.last}"
        count = "" if self.count == 1 else f" for {self.count}"
        return f"every {self.every}{count} from {self.first}{end}"

    def __contains__(self, step: int) -> bool:
        return self.first <= step <= (step if self.last is None else self.last) and self._place(step) < self.count

    def after(self, step: int) -> int | None:
        """Return the first selected step beyond ``step``, or None."""
        if step < self.first:
            return self.first
        place = self._place(step) + 1
        found = step + (1 if place < self.count else self.every - place + 1)
        return found if self.last is None or found <= self.last else None

    def _place(self, step: int) -> int:
        return (step - self.first) % self.every


def parse_span(spec: int | str) -> StepSpan:
    """Parse one entry of ``steps``.

    Raises:
        ValueError: the entry has another form than `GRAMMAR`.
        TypeError: the entry is neither a number nor text.
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
            raise ValueError(f"the range {spec!r} is empty: its end is below its start")
        return StepSpan(first, last)
    if match := _EVERY.fullmatch(spec):
        every = int(match[1])
        if every == 0:
            raise ValueError(f"{spec!r}: the interval must be at least 1")
        count = int(match[2]) if match[2] else 1
        if not 1 <= count < max(every, 2):
            raise ValueError(
                f"{spec!r}: for {count} does not fit between every {every}; expected 1 to {max(every - 1, 1)}"
            )
        first = int(match[3]) if match[3] else every
        end = int(match[4]) if match[4] else None
        if end is not None and end < first:
            raise ValueError(f"{spec!r} selects nothing: its end is below its start")
        return StepSpan(first, end, 1 if first == end else every, 1 if first == end else count)
    meant = _OTHER_RANGE.fullmatch(spec)
    hint = f". Write {meant[1]}..{meant[2]}" if meant else ""
    raise ValueError(f"{spec!r} is not a step: expected {GRAMMAR}{hint}")


@attrs.frozen
class TimedSteps:
    """Steps that come by the clock: which ones, the processes of the job agree on while it runs."""

    every: int
    unit: str
    """``s``, ``min`` or ``h``."""
    count: int = 1
    """How many steps in a row."""

    @property
    def every_s(self) -> float:
        """The time from one capture to the next, in seconds."""
        return self.every * _UNITS_S[self.unit]

    @property
    def spec(self) -> str:
        """The entry of ``steps`` that gives this."""
        return f"every {self.every} {self.unit}" + ("" if self.count == 1 else f" for {self.count}")


def parse_timed(spec: int | str) -> TimedSteps | None:
    """Parse an entry of ``steps`` that says a time; None if it says none.

    Raises:
        ValueError: the time or the number of steps is 0.
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
    """The selected global steps, as a union of spans. The order of the entries does not matter."""

    spans: tuple[StepSpan, ...] = ()
    timed: tuple[TimedSteps, ...] = ()
    """Beside them, what comes by the clock. No other method counts it: nobody knows its steps beforehand."""

    @classmethod
    def from_list(cls, specs: Sequence[int | str]) -> Schedule:
        """Build a schedule from entries as the config has them: `GRAMMAR`."""
        found = [parse_timed(spec) or parse_span(spec) for spec in specs]
        spans = tuple(one for one in found if isinstance(one, StepSpan))
        return cls(spans, tuple(one for one in found if isinstance(one, TimedSteps)))

    def to_list(self) -> list[int | str]:
        """Return the entries as the config has them."""
        return [span.spec for span in self.spans] + [timed.spec for timed in self.timed]

    def __contains__(self, step: int) -> bool:
        return any(step in span for span in self.spans)

    def after(self, step: int) -> int | None:
        """Return the first selected step beyond ``step``; None when no later step is selected."""
        return min((found for span in self.spans if (found := span.after(step)) is not None), default=None)

    def is_endless_at(self, step: int) -> bool:
        """Tell whether a step is selected by an entry without end only, so that nobody counts on it."""
        return all(span.last is None for span in self.spans if step in span)

    def is_last(self, step: int, final_step: int | None = None) -> bool:
        """Tell whether no selected step follows ``step`` in a job that ends with ``final_step`` (None: unknown).

        Depends on nothing that was captured before, so it holds for a job that resumes in the middle.
        """
        following = self.after(step)
        return following is None or (final_step is not None and following > final_step)

    def steps(self, first: int, final_step: int) -> Iterator[int]:
        """Yield the selected steps from ``first`` to ``final_step``, both included, in order."""
        step = self.after(first - 1)
        while step is not None and step <= final_step:
            yield step
            step = self.after(step)

    def runs(self, first: int, final_step: int, *, joined: bool = True) -> Iterator[tuple[int, int]]:
        """Yield the first and last step of each capture between ``first`` and ``final_step``.

        Args:
            first: the first step that counts.
            final_step: the last one.
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

    @property
    def last(self) -> int | None:
        """The last selected step; None if the schedule has no end."""
        if self.timed:
            return None
        ends = [span.last for span in self.spans]
        return None if None in ends else max((end for end in ends if end is not None), default=-1)


@attrs.define(eq=False)
class OnDemandSteps:
    """Global steps that were asked for while the job ran, ``first`` to ``last``, both included."""

    token: str
    first: int
    last: int
    begun: bool = False
    """Whether their capture has begun, or in discrete mode their first step."""
    captures: list[str] = attrs.field(factory=list)
    """The ids of what was begun for them."""
    incomplete: list[str] = attrs.field(factory=list)
    """The ID of each incomplete capture, with the reason."""


@attrs.define
class PlannedSteps:
    """The global steps that a process captures: those that the config selects, and those that were asked for.

    What was asked for is captured by itself, from its first step on, wherever it lies: a capture that the config
    began before ends there, and another one goes on behind. So who knew of the request early and who learnt of it
    at its first step record the same.
    """

    schedule: Schedule
    final_step: int | None = None
    warmup_steps: int = 0
    joined: bool = True
    """Whether adjacent steps that the config selects share one capture."""
    demands: list[OnDemandSteps] = attrs.field(factory=list)
    """What was asked for and is not over. Changed by `add` and `remove` only."""
    quiet: tuple[float, float] = attrs.field(default=(0, 0), init=False)
    """From and below these steps nothing begins, if nothing was asked for: found once, so that idle steps need not ask
    `begins`.
    """

    def add(self, demand: OnDemandSteps) -> None:
        """Take steps that were asked for."""
        self.demands.append(demand)
        self.quiet = (0, 0)

    def remove(self, demand: OnDemandSteps) -> None:
        """Forget steps that are over, or will not be captured."""
        self.demands = [other for other in self.demands if other is not demand]
        self.quiet = (0, 0)

    def configures(self, step: int) -> bool:
        """Tell whether the config selects a step."""
        return step in self.schedule and (self.final_step is None or step <= self.final_step)

    def demand_at(self, step: int) -> OnDemandSteps | None:
        """Return what was asked for at a step, if anything."""
        return next((demand for demand in self.demands if demand.first <= step <= demand.last), None)

    def selects(self, step: int) -> bool:
        """Tell whether a step is captured."""
        return self.configures(step) or self.demand_at(step) is not None

    def begins(self, step: int) -> tuple[int, OnDemandSteps | None] | None:
        """Return the first step of the capture that must begin at ``step``, to warm up or to record, and its demand."""
        if self.quiet[0] <= step < self.quiet[1]:
            return None
        coming: list[tuple[int, OnDemandSteps | None]] = [
            (demand.first, demand) for demand in self.demands if not demand.begun and step <= demand.first
        ]
        selected = self.schedule.after(step - 1)
        if selected is not None and self.configures(selected):
            coming.append((selected, None))
        first, demand = min(coming, key=lambda one: one[0], default=(None, None))  # what was asked for goes first
        if first is None or step < first - self.warmup_steps:
            self.quiet = (step, math.inf if first is None else first - self.warmup_steps)
            return None
        return first, demand

    def continues(self, first_step: int, current_step: int, token: str | None) -> bool:
        """Tell whether the next step belongs to the same capture.

        Args:
            first_step: the first step that the capture records.
            current_step: the step that is under way.
            token: of the demand that the capture is of, if any.
        """
        following = current_step + 1
        if any(demand.first == following and not demand.begun for demand in self.demands):
            return False
        if following <= first_step:
            return True
        if token is None:
            return self.joined and self.configures(following)
        return any(demand.token == token and following <= demand.last for demand in self.demands)

    def is_one_capture(self, first: int, last: int) -> bool:
        """Tell whether the config makes one capture of just these steps."""
        if not self.joined:
            return first == last and self.configures(first)
        return not self.configures(first - 1) and not self.configures(last + 1) and self.are_all_configured(first, last)

    def are_all_configured(self, first: int, last: int) -> bool:
        """Tell whether the config selects all of these steps."""
        return all(map(self.configures, range(first, last + 1)))


class WindowPhase(StrEnum):
    """What a recorder does during one iteration of a window."""

    OFF = "off"
    WARMUP = "warmup"
    RECORD = "record"
    RECORD_LAST = "record_last"
    """Record, and write the cycle's trace when the iteration ends."""


@attrs.frozen(kw_only=True)
class Window:
    """Iterations to record inside a capture: ``skip_first``, then cycles of ``wait``, ``warmup``, ``active``.

    The fields mean what they mean in ``torch.profiler.schedule``; each cycle gives one trace.
    """

    active: int = attrs.field(validator=validators.ge(1))
    """Iterations recorded per cycle."""
    wait: int = attrs.field(default=0, validator=validators.ge(0))
    """Iterations not recorded at the start of each cycle. Default: 0."""
    warmup: int = attrs.field(default=0, validator=validators.ge(0))
    """Iterations observed and thrown away before recording, so that start-up cost stays out. Default: 0."""
    repeat: int = attrs.field(default=1, validator=validators.ge(0))
    """Cycles per capture; 0 goes on until the capture ends. Default: 1."""
    skip_first: int = attrs.field(default=0, validator=validators.ge(0))
    """Iterations skipped once, before the first cycle. Default: 0."""

    @property
    def cycle(self) -> int:
        """Iterations per cycle."""
        return self.wait + self.warmup + self.active

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
    """Engine iterations to record: scheduler steps of an engine that run at least one token.

    ``skip`` is relative, to the start of the capture; ``first`` is absolute, from the start of the engine. When
    prefill and decode are recorded apart, each of them is counted by itself.
    """

    count: int = attrs.field(validator=validators.ge(1))
    """Iterations to record; the recording then ends by itself."""
    skip: int = attrs.field(default=0, validator=validators.ge(0))
    """Iterations to pass over after the start. Default: 0."""
    first: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(0)))
    """The first iteration to record, counted from 0 when the engine starts. The engine then captures by itself, once,
    with no call from anyone. Default: none, captures are started by a call."""

    @first.validator
    def _one_start(self, _: object, first: int | None) -> None:
        if first is not None and self.skip:
            raise ValueError("first: it counts from the start of the engine and skip from that of a capture; give one")
