"""What a rule says of one rank, before the same of several ranks becomes one finding."""

from __future__ import annotations

import attrs

from profdeck_traces.analysis.run_model import Evidence
from profdeck_traces.findings.rank_view import RankView


@attrs.frozen(kw_only=True)
class RankFinding:
    """A finding of one rank."""

    rule: str
    text: str
    do: str
    label: str
    capture: str | None = None
    """Id of the capture that the numbers come from."""
    gain_us: float | None = None
    step_us: float = 0.0
    key: str = ""
    """What it is about besides the rule, such as a kernel: ranks that share it have one finding."""
    evidence: Evidence | None = None
    of_all: bool = False
    """Whether it is true of all ranks alike, so that none is named."""

    @property
    def share(self) -> float | None:
        """The gain as a fraction of the step."""
        return None if self.gain_us is None or not self.step_us else min(1.0, self.gain_us / self.step_us)


def draft(view: RankView, rule: str, text: str, do: str, **more: object) -> RankFinding:
    """Return a finding of a rank, with its typical step as evidence unless another is given."""
    defaults = {"label": view.label, "capture": view.rank.capture, "step_us": view.step_us, "evidence": view.evidence()}
    return RankFinding(rule=rule, text=text, do=do, **(defaults | more))  # type: ignore[arg-type]  # the fields are checked


def ms(time_us: float) -> str:
    """Write a time in milliseconds with three digits that matter."""
    value = time_us / 1000
    if value >= 100:
        return f"{value:,.0f} ms"
    return f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def percent(share: float) -> str:
    """Write a share in percent, with a digit after the point where it is small."""
    return f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"
