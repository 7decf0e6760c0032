"""Target discovery: finds the engines of a role by URL, router, targets file, actor name or actor group.

The workers of a router are read from ``GET /workers`` (vllm-router 0.1.17, sglang-router 0.3.2), which returns
``{"workers": [{"url", "worker_type", "is_healthy", ...}], ...}``. A router that balances over data-parallel ranks lists
each rank as a worker with the URL ``SERVER@RANK``. All ranks of a server are merged into one target.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import attrs
import msgspec

from profdeck.base.errors import CaptureError, TargetError
from profdeck.base.json_files import JsonKind
from profdeck.base.outcome import Outcome
from profdeck.config.structuring import structure
from profdeck.config.targets import SOCKET, SampleBy, TargetsConfig, WorkerType
from profdeck.engine.clusters import ActorGroup, AskActor, FoundActor, get_cluster
from profdeck.engine.transport.http_client import HttpClient
from profdeck.engine.transport.token import own_token
from profdeck.records.request import BatchKind
from profdeck.replicas.worker_hosts import WorkerHosts
from profdeck_traces.base.documents import read_document, show
from profdeck_traces.base.errors import ConfigError

_ROUTER_TIMEOUT_S = 10.0
_ACTORS = "targets.actors"
_AUTH_ERRORS = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}


@attrs.frozen(kw_only=True)
class Target:
    """One engine that records for a role."""

    handle: object
    """Server URL, engine object or actor, as accepted by the backend's ``bind``."""
    replica: int
    worker_type: WorkerType | None = None
    """Worker type from the targets file or the router; None if it is unknown."""
    healthy: bool = True
    """Health reported by the router; True if no router lists the target."""
    problem: TargetError | None = None
    """Error found during discovery, such as a missing actor or an untrusted host. The target is not contacted."""
    ranks: tuple[int, ...] | None = None
    """Ranks of this engine that record; None to use the role's setting."""
    batch_kinds: tuple[BatchKind, ...] | None = None
    """Batch kinds that this engine records; None to use the role's setting."""
    model: str | None = None
    """Model ID reported by the router; None if it is unknown."""
    load: float | None = None
    """Requests in flight, as counted by the router; None if the number is unknown."""

    @property
    def can_be_asked(self) -> bool:
        """True if the target is healthy and discovery found no problem."""
        return self.healthy and self.problem is None


@attrs.frozen(kw_only=True)
class _ServerEntry:
    """A server listed in the config, the targets file or the router's response."""

    url: str
    replica: int | None = attrs.field(default=None)
    worker_type: WorkerType | None = None

    @replica.validator
    def _check_replica(self, _: object, replica: int | None) -> None:
        if replica is not None and replica < 0:
            raise ValueError(f"replica: expected 0 or greater, got {replica}")


class _RouterWorker(msgspec.Struct):
    url: str
    worker_type: str = ""
    is_healthy: bool = True
    model_id: str | None = None
    load: float | None = None
    """Negative in router builds that do not count requests."""


class _WorkersResponse(msgspec.Struct):
    workers: list[_RouterWorker]


_WORKERS_RESPONSE = JsonKind(_WorkersResponse)


class ReplicaNumbers:
    """Assigns replica numbers that remain stable if targets disappear and return between captures."""

    def __init__(self) -> None:
        self._number_by_key: dict[str, int] = {}
        self.count: int | None = None
        """Number of targets found: the number of keys passed to the latest call to `number`."""

    def number(self, requested: Mapping[str, int | None]) -> dict[str, int]:
        """Return a replica number for each key.

        A requested number takes precedence over a number that was assigned earlier. New keys without a requested number
        get the next free numbers, in natural sort order.

        Args:
            requested: requested number, or None, by a key that identifies the target, such as its URL.

        Raises:
            ConfigError: two targets have the same number.
        """
        self.count = len(requested)
        self._number_by_key |= {key: number for key, number in requested.items() if number is not None}
        used_numbers = set(self._number_by_key.values())
        limit = len(used_numbers) + len(requested)
        free_numbers = (number for number in range(limit) if number not in used_numbers)
        for key in sorted(requested, key=_natural_sort_key):
            if key not in self._number_by_key:
                self._number_by_key[key] = next(free_numbers)
        key_by_number: dict[int, str] = {}
        for key in requested:
            number = self._number_by_key[key]
            if (other_key := key_by_number.setdefault(number, key)) != key:
                raise ConfigError(
                    f"The targets {other_key} and {key} both have the replica number {number}. Replica numbers must be "
                    "unique."
                )
        return {key: self._number_by_key[key] for key in requested}


