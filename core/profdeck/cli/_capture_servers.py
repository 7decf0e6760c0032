"""Server captures of `profdeck capture`: check the servers, start the capture, wait for it and stop it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from profdeck.base.ctrl_c import StopSignal
from profdeck.base.errors import CaptureError
from profdeck.base.identity import Identity
from profdeck.base.processes import allow_files
from profdeck.cli import _checked_servers
from profdeck.cli._capture_progress import watching
from profdeck.cli._checked_servers import CheckedServer
from profdeck.cli.options import SETTINGS_SOURCE
from profdeck.config.model import Config
from profdeck.config.sources import ConfigDraft, load_draft
from profdeck.config.structuring import structure
from profdeck.config.targets import TargetsConfig
from profdeck.engine.clusters import the_cluster
from profdeck.lifecycle.opening import open_roles
from profdeck.profiler import Profiler
from profdeck.records.capture import EngineCapture
from profdeck.records.run_directory import RUN_FILE, run_name
from profdeck.replicas.discovery import ReplicaNumbers, discover
from profdeck.replicas.routers import find_router, is_to_be_found
from profdeck_traces.base.errors import ConfigError, describe_error, did_you_mean
from profdeck_traces.cli import terminal

_ROLE = "server"
_ACTORS = "targets.actors"
_COMMAND = "command line"
_FILES = 1024
_FILES_PER_SERVER = 4
_STOPPING = "Stopping the recording. Press Ctrl-C again to exit without waiting for files."
_FIXED = {"steps": [0], "mode": "continuous", "on_demand": False, "on_error": "raise"}
"""Settings without which a command line would not capture once, or not say why."""


@attrs.frozen(kw_only=True)
class ServerOptions:
    """Command-line options for capturing servers."""

    urls: tuple[str, ...]
    router: str | None
    file: Path | None
    actors: tuple[str, ...]
    """Actor names or patterns."""
    namespace: str | None
    """Namespace of the actors; None to use the only job that has engines."""
    role: str | None
    replica: int | None
    own: Mapping[str, Any]
    """Settings of every role."""
    of_targets: Mapping[str, Any]
    """Settings of the targets of every role."""
    settings: Mapping[str, Any]
    """Other settings, by dotted key."""
    config: Path | None
    iterations: int | None
    timeout_s: float

    @property
    def names_servers(self) -> bool:
        """True if the options name servers, False if only the config does."""
        return bool(self.urls or self.router or self.file or self.actors)

    @property
    def names_one(self) -> bool:
        """True if the options name exactly one server, by URL, and nothing else."""
        return len(self.urls) == 1 and not (self.router or self.file or self.actors or self.of_targets)


@attrs.frozen(kw_only=True)
class ServerCapture:
    """Result of a server capture."""

    run: Path
    captures: tuple[EngineCapture, ...]
    """One per role; none if the start failed."""
    servers: tuple[CheckedServer, ...]
    error: CaptureError | None
    """Why the start failed."""


@attrs.define(kw_only=True)
class _Role:
    """A role with its servers."""

    name: str
    alone: bool
    """Whether it has a single server and no targets."""
    servers: list[CheckedServer]

    @property
    def target(self) -> str | None:
        """The URL of the only server; None if the role has targets."""
        return self.servers[0].url if self.alone else None

    @property
    def identity(self) -> Identity:
        """The identity of this process in the role."""
        return Identity(role=self.name, replica=self.servers[0].replica if self.alone else None)


async def capture(given: ServerOptions, stop: StopSignal) -> ServerCapture:
    """Capture servers.

    Args:
        given: the command-line options.
        stop: the signal that stops the recording before its windows are full or the timeout has passed.

    Raises:
        ConfigError: an option is invalid, or the servers cannot be captured together.
        CaptureError: no server can be captured.
        PluginError: no backend can be used for the servers.
    """
    with contextlib.ExitStack() as until_stopped:
        return await _capture(given, stop, until_stopped)


async def _capture(given: ServerOptions, stop: StopSignal, until_stopped: contextlib.ExitStack) -> ServerCapture:
    draft = load_draft(given.config, settings=given.settings, settings_source=SETTINGS_SOURCE)
    roles = [await _role(given, draft, name, until_stopped) for name in _names(given, draft)]
    # The other roles are left out: this capture is all that its run has, and nobody is to miss or await them.
    draft.data["roles"] = {role.name: draft.get("roles", role.name) or {} for role in roles}
    structure({**draft.data, "roles": {}}, Config, where="")  # what is wrong beside them is said before they are asked
    servers = [server for role in roles for server in role.servers]
    allow_files(_FILES + _FILES_PER_SERVER * len(servers))  # each server takes several connections
    await _checked(servers)
    for role in roles:
        draft.set(f"roles.{role.name}.backend", _checked_servers.common_backend(role.servers), _COMMAND)
    if draft.get("output") is None and (output := await _checked_servers.common_output(servers)) is not None:
        draft.set("output", str(output), _COMMAND)
    _set(draft, _FIXED)
    config = draft.checked().config
    targets = {role.name: role.target for role in roles}
    profiler = Profiler(open_roles(config, targets, {role.name: role.identity for role in roles}, ()))
    try:
        captures = await _recorded(given, profiler, servers, stop)
    except CaptureError as error:
        run = config.output.absolute() / run_name(config.run)
        if len(servers) > 1 and (run / RUN_FILE).exists():
            error = CaptureError(f"{error} For the result of each server: profdeck ls {terminal.short_path(run)}")
        return ServerCapture(run=run, captures=(), servers=tuple(servers), error=error)
    made = tuple(captures.values())
    request = made[0].request
    assert request is not None  # noqa: S101  # captures of servers have a request
    return ServerCapture(run=request.output / request.run, captures=made, servers=tuple(servers), error=None)


# What is to be captured.


def _names(given: ServerOptions, draft: ConfigDraft) -> list[str]:
    """Return the roles whose servers are to be captured."""
    if given.names_servers:
        return [given.role or _ROLE]
    roles = draft.checked().config.roles
    found = [name for name, role in roles.items() if role.targets and role.targets.discovers]
    if given.role is not None and given.role not in found:
        raise ConfigError(
            f"--role {given.role}: the config names no servers for this role under targets."
            f"{did_you_mean(given.role, found)}"
        )
    if not found:
        raise ConfigError(
            f"--config {given.config}: no role of it says under targets where servers are. Name them there, or by "
            "--url, --router or --targets."
        )
    return found if given.role is None else [given.role]


async def _role(given: ServerOptions, draft: ConfigDraft, name: str, until_stopped: contextlib.ExitStack) -> _Role:
    """Find a role's servers, and join the cluster if some of them are actors.

    Raises:
        ConfigError: an option is invalid.
        CaptureError: a router does not answer, or there is no server.
    """
    _check_urls(given.urls)
    where: dict[str, Any] = {
        "urls": list(given.urls),
        "router": await _router(given.router),
        "file": given.file and str(given.file),
    }
    if given.actors:
        the_cluster(_ACTORS).join(until_stopped)
        where |= {"actors": list(given.actors), "actor_namespace": given.namespace or await _namespace(given.actors)}
    of_targets = given.of_targets if given.names_one or not given.names_servers else {**where, **given.of_targets}
    _set(draft, {f"roles.{name}.{key}": value for key, value in given.own.items()})
    _set(draft, {f"roles.{name}.targets.{key}": value for key, value in of_targets.items()})
    for key, value in given.settings.items():  # the strongest
        draft.set(key, value, SETTINGS_SOURCE)
    roles = draft.get("roles") or {}
    if name not in roles and any(str(role).lower() == name.lower() for role in roles):
        raise ConfigError(f"--role {name}: the config writes it otherwise; it has the roles {', '.join(roles)}.")
    backend = _backend(given, draft, name)
    if given.names_one and draft.get("roles", name, "targets") is None:
        server = CheckedServer(role=name, url=given.urls[0], replica=given.replica, backend=backend)
        return _Role(name=name, alone=True, servers=[server])
    if given.replica is not None:
        raise ConfigError("--replica numbers a single server; many are numbered by themselves, or by --targets FILE.")
    if given.names_one:
        _set(draft, {f"roles.{name}.targets.urls": list(given.urls)})
    targets = structure(draft.get("roles", name, "targets"), TargetsConfig, where=f"roles.{name}.targets")
    if targets.actors:
        the_cluster(_ACTORS).join(until_stopped)
    backends = _checked_servers.engine_backends(backend)
    found, notes = await discover(targets, ReplicaNumbers(), _checked_servers.asking_by(backends))
    for note in notes:
        terminal.print_stderr(note)
    servers = [CheckedServer.found(name, target, backend) for target in found]
    return _Role(name=name, alone=False, servers=servers)


async def _namespace(actors: Sequence[str]) -> str:
    """Find the only namespace in which these actors hold engines; see `Cluster.find_namespace`."""
    ask = _checked_servers.asking_by(_checked_servers.engine_backends())
    namespace, warnings = await the_cluster(_ACTORS).find_namespace(actors, ask)
    for warning in warnings:
        terminal.warn(warning)
    return namespace


async def _router(given: str | None) -> str | None:
    """Return a router's URL, after a search if the URL is not given.

    Raises:
        CaptureError: none is found, or several are.
    """
    if given is None or not is_to_be_found(given):
        return given
    url = await find_router(given)
    terminal.print_stderr(f"The router is {url}.")
    return url


def _set(draft: ConfigDraft, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        draft.set(key, value, _COMMAND)


def _backend(given: ServerOptions, draft: ConfigDraft, name: str) -> str | None:
    """Return the backend that servers are said to have; None if they have to be asked.

    That of a config is of other targets than those of the command line.
    """
    backend = draft.get("roles", name, "backend")
    if given.names_servers and draft.sources.get(("roles", name, "backend")) not in {
        SETTINGS_SOURCE,
        _COMMAND,
    }:
        return None
    _checked_servers.engine_backend(backend)
    return str(backend)


def _check_urls(urls: Iterable[str]) -> None:
    seen: set[str] = set()
    for url in urls:
        server = CheckedServer(role=_ROLE, url=url, replica=None)
        if server.problem is not None:
            raise ConfigError(
                f"--url {url}: expected the URL of a server, such as http://127.0.0.1:8000 or unix:/run/engine.sock."
            )
        if server.name in seen:
            raise ConfigError(f"--url {server.name}: this server is named twice.")
        seen.add(server.name)


async def _checked(servers: list[CheckedServer]) -> None:
    """Check all servers, and tell what is found.

    Raises:
        ConfigError: one is a router.
        CaptureError: there is one only, and it cannot be asked.
    """
    await _checked_servers.check_all(servers)
    if routers := [server.name for server in servers if server.is_router]:
        raise ConfigError(
            f"{', '.join(routers)}: this is a router, which would pass a start and its stop on to any of its workers. "
            "Name it by --router, so that each worker is asked by its own URL."
        )
    if len(servers) > 1:
        _checked_servers.show(servers)
    elif servers[0].problem is not None:
        raise servers[0].problem
    elif servers[0].reason and servers[0].backend is not None:
        terminal.warn(servers[0].complaint)
    _checked_servers.warn_of_versions(servers)


# The capture.


async def _recorded(
    given: ServerOptions, profiler: Profiler, servers: list[CheckedServer], stop: StopSignal
) -> dict[str, EngineCapture]:
    """Start, wait and stop; what is started is stopped, whatever happens.

    Raises:
        CaptureError: the start failed.
    """
    stopping = False
    try:
        await profiler.astart(0)
        captures = {role: capture for role, capture in profiler.captures.items() if isinstance(capture, EngineCapture)}
        recording = [server for server in servers if _takes_part(server, captures[server.role])]
        lost: str | None = None
        async with watching(profiler, len(recording), given.iterations) as phase:
            try:
                await _wait(profiler, given.timeout_s, stop)
            except CaptureError as error:  # all servers stopped answering: report the existing files
                lost = describe_error(error)
            phase.stopping = stopping = True
            with contextlib.suppress(CaptureError):  # what is incomplete is in the report
                await (profiler.astop() if lost is None else profiler.aclose(lost))
    except asyncio.CancelledError:
        if not stopping:
            terminal.print_stderr(_STOPPING)
        raise
    finally:
        await profiler.aclose("interrupted")  # otherwise, the servers would continue recording
    return captures


async def _wait(profiler: Profiler, timeout_s: float, stop: StopSignal) -> None:
    """Wait until all windows are full, the timeout has passed or a signal arrives.

    Raises:
        CaptureError: all servers have stopped answering.
    """
    windows, signalled = asyncio.create_task(profiler.await_window(timeout_s)), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((windows, signalled), return_when=asyncio.FIRST_COMPLETED)
        if windows.done():
            windows.result()
        else:
            terminal.print_stderr(_STOPPING)
    finally:
        windows.cancel()
        signalled.cancel()
        await asyncio.gather(windows, signalled, return_exceptions=True)


def _takes_part(server: CheckedServer, capture: EngineCapture) -> bool:
    if capture.fleet is None:
        return True
    return any(record.took_part and record.name == server.name for record in capture.fleet.targets)
