"""Checks servers and actors before a capture: their backend, profdeck version, health and output directory."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Self

import attrs
from packaging.version import InvalidVersion, Version

from profdeck.backends.api import EngineBackend
from profdeck.backends.plugins import BACKENDS, load_backend
from profdeck.base.errors import CaptureError, TargetError, target_error
from profdeck.base.outcome import Outcome
from profdeck.config.targets import WorkerType
from profdeck.engine.clusters import Actor, AskActor, NoEngineError
from profdeck.engine.transport.http_engine import HttpEngine, ServerInfo
from profdeck.replicas.discovery import Target
from profdeck.replicas.fan_out import fan_out
from profdeck_traces.base.credentials import redact
from profdeck_traces.base.entry_points import installed
from profdeck_traces.base.errors import ConfigError, PluginError, UnknownPluginError
from profdeck_traces.base.progress import Progress
from profdeck_traces.base.version import __version__

logger = logging.getLogger("profdeck")

_REPLY_S = 30.0
_CHECK_S = 60.0
"""Time limit for all requests to one server."""
_NO_RESPONSE = {Outcome.UNREACHABLE, Outcome.TIMED_OUT}


@attrs.define(kw_only=True)
class CheckedServer:
    """A server or actor, and the results of its checks."""

    role: str
    url: str
    replica: int | None
    worker_type: WorkerType | None = None
    listed_healthy: bool = True
    """Health reported by the router."""
    actor: Actor | None = None
    """The actor; None if the target is a server."""
    name: str = attrs.field(init=False)
    """Name in manifests."""
    engine: HttpEngine | None = attrs.field(default=None, init=False)
    """HTTP client of the server; ``None`` for an actor, or if the URL is invalid."""
    backend: str | None = None
    about: ServerInfo | None = None
    """Response of profdeck's routes; ``None`` if the server has none or does not respond."""
    healthy: bool | None = None
    """Result of its health check; ``None`` if the health is unknown."""
    health: str = "/health"
    """Route of the health check; see `EngineBackend`."""
    is_router: bool = False
    """True for a router, which would forward requests to one of its workers."""
    problem: TargetError | None = None
    """Error of its check."""

    def __attrs_post_init__(self) -> None:
        """Derive the name and the HTTP client from the URL."""
        self.name = redact(self.url)
        if not self.is_server or self.problem is not None:
            return
        try:
            self.engine = HttpEngine(self.url, timeout_s=_REPLY_S)
            self.name = self.engine.name
        except ConfigError as error:
            self.problem = TargetError(str(error), Outcome.REFUSED)

    @classmethod
    def from_target(cls, role: str, target: Target, backend: str | None) -> Self:
        """Create a server from a target that discovery found for a role."""
        return cls(
            role=role,
            url=str(target.handle),
            replica=target.replica,
            worker_type=target.worker_type,
            listed_healthy=target.healthy,
            actor=target.handle if isinstance(target.handle, Actor) else None,
            problem=target.problem,
            backend=backend,
        )

    @property
    def is_server(self) -> bool:
        """True for a server, false for an actor."""
        return self.actor is None

    @property
    def state(self) -> str:
        """State in one to three words, such as ``ready`` or ``not writable``."""
        if not self.listed_healthy or self.healthy is False:
            return "unhealthy"
        if self.problem is not None:
            return self.problem.outcome.replace("_", " ")
        if self.backend is None:
            return "not recognised"
        if self.actor is not None:
            return "ready"
        if self.about is None:
            return "own profiler only"
        return "not writable" if self.about.writable is False else "ready"

    @property
    def reason(self) -> str:
        """Problem of the server in a sentence, or an empty string."""
        if not self.listed_healthy:
            return "The router reports that this worker is unhealthy, so it is not captured."
        if self.problem is not None:
            return str(self.problem)
        if self.healthy is False:
            return f"The health check at {self.health} failed."
        if self.backend is None:
            return "No installed backend recognises this server."
        if self.about is not None and self.about.writable is False:
            return (
                f"The server cannot write to {self.about.output} on {self.about.host}. Give its user write permission, "
                "or restart it with another output in its config."
            )
        return ""

    @property
    def complaint(self) -> str:
        """The problem, preceded by the name of the server."""
        return self.reason if self.reason.startswith(self.name) else f"{self.name}: {self.reason}"

    @property
    def plain(self) -> dict[str, object]:
        """JSON data."""
        return {
            "role": self.role,
            "url": self.name,
            "replica": self.replica,
            "worker_type": self.worker_type,
            "backend": self.backend,
            "profdeck": self.about.profdeck if self.about else None,
            "state": self.state.replace(" ", "_"),
            "reason": self.reason or None,
        }

    async def check(self, backends: Mapping[str, type[EngineBackend]]) -> None:
        """Detect the backend, and query the health and profdeck's routes.

        Args:
            backends: Candidate backends by name. Empty if the backend is known.
        """
        if self.actor is not None:
            self.backend = await backend_of(self.actor, backends or engine_backends(self.backend))
        if self.engine is None or not self.listed_healthy:
            return
        try:
            try:
                self.about = await self.engine.about()
            except TargetError as error:
                if error.outcome is not Outcome.NOT_ENABLED:  # the engine's own profiler may be available
                    self.problem = error
                if error.outcome in _NO_RESPONSE:
                    return
            self.is_router = await _is_router(self.engine)
            if self.backend is None:
                await self.engine.close()  # one connection at a time: there may be a thousand servers
                self.backend = await _detect_backend(self.url, backends)
            # Without profdeck's routes, the server's health is still unknown.
            if self.about is None and self.backend is not None:
                self.health = engine_backend(self.backend).health
                self.healthy = await _is_healthy(self.engine, self.health)
        finally:
            await self.engine.close()

    async def output(self) -> Path | None:
        """Return the output directory of a server on this host, or ``None`` if there is none."""
        if self.about is not None:
            return Path(self.about.output) if self.engine is not None and await self.engine.is_here() else None
        if self.backend is None or self.engine is None or self.problem is not None:
            return None
        cls = engine_backend(self.backend)
        backend = cls(cls.Options())
        backend.bind(self.url)
        try:
            return await backend.output()
        except CaptureError:  # the start of the capture reports it
            return None
        finally:
            await backend.release()