def check_file(config: TargetsConfig) -> None:
    """Validate the targets file, and check that the libraries for actors are installed. Captures read the file again.

    Raises:
        ConfigError: the file cannot be read or is invalid.
        PluginError: actors are configured, but their plugin or library is not installed.
    """
    ReplicaNumbers().number({entry.url: entry.replica for entry in _merge_duplicates(_read_entries(config))})
    if config.actors:
        get_cluster(_ACTORS).require(f"{_ACTORS} needs")


async def discover(config: TargetsConfig, numbers: ReplicaNumbers, ask: AskActor) -> tuple[list[Target], list[str]]:
    """Find the targets selected by a role's config.

    Args:
        config: sources to search, and selection by worker type and replica.
        numbers: assigns replica numbers.
        ask: checks whether an actor holds an engine. Called only for actors that match a name pattern.

    Returns:
        The targets in the order of their replica numbers, and notes about actors without an engine.

    Raises:
        ConfigError: the targets file is invalid, or two targets have the same replica number.
        CaptureError: a router is unreachable or its response is invalid, this process has not joined a cluster, or no
            target was found.
    """
    entries = {entry.url: entry for entry in _merge_duplicates(_read_entries(config))}
    trusted_hosts = WorkerHosts.from_config(
        config.worker_hosts, [*entries, *([config.router] if config.router else [])]
    )
    health: dict[str, bool] = {}
    models: dict[str, str | None] = {}
    loads: dict[str, float] = {}
    if config.router:
        for worker in await query_workers(config.router, os.environ.get(config.router_key_variable)):
            url, worker_type = _server_url(worker.url), _parse_worker_type(worker.worker_type)
            entry = entries.get(url) or _ServerEntry(url=url)
            entries[url] = entry if entry.worker_type else attrs.evolve(entry, worker_type=worker_type)
            health[url] = health.get(url, False) or worker.is_healthy
            models[url] = worker.model_id
            if worker.load is not None and worker.load >= 0:
                loads[url] = loads.get(url, 0) + worker.load
    actors, notes = await get_cluster(_ACTORS).find_actors(config, ask) if config.actors else ([], [])
    replicas = numbers.number(
        {entry.url: entry.replica for entry in entries.values()} | {actor.key: None for actor in actors}
    )
    targets = [
        Target(
            handle=entry.url,
            replica=replicas[entry.url],
            worker_type=entry.worker_type,
            healthy=health.get(entry.url, True),
            problem=trusted_hosts.check(entry.url) if own_token() or entry.url.startswith(SOCKET) else None,
            model=models.get(entry.url),
            load=loads.get(entry.url),
        )
        for entry in entries.values()
    ]
    targets += [_actor_target(actor, replicas[actor.key]) for actor in actors]
    selected = [target for target in targets if _is_selected(config, target)]
    if not selected:
        count = f"{len(targets)} found, but not selected by worker_types or replicas" if targets else "none found"
        text = f"There is no target ({count}). Searched: {', '.join(_sources(config))}."
        raise CaptureError(" ".join([text, *notes]))
    return sorted(selected, key=lambda target: target.replica), notes


