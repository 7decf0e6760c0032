"""Python API of `profdeck capture servers`: captures running servers or actors once, without a job."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from profdeck.backends.api import TargetState
from profdeck.base import interrupts
from profdeck.base.errors import CaptureError
from profdeck.base.identity import Identity
from profdeck.base.interrupts import StopSignal
from profdeck.base.observer import Observer
from profdeck.base.operations import running_loop
from profdeck.base.processes import raise_open_file_limit
from profdeck.config.model import Config
from profdeck.config.sources import ConfigDraft, load_draft
from profdeck.config.structuring import structure
from profdeck.config.targets import TargetsConfig
from profdeck.engine.clusters import get_cluster
from profdeck.lifecycle.role_factory import build_roles
from profdeck.profiler import Profiler
from profdeck.records.capture import EngineCapture
from profdeck.records.run_directory import RUN_FILE, run_name
from profdeck.replicas import survey
from profdeck.replicas.discovery import ReplicaNumbers, discover
from profdeck.replicas.routers import find_router, is_to_be_found
from profdeck.replicas.survey import CheckedServer
from profdeck_traces.base.documents import show
from profdeck_traces.base.errors import ConfigError, describe_error, did_you_mean
from profdeck_traces.base.text import plural, short_path

TIMEOUT_S = 300.0
"""Default time limit of a recording."""

_ROLE = "server"
_ACTORS = "targets.actors"
_REQUEST = "request"
_FILES = 1024
_FILES_PER_SERVER = 4
_STOPPING = "Stopping the recording. Press Ctrl-C again to exit without waiting for files."
_FIXED = {"steps": [0], "mode": "continuous", "on_demand": False, "on_error": "raise"}
"""Settings of a single capture whose errors are raised."""


@attrs.frozen(kw_only=True)
class ServerRequest:
    """Parameters for capturing servers.

    If the request specifies no servers, the servers in the config are captured.
    """

    urls: tuple[str, ...] = ()
    """URLs of servers, such as ``http://127.0.0.1:8000`` or ``unix:/run/engine.sock``."""
    router: str | None = None
    """URL of a router whose workers are captured, path of a log file that contains the URL, or ``auto``."""
    targets_file: Path | None = None
    """YAML or TOML file that lists servers."""
    actors: tuple[str, ...] = ()
    """Names of actors of the installed cluster plugin; ``*`` matches any string."""
    role: str | None = None
    """Role of the servers in the job. Default: ``server``, or all roles with targets in the config."""
    sample: int | None = None
    """Number of servers to capture for each worker type. Default: all."""
    iterations: int | None = None
    """Number of engine iterations to record. Default: the number in the config, or until the time limit."""
    skip: int = 0
    """Number of iterations to skip before the recording."""
    batch_kinds: tuple[str, ...] = ()
    """Kinds of batches to record in separate captures. Default: all kinds in one capture."""
    ranks: str | None = None
    """Ranks of each engine that record, such as ``0,8`` or ``0..7``, or ``all``. Default: 0."""
    output: Path | None = None
    """Output directory for the run. Default: the output directory of the servers."""
    config: Path | None = None
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    """Config settings by dotted key. They override everything else."""
    settings_source: str = "call"
    """Name of the source of these settings in error messages."""
    timeout_s: float = TIMEOUT_S
    """Time limit of the recording. When it has passed, the recording is stopped and its files are collected."""

    @property
    def specifies_servers(self) -> bool:
        """True if the request itself specifies which servers to capture."""
        return bool(self.urls or self.router or self.targets_file or self.actors)

    @property
    def specifies_one(self) -> bool:
        """True if the request specifies exactly one server, by its URL."""
        return len(self.urls) == 1 and not (self.router or self.targets_file or self.actors or self.sample)


class ServerObserver(Observer):
    """Base class for displaying the progress of a server capture. By default, its methods do nothing."""

    def servers_checked(self, servers: Sequence[CheckedServer]) -> None:
        """Called after the servers have been checked, if there is more than one server."""

    def recording_started(self, states: Callable[[], Mapping[str, TargetState]], count: int) -> None:
        """Called when the recording has started.

        Args:
            states: Returns the current states of the servers that report progress, by name.
            count: Number of servers that record.
        """

    def recording_stopped(self) -> None:
        """Called when the recording ends, before the servers write their files."""

    def files_collected(self) -> None:
        """Called when the capture ends, even after an error, if `recording_started` was called."""


@attrs.frozen(kw_only=True)
class ServerCapture:
    """Result of capturing one or more servers."""

    run: Path
    """The run directory. It does not exist if nothing was recorded."""
    captures: tuple[EngineCapture, ...]
    """One capture per role; empty if the start failed."""
    servers: tuple[CheckedServer, ...]
    error: CaptureError | None
    """Error of a failed start; ``None`` if the capture started."""