async def check_all(servers: Sequence[CheckedServer], on_progress: Progress) -> None:
    """Check all servers in parallel.

    Args:
        servers: The servers. Their attributes are updated.
        on_progress: Called with the number of checked servers and the total.
    """
    backends = engine_backends() if any(server.backend is None for server in servers) else {}
    done = 0

    async def check(server: CheckedServer) -> None:
        nonlocal done
        await server.check({} if server.backend else backends)
        on_progress(done := done + 1, len(servers))

    on_progress(done, len(servers))
    results = await fan_out(check, servers, timeout_s=_CHECK_S, each_timeout_s=_CHECK_S)
    for server, result in zip(servers, results, strict=True):
        if isinstance(result, BaseException):
            server.problem = target_error(result)


def engine_backends(name: str | None = None) -> dict[str, type[EngineBackend]]:
    """Import engine backends. Backends that cannot be imported are logged and skipped, unless one is requested by name.

    Args:
        name: Name of the only backend to import. Default: all installed backends.

    Returns:
        The backend classes by name.
    """
    if name is not None:
        return {name: engine_backend(name)}
    backends = {}
    for backend_name in installed(BACKENDS):
        try:
            cls = load_backend(backend_name)
        except PluginError as error:
            logger.info("%s This backend is not used to detect servers.", error)
            continue
        if issubclass(cls, EngineBackend):
            backends[backend_name] = cls
    return backends


async def backend_of(actor: Actor, backends: Mapping[str, type[EngineBackend]]) -> str:
    """Return the name of the backend that can control an actor's engine.

    Raises:
        NoEngineError: The actor does not hold an engine for these backends.
        CaptureError: The actor does not respond.
    """
    no_engine = NoEngineError(f"{actor} cannot be captured: no engine backend is installed.", Outcome.REFUSED)
    for name, cls in backends.items():
        backend = cls(cls.Options())
        try:
            backend.bind(actor)
        except ConfigError:  # the backend does not support actors
            continue
        try:
            await backend.reach()
        except NoEngineError as error:
            no_engine = error
        else:
            return name
        finally:
            await backend.release()
    raise no_engine


def asking_by(backends: Mapping[str, type[EngineBackend]]) -> AskActor:
    """Return a function that checks whether an actor holds an engine for one of the backends."""
    return lambda actor: backend_of(actor, backends)