async def find_targets(
    config: TargetsConfig,
    given: Sequence[object] | None,
    numbers: ReplicaNumbers,
    ask: AskActor,
) -> tuple[list[Target], list[str]]:
    """Find the targets that record, and select a sample of them.

    Args:
        config: specifies where to find targets if ``given`` is None, and the sample.
        given: handles from the host; None if the config specifies where to find targets.
        numbers: assigns replica numbers.
        ask: checks whether an actor holds an engine.

    Returns:
        The targets in the order of their replica numbers, and notes about excluded actors and targets.

    Raises:
        ConfigError: see `discover`.
        CaptureError: see `discover` and `expand`.
    """
    if given is None:
        targets, notes = await discover(config, numbers, ask)
    else:
        targets, notes = await expand(given, numbers, ask)
    sample, sample_notes = select_sample(targets, config.sample, config.sample_by)
    return sample, [*notes, *sample_notes]


def select_sample(
    targets: list[Target], limit: int | None, by: SampleBy = SampleBy.NUMBER
) -> tuple[list[Target], list[str]]:
    """Select the targets that record. Unavailable targets are selected only if too few targets are available.

    Args:
        targets: all targets, in the order of their replica numbers.
        limit: maximum number of targets for each worker type and model; None for all.
        by: order of the selection. If no target has a load, replica numbers are used instead.

    Returns:
        The selected targets in the order of their replica numbers, and notes about the selection.
    """
    if limit is None:
        return targets, []
    groups: defaultdict[tuple[WorkerType, str | None], list[Target]] = defaultdict(list)
    for target in targets:
        groups[target.worker_type or WorkerType.REGULAR, target.model].append(target)
    selected: list[Target] = []
    for group in groups.values():
        available = [target for target in group if target.can_be_asked]
        unavailable = [target for target in group if not target.can_be_asked]
        count = min(limit, len(available))
        if by is SampleBy.LOAD and any(target.load for target in available):
            selected += sorted(available, key=lambda target: -(target.load or 0))[:count]
        else:
            selected += select_evenly(available, count)
        selected += unavailable[: limit - count]
    if len(selected) == len(targets):
        return targets, []
    notes = [f"Selected {len(selected)} of {len(targets)} targets, because sample is {limit}."]
    if by is SampleBy.LOAD and not any(target.load for target in targets):
        notes.append(
            "The targets were selected by replica number, because the router reports no requests in flight. With "
            "--policy round_robin, it never counts them."
        )
    return sorted(selected, key=lambda target: target.replica), notes


