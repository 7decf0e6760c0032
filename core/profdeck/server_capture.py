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
from profdeck.config.model import Config, RoleConfig
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
from profdeck.replicas.routers import find_router, is_search_location
from profdeck.replicas.survey import CheckedServer
from profdeck_traces.base.documents import show
from profdeck_traces.base.errors import ConfigError, describe_error, did_you_mean
from profdeck_traces.base.text import plural, shell_path

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
_UNKNOWN = {"backend": "", "targets": None}
"""Settings of a role that are determined after the request has been validated."""


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
    """YAML or TOML file with a config. Default: the file in ``PROFDECK_CONFIG``, if any."""
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    """Config settings by dotted key. They override all other settings, including the parameters of this request."""
    timeout_s: float = TIMEOUT_S
    """Time limit of the recording, in seconds. After this time, the recording is stopped and its files are collected.
    """


class ServerObserver(Observer):
    """Observer of a server capture. Override its methods to display progress. By default, they do nothing."""

    def servers_checked(self, servers: Sequence[CheckedServer]) -> None:
        """Called after the servers have been checked, if there is more than one server.

        Args:
            servers: The servers, with the attributes that `ServerCapture.servers` describes.
        """

    def recording_started(self, states: Callable[[], Mapping[str, TargetState]], count: int) -> None:
        """Called when the recording has started, with a function that returns the progress of the servers.

        Args:
            states: Returns the last reported state of each server that reports progress, by name.
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
    """The servers that were found, with ``name``, ``role``, ``replica``, ``worker_type``, ``backend``, ``state`` and
    ``reason``. ``reason`` describes the server's problem and is empty if there is none."""
    error: CaptureError | None
    """Error of a failed start; ``None`` if the capture started."""


@attrs.frozen(kw_only=True)
class _Role:
    """A role and its servers."""

    name: str
    alone: bool
    """True for a single server, which is captured directly instead of as a target."""
    servers: list[CheckedServer]

    @property
    def target(self) -> str | None:
        """URL of the single server; ``None`` if the servers are captured as targets."""
        return self.servers[0].url if self.alone else None

    @property
    def identity(self) -> Identity:
        """Role and replica of this process in the run."""
        return Identity(role=self.name, replica=self.servers[0].replica if self.alone else None)


