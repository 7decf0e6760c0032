"""Config models: captured steps, output directory, roles and their backends.

`profdeck.config.sources` loads the config. A role's ``options`` are validated later, against the options class of its
backend.
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
from profdeck.config.structuring import duration_validator, expand_path
from profdeck.config.targets import TargetsConfig
from profdeck_traces.base.errors import did_you_mean

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Mode(StrEnum):
    """Scope of a capture: complete global steps, or one stage of a global step."""

    CONTINUOUS = "continuous"
    DISCRETE = "discrete"


class OnError(StrEnum):
    """Handling of profiling errors in the host."""

    WARN = "warn"
    RAISE = "raise"


def _name_validator(kind: str, *, reserved: tuple[str, ...] = ()) -> Any:
    """Return a validator for the names of stages, roles or listeners.

    Args:
        kind: noun for error messages, such as ``stage``.
        reserved: names that are not allowed.
    """

    def check(_: object, __: object, names: Any) -> None:
        for name in names:
            if not NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is not a {kind}: expected a letter, then up to 63 letters, digits, '_' or '-'"
                )
            if name in reserved:
                raise ValueError(f"{name!r} cannot be the name of a {kind}: it is a top-level key of the config")

    return check


@attrs.frozen(kw_only=True)
class RoleConfig:
    """Config of one role."""

    backend: str
    """Name of the backend that records this role. `profdeck plugins` lists the installed backends."""

    ranks: str | tuple[int, ...] = attrs.field(default=(0,))
    """Ranks that record: ``all``, a range such as ``0..7``, or a list of ranks and ranges. Default: ``[0]``, because
    traces are large and those of different ranks are similar."""

    stages: tuple[str, ...] = attrs.field(default=(), validator=_name_validator("stage"))
    """Stages to capture in discrete mode. Default: all stages of the host."""

    batch_kinds: tuple[BatchKind, ...] = ()
    """Kinds of batches to record: `prefill`, `decode`, `mixed`. Engine backends only. Each kind is recorded in separate
    captures. Default: all kinds in one capture."""

    warmup_steps: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(0)))
    """Number of warm-up steps before a capture. The recorder discards them, so that the trace does not contain its
    start-up overhead. Default: 1 for backends that record a device, 0 with a window. If no step precedes a capture, the
    capture starts without warm-up. Continuous mode only."""

    window: Window | None = None
    """Mini-batches to record in each capture. Default: all."""

    iterations: Iterations | None = None
    """Engine iterations to record in each capture. Engine backends only. Default: all from start to stop."""

    targets: TargetsConfig | None = None
    """Engines that record together for this role. Engine backends only. Default: the target that the host passes."""

    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Options of the backend. `profdeck plugins NAME` prints their descriptions."""

    @ranks.validator
    def _check_ranks(self, _: object, ranks: str | tuple[int, ...]) -> None:
        if isinstance(ranks, str):
            if ranks != "all":
                raise ValueError(f"ranks: expected 'all', a range such as 0..7 or a list such as [0, 8], got {ranks!r}")
        elif not ranks:
            raise ValueError("ranks: the list is empty, so nothing would be recorded; remove the key to record rank 0")
        elif min(ranks) < 0:
            raise ValueError(f"ranks: {min(ranks)} is not a rank; ranks count from 0")

    def expected_ranks(self, world_size: int) -> tuple[int, ...]:
        """Return the sorted ranks that should record if the role has ``world_size`` processes."""
        if isinstance(self.ranks, str):
            return tuple(range(world_size))
        return tuple(sorted({rank for rank in self.ranks if rank < world_size}))


@attrs.frozen(kw_only=True)
class FinishConfig:
    """Task that runs when a capture has ended in all processes of the job."""

    command: str | None = attrs.field(default=None)
    """Shell command (`/bin/sh -c`). It runs once per capture, complete or not, when all participating processes have
    ended the capture and its files have been verified. It receives a JSON document on stdin. Default: none."""

    timeout_s: float = attrs.field(default=600.0, validator=duration_validator(validators.gt(0.0)))
    """Time limit for the command, and for each listener, in seconds. After this time, its process group is terminated.
    Default: 600."""

    wait_s: float = attrs.field(default=300.0, validator=duration_validator(validators.ge(0.0)))
    """Time to wait for processes that report nothing, such as killed ranks, in seconds. The wait restarts whenever a
    process begins or ends the capture, and while a process is recording. Default: 300."""

    @command.validator
    def _check_command(self, _: object, command: str | None) -> None:
        if command is not None and not command.strip():
            raise ValueError("command: the command is empty; remove the key to run nothing")