async def _is_healthy(engine: HttpEngine, route: str) -> bool | None:
    """Query a server's health. Return ``None`` if the health is unknown, for example without such a route."""
    try:
        response = await engine.request("GET", route)
    except CaptureError:
        return False
    return False if response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR else response.is_success or None


async def _is_router(engine: HttpEngine) -> bool:
    try:
        response = await engine.request("GET", "/workers")
        return response.is_success and isinstance(response.json()["workers"], list)
    except (CaptureError, ValueError, KeyError, TypeError):
        return False


async def _detect_backend(url: str, backends: Mapping[str, type[EngineBackend]]) -> str | None:
    for name, cls in backends.items():
        if await cls.recognises(url):
            return name
    return None


def engine_backend(name: str) -> type[EngineBackend]:
    """Import an engine backend.

    Raises:
        ConfigError: The backend does not control engines.
        PluginError: The backend is not installed or cannot be imported.
    """
    cls = load_backend(name)
    if not issubclass(cls, EngineBackend):
        raise ConfigError(f"The backend '{name}' records its own process and cannot control servers.")
    return cls


def common_backend(servers: Sequence[CheckedServer]) -> str:
    """Return the backend of a role's servers. Unreachable servers are ignored if another server has a backend.

    Raises:
        ConfigError: The servers have different backends.
        CaptureError: No server can be captured.
        UnknownPluginError: No backend recognises the servers.
    """
    names_by_backend: dict[str, list[str]] = defaultdict(list)
    for server in servers:
        if server.backend is not None:
            names_by_backend[server.backend].append(server.name)
    if len(names_by_backend) > 1:
        listing = "; ".join(f"{backend}: {', '.join(names)}" for backend, names in names_by_backend.items())
        raise ConfigError(
            f"The servers have different backends, but a role has only one backend: {listing}. Define a role for each "
            "backend in a config, with its servers under targets, and capture all roles with: "
            "profdeck capture servers --config FILE"
        )
    for backend in names_by_backend:
        return backend
    problems = [server.problem for server in servers if server.problem is not None]
    if len(servers) == 1 and problems:
        raise problems[0]
    if problems:
        raise CaptureError(f"None of {len(servers)} servers can be captured. {problems[0]} {problems[0].fix}")
    names = servers[0].name if len(servers) == 1 else f"{servers[0].name} and {len(servers) - 1} more"
    raise UnknownPluginError(
        f"No backend recognises the server at {names}. Check its address. For a router, use --router. If the server "
        f"does not identify itself, set its backend: --set {servers[0].role}.backend=NAME"
    )


async def common_output(servers: Sequence[CheckedServer]) -> Path | None:
    """Return the output directory of the servers on this host, or ``None`` if no server reports one.

    Raises:
        ConfigError: The servers have different output directories.
    """
    names_by_output: dict[Path, list[str]] = defaultdict(list)
    outputs = await asyncio.gather(*(server.output() for server in servers))
    for server, output in zip(servers, outputs, strict=True):
        if output is not None:
            names_by_output[output].append(server.name)
    if len(names_by_output) > 1:
        listing = "; ".join(f"{output}: {', '.join(names)}" for output, names in names_by_output.items())
        raise ConfigError(
            f"The servers have different output directories, but a capture has only one: {listing}. Start the servers "
            "with the same output in their configs, or run a command for each directory."
        )
    return next(iter(names_by_output), None)


def version_warnings(servers: Iterable[CheckedServer]) -> list[str]:
    """Return one warning for each remote profdeck version that might be incompatible with the local version."""
    servers_by_version: dict[str, list[str]] = defaultdict(list)
    for server in servers:
        if server.about is not None and _release(server.about.profdeck) != _release(__version__):
            servers_by_version[server.about.profdeck].append(server.name)
    return [
        f"{names[0] if len(names) == 1 else f'{names[0]} and {len(names) - 1} more'}: the version of profdeck is "
        f"{version} there and {__version__} here. If the capture fails, install the same version on both sides."
        for version, names in servers_by_version.items()
    ]


def _release(version: str) -> tuple[int, ...] | str:
    """Return the major version and, below 1.0, the minor version. Versions with the same result are compatible."""
    try:
        major, minor, *_ = (*Version(version).release, 0)
    except InvalidVersion:
        return version
    return (major,) if major else (major, minor)
