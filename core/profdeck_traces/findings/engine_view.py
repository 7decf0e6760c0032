"""Measurements of one server for the engine rules."""

from __future__ import annotations

import functools
import shlex
import statistics
from collections.abc import Iterable, Sequence

import attrs

from profdeck_traces.analysis.engine_iterations import EngineIteration, iterations_of, server_label, traces_of_servers
from profdeck_traces.analysis.model import RunSummary
from profdeck_traces.analysis.run_model import Evidence
from profdeck_traces.analysis.step_names import DECODE
from profdeck_traces.findings.cures import engine_cure
from profdeck_traces.findings.rank_finding import RankFinding
from profdeck_traces.findings.rank_view import RankView


@attrs.frozen(slots=False)
class ServerView:
    """Engine iterations of one server in all of its captures. Times are in microseconds."""

    views: tuple[RankView, ...]
    """One view per trace. Together they have at least one iteration."""
    label: str
    """Role and replica, such as ``rollout/1``."""

    @functools.cached_property
    def by_trace(self) -> list[tuple[RankView, list[EngineIteration]]]:
        """Each trace with its iterations, sorted by time."""
        return [(view, iterations_of(view.rank)) for view in self.views]

    @functools.cached_property
    def iterations(self) -> list[EngineIteration]:
        """Iterations of all traces."""
        return [iteration for _, iterations in self.by_trace for iteration in iterations]

    @functools.cached_property
    def decodes(self) -> list[EngineIteration]:
        """Iterations that only decode."""
        return [iteration for iteration in self.iterations if iteration.step.stage == DECODE]

    @functools.cached_property
    def decode_us(self) -> float | None:
        """Median period of the decode iterations; ``None`` if there are fewer than three."""
        periods = [iteration.period_us for iteration in self.decodes]
        return statistics.median(periods) if len(periods) >= 3 else None

    @functools.cached_property
    def time_us(self) -> float:
        """Total time of all iterations, excluding pauses in which the server had no requests."""
        return sum(iteration.period_us for iteration in self.iterations)

    @property
    def iteration_us(self) -> float:
        """Mean period of an iteration."""
        return self.time_us / len(self.iterations)

    @property
    def engine(self) -> str | None:
        """The plugin that recognises the iterations."""
        return next((view.rank.engine for view in self.views if view.rank.engine), None)

    @property
    def has_device(self) -> bool:
        """True if device work was recorded."""
        return any(view.rank.devices for view in self.views)

    def numbers(self, field: str) -> list[int] | None:
        """Return the values of a `BatchDetails` field for the iterations that have it, or ``None`` if none does."""
        found = [
            getattr(iteration.step.details, field)
            for iteration in self.iterations
            if iteration.step.details is not None
        ]
        stated = [number for number in found if number is not None]
        return stated or None

    def find(self, cause: str, text: str, do: str, at: EngineIteration | None = None, **more: object) -> RankFinding:
        """Return a finding about this server.

        Args:
            cause: Id of the cause.
            text: Description.
            do: Generic cure, used if the engine's plugin does not provide its own.
            at: Iteration that shows the problem. Default: the longest iteration.
            more: Additional fields of the finding.
        """
        at = at or max(self.iterations, key=lambda iteration: iteration.period_us)
        view = next(view for view, iterations in self.by_trace if any(one is at for one in iterations))
        fields = {
            "capture": view.rank.capture,
            "role": view.rank.role,
            "replica": view.rank.replica,
            "rank": view.rank.rank,
            "step_us": self.iteration_us,
            "check": f"profdeck view {shlex.quote(view.rank.path)} --iterations {at.index}",
            "evidence": Evidence(path=view.rank.path, start_us=at.step.start_us, duration_us=at.period_us),
        }
        return RankFinding(
            rule=cause,
            text=text,
            do=engine_cure(self.engine, cause, do),
            label=view.label,
            **(fields | more),  # type: ignore[arg-type]  # unknown fields raise TypeError
        )


def servers_in(run: RunSummary, views: Iterable[RankView]) -> list[ServerView]:
    """Return the servers of a run that have engine iterations."""
    by_path = {view.rank.path: view for view in views}
    servers = []
    for traces in traces_of_servers(run.ranks):
        found = tuple(by_path[trace.path] for trace in traces if trace.path in by_path)
        if found:
            servers.append(ServerView(found, server_label(traces, run.ranks)))
    return servers


def fleets(servers: Sequence[ServerView]) -> list[list[ServerView]]:
    """Group servers by run and role. Omit single servers, and servers with neither role nor replica."""
    groups: dict[tuple[str | None, str | None], list[ServerView]] = {}
    for server in servers:
        rank = server.views[0].rank
        if rank.role is not None or rank.replica is not None:
            groups.setdefault((rank.run, rank.role), []).append(server)
    return [group for group in groups.values() if len(group) > 1]