@attrs.frozen(kw_only=True)
class Config:
    """Config of a job. All processes of the job use the same config."""

    output: Path = attrs.field(default=Path("profiles"), converter=expand_path)
    """Directory that contains the run directories. Default: ``./profiles``. ``~`` is the home directory. Nothing is
    written outside of the directory."""

    run: str | None = attrs.field(default=None)
    """Name of this job's run directory. Default: the launcher's job ID, or the start time."""

    steps: Schedule = attrs.field(factory=Schedule)
    """Global steps to capture. `profdeck.config.schedule.GRAMMAR` describes the entries. Default: none."""

    on_demand: bool | str = True
    """Channel of the requests of `profdeck capture job RUN`. ``true`` (default): the run
    directory, which all processes must share and check once per global step. Name of a store, as listed by
    ``profdeck plugins``: that store, for hosts without a shared directory. ``false``: disabled."""

    join_steps: bool = True
    """Capture adjacent steps together, in one capture. Default: true. An on-demand request is always one capture."""

    mode: Mode = Mode.CONTINUOUS
    """``continuous``: captures contain complete steps (default). ``discrete``: each stage has its own capture."""

    on_error: OnError = OnError.WARN
    """``warn``: log profiling errors and continue the job (default). ``raise``: raise them in the host."""

    final_step: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(0)))
    """Last global step of the job. Default: unknown."""

    roles: Mapping[str, RoleConfig] = attrs.field(factory=dict)
    """Config of each role, by name. Roles without an entry record nothing."""

    listeners: tuple[str, ...] = attrs.field(default=(), validator=_name_validator("listener"))
    """Entry-point names of plugins that are notified of every capture. Default: none."""

    listener_options: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    """Options of listeners, by entry-point name. `profdeck plugins NAME` prints the options of a listener. Default:
    none."""

    finish: FinishConfig = attrs.field(factory=FinishConfig)
    """Task that runs when a capture has ended in all processes of the job. Default: none."""

    @run.validator
    def _check_run(self, _: object, run: str | None) -> None:
        if run is not None and not _RUN_NAME.fullmatch(run):
            raise ValueError(
                f"run: {run!r} is not a directory name; expected letters, digits, '.', '_' and '-', no path"
            )

    @listener_options.validator
    def _check_listener_options(self, _: object, options: Mapping[str, object]) -> None:
        for name in options:
            if name not in self.listeners:
                hint = did_you_mean(name, self.listeners) or f" Listeners: {', '.join(self.listeners) or 'none'}."
                raise ValueError(f"listener_options: '{name}' is not in listeners.{hint}")

    @steps.validator
    def _check_timed_steps(self, _: object, steps: Schedule) -> None:
        if steps.timed and self.on_demand is False:
            raise ValueError(
                f"steps: '{steps.timed[0].spec}' requires on-demand requests, but on_demand is false; remove that "
                "key, or specify step numbers"
            )

    @roles.validator
    def _check_role_names(self, _: object, roles: Mapping[str, RoleConfig]) -> None:
        _name_validator("role", reserved=TOP_LEVEL_KEYS)(self, _, roles)

    @roles.validator
    def _check_warmup(self, _: object, roles: Mapping[str, RoleConfig]) -> None:
        for name, role in roles.items():
            if self.mode is Mode.DISCRETE and role.warmup_steps:
                raise ValueError(
                    f"roles.{name}.warmup_steps: not supported in discrete mode, because no step precedes a stage; "
                    "use mode: continuous, or a window with warmup"
                )

    @roles.validator
    def _check_server_roles(self, _: object, roles: Mapping[str, RoleConfig]) -> None:
        """Reject a server in several roles, because a server can record only one capture at a time.

        In discrete mode, a server may have several roles, because their stages run one after the other.
        """
        owners: dict[str, str] = {}
        for name, role in roles.items():
            for url in role.targets.urls if role.targets and self.mode is Mode.CONTINUOUS else ():
                owner = owners.setdefault(url.rstrip("/"), name)
                if owner != name:
                    raise ValueError(
                        f"roles.{name}.targets.urls: {url} is also a target of the role {owner!r}; a server can "
                        "record for only one role"
                    )


TOP_LEVEL_KEYS = tuple(field.name for field in attrs.fields(Config))
"""Names that roles cannot have, because ``NAME.key`` in a setting would be ambiguous."""