@attrs.frozen(kw_only=True)
class _Role:
    """A role and its servers."""

    name: str
    alone: bool
    """True for a single server, which is captured without targets."""
    servers: list[CheckedServer]

    @property
    def target(self) -> str | None:
        """URL of the single server; ``None`` if the servers are captured as targets."""
        return self.servers[0].url if self.alone else None

    @property
    def identity(self) -> Identity:
        """Role and replica of this process in the run."""
        return Identity(role=self.name, replica=self.servers[0].replica if self.alone else None)


def capture_servers(request: ServerRequest, observer: ServerObserver | None = None) -> ServerCapture:
    """Capture servers once, and wait for their files.

    Ctrl-C or SIGTERM stops the recording early. The recorded files are kept.

    Args:
        request: The parameters of the capture.
        observer: Receives messages and progress.

    Raises:
        ConfigError: The request is invalid, or the servers cannot be captured together.
        CaptureError: No server can be captured.
        PluginError: No backend can be used for the servers.
        KeyboardInterrupt: A second interrupt ended the wait for files.
    """
    if running_loop() is not None:
        raise ConfigError(
            "capture_servers cannot run in a thread with a running event loop. Use: await acapture_servers(...)"
        )
    stop = StopSignal()
    with asyncio.Runner() as runner:
        return interrupts.run(runner, acapture_servers(request, observer, stop), stop)


async def acapture_servers(
    request: ServerRequest, observer: ServerObserver | None = None, stop: StopSignal | None = None
) -> ServerCapture:
    """Async version of `capture_servers`.

    Args:
        request: The parameters of the capture.
        observer: Receives messages and progress.
        stop: Signal that stops the recording early. The recorded files are kept.
    """
    _check(request)
    with contextlib.ExitStack() as until_stopped:
        capture = _Capturing(request, observer or ServerObserver(), stop or StopSignal(), until_stopped)
        return await capture.run()


def _check(request: ServerRequest) -> None:
    urls: Any = request.urls
    if not isinstance(urls, tuple | list) or not all(isinstance(url, str) for url in urls):
        raise ConfigError(f"urls: expected a tuple of strings, got {show(urls)}.")
    for name in ("iterations", "sample"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}.")
    if not 0 < request.timeout_s < math.inf:
        raise ConfigError(f"timeout_s must be a positive number of seconds, got {request.timeout_s}.")
    if request.iterations is None and request.skip:
        raise ConfigError("skip is set, but iterations is not. Set iterations as well.")
    _ranks(request)
    seen: set[str] = set()
    for url in request.urls:
        server = CheckedServer(role=_ROLE, url=url, replica=None)
        if server.problem is not None:
            raise ConfigError(f"'{url}' is not the URL of a server, such as http://127.0.0.1:8000 or unix:/run/a.sock.")
        if server.name in seen:
            raise ConfigError(f"{server.name}: this server is specified twice.")
        seen.add(server.name)


def _ranks(request: ServerRequest) -> str | list[int | str] | None:
    """Return the requested ranks in the format of the config, where ranges such as ``0..7`` are strings."""
    if request.ranks is None or request.ranks == "all":
        return request.ranks
    try:
        return [part if ".." in part else int(part) for part in request.ranks.split(",")]
    except ValueError:
        raise ConfigError(f"ranks '{request.ranks}': expected all, or numbers such as 0,8 or 0..7.") from None