def select_evenly(targets: Sequence[Target], count: int) -> list[Target]:
    """Return ``count`` evenly spaced targets. ``count`` must not exceed the number of targets."""
    return [targets[index * len(targets) // count] for index in range(count)]


async def expand(given: Sequence[object], numbers: ReplicaNumbers, ask: AskActor) -> tuple[list[Target], list[str]]:
    """Create targets from handles that the host passed. Groups are replaced by their actors that hold an engine.

    Args:
        given: handles; actors and groups must be those of `profdeck.engine.clusters`.
        numbers: assigns replica numbers. Actors of groups are numbered last.
        ask: checks whether an actor holds an engine.

    Returns:
        The targets in the order of their replica numbers, and notes about actors without an engine.

    Raises:
        CaptureError: the cluster does not respond, or there is no target.
    """
    groups = [handle for handle in given if isinstance(handle, ActorGroup)]
    single_handles = [handle for handle in given if not isinstance(handle, ActorGroup)]
    targets = [Target(handle=handle, replica=replica) for replica, handle in enumerate(single_handles)]
    if not groups:
        numbers.number({f"given {target.replica}": target.replica for target in targets})
        return targets, []
    actors: list[FoundActor] = []
    notes: list[str] = []
    for group in groups:
        group_actors, group_notes = await group.find_actors(single_handles, ask)
        actors += group_actors
        notes += group_notes
    replicas = numbers.number(
        {f"given {replica}": replica for replica in range(len(single_handles))} | {actor.key: None for actor in actors}
    )
    targets += [_actor_target(actor, replicas[actor.key]) for actor in actors]
    if not targets:
        text = f"There is no target: no named actor with an engine in {', '.join(map(str, groups))}."
        raise CaptureError(" ".join([text, *notes]))
    return sorted(targets, key=lambda target: target.replica), notes


def _actor_target(found: FoundActor, replica: int) -> Target:
    if isinstance(found.actor, TargetError):
        return Target(handle=found.key, replica=replica, problem=found.actor)
    return Target(handle=found.actor, replica=replica)


def _read_entries(config: TargetsConfig) -> Iterable[_ServerEntry]:
    """Yield the servers in ``urls`` and in the targets file.

    Raises:
        ConfigError: the file cannot be read or is invalid.
    """
    for url in config.urls:
        yield _ServerEntry(url=url.rstrip("/"))
    if config.file is None:
        return
    document = read_document(config.file)
    entries = document.get("targets") if isinstance(document, dict) else document
    if not isinstance(entries, list):
        raise ConfigError(
            f"{config.file}: expected a list of URLs, or of mappings with url, replica and worker_type, at the top "
            f"level or under 'targets', got {show(document)}."
        )
    for index, item in enumerate(entries):
        data: Any = {"url": item} if isinstance(item, str) else item
        entry = structure(data, _ServerEntry, where=f"{config.file}: targets[{index}]")
        yield attrs.evolve(entry, url=entry.url.rstrip("/"))


def _merge_duplicates(entries: Iterable[_ServerEntry]) -> Iterable[_ServerEntry]:
    """Merge entries with the same URL.

    Raises:
        ConfigError: two entries with the same URL have different replica numbers.
    """
    merged: dict[str, _ServerEntry] = {}
    for entry in entries:
        earlier = merged.get(entry.url, entry)
        if None not in {earlier.replica, entry.replica} and earlier.replica != entry.replica:
            raise ConfigError(
                f"The target {entry.url} is listed with two replica numbers, {earlier.replica} and {entry.replica}."
            )
        merged[entry.url] = _ServerEntry(
            url=entry.url,
            replica=earlier.replica if entry.replica is None else entry.replica,
            worker_type=entry.worker_type or earlier.worker_type,
        )
    return merged.values()


async def query_workers(router: str, key: str | None, timeout_s: float = _ROUTER_TIMEOUT_S) -> list[_RouterWorker]:
    """Query a router for its workers.

    Args:
        router: URL of the router.
        key: API key of the router, if any.
        timeout_s: time limit, in seconds.

    Raises:
        TargetError: the router is unreachable, or its response is an error or has an unknown format.
    """
    client = HttpClient(router, timeout_s=timeout_s)
    try:
        response = await client.request("GET", "/workers", token=key, idempotent=True)
    finally:
        await client.close()
    name = f"The router {client.url}"
    if not response.is_success:
        unauthorized = response.status_code in _AUTH_ERRORS
        fix = (
            "Set the environment variable in router_key_variable to its API key." if unauthorized else "Check its log."
        )
        raise TargetError(f"{name} replied to /workers with {response.status_code}. {fix}", Outcome.REFUSED, fix)
    try:
        return _WORKERS_RESPONSE.decode(response.content).workers
    except ValueError as error:
        text = f"{name} replied to /workers with an unknown format: {error}."
        raise TargetError(text, Outcome.NOT_ENABLED) from None


def _server_url(worker_url: str) -> str:
    """Return the URL of a worker's server, without the data-parallel rank."""
    return re.sub(r"@\d+$", "", worker_url.rstrip("/")).rstrip("/")


def _parse_worker_type(text: str) -> WorkerType | None:
    """Return the worker type, or None for types that profdeck does not support."""
    return WorkerType(text) if text in set(WorkerType) else None


def _is_selected(config: TargetsConfig, target: Target) -> bool:
    if config.worker_types and (target.worker_type or WorkerType.REGULAR) not in config.worker_types:
        return False
    return config.replicas is None or target.replica in config.replicas


def _sources(config: TargetsConfig) -> list[str]:
    return [*config.urls, *(str(source) for source in (config.router, config.file) if source), *config.actors]


def _natural_sort_key(text: str) -> list[tuple[int, str]]:
    """Return a sort key that compares numbers numerically: port 8010 after 8009, host10 after host9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
