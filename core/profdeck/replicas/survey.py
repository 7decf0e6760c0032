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
from profdeck.engine.transport.http_engine import About, HttpEngine
from profdeck.replicas.discovery import Target
from profdeck.replicas.fan_out import fan_out
from profdeck_traces.base.entry_points import installed
from profdeck_traces.base.errors import ConfigError, PluginError, UnknownPluginError
from profdeck_traces.base.progress import Progress
from profdeck_traces.base.version import __version__

logger = logging.getLogger("profdeck")

_ANSWER_S = 30.0
_CHECK_S = 60.0
"""Time limit for all requests to one server."""
_GONE = {Outcome.UNREACHABLE, Outcome.TIMED_OUT}


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
    about: About | None = None
    """Response of its profdeck routes; ``None`` if it has none or does not respond."""
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
        self.name = self.url
        if not self.is_server or self.problem is not None:
            return
        try:
            self.engine = HttpEngine(self.url, timeout_s=_ANSWER_S)
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
            return "Its router says that it is not healthy, so it is left out."
        if self.problem is not None:
            return str(self.problem)
        if self.healthy is False:
            return f"Its {self.health} does not answer that it is well."
        if self.backend is None:
            return "No backend knows such a server."
        if self.about is not None and self.about.writable is False:
            return (
                f"It cannot write below {self.about.output} on {self.about.host}. Let the server's user write there, "
                "or start it with another output in its config."
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
                if error.outcome is not Outcome.NOT_ENABLED:  # its own profiler may do
                    self.problem = error
                if error.outcome in _GONE:
                    return
            self.is_router = await _is_router(self.engine)
            if self.backend is None:
                await self.engine.close()  # one connection at a time: there may be a thousand servers
                self.backend = await _recognised(self.url, backends)
            if self.about is None and self.backend is not None:  # ranks that have just answered need not be asked again
                self.health = engine_backend(self.backend).health
                self.healthy = await _healthy(self.engine, self.health)
        finally:
            await self.engine.close()

    async def output(self) -> Path | None:
        """Return the output directory of a server on this host, or ``None`` if there is none."""
        if self.about is not None:
            return Path(self.about.output) if self.engine is not None and await self.engine.is_here() else None
        if self.backend is None or self.engine is None or self.problem is not None:
            return None
        cls = engine_backend(self.backend)
        asked = cls(cls.Options())
        asked.bind(self.url)
        try:
            return await asked.output()
        except CaptureError:  # which its start will tell
            return None
        finally:
            await asked.release()


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
    """Import the backends of engines, by name: one, or all, of which one that cannot be imported knows no server."""
    if name is not None:
        return {name: engine_backend(name)}
    found = {}
    for each in installed(BACKENDS):
        try:
            cls = load_backend(each)
        except PluginError as error:
            logger.info("%s It is not asked whose the servers are.", error)
            continue
        if issubclass(cls, EngineBackend):
            found[each] = cls
    return found


async def backend_of(actor: Actor, backends: Mapping[str, type[EngineBackend]]) -> str:
    """Return the name of the backend that can control an actor's engine.

    Raises:
        NoEngineError: The actor does not hold an engine for these backends.
        CaptureError: The actor does not respond.
    """
    none = NoEngineError(f"{actor} cannot be captured: no engine backend is installed.", Outcome.REFUSED)
    for name, cls in backends.items():
        asked = cls(cls.Options())
        try:
            asked.bind(actor)
        except ConfigError:  # the backend does not support actors
            continue
        try:
            await asked.reach()
        except NoEngineError as error:
            none = error
        else:
            return name
        finally:
            await asked.release()
    raise none


def asking_by(backends: Mapping[str, type[EngineBackend]]) -> AskActor:
    """Return a function that checks whether an actor holds an engine for one of the backends."""
    return lambda actor: backend_of(actor, backends)


async def _healthy(engine: HttpEngine, route: str) -> bool | None:
    """Ask a server whether it is well; one that has no such route says nothing by that."""
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


async def _recognised(url: str, backends: Mapping[str, type[EngineBackend]]) -> str | None:
    for name, cls in backends.items():
        if await cls.recognises(url):
            return name
    return None


def engine_backend(name: str) -> type[EngineBackend]:
    """Import the backend of an engine.

    Raises:
        ConfigError: it is the backend of something else.
        PluginError: it cannot be used.
    """
    cls = load_backend(name)
    if not issubclass(cls, EngineBackend):
        raise ConfigError(f"The backend '{name}' records its own process and controls no server.")
    return cls


def common_backend(servers: Sequence[CheckedServer]) -> str:
    """Return the backend of all servers of a role, of which some may not have been reached.

    Raises:
        ConfigError: they are of several kinds.
        CaptureError: none can be reached.
        UnknownPluginError: no backend knows any.
    """
    of: dict[str, list[str]] = defaultdict(list)
    for server in servers:
        if server.backend is not None:
            of[server.backend].append(server.name)
    if len(of) > 1:
        listed = "; ".join(f"{name}: {', '.join(urls)}" for name, urls in of.items())
        raise ConfigError(
            f"The servers are of several kinds, and a role has one backend: {listed}. Give each kind a role of its own "
            "in a config, with the servers under targets, and capture all roles with: "
            "profdeck capture servers --config FILE"
        )
    for name in of:
        return name
    problems = [server.problem for server in servers if server.problem is not None]
    if len(servers) == 1 and problems:
        raise problems[0]
    if problems:
        raise CaptureError(f"None of {len(servers)} servers can be captured. {problems[0]} {problems[0].fix}")
    which = servers[0].name if len(servers) == 1 else f"{servers[0].name} and {len(servers) - 1} more"
    raise UnknownPluginError(
        f"No backend recognises the server at {which}. Check its address. For a router, use --router. If the server "
        f"does not identify itself, set its backend: --set {servers[0].role}.backend=NAME"
    )


async def common_output(servers: Sequence[CheckedServer]) -> Path | None:
    """Return the directory that the servers on this host write below; None if they do not say.

    Raises:
        ConfigError: they have several.
    """
    of: dict[Path, list[str]] = defaultdict(list)
    for server, output in zip(servers, await asyncio.gather(*(one.output() for one in servers)), strict=True):
        if output is not None:
            of[output].append(server.name)
    if len(of) > 1:
        listed = "; ".join(f"{output}: {', '.join(urls)}" for output, urls in of.items())
        raise ConfigError(
            f"The servers write below several directories, and a capture has one: {listed}. Start them with the same "
            "output in their configs, or run a command for each directory."
        )
    return next(iter(of), None)


def version_warnings(servers: Iterable[CheckedServer]) -> list[str]:
    """Return one warning for each remote profdeck version that might be incompatible with the local version."""
    servers_by_version: dict[str, list[str]] = defaultdict(list)
    for server in servers:
        if server.about is not None and _release(server.about.profdeck) != _release(__version__):
            servers_by_version[server.about.profdeck].append(server.name)
    return [
        f"{names[0] if len(names) == 1 else f'{names[0]} and {len(names) - 1} more'}: profdeck is {version} there and "
        f"{__version__} here. If they do not understand each other, install the same version on both sides."
        for version, names in servers_by_version.items()
    ]


def _release(version: str) -> tuple[int, ...] | str:
    """Return the part of a version that all compatible versions have in common.

    This is the major version and, below 1.0, also the minor version.
    """
    try:
        major, minor, *_ = (*Version(version).release, 0)
    except InvalidVersion:
        return version
    return (major,) if major else (major, minor)
