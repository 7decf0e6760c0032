"""The numbers of one rank that rules ask for, per step."""

from __future__ import annotations

import functools
import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable

import attrs

from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.analysis.cold_steps import excluded_steps, is_cold, warm_steps
from profdeck_traces.analysis.contributions import OUTLIER
from profdeck_traces.analysis.detail_model import RecordingCost, StageSummary, StepOfDevice
from profdeck_traces.analysis.model import DeviceSummary, RankSummary, RunSummary, StepSummary
from profdeck_traces.analysis.rank_labels import labels_of
from profdeck_traces.analysis.run_model import Evidence
from profdeck_traces.analysis.step_names import GLOBAL_STEP, ITERATION
from profdeck_traces.analysis.typical_step import typical_steps
from profdeck_traces.base.text import plural
from profdeck_traces.inputs.facts import ENGINE_ITERATION

_FEWEST_STEPS = 3
_MIN_SLOWDOWN = 1.15


def views_of(run: RunSummary) -> list[RankView]:
    """Return the traces of a run, in their order."""
    labels, typical = labels_of(run.ranks), typical_steps(run.ranks)
    sizes = Counter((rank.run, rank.capture, rank.role, rank.replica) for rank in run.ranks)
    return [
        RankView(
            rank,
            labels[rank.path],
            typical.get(rank.path),
            sizes[rank.run, rank.capture, rank.role, rank.replica],
        )
        for rank in run.ranks
    ]


