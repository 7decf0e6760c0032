"""Findings for a single rank, before findings that several ranks have in common are merged."""

from __future__ import annotations

import attrs

from profdeck_traces.analysis.formatting import ranges
from profdeck_traces.analysis.run_model import Evidence
from profdeck_traces.base.text import shell_word
from profdeck_traces.findings.rank_view import RankView


@attrs.frozen(kw_only=True)
class RankFinding:
    """A finding of one rank."""

    rule: str
    """Cause of the problem."""
    text: str
    do: str
    label: str
    capture: str | None = None
    """Id of the capture that the numbers come from."""
    role: str | None = None
    gain_us: float | None = None
    time_us: float | None = None
    """Time per step that the problem takes. Default: the gain."""
    step_us: float = 0.0
    key: str = ""
    """Subject of the finding, such as a kernel.

    Findings from several ranks are merged if their role, rule, key, stage and function are equal.
    """
    stage: str | None = None
    line: str | None = None
    """Function in user code, as ``file(line): function``."""
    replica: int | None = None
    """Affected server, if the problem affects only one."""
    rank: int | None = None
    """Affected rank, if the problem affects only one."""
    confidence: str = "medium"
    """``high`` if the trace contains the cause itself, ``medium`` if it is inferred from times or names."""
    check: str | None = None
    """Command that shows the evidence."""
    evidence: Evidence | None = None
    of_all: bool = False
    """True if the finding applies to all ranks equally. Its text then names no rank."""

    @property
    def share(self) -> float | None:
        """The gain as a fraction of the step."""
        return None if self.gain_us is None or not self.step_us else min(1.0, self.gain_us / self.step_us)


MACHINE_BUSY = "the machine was busy"
"""Reason for causes that cannot be distinguished from waits for a CPU."""
WAITED_FOR_CPU = "the ranks waited for a CPU"
"""Same reason, if the job's own load can explain the waits."""
_COSTLY_OPTIONS = {"with_stack": "stacks", "record_shapes": "shapes"}


@attrs.frozen
class NotJudged:
    """A cause that cannot be judged because a rank has insufficient data."""

    rule: str
    reason: str
    """Missing data, such as ``stacks were not recorded``."""


def draft(view: RankView, rule: str, text: str, do: str, **more: object) -> RankFinding:
    """Return a finding of a rank, with its typical step as evidence unless another is given."""
    defaults = {
        "label": view.label,
        "capture": view.rank.capture,
        "role": view.rank.role,
        "step_us": view.step_us,
        "check": view.show_step(),
        "evidence": view.evidence(),
    }
    return RankFinding(rule=rule, text=text, do=do, **(defaults | more))  # type: ignore[arg-type]  # the fields are checked


def get_function(view: RankView) -> str:
    """Suggest how to find the function behind time outside operators, if no stacks were recorded."""
    how = record_with(view, "with_stack", steps=1)
    return f"{how}, to get the function" if view.rank.role is None else f"record one step with stacks: {how}"


def record_with(view: RankView, *options: str, value: str = "true", steps: int | None = None) -> str:
    """Return the command or setting that records a rank again with the given options.

    Args:
        view: The rank.
        options: Boolean options of the backend.
        value: Value of these options.
        steps: Number of steps to record. Default: those of the view.
    """
    role = view.rank.role
    if role is None:  # not recorded by profdeck
        return f"pass {' and '.join(f'{option}={value.capitalize()}' for option in options)} to torch.profiler.profile"
    settings, keys = [f"options.{option}={value}" for option in options], [f"{option}: {value}" for option in options]
    if view.is_engine:
        command = f"profdeck capture servers --url URL --iterations {steps or 5}"
        command += "".join(f" --set server.{setting}" for setting in settings)
    else:
        numbers = [step.step for step in view.steps if step.step is not None]
        which = shell_word(ranges([numbers[-1]] if numbers and steps == 1 else numbers) or "10..14")
        command = f"profdeck run --steps {which}{''.join(f' --set {role}.{setting}' for setting in settings)} SCRIPT"
    return f"`{command}`, or `{', '.join(keys)}` in roles.{role}.options of the config"


def costly_options(view: RankView) -> dict[str, str]:
    """Return the enabled options that slow down a recording, each with a display name for its data."""
    account = view.rank.account
    is_on = {"with_stack": account is not None and account.has_stacks, "record_shapes": bool(view.rank.shapes)}
    return {option: name for option, name in _COSTLY_OPTIONS.items() if is_on[option]}


def record_cheaply(view: RankView) -> str:
    """Return advice for a recording with less overhead."""
    if not (options := costly_options(view)):
        return "record fewer activities, or compare times only with those of other recordings"
    names = " and ".join(options.values())
    return f"to measure times, record without {names}: {record_with(view, *options, value='false')}"


def record_in_a_row(view: RankView) -> str:
    """Suggest how to record enough steps."""
    do = "record at least three steps in a row"
    if view.rank.role is None:
        return do
    first = max((step.step for step in view.steps if step.step is not None), default=10)
    steps = f"{first}..{first + 4}"
    return f'{do}: `profdeck run --steps {steps} SCRIPT`, or `steps: ["{steps}"]` in the config'


def ms(time_us: float) -> str:
    """Format a time in milliseconds with three significant digits."""
    value = time_us / 1000
    if value >= 100:
        return f"{value:,.0f} ms"
    return f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def percent(share: float) -> str:
    """Format a share as a percentage, with one decimal place below 10 %."""
    return f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"