def capture_servers(
    request: ServerRequest, observer: ServerObserver | None = None, *, settings_source: str = "call"
) -> ServerCapture:
    """Capture servers once, and wait for their files.

    Ctrl-C or SIGTERM stops the recording early. The recorded files are kept.

    Args:
        request: The parameters of the capture.
        observer: Receives messages and progress.
        settings_source: Name for the origin of ``request.settings`` in error messages, such as ``--set``.

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
        return interrupts.run(runner, _capture(request, observer, stop, settings_source), stop)


async def acapture_servers(
    request: ServerRequest,
    observer: ServerObserver | None = None,
    stop: asyncio.Event | None = None,
    *,
    settings_source: str = "call",
) -> ServerCapture:
    """Async version of `capture_servers`, without handling of signals.

    Args:
        request: The parameters of the capture.
        observer: Receives messages and progress.
        stop: Event that stops the recording early when it is set. The recorded files are kept.
        settings_source: Name for the origin of ``request.settings`` in error messages.
    """
    return await _capture(request, observer, stop or asyncio.Event(), settings_source)


async def _capture(
    request: ServerRequest, observer: ServerObserver | None, stop: StopSignal | asyncio.Event, settings_source: str
) -> ServerCapture:
    _check(request)
    with contextlib.ExitStack() as until_stopped:
        capture = _Capturing(request, observer or ServerObserver(), stop, settings_source, until_stopped)
        return await capture.run()


def _check(request: ServerRequest) -> None:
    """Validate a request before any server is contacted.

    Raises:
        ConfigError: A parameter is invalid.
    """
    urls: Any = request.urls
    if not isinstance(urls, tuple | list) or not all(isinstance(url, str) for url in urls):
        raise ConfigError(f"urls: expected a tuple of strings, got {show(urls)}.")
    for name, minimum in (("iterations", 1), ("sample", 1), ("skip", 0)):
        value = getattr(request, name)
        if value is not None and value < minimum:
            raise ConfigError(f"{name} must be at least {minimum}, got {value}.")
    if not 0 < request.timeout_s < math.inf:
        raise ConfigError(f"timeout_s must be a positive number of seconds, got {request.timeout_s}.")
    if request.iterations is None and request.skip:
        raise ConfigError("skip is set, but iterations is not. Set iterations as well.")
    structure({**_role_settings(request), **_UNKNOWN}, RoleConfig, where="")
    names: set[str] = set()
    for url in request.urls:
        server = CheckedServer(role=_ROLE, url=url, replica=None)
        if server.problem is not None:
            raise ConfigError(f"'{url}' is not the URL of a server, such as http://127.0.0.1:8000 or unix:/run/a.sock.")
        if server.name in names:
            raise ConfigError(f"{server.name}: this server is specified twice.")
        names.add(server.name)


def _role_settings(request: ServerRequest) -> dict[str, Any]:
    """Return the settings of a role that the request specifies."""
    settings = {
        "ranks": _parse_ranks(request.ranks),
        "iterations": request.iterations and {"count": request.iterations, "skip": request.skip},
        "batch_kinds": list(request.batch_kinds),
    }
    return {key: value for key, value in settings.items() if value}


def _parse_ranks(ranks: str | None) -> str | list[int | str] | None:
    """Return the requested ranks in the format of the config, where ranges such as ``0..7`` are strings."""
    if ranks is None or ranks == "all":
        return ranks
    try:
        return [item if ".." in item else int(item) for item in ranks.split(",")]
    except ValueError:
        raise ConfigError(f"ranks: expected all, or numbers such as 0,8 or 0..7, got {show(ranks)}.") from None


@attrs.frozen
class _Capturing:
    """A server capture in progress."""

    request: ServerRequest
    observer: ServerObserver
    stop: StopSignal | asyncio.Event
    settings_source: str
    until_stopped: contextlib.ExitStack
    """Leaves clusters when the capture has ended."""

    async def run(self) -> ServerCapture:
        request = self.request
        draft = load_draft(request.config, settings=request.settings, settings_source=self.settings_source)
        if request.output is not None and "output" not in request.settings:
            draft.set("output", str(request.output), _REQUEST)
        names = self._role_names(draft)
        self._check_settings(draft, names)
        single = self._specifies_single_server(draft, names)
        for name in names:
            self._apply_request(draft, name)
        _set(draft, _FIXED)
        _validate(draft, names)
        roles = [self._single_role(draft, names[0])] if single else [await self._role(draft, name) for name in names]
        # Remove the config's other roles, because the run report would list them as missing.
        draft.data["roles"] = {role.name: draft.get("roles", role.name) or {} for role in roles}
        servers = [server for role in roles for server in role.servers]
        raise_open_file_limit(_FILES + _FILES_PER_SERVER * len(servers))  # each server needs several connections
        await self._check_servers(servers)
        for role in roles:
            draft.set(f"roles.{role.name}.backend", survey.common_backend(role.servers), _REQUEST)
        if draft.get("output") is None and (output := await survey.common_output(servers)) is not None:
            draft.set("output", str(output), _REQUEST)
        config = draft.checked().config
        targets = {role.name: role.target for role in roles}
        profiler = Profiler(build_roles(config, targets, {role.name: role.identity for role in roles}, ()))
        try:
            captures = tuple((await self._record(profiler, servers)).values())
        except CaptureError as error:
            run = config.output.absolute() / run_name(config.run)
            if len(servers) > 1 and (run / RUN_FILE).exists():
                error = CaptureError(f"{error} To list the result of each server: profdeck ls {shell_path(run)}")
            return ServerCapture(run=run, captures=(), servers=tuple(servers), error=error)
        sent = captures[0].request
        assert sent is not None  # noqa: S101  # captures of servers have a request
        return ServerCapture(run=sent.output / sent.run, captures=captures, servers=tuple(servers), error=None)

    # Selection of servers.

    @property
    def _specifies_servers(self) -> bool:
        """True if the request itself specifies which servers to capture."""
        request = self.request
        return bool(request.urls or request.router or request.targets_file or request.actors)

    def _specifies_single_server(self, draft: ConfigDraft, names: Sequence[str]) -> bool:
        """Return whether the request specifies only one server, by its URL, and the config adds no targets."""
        request = self.request
        if len(request.urls) != 1 or request.router or request.targets_file or request.actors or request.sample:
            return False
        return draft.get("roles", names[0], "targets") is None

    def _role_names(self, draft: ConfigDraft) -> list[str]:
        """Return the names of the roles to capture."""
        role = self.request.role
        if self._specifies_servers:
            return [role or _ROLE]
        roles = draft.checked().config.roles
        names = [name for name, config in roles.items() if config.targets and config.targets.discovers]
        if role is not None and role not in names:
            raise ConfigError(
                f"The role '{role}' has no servers under targets in the config.{did_you_mean(role, names)}"
            )
        if not names:
            raise ConfigError(
                "No servers specified, and no role in the config has targets. Specify urls, a router, a targets file "
                "or actors, or add targets to the config."
            )
        return names if role is None else [role]

    def _apply_request(self, draft: ConfigDraft, name: str) -> None:
        """Set the requested values of a role."""
        request, roles = self.request, draft.get("roles") or {}
        if name not in roles and any(str(role).lower() == name.lower() for role in roles):
            raise ConfigError(f"The config has no role '{name}'. Its roles are {', '.join(roles)}.")
        _set(draft, {f"roles.{name}.{key}": value for key, value in _role_settings(request).items()})
        if request.sample:
            draft.set(f"roles.{name}.targets.sample", request.sample, _REQUEST)
        self._apply_settings(draft)

    def _apply_settings(self, draft: ConfigDraft) -> None:
        """Apply the request's settings again, because they override the values that were set from the request."""
        for key, value in self.request.settings.items():
            draft.set(key, value, self.settings_source)

    def _single_role(self, draft: ConfigDraft, name: str) -> _Role:
        """Return a role for the only server of the request."""
        backend = self._backend(draft, name)
        server = CheckedServer(role=name, url=self.request.urls[0], replica=None, backend=backend)
        return _Role(name=name, alone=True, servers=[server])

    async def _role(self, draft: ConfigDraft, name: str) -> _Role:
        """Find a role's servers. If the role has actors, join their cluster first.

        Raises:
            ConfigError: The request or the config is invalid.
            CaptureError: A router does not respond, or no server was found.
        """
        if self._specifies_servers:
            locations = await self._locations(draft, name)
            _set(draft, {f"roles.{name}.targets.{key}": value for key, value in locations.items()})
            self._apply_settings(draft)
        backend = self._backend(draft, name)
        config = structure(draft.get("roles", name, "targets"), TargetsConfig, where=f"roles.{name}.targets")
        if config.actors:
            get_cluster(_ACTORS).join(self.until_stopped)
        targets, notes = await discover(config, ReplicaNumbers(), survey.asking_by(survey.engine_backends(backend)))
        for note in notes:
            self.observer.note(note)
        servers = [CheckedServer.from_target(name, target, backend) for target in targets]
        return _Role(name=name, alone=False, servers=servers)

    def _check_settings(self, draft: ConfigDraft, captured: Sequence[str]) -> None:
        """Check that all settings apply to this capture.

        Raises:
            ConfigError: A setting belongs to another role, or has a fixed value in this kind of capture.
        """
        if not isinstance(roles := draft.get("roles") or {}, dict):
            raise ConfigError(f"roles: expected a mapping of role names, got {show(roles)}.")
        source = self.settings_source
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

    async def _locations(self, draft: ConfigDraft, name: str) -> dict[str, Any]:
        """Return ``targets`` settings that select the servers specified in the request, and no others."""
        request = self.request
        locations: dict[str, Any] = {
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
            locations["actor_namespace"] = namespace
        return locations

    async def _router(self, router: str | None) -> str | None:
        """Return the router's URL. If `router` is ``auto`` or a log file, search for the URL.

        Raises:
            CaptureError: No router is found, or several routers are.
        """
        if router is None or not is_search_location(router):
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
        if backend is None or (self._specifies_servers and source != self.settings_source):
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
            captures = {
                role: capture for role, capture in profiler.captures.items() if isinstance(capture, EngineCapture)
            }
            recording = [server for server in servers if _participates(server, captures[server.role])]
            connection_error: str | None = None
            self.observer.recording_started(lambda: profiler.states, len(recording))
            try:
                try:
                    await self._wait(profiler)
                except CaptureError as error:  # all servers stopped responding: report the existing files
                    connection_error = describe_error(error)
                stopping = True
                self.observer.recording_stopped()
                with contextlib.suppress(CaptureError):  # the report lists incomplete captures
                    await (profiler.astop() if connection_error is None else profiler.aclose(connection_error))
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


def _validate(draft: ConfigDraft, names: Sequence[str]) -> None:
    """Validate the config of the captured roles, except for their targets and backends.

    Raises:
        ConfigError: A key or value is invalid.
    """
    roles = {name: draft.get("roles", name) or {} for name in names}
    roles = {
        name: {**settings, **_UNKNOWN} if isinstance(settings, Mapping) else settings
        for name, settings in roles.items()
    }
    structure({**draft.data, "roles": roles}, Config, where="")


def _participates(server: CheckedServer, capture: EngineCapture) -> bool:
    if capture.fleet is None:
        return True
    return any(record.took_part and record.name == server.name for record in capture.fleet.targets)