@attrs.frozen(slots=False)
class RankView:
    """One rank, with its times as sums over the steps that divide it; without steps, over the recording."""

    rank: RankSummary
    label: str
    """What people call it."""
    typical_step: StepSummary | None
    """The step that pictures show, if it has steps."""
    team_size: int = 1
    """Number of ranks recorded with it, including itself."""

    @functools.cached_property
    def kind(self) -> str | None:
        """The kind of its steps: global steps, else iterations, else None."""
        kinds = {step.kind for step in self.rank.steps}
        return next((kind for kind in (GLOBAL_STEP, ITERATION) if kind in kinds), None)

    @property
    def is_engine(self) -> bool:
        """True if the steps are engine iterations."""
        return self.kind == ITERATION or self.rank.unit == ENGINE_ITERATION

    @functools.cached_property
    def steps(self) -> list[StepSummary]:
        """Steps of that kind, without cold steps if there are others."""
        return warm_steps([step for step in self.rank.steps if step.kind == self.kind])

    @functools.cached_property
    def excluded(self) -> list[StepSummary]:
        """Cold steps of that kind that `steps` omits."""
        return [step for step in excluded_steps(self.rank.steps) if step.kind == self.kind]

    @property
    def is_cold(self) -> bool:
        """True if all steps are cold."""
        return is_cold(self.rank)

    @functools.cached_property
    def timed_steps(self) -> list[StepSummary]:
        """Steps with a known duration.

        With devices, these are the steps that last until the next step. If there are none, all steps with device work
        are returned.
        """
        steps = [step for step in self.steps if any(of.duration_us > 0 for of in step.devices)]
        followed = [step for step in steps if all(of.is_followed for of in step.devices)]
        return followed or steps or [step for step in self.steps if step.duration_us > 0]

    @functools.cached_property
    def durations_us(self) -> list[float]:
        """Durations of the timed steps: on the device if there is one, otherwise on the host."""
        return [max((of.duration_us for of in step.devices), default=step.duration_us) for step in self.timed_steps]

    @functools.cached_property
    def time_us(self) -> float:
        """The time of all steps, of the device where there is one; without steps, of the recording."""
        if self.durations_us:
            return sum(self.durations_us)
        return max((device.span_us for device in self.rank.devices), default=0.0) or self.rank.span_us

    @property
    def count(self) -> int:
        """Number of steps, or 1 for a recording."""
        return max(1, len(self.steps))

    @property
    def step_us(self) -> float:
        """Mean duration of the timed steps. Without steps, the duration of the recording."""
        return self.time_us / self._timed_count

    @property
    def _timed_count(self) -> int:
        return max(1, len(self.timed_steps))

    @property
    def unit(self) -> str:
        """Interval to which times refer: ``step``, ``iteration`` or ``recording``."""
        return "recording" if self.kind is None else "iteration" if self.kind == ITERATION else "step"

    @property
    def each(self) -> str:
        """Phrase that follows "of" in a text, such as "each step"."""
        return "the recording" if self.kind is None else f"each {self.unit}"

    @property
    def per(self) -> str:
        """Phrase that follows a time or a number in a text, such as "per step"."""
        return "in the recording" if self.kind is None else f"per {self.unit}"

    @functools.cached_property
    def devices(self) -> list[StepOfDevice | DeviceSummary]:
        """Device times in the timed steps. Without steps, device times in the recording."""
        return [of for step in self.timed_steps for of in step.devices] if self.steps else [*self.rank.devices]

    @property
    def device_count(self) -> int:
        """Number of devices, at least 1."""
        return max(1, len(self.rank.devices))

    def of_devices(self, field: str) -> float:
        """Return a time of devices per step, the mean of the devices."""
        return sum(float(getattr(device, field)) for device in self.devices) / self.device_count / self._timed_count

    @property
    def exposed_communication_us(self) -> float:
        """Time per step of communication without overlap, excluding waits that were assigned to other ranks."""
        account = self.rank.account
        owners = account.owners if account else ()
        waits_us = sum(owner.time_us for owner in owners if owner.kind == OwnerKind.WAIT_FOR_RANK.label)
        return max(0.0, self.of_devices("exposed_communication_us") - waits_us / (account.steps if account else 1))

    @functools.cached_property
    def idle(self) -> dict[str, float]:
        """Idle time of devices per step, by its cause."""
        causes: defaultdict[str, float] = defaultdict(float)
        for device in self.devices:
            for cause in device.idle:
                causes[cause.cause] += cause.idle_us
        number = self.device_count * self._timed_count
        return {cause: causes[cause] / number for cause in sorted(causes, key=causes.__getitem__, reverse=True)}

    @property
    def idle_us(self) -> float:
        """Idle time of devices per step."""
        return self.of_devices("idle_us")

    @property
    def kernel_us(self) -> float:
        """The sum of all kernels, copies and fills."""
        return sum(of.total_us for of in self.rank.categories)

    def calls_per_step(self, count: float) -> float:
        """Return the average number of calls per step, given the number of calls in the recording."""
        return count / (self.count + len(self.excluded))

    def kernel_calls(self, count: int, noun: str = "kernel") -> str:
        """Format the number of calls per step and device, given the number of calls in the recording."""
        calls = plural(round(self.calls_per_step(count) / self.device_count), noun)
        return f"{calls} {self.per}{' on each device' if self.device_count > 1 else ''}"

    def per_step(self, total_us: float) -> float:
        """Return the time per step and device, given the total over all devices in the recording.

        This assumes that the share of the total that falls within steps equals the share of the devices' busy time
        that falls within steps.
        """
        return total_us * self._share_of_steps / self._timed_count / self.device_count

    @functools.cached_property
    def _share_of_steps(self) -> float:
        busy_us = sum(device.busy_us for device in self.rank.devices)
        in_steps_us = sum(device.busy_us for device in self.devices)
        return in_steps_us / busy_us if busy_us else 1.0

    @property
    def stages(self) -> tuple[StageSummary, ...]:
        """The stages of its steps."""
        return self.rank.host_times.stages if self.rank.host_times else ()

    @functools.cached_property
    def stage_us(self) -> dict[str, float]:
        """Time in each stage per step, in microseconds."""
        return self._by_stage(lambda stage: stage.total_us)

    @functools.cached_property
    def stage_without_collectives_us(self) -> dict[str, float]:
        """Time in each stage per step, in microseconds, excluding collectives on the host."""
        return self._by_stage(lambda stage: stage.total_us - stage.communication_us)

    def _by_stage(self, time_us: Callable[[StageSummary], float]) -> dict[str, float]:
        sums: dict[str, float] = {}
        for stage in self.stages:
            sums[stage.name] = sums.get(stage.name, 0.0) + time_us(stage) / self.host_steps
        return sums

    @property
    def host_steps(self) -> int:
        """Number of steps on the host, or 1 if there are no steps."""
        times = self.rank.host_times
        return max(1, times.steps) if times else 1

    @property
    def host_step_us(self) -> float:
        """The mean step on the host."""
        times = self.rank.host_times
        return times.total_us / self.host_steps if times else 0.0

    @property
    def is_contended(self) -> bool:
        """True if other processes kept the machine busy during the recording."""
        return self.rank.host_load is not None and self.rank.host_load.describe_contention() is not None

    @property
    def slowdown(self) -> RecordingCost | None:
        """Comparison of recorded and unrecorded steps, if recorded steps take at least 1.15 times as long."""
        cost = self.rank.recording_cost
        return cost if cost is not None and cost.ratio >= _MIN_SLOWDOWN else None

    @property
    def cpu_wait_share(self) -> float:
        """Fraction of the recording that the main thread waited for a CPU, whatever used it. 0 if at most 5 %."""
        load = self.rank.host_load
        return max(load.wait_fraction, load.lost_fraction) if load is not None else 0.0

    def is_due_to_cpu_waits(self, time_us: float, min_share: float, step_us: float | None = None) -> bool:
        """Return whether waits for a CPU can explain the time that a rank spends waiting for other ranks.

        They can if the time exceeds their share of the step, summed over the ranks, by at most `min_share`: every rank
        that waits for a CPU can make the others wait. With devices, return False, because steps hardly depend on the
        CPU.

        Args:
            time_us: Time per step of the waits for other ranks.
            min_share: Minimum share of the step for a finding.
            step_us: Mean step. Default: that of this rank.
        """
        if self.rank.devices or not self.cpu_wait_share:
            return False
        step_us = self.step_us if step_us is None else step_us
        return time_us - max(2, self.team_size) * self.cpu_wait_share * step_us <= min_share * step_us

    def typical(self) -> RankView:
        """Return the same without the steps that are much longer than the median, if three or more are left."""
        if len(self.durations_us) <= _FEWEST_STEPS:
            return self
        limit_us = OUTLIER * statistics.median(self.durations_us)
        kept = [
            step
            for step in self.rank.steps
            if step.kind != self.kind
            or step.cold
            or max([step.duration_us, *(of.duration_us for of in step.devices)]) <= limit_us
        ]
        enough = sum(step.kind == self.kind and not step.cold for step in kept) >= _FEWEST_STEPS
        return RankView(attrs.evolve(self.rank, steps=tuple(kept)), self.label, self.typical_step) if enough else self

    def evidence(self, step: StepSummary | None = None) -> Evidence | None:
        """Return where a step is in the trace; the typical one, if not given."""
        step = step or self.typical_step
        if step is None:
            return None
        for of in step.devices[:1]:
            return Evidence(path=self.rank.path, start_us=of.start_us, duration_us=of.duration_us)
        return Evidence(path=self.rank.path, start_us=step.start_us, duration_us=step.duration_us)

    def show_step(self, step: StepSummary | None = None) -> str:
        """Return a command that shows a step. The default is the typical step."""
        step = step or self.typical_step
        if step is None or step.step is None:
            return f"profdeck view {shlex.quote(self.rank.path)}"
        option = "--iterations" if step.kind == ITERATION else "--steps"
        return f"profdeck view {shlex.quote(self.rank.path)} {option} {step.step}"

    def of_kind(self, kind: str, stage: str) -> list[StepSummary]:
        """Return the steps of a kind and stage, without cold steps if there are others."""
        return warm_steps([step for step in self.rank.steps if (step.kind, step.stage) == (kind, stage)])
