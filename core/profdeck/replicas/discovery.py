"""Finds the engines of a role: servers by URL, behind a router, in a file; actors by name and in placement groups.

A router is asked for ``GET /workers`` (vllm-router 0.1.17, sglang-router 0.3.2), which answers
``{"workers": [{"url", "worker_type", "is_healthy", ...}], ...}``. With data-parallel ranks of its own the URL of a
worker ends in ``@RANK``: such workers are one server.
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
_LOCKED = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}


@attrs.frozen(kw_only=True)
class Target:
    """One engine that records for a role."""

    handle: object
    """What the backend takes: the URL of a server, an engine object, or the actor that holds one."""
    replica: int
    worker_type: WorkerType | None = None
    """What it does behind its router; None where nothing tells."""
    healthy: bool = True
    """What its router says of it."""
    problem: TargetError | None = None
    """Why it cannot be asked, when that is already known."""
    ranks: tuple[int, ...] | None = None
    """Which of its own ranks record; None if the role says."""
    batch_kinds: tuple[BatchKind, ...] | None = None
    """Which batches it records; None if the role says."""
    model: str | None = None
    """What it serves, in its router's words; None where nothing tells."""
    load: float | None = None
    """How many requests its router has sent there that are not answered yet; None where nothing tells."""

    @property
    def can_be_asked(self) -> bool:
        """Whether nothing is known that keeps it from recording."""
        return self.healthy and self.problem is None


@attrs.frozen(kw_only=True)
class _Listed:
    """A server as the config, a file or a router lists it."""

    url: str
    replica: int | None = attrs.field(default=None)
    worker_type: WorkerType | None = None

    @replica.validator
    def _counts_from_0(self, _: object, replica: int | None) -> None:
        if replica is not None and replica < 0:
            raise ValueError(f"replica: {replica} is no number of a replica; they count from 0")


class _Worker(msgspec.Struct):
    url: str
    worker_type: str = ""
    is_healthy: bool = True
    model_id: str | None = None
    load: float | None = None
    """Below 0 in some builds of routers, which do not count."""


class _Workers(msgspec.Struct):
    workers: list[_Worker]


_WORKERS = JsonKind(_Workers)