@attrs.frozen
class _Capturing:
    """A server capture in progress."""

    request: ServerRequest
    observer: ServerObserver
    stop: StopSignal
    until_stopped: contextlib.ExitStack
    """Leaves clusters when the capture has ended."""

    async def run(self) -> ServerCapture:
        request = self.request
        draft = load_draft(request.config, settings=request.settings, settings_source=request.settings_source)
        if request.output is not None and "output" not in request.settings:
            draft.set("output", str(request.output), _REQUEST)
        names = self._names(draft)
        self._check_settings(draft, names)
        roles = [await self._role(draft, name) for name in names]
        # Remove the config's other roles, because the run report would list them as missing.
        draft.data["roles"] = {role.name: draft.get("roles", role.name) or {} for role in roles}
        structure({**draft.data, "roles": {}}, Config, where="")  # report other errors before servers are contacted
        servers = [server for role in roles for server in role.servers]
        raise_open_file_limit(_FILES + _FILES_PER_SERVER * len(servers))  # each server needs several connections
        await self._check_servers(servers)
        for role in roles:
            draft.set(f"roles.{role.name}.backend", survey.common_backend(role.servers), _REQUEST)
        if draft.get("output") is None and (output := await survey.common_output(servers)) is not None:
            draft.set("output", str(output), _REQUEST)
        _set(draft, _FIXED)
        config = draft.checked().config
        targets = {role.name: role.target for role in roles}
        profiler = Profiler(build_roles(config, targets, {role.name: role.identity for role in roles}, ()))
        try:
            captures = await self._record(profiler, servers)
        except CaptureError as error:
            run = config.output.absolute() / run_name(config.run)
            if len(servers) > 1 and (run / RUN_FILE).exists():
                error = CaptureError(f"{error} To list the result of each server: profdeck ls {short_path(run)}")
            return ServerCapture(run=run, captures=(), servers=tuple(servers), error=error)
        made = tuple(captures.values())
        first = made[0].request
        assert first is not None  # noqa: S101  # captures of servers have a request
        return ServerCapture(run=first.output / first.run, captures=made, servers=tuple(servers), error=None)

    # Selection of servers.

    def _names(self, draft: ConfigDraft) -> list[str]:
        """Return the names of the roles to capture."""
        role = self.request.role
        if self.request.specifies_servers:
            return [role or _ROLE]
        roles = draft.checked().config.roles
        found = [name for name, one in roles.items() if one.targets and one.targets.discovers]
        if role is not None and role not in found:
            raise ConfigError(
                f"The role '{role}' has no servers under targets in the config.{did_you_mean(role, found)}"
            )
        if not found:
            raise ConfigError(
                "No server is specified, and no role of the config specifies servers under targets. Specify urls, a "
                "router, a targets file or actors, or add targets to the config."
            )
        return found if role is None else [role]

    async def _role(self, draft: ConfigDraft, name: str) -> _Role:
        """Find a role's servers. If the role has actors, join their cluster first.

        Raises:
            ConfigError: The request or the config is invalid.
            CaptureError: A router does not respond, or no server was found.
        """
        request = self.request
        alone = request.specifies_one and draft.get("roles", name, "targets") is None
        _set(draft, {f"roles.{name}.{key}": value for key, value in self._settings_of_role().items()})
        if request.sample:
            draft.set(f"roles.{name}.targets.sample", request.sample, _REQUEST)
        if request.specifies_servers and not alone:
            where = await self._where(draft, name)
            _set(draft, {f"roles.{name}.targets.{key}": value for key, value in where.items()})
        for key, value in request.settings.items():  # override everything else
            draft.set(key, value, request.settings_source)
        roles = draft.get("roles") or {}
        if name not in roles and any(str(role).lower() == name.lower() for role in roles):
            raise ConfigError(f"The config has no role '{name}'. Its roles are {', '.join(roles)}.")
        backend = self._backend(draft, name)
        if alone:
            server = CheckedServer(role=name, url=request.urls[0], replica=None, backend=backend)
            return _Role(name=name, alone=True, servers=[server])
        targets = structure(draft.get("roles", name, "targets"), TargetsConfig, where=f"roles.{name}.targets")
        if targets.actors:
            get_cluster(_ACTORS).join(self.until_stopped)
        found, notes = await discover(targets, ReplicaNumbers(), survey.asking_by(survey.engine_backends(backend)))
        for note in notes:
            self.observer.note(note)
        return _Role(name=name, alone=False, servers=[CheckedServer.found(name, one, backend) for one in found])

    def _check_settings(self, draft: ConfigDraft, captured: Sequence[str]) -> None:
        """Check that all settings apply to this capture.

        Raises:
            ConfigError: A setting belongs to another role, or has a fixed value in this kind of capture.
        """
        if not isinstance(roles := draft.get("roles") or {}, dict):
            raise ConfigError(f"roles: expected a mapping of role names, got {show(roles)}.")
        source = self.request.settings_source
        for key, origin in draft.sources.items():
            if origin != source:
                continue
            if key[0] in _FIXED:
                raise ConfigError(f"{source} {key[0]}: it has no effect on a capture of servers. Remove this setting.")
            if key[0] == "roles" and len(key) > 1 and key[1] not in captured:
                raise ConfigError(
                    f"{source} {'.'.join(key[1:])}: '{key[1]}' is not captured. Captured roles: {', '.join(captured)}."
                    f"{did_you_mean(key[1], captured)}"
                )

    def _settings_of_role(self) -> dict[str, Any]:
        request = self.request
        settings = {
            "ranks": _ranks(request),
            "iterations": request.iterations and {"count": request.iterations, "skip": request.skip},
            "batch_kinds": list(request.batch_kinds),
        }
        return {key: value for key, value in settings.items() if value}

    async def _where(self, draft: ConfigDraft, name: str) -> dict[str, Any]:
        """Return ``targets`` settings that select the servers specified in the request, and no others."""
        request = self.request
        where: dict[str, Any] = {
            "urls": list(request.urls),
            "router": await self._router(request.router),
            "file": request.targets_file and str(request.targets_file),
            "actors": list(request.actors),
        }
        if request.actors:
            cluster = get_cluster(_ACTORS)
            cluster.join(self.until_stopped)
            namespace = draft.get("roles", name, "targets", "actor_namespace")
            if namespace is None:
                ask = survey.asking_by(survey.engine_backends())
                namespace, warnings = await cluster.find_namespace(request.actors, ask)
                for warning in warnings:
                    self.observer.warn(warning)
            where["actor_namespace"] = namespace
        return where

    async def _router(self, router: str | None) -> str | None:
        """Return the router's URL. If `router` is ``auto`` or a log file, search for the URL.

        Raises:
            CaptureError: No router is found, or several routers are.
        """
        if router is None or not is_to_be_found(router):
            return router
        url = await find_router(router)
        self.observer.note(f"The router is {url}.")
        return url

    def _backend(self, draft: ConfigDraft, name: str) -> str | None:
        """Return the configured backend of the servers, or ``None`` if it must be detected.

        A backend in a config file applies only to the targets in that file, not to servers specified in the request.
        """
        backend = draft.get("roles", name, "backend")
        source = draft.sources.get(("roles", name, "backend"))
        if backend is None or (self.request.specifies_servers and source != self.request.settings_source):
            return None
        survey.engine_backend(backend)
        return str(backend)

    async def _check_servers(self, servers: list[CheckedServer]) -> None:
        """Check all servers.

        Raises:
            ConfigError: A server is a router.
            CaptureError: The only server does not respond.
        """
        with self.observer.phase(f"Checking {plural(len(servers), 'server')}") as on_progress:
            await survey.check_all(servers, on_progress)
        if routers := [server.name for server in servers if server.is_router]:
            raise ConfigError(
                f"{', '.join(routers)}: this is a router, which may forward the start and the stop to different "
                "workers. Use --router instead, so that profdeck contacts each worker at its own URL."
            )
        if len(servers) > 1:
            self.observer.servers_checked(servers)
        elif servers[0].problem is not None:
            raise servers[0].problem
        elif servers[0].reason and servers[0].backend is not None:
            self.observer.warn(servers[0].complaint)
        for warning in survey.version_warnings(servers):
            self.observer.warn(warning)

    # Recording.

    async def _record(self, profiler: Profiler, servers: list[CheckedServer]) -> dict[str, EngineCapture]:
        """Start the recording, wait until it ends, and stop all servers that were started, even after an error.

        Raises:
            CaptureError: The start failed.
        """
        stopping, reason = False, "interrupted"
        try:
            await profiler.astart(0)
            captures = {role: one for role, one in profiler.captures.items() if isinstance(one, EngineCapture)}
            recording = [server for server in servers if _takes_part(server, captures[server.role])]
            lost: str | None = None
            self.observer.recording_started(lambda: profiler.states, len(recording))
            try:
                try:
                    await self._wait(profiler)
                except CaptureError as error:  # all servers stopped responding: report the existing files
                    lost = describe_error(error)
                stopping = True
                self.observer.recording_stopped()
                with contextlib.suppress(CaptureError):  # the report lists incomplete captures
                    await (profiler.astop() if lost is None else profiler.aclose(lost))
            finally:
                self.observer.files_collected()
        except asyncio.CancelledError:
            if not stopping:
                self.observer.note(_STOPPING)
            raise
        except Exception as error:
            reason = describe_error(error)
            raise
        finally:
            await profiler.aclose(reason)  # otherwise, the servers would continue recording
        return captures

    async def _wait(self, profiler: Profiler) -> None:
        """Wait until all recording windows are complete, the time limit passes or a stop is requested.

        Raises:
            CaptureError: All servers have stopped responding.
        """
        windows = asyncio.create_task(profiler.await_window(self.request.timeout_s))
        stopped = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait((windows, stopped), return_when=asyncio.FIRST_COMPLETED)
            if windows.done():
                windows.result()
            else:
                self.observer.note(_STOPPING)
        finally:
            windows.cancel()
            stopped.cancel()
            await asyncio.gather(windows, stopped, return_exceptions=True)


def _set(draft: ConfigDraft, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        draft.set(key, value, _REQUEST)


def _takes_part(server: CheckedServer, capture: EngineCapture) -> bool:
    if capture.fleet is None:
        return True
    return any(record.took_part and record.name == server.name for record in capture.fleet.targets)
