"""The config: what to capture, where to put it, and which backend each role uses.

The models are plain attrs classes; `profdeck.config.sources` reads and merges the places that values come from. A
role's ``options`` belong to its backend and are checked against that backend's options class, not here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import attrs
from attrs import validators

from profdeck.base.identity import NAME
from profdeck.config.batch_kinds import BatchKind
from profdeck.config.schedule import Iterations, Schedule, Window
from profdeck.config.structuring import duration_validator
from profdeck.config.targets import TargetsConfig
from profdeck_traces.base.errors import did_you_mean

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Mode(StrEnum):
    """Scope of a capture: complete global steps, or one stage of a global step."""

    CONTINUOUS = "continuous"
    DISCRETE = "discrete"


class OnError(StrEnum):
    """What a failure of profiling does to the host."""

    WARN = "warn"
    RAISE = "raise"


def _names(what: str, *, reserved: tuple[str, ...] = ()) -> Any:
    def check(_: object, __: object, names: Any) -> None:
        for name in names:
            if not NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is not a {what}: expected a letter, then up to 63 letters, digits, '_' or '-'"
                )
            if name in reserved:
                raise ValueError(f"{name!r} cannot name a {what}: it is a key of the config itself")

    return check


@attrs.frozen(kw_only=True)
class RoleConfig:
    """The section of the config for one role."""

    backend: str
    """The backend that records this role; `profdeck plugins` lists the installed backends."""

    ranks: str | tuple[int, ...] = attrs.field(default=(0,))
    """The ranks that record: ``all``, a list, or ranges such as ``0..7``, alone or in a list. Default: ``[0]``, since
    traces are large and ranks alike."""

    stages: tuple[str, ...] = attrs.field(default=(), validator=_names("stage"))
    """The stages to capture in discrete mode. Default: every stage that the host declares."""

    batch_kinds: tuple[BatchKind, ...] = ()
    """Kinds of batches to record, for backends of engines: `prefill`, `decode`, `mixed`. Each kind is recorded in
    separate captures. Default: all kinds in one capture."""

    warmup_steps: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(0)))
    """Number of global steps before a capture that the recorder records and discards, to keep its start-up cost out of
    the trace. Default: 1 for backends that record a device, 0 with a window. If no step precedes a capture, the capture
    starts without warm-up. Continuous mode only."""

    window: Window | None = None
    """Mini-batches to record inside a capture. Default: all."""

    iterations: Iterations | None = None
    """Engine iterations to record inside a capture, for backends of engines. Default: all from start to stop."""

    targets: TargetsConfig | None = None
    """The engines that record together for this role, for backends of engines. Default: the one target that the host
    names."""

    options: Mapping[str, Any] = attrs.field(factory=dict)
    """The backend's own options; `profdeck plugins NAME` explains each."""

    @ranks.validator
    def _all_or_ranks(self, _: object, ranks: str | tuple[int, ...]) -> None:
        if isinstance(ranks, str):
            if ranks != "all":
                raise ValueError(f"ranks: expected 'all', a range such as 0..7 or a list such as [0, 8], got {ranks!r}")
        elif not ranks:
            raise ValueError("ranks: the list is empty, so nothing would be recorded; remove the key for [0]")
        elif min(ranks) < 0:
            raise ValueError(f"ranks: {min(ranks)} is not a rank; ranks count from 0")

    def expected_ranks(self, world_size: int) -> tuple[int, ...]:
        """Return the ranks that should record in a job of ``world_size`` processes of this role."""
        if isinstance(self.ranks, str):
            return tuple(range(world_size))
        return tuple(sorted({rank for rank in self.ranks if rank < world_size}))


@attrs.frozen(kw_only=True)
class FinishConfig:
    """What is run when a capture has ended in all processes of the job."""

    command: str | None = attrs.field(default=None)
    """A command for `/bin/sh -c`, run once per capture when all processes that take part have ended it and its files
    have been read back, whatever came of it. It gets a JSON document as its input. Default: none."""

    timeout_s: float = attrs.field(default=600.0, validator=duration_validator(validators.gt(0.0)))
    """How long the command may take, and each listener, in seconds; then it is ended with all that it has started in
    its process group. Default: 600."""

    wait_s: float = attrs.field(default=300.0, validator=duration_validator(validators.ge(0.0)))
    """How long to wait for silent processes, in seconds: a rank that was killed, a role that takes no part. It begins
    again whenever one of them begins or ends the capture, and as long as one is known to be
    recording. Default: 300."""

    @command.validator
    def _not_empty(self, _: object, command: str | None) -> None:
        if command is not None and not command.strip():
            raise ValueError("command: it is empty; remove the key to run nothing")