class ReplicaNumbers:
    """Numbers the replicas of a role: each keeps its number while it comes and goes."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}

    def number(self, wanted: Mapping[str, int | None]) -> dict[str, int]:
        """Return a number for each: the one that is wanted for it, the one that it has, else the next free one.

        Args:
            wanted: by what tells it from others, such as a URL.

        Raises:
            ConfigError: two of them have one number.
        """
        self._of |= {key: number for key, number in wanted.items() if number is not None}
        taken = set(self._of.values())
        free = (number for number in range(len(taken) + len(wanted)) if number not in taken)
        for key in sorted(wanted, key=_natural):
            if key not in self._of:
                self._of[key] = next(free)
        first: dict[int, str] = {}
        for key in wanted:
            number = self._of[key]
            if (other := first.setdefault(number, key)) != key:
                raise ConfigError(f"The targets {other} and {key} are both replica {number}; numbers are unique.")
        return {key: self._of[key] for key in wanted}


def check_file(config: TargetsConfig) -> None:
    """Validate the targets file, and check that the libraries for actors are installed. Captures read the file again.

    Raises:
        ConfigError: the file cannot be read, or is wrong.
        PluginError: actors are configured, but their plugin or library is not installed.
    """
    ReplicaNumbers().number({entry.url: entry.replica for entry in _unique(_given(config))})
    if config.actors:
        get_cluster(_ACTORS).require(f"{_ACTORS} needs")


async def discover(config: TargetsConfig, numbers: ReplicaNumbers, ask: AskActor) -> tuple[list[Target], list[str]]:
    """Find the targets that a role's config selects.

    Args:
        config: says where they are.
        numbers: numbers them.
        ask: asks an actor that only a pattern names.

    Returns:
        The targets, each once, by replica; and what to note of actors that are none.

    Raises:
        ConfigError: a file is wrong.
        CaptureError: a router is unreachable or its response is invalid, this process has not joined a cluster, or no
            target was found.
    """
    listed = {entry.url: entry for entry in _unique(_given(config))}
    trusted = WorkerHosts.of(config.worker_hosts, [*listed, *([config.router] if config.router else [])])
    healthy: dict[str, bool] = {}
    model: dict[str, str | None] = {}
    load: dict[str, float] = {}
    if config.router:
        for worker in await workers_of(config.router, os.environ.get(config.router_key_variable)):
            url, kind = _server(worker.url), _known(worker.worker_type)
            entry = listed.get(url) or _Listed(url=url)
            listed[url] = entry if entry.worker_type else attrs.evolve(entry, worker_type=kind)
            healthy[url] = healthy.get(url, False) or worker.is_healthy
            model[url] = worker.model_id
            if worker.load is not None and worker.load >= 0:
                load[url] = load.get(url, 0) + worker.load
    named, notes = await get_cluster(_ACTORS).find_actors(config, ask) if config.actors else ([], [])
    number = numbers.number({entry.url: entry.replica for entry in listed.values()} | {one.key: None for one in named})
    targets = [
        Target(
            handle=entry.url,
            replica=number[entry.url],
            worker_type=entry.worker_type,
            healthy=healthy.get(entry.url, True),
            problem=trusted.refusal(entry.url) if own_token() or entry.url.startswith(SOCKET) else None,
            model=model.get(entry.url),
            load=load.get(entry.url),
        )
        for entry in listed.values()
    ]
    targets += [_of_name(one, number[one.key]) for one in named]
    chosen = [target for target in targets if _selected(config, target)]
    if not chosen:
        found = f"{len(targets)} found, none of them selected by worker_types or replicas" if targets else "none found"
        text = f"There is no target ({found}); looked in: {', '.join(_places(config))}."
        raise CaptureError(" ".join([text, *notes]))
    return sorted(chosen, key=lambda target: target.replica), notes


async def find_targets(
    config: TargetsConfig,
    given: Sequence[object] | None,
    numbers: ReplicaNumbers,
    ask: AskActor,
) -> tuple[list[Target], list[str]]:
    """Find the targets that record, which a host gives or the config names, and what to note of others.

    Raises:
        ConfigError: as `discover`.
        CaptureError: as `discover` and `expand`.
    """
    if given is None:
        found, notes = await discover(config, numbers, ask)
    else:
        found, notes = await expand(given, numbers, ask)
    chosen, of_sample = sampled(found, config.sample, config.sample_by)
    return chosen, [*notes, *of_sample]


def sampled(targets: list[Target], most: int | None, by: SampleBy = SampleBy.NUMBER) -> tuple[list[Target], list[str]]:
    """Choose which targets record: so many of each kind of worker and each model at most.

    Who cannot be asked is chosen only where too few others are there.

    Args:
        targets: all of them, by replica.
        most: how many of a kind; None for all.
        by: which: the same of the same targets in each capture, spread over their numbers, or those with the most
            load, where one has any.

    Returns:
        Those that are chosen, by replica; and what to note of that.
    """
    if most is None:
        return targets, []
    kinds: defaultdict[tuple[WorkerType, str | None], list[Target]] = defaultdict(list)
    for target in targets:
        kinds[target.worker_type or WorkerType.REGULAR, target.model].append(target)
    chosen: list[Target] = []
    for of_kind in kinds.values():
        able = [target for target in of_kind if target.can_be_asked]
        unable = [target for target in of_kind if not target.can_be_asked]
        count = min(most, len(able))
        if by is SampleBy.LOAD and any(target.load for target in able):
            chosen += sorted(able, key=lambda target: -(target.load or 0))[:count]
        else:
            chosen += spread(able, count)
        chosen += unable[: most - count]
    if len(chosen) == len(targets):
        return targets, []
    notes = [f"{len(chosen)} of {len(targets)} targets were chosen to record, as sample: {most} says."]
    if by is SampleBy.LOAD and not any(target.load for target in targets):
        notes.append("They are spread, as the router calls all idle: with --policy round_robin it always does.")
    return sorted(chosen, key=lambda target: target.replica), notes


def spread(targets: Sequence[Target], count: int) -> list[Target]:
    """Choose so many of at least as many targets, spread over their numbers."""
    return [targets[number * len(targets) // count] for number in range(count)]


async def expand(given: Sequence[object], numbers: ReplicaNumbers, ask: AskActor) -> tuple[list[Target], list[str]]:
    """Build targets from the handles that the host passed. Actors with engines replace their placement groups.

    Args:
        given: handles; actors and groups must be those of `profdeck.engine.clusters`.
        numbers: assigns replica numbers. Actors of groups are numbered last.
        ask: connects to an actor's engine.

    Returns:
        The targets, by replica; and what to note of who is none.

    Raises:
        CaptureError: the cluster does not answer, or there is no target.
    """
    groups = [handle for handle in given if isinstance(handle, ActorGroup)]
    fixed = [handle for handle in given if not isinstance(handle, ActorGroup)]
    targets = [Target(handle=handle, replica=replica) for replica, handle in enumerate(fixed)]
    if not groups:
        return targets, []
    found: list[FoundActor] = []
    notes: list[str] = []
    for group in groups:
        of_group, left_out = await group.find_actors(fixed, ask)
        found += of_group
        notes += left_out
    number = numbers.number(
        {f"given {replica}": replica for replica in range(len(fixed))} | {one.key: None for one in found}
    )
    targets += [_of_name(one, number[one.key]) for one in found]
    if not targets:
        places = ", ".join(map(str, groups))
        raise CaptureError(" ".join([f"There is no target: no actor with a name and an engine in {places}.", *notes]))
    return sorted(targets, key=lambda target: target.replica), notes


def _of_name(named: FoundActor, replica: int) -> Target:
    if isinstance(named.actor, TargetError):
        return Target(handle=named.key, replica=replica, problem=named.actor)
    return Target(handle=named.actor, replica=replica)


def _given(config: TargetsConfig) -> Iterable[_Listed]:
    for url in config.urls:
        yield _Listed(url=url.rstrip("/"))
    if config.file is None:
        return
    document = read_document(config.file)
    entries = document.get("targets") if isinstance(document, dict) else document
    if not isinstance(entries, list):
        raise ConfigError(
            f"{config.file}: expected a list of URLs, or of mappings with url, replica and worker_type, or such a list "
            f"under 'targets'; got {show(document)}."
        )
    for number, entry in enumerate(entries):
        plain: Any = {"url": entry} if isinstance(entry, str) else entry
        found = structure(plain, _Listed, where=f"{config.file}: targets[{number}]")
        yield attrs.evolve(found, url=found.url.rstrip("/"))


def _unique(listed: Iterable[_Listed]) -> Iterable[_Listed]:
    """Put together what several places say of one server."""
    found: dict[str, _Listed] = {}
    for entry in listed:
        before = found.get(entry.url, entry)
        if None not in {before.replica, entry.replica} and before.replica != entry.replica:
            raise ConfigError(f"The target {entry.url} is listed as replica {before.replica} and as {entry.replica}.")
        found[entry.url] = _Listed(
            url=entry.url,
            replica=before.replica if entry.replica is None else entry.replica,
            worker_type=entry.worker_type or before.worker_type,
        )
    return found.values()


async def workers_of(router: str, key: str | None, timeout_s: float = _ROUTER_TIMEOUT_S) -> list[_Worker]:
    """Ask a router for its workers.

    Raises:
        TargetError: it cannot be reached, or does not answer as routers do.
    """
    client = HttpClient(router, timeout_s=timeout_s)
    try:
        response = await client.request("GET", "/workers", token=key, idempotent=True)
    finally:
        await client.close()
    where = f"The router {client.url}"
    if not response.is_success:
        locked = response.status_code in _LOCKED
        why = "Set the variable that router_key_variable names to its API key." if locked else "See its log."
        raise TargetError(f"{where} answered {response.status_code} to /workers. {why}", Outcome.REFUSED, why)
    try:
        return _WORKERS.decode(response.content).workers
    except ValueError as error:
        raise TargetError(f"{where} does not answer /workers as routers do: {error}.", Outcome.NOT_ENABLED) from None


def _server(url: str) -> str:
    """Return the URL of a worker's server, without a data-parallel rank."""
    return re.sub(r"@\d+$", "", url.rstrip("/")).rstrip("/")


def _known(worker_type: str) -> WorkerType | None:
    return WorkerType(worker_type) if worker_type in set(WorkerType) else None


def _selected(config: TargetsConfig, target: Target) -> bool:
    if config.worker_types and (target.worker_type or WorkerType.REGULAR) not in config.worker_types:
        return False
    return config.replicas is None or target.replica in config.replicas


def _places(config: TargetsConfig) -> list[str]:
    return [*config.urls, *(str(place) for place in (config.router, config.file) if place), *config.actors]


def _natural(url: str) -> list[tuple[int, str]]:
    """Order numbers in text as numbers: port 8010 comes behind 8009, host10 behind host9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", url)]
