"""Which names in a trace are steps: global steps, and the iterations of engines that plugins name."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence

import attrs

from profdeck_traces.analysis.detail_model import BatchDetails
from profdeck_traces.base.entry_points import TRACE_NAMES, installed, load
from profdeck_traces.base.errors import PluginError, describe_error

logger = logging.getLogger("profdeck")

GLOBAL_STEP, ITERATION = "global_step", "iteration"
PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"

_GLOBAL_STEP = re.compile(r"ProfilerStep#(\d{1,18})")
_MAX_DIGITS = 18  # of a number of 64 bits


@attrs.frozen
class StepName:
    """What the name of a step says."""

    kind: str
    """``global_step`` or ``iteration``."""
    step: int | None = None
    stage: str | None = None
    requests: int | None = None
    prefill_tokens: int | None = None
    decode_tokens: int | None = None
    prefill_requests: int | None = None
    decode_requests: int | None = None
    details: BatchDetails | None = None
    """``None`` if the name contains no details."""
    engine: str | None = None
    """Plugin whose pattern matches the name; ``None`` for a global step."""

    @property
    def tokens(self) -> int | None:
        """All tokens of the batch; ``None`` where the name does not state them."""
        if self.stage == PREFILL:
            return self.prefill_tokens
        if self.stage == DECODE:
            return self.decode_tokens
        if self.prefill_tokens is None or self.decode_tokens is None:
            return None
        return self.prefill_tokens + self.decode_tokens


class StepNames:
    """Reads names of steps.

    Args:
        patterns: Regular expressions for the names of iterations, as in the module's docstring.
        engines: Name of the plugin that provides each pattern. Default: unknown.
    """

    def __init__(self, patterns: Iterable[str], engines: Sequence[str] = ()) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._engines: Sequence[str | None] = engines or [None] * len(self._patterns)

    @classmethod
    def load(cls) -> StepNames:
        """Take the patterns of all installed plugins; one that is broken is left out with a warning."""
        patterns: dict[str, str] = {}
        for name in installed(TRACE_NAMES):
            try:
                patterns[name] = re.compile(load(TRACE_NAMES, name)).pattern
            except (PluginError, re.error, TypeError) as error:
                logger.warning("Iterations of '%s' are not recognised in traces: %s", name, describe_error(error))
        return cls(patterns.values(), [*patterns])

    @property
    def patterns(self) -> list[str]:
        """The regular expressions."""
        return [pattern.pattern for pattern in self._patterns]

    def is_step(self, name: str) -> bool:
        """Return whether a name is a step name."""
        return self.parse(name) is not None

    def parse(self, name: str) -> StepName | None:
        """Return what a name says, ``None`` if it is not that of a step."""
        if found := _GLOBAL_STEP.fullmatch(name):
            return StepName(GLOBAL_STEP, int(found[1]))
        for pattern, engine in zip(self._patterns, self._engines, strict=True):
            if found := pattern.fullmatch(name):
                return _iteration(found.groupdict(), engine)
        return None


def _iteration(groups: dict[str, str | None], engine: str | None) -> StepName:
    number = {
        group: int(text) for group, text in groups.items() if text and text.isdecimal() and len(text) <= _MAX_DIGITS
    }
    prefill, decode = number.get("prefill_requests"), number.get("decode_requests")
    stage = next((stage for stage in (PREFILL, DECODE, MIXED) if groups.get(stage)), None)
    if stage is None and (word := groups.get("stage")):
        stage = word.lower()
    if stage is None and prefill is not None and decode is not None:
        stage = {(True, True): MIXED, (True, False): PREFILL, (False, True): DECODE}.get((prefill > 0, decode > 0))
    both = None if prefill is None or decode is None else prefill + decode
    details = {field.name: number[field.name] for field in attrs.fields(BatchDetails) if field.name in number}
    return StepName(
        ITERATION,
        stage=stage,
        requests=number.get("requests", both),
        prefill_tokens=number.get("prefill_tokens"),
        decode_tokens=number.get("decode_tokens"),
        prefill_requests=prefill,
        decode_requests=decode,
        details=BatchDetails(**details) if details else None,
        engine=engine,
    )