@attrs.frozen(kw_only=True)
class Config:
    """The whole config of a job, the same for all of its processes."""

    output: Path = Path("profiles")
    """The directory that holds the runs. Default: ``./profiles``. Nothing is written outside of it."""

    run: str | None = attrs.field(default=None)
    """The name of this job's run directory. Default: the launcher's job id, or the start time."""

    steps: Schedule = attrs.field(factory=Schedule)
    """The global steps to capture, each entry as `profdeck.config.schedule.GRAMMAR` says. Default: none."""

    on_demand: bool | str = True
    """How `profdeck capture job RUN` requests captures while the job runs. ``true`` (default): through the run
    directory, which all processes must share and check once per global step. Name of a store, as listed by
    ``profdeck plugins``: for hosts without a shared directory. ``false``: disabled."""

    join_steps: bool = True
    """Whether adjacent steps share one capture. Default: true. What is asked for on demand is one capture anyway."""

    mode: Mode = Mode.CONTINUOUS
    """``continuous``: one capture of whole steps (default); ``discrete``: one capture per stage."""

    on_error: OnError = OnError.WARN
    """``warn``: a failure of profiling is logged and the job goes on (default); ``raise``: it is raised."""

    final_step: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(0)))
    """The last global step of the job, when it is known. Default: unknown."""

    roles: Mapping[str, RoleConfig] = attrs.field(factory=dict)
    """What each role records. A role that is not here records nothing."""

    listeners: tuple[str, ...] = attrs.field(default=(), validator=_names("listener"))
    """Plugins that are notified of every capture, by entry-point name. Default: none."""

    listener_options: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    """Options of listeners, by entry-point name. `profdeck plugins NAME` prints the options of a listener. Default:
    none."""

    finish: FinishConfig = attrs.field(factory=FinishConfig)
    """What is run when a capture has ended in all processes of the job. Default: nothing."""

    @run.validator
    def _one_path_component(self, _: object, run: str | None) -> None:
        if run is not None and not _RUN_NAME.fullmatch(run):
            raise ValueError(
                f"run: {run!r} is not a directory name; expected letters, digits, '.', '_' and '-', no path"
            )

    @listener_options.validator
    def _of_selected_listeners(self, _: object, options: Mapping[str, object]) -> None:
        for name in options:
            if name not in self.listeners:
                hint = did_you_mean(name, self.listeners) or f" It has {', '.join(self.listeners) or 'none'}."
                raise ValueError(f"listener_options: '{name}' is not in listeners.{hint}")

    @steps.validator
    def _time_needs_requests(self, _: object, steps: Schedule) -> None:
        if steps.timed and self.on_demand is False:
            raise ValueError(
                f"steps: '{steps.timed[0].spec}' is asked for while the job runs, which on_demand: false forbids; "
                "remove that key, or say the steps in numbers"
            )

    @roles.validator
    def _roles_are_names(self, _: object, roles: Mapping[str, RoleConfig]) -> None:
        _names("role", reserved=TOP_LEVEL_KEYS)(self, _, roles)

    @roles.validator
    def _warmup_only_when_continuous(self, _: object, roles: Mapping[str, RoleConfig]) -> None:
        for name, role in roles.items():
            if self.mode is Mode.DISCRETE and role.warmup_steps:
                raise ValueError(
                    f"roles.{name}.warmup_steps: discrete mode captures stages, which have no step before them; "
                    "use mode: continuous, or a window with warmup"
                )

    @roles.validator
    def _a_server_has_one_role(self, _: object, roles: Mapping[str, RoleConfig]) -> None:
        """Refuse what would be two captures of one server at a time; stages come one after the other."""
        owners: dict[str, str] = {}
        for name, role in roles.items():
            for url in role.targets.urls if role.targets and self.mode is Mode.CONTINUOUS else ():
                owner = owners.setdefault(url.rstrip("/"), name)
                if owner != name:
                    raise ValueError(
                        f"roles.{name}.targets.urls: {url} is a target of the role {owner!r} as well, and a server "
                        "records one capture at a time; name it in one role"
                    )


TOP_LEVEL_KEYS = tuple(field.name for field in attrs.fields(Config))
"""What a role cannot be called: settings name roles and these keys alike."""
