"""What a role's config says of the engines that record for it."""

from __future__ import annotations

import ipaddress
import re
from enum import StrEnum
from pathlib import Path
from typing import Any

import attrs
from attrs import validators

from profdeck.config.structuring import duration_validator

SOCKET = "unix:"
"""What the URL of a server begins with that listens at a Unix socket; the path follows."""
_URL = re.compile(rf"https?://[^/\s?#]+\S*|{SOCKET}/\S+")
_HOST = re.compile(r"[\w.*:-]+")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class WorkerType(StrEnum):
    """What a worker behind a router does, in the routers' words."""

    REGULAR = "regular"
    """Prefill and decode."""
    PREFILL = "prefill"
    DECODE = "decode"


class SampleBy(StrEnum):
    """Which targets are chosen where some are enough."""

    NUMBER = "number"
    """The same ones in each capture, spread over their numbers."""
    LOAD = "load"
    """Those with the most requests, as the router counts them when the capture begins."""


class Policy(StrEnum):
    """How many targets have to start for a capture to go on."""

    ANY = "any"
    """One is enough; the others are reported."""
    QUORUM = "quorum"
    """As many as ``quorum`` says."""
    ALL = "all"


def _urls(_: object, attribute: attrs.Attribute[Any], urls: tuple[str, ...]) -> None:
    for url in urls:
        if not _URL.fullmatch(url):
            raise ValueError(
                f"{attribute.name}: {url!r} is no URL of a server, such as http://127.0.0.1:8000 or unix:/run/x.sock"
            )


@attrs.frozen(kw_only=True)
class TargetsConfig:
    """Engines of a role: servers by URL, workers of a router, servers listed in a file, or actors by name."""

    urls: tuple[str, ...] = attrs.field(default=(), validator=_urls)
    """The servers, such as `http://127.0.0.1:8000`, or `unix:/run/engine.sock` at a socket. Default: none."""

    router: str | None = attrs.field(default=None)
    """The URL of a router that lists its workers at `/workers`, as vllm-router and sglang-router do. Each worker is
    asked by its own URL, never through the router. Default: none."""

    router_key_variable: str = "PROFDECK_ROUTER_KEY"
    """The environment variable that holds the router's API key. Default: `PROFDECK_ROUTER_KEY`; unset, none is sent."""

    worker_hosts: tuple[str, ...] = attrs.field(default=())
    """Hosts that may have `PROFDECK_TOKEN` though the router alone names them: names or addresses, in which `*` stands
    for anything, and networks such as `10.0.0.0/8`. Hosts of `router`, `urls` and `file` may always. Default: none."""

    file: Path | None = None
    """A YAML or TOML file that lists servers: URLs, or mappings with `url` and, if known, `replica` and `worker_type`;
    in TOML under `targets`. It is read again for each capture. Default: none."""

    actors: tuple[str, ...] = attrs.field(default=())
    """Names of actors that hold an engine object, in the cluster that the host has joined. `*` matches any text, and
    matching actors without an engine are skipped. Each capture looks the actors up again. Default: none."""

    actor_namespace: str | None = None
    """The namespace of `actors`. Default: the host's namespace."""

    actor_attribute: str | None = attrs.field(default=None)
    """Location of the engine in an actor: an attribute, or a dotted path such as `worker.engine`. Default: the only
    attribute that is an engine of the backend, or else the actor itself."""

    worker_types: tuple[WorkerType, ...] = ()
    """Which kinds of workers record: `regular`, `prefill`, `decode`. A server of which nothing tells the kind counts
    as regular. Default: all."""

    replicas: tuple[int, ...] | None = attrs.field(default=None)
    """Which replicas record, by number. Default: all. Servers are numbered in the order of their URLs, with numbers as
    numbers."""

    sample: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(1)))
    """How many of the selected targets record: so many of each kind of worker and, where a router tells it, of each
    model, healthy ones first. Default: all."""

    sample_by: SampleBy = SampleBy.NUMBER
    """Which: `number`, the same ones each time (default), or `load`, those to which the router has sent
    most, which routers count with `--policy cache_aware`."""

    policy: Policy = Policy.ANY
    """How many targets have to start: `any` (default), `all`, or `quorum`. When too few do, what has started is stopped
    and the capture fails; when too few can be reached, nothing is started."""

    quorum: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(1)))
    """With `policy: quorum`: how many."""

    start_timeout_s: float = attrs.field(default=60.0, validator=duration_validator(validators.gt(0.0)))
    """How long the start of all targets may take together, in seconds; a target that has not answered then is given up.
    In the first half of that time all targets are reached, and who is not takes no part. A target that is late is told
    to stop, which takes up to 3 seconds more. Default: 60."""

    stop_timeout_s: float = attrs.field(default=1800.0, validator=duration_validator(validators.gt(0.0)))
    """The same for the stop, which waits for the files. Default: 1800."""

    @router.validator
    def _is_url(self, attribute: attrs.Attribute[Any], router: str | None) -> None:
        if router is not None:
            _urls(self, attribute, (router,))

    @worker_hosts.validator
    def _are_hosts(self, _: object, hosts: tuple[str, ...]) -> None:
        for host in hosts:
            if "/" not in host and _HOST.fullmatch(host):
                continue
            try:
                ipaddress.ip_network(host, strict=False)
            except ValueError:
                text = f"worker_hosts: {host!r} is no host or network, such as gpu7, *.cluster.local or 10.0.0.0/8"
                raise ValueError(text) from None

    @actors.validator
    def _are_names(self, _: object, actors: tuple[str, ...]) -> None:
        if "" in actors or len(set(actors)) < len(actors):
            raise ValueError(f"actors: expected different names, such as [rollout_0, rollout_1], got {list(actors)}")

    @actor_attribute.validator
    def _is_dotted(self, _: object, path: str | None) -> None:
        if path is not None and not _DOTTED.fullmatch(path):
            raise ValueError(f"actor_attribute: expected a dotted path, such as worker.engine, got {path!r}")

    @replicas.validator
    def _are_numbers(self, _: object, replicas: tuple[int, ...] | None) -> None:
        if replicas is not None and (not replicas or min(replicas) < 0):
            raise ValueError(f"replicas: expected numbers from 0, such as [0, 3], got {list(replicas)}")

    def __attrs_post_init__(self) -> None:
        """Check the fields against each other."""
        if (self.policy is Policy.QUORUM) != (self.quorum is not None):
            raise ValueError("quorum: it goes with policy: quorum, and policy: quorum needs it; give both or neither")
        if self.worker_hosts and self.router is None:
            raise ValueError("worker_hosts: it is for workers that a router lists, and there is no router")
        if self.sample_by is SampleBy.LOAD and (self.router is None or self.sample is None):
            raise ValueError(
                "sample_by: load chooses the targets of a sample by what a router says: give router and sample, too"
            )
        if self.actor_namespace is not None and not self.actors:
            raise ValueError("actor_namespace: it is that of actors, and none are named")

    @property
    def needed(self) -> int | None:
        """How many targets have to start; None for all."""
        return {Policy.ANY: 1, Policy.QUORUM: self.quorum, Policy.ALL: None}[self.policy]

    @property
    def discovers(self) -> bool:
        """Whether it names any place where targets are found."""
        return bool(self.urls or self.router or self.file or self.actors)
