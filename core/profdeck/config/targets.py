"""Config of a role's targets: engines that record together."""

from __future__ import annotations

import ipaddress
import re
from enum import StrEnum
from pathlib import Path
from typing import Any

import attrs
from attrs import validators

from profdeck.config.structuring import duration_validator, expand_path

SOCKET = "unix:"
"""URL prefix of a server that listens at a Unix socket. The path of the socket follows."""
_URL = re.compile(rf"https?://[^/\s?#]+\S*|{SOCKET}/\S+")
_HOST = re.compile(r"[\w.*:-]+")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class WorkerType(StrEnum):
    """Type of a worker, as named by routers."""

    REGULAR = "regular"
    """Prefill and decode."""
    PREFILL = "prefill"
    DECODE = "decode"


class SampleBy(StrEnum):
    """Order in which a sample of the targets is selected."""

    NUMBER = "number"
    """Evenly spaced replica numbers, the same in each capture."""
    LOAD = "load"
    """Most requests in flight, as counted by the router when the capture begins."""


class Policy(StrEnum):
    """Number of targets that must start for a capture to continue."""

    ANY = "any"
    """At least one target. Targets that did not start are reported."""
    QUORUM = "quorum"
    """At least ``quorum`` targets."""
    ALL = "all"


def _check_urls(_: object, attribute: attrs.Attribute[Any], urls: tuple[str, ...]) -> None:
    for url in urls:
        if not _URL.fullmatch(url):
            raise ValueError(
                f"{attribute.name}: {url!r} is not the URL of a server, such as http://127.0.0.1:8000 or "
                "unix:/run/engine.sock"
            )


@attrs.frozen(kw_only=True)
class TargetsConfig:
    """Targets of a role: servers by URL, workers of a router, servers in a file, or actors by name."""

    urls: tuple[str, ...] = attrs.field(default=(), validator=_check_urls)
    """URLs of servers, such as `http://127.0.0.1:8000`, or `unix:/run/engine.sock` for a Unix socket. Default: none."""

    router: str | None = attrs.field(default=None)
    """URL of a router that lists its workers at `/workers`, such as vllm-router or sglang-router. Requests are sent
    directly to the URL of each worker, not through the router. Default: none."""

    router_key_variable: str = "PROFDECK_ROUTER_KEY"
    """Environment variable with the router's API key. If the variable is not set, no key is sent. Default:
    `PROFDECK_ROUTER_KEY`."""

    worker_hosts: tuple[str, ...] = attrs.field(default=())
    """Trusted hosts of workers that only the router lists. `PROFDECK_TOKEN` is sent to these hosts and to the hosts in
    `router`, `urls` and `file`. Names and addresses, in which `*` matches any text, or networks such as `10.0.0.0/8`.
    Default: none."""

    file: Path | None = attrs.field(default=None, converter=expand_path)
    """YAML or TOML file that lists servers. Each entry is a URL, or a mapping with `url` and optionally `replica` and
    `worker_type`. In TOML, the list has the key `targets`. Each capture reads the file again. Default: none."""

    actors: tuple[str, ...] = attrs.field(default=())
    """Names of actors that hold an engine, in the cluster that the host has joined. `*` matches any text, and matching
    actors without an engine are skipped. Each capture looks up the actors again. Default: none."""

    actor_namespace: str | None = None
    """Namespace of `actors`. Default: the namespace of the host."""

    actor_attribute: str | None = attrs.field(default=None)
    """Attribute of an actor that holds the engine, or a dotted path such as `worker.engine`. Default: the only
    attribute that is an engine of the backend, otherwise the actor itself."""

    worker_types: tuple[WorkerType, ...] = ()
    """Types of workers that record: `regular`, `prefill`, `decode`. A server of unknown type is treated as regular.
    Default: all."""

    replicas: tuple[int, ...] | None = attrs.field(default=None)
    """Numbers of the replicas that record. Servers are numbered in the natural sort order of their URLs, in which port
    9000 precedes port 10000. Default: all."""

    sample: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(1)))
    """Maximum number of targets that record, for each worker type and, if a router reports models, for each model.
    Healthy targets take precedence. Default: all."""

    sample_by: SampleBy = SampleBy.NUMBER
    """Selection of the sample. `number`: evenly spaced replica numbers, the same in each capture (default). `load`: the
    targets with the most requests in flight, which routers count with `--policy cache_aware`."""

    policy: Policy = Policy.ANY
    """Number of targets that must start: `any` (at least one, default), `all`, or `quorum`. If too few targets start,
    they are stopped and the capture fails. If too few targets can be reached, none is started."""

    quorum: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(1)))
    """Minimum number of targets that must start. Required with `policy: quorum`, otherwise not allowed."""

    start_timeout_s: float = attrs.field(default=60.0, validator=duration_validator(validators.gt(0.0)))
    """Time limit for the start of all targets together, in seconds. Targets that cannot be reached within the first
    half, or that do not start in time, do not record. A late target is sent a stop command, which takes up to 3 more
    seconds. Default: 60."""

    stop_timeout_s: float = attrs.field(default=1800.0, validator=duration_validator(validators.gt(0.0)))
    """Time limit for the stop of all targets together, in seconds. The stop waits for their files. Default: 1800."""

    @router.validator
    def _check_router(self, attribute: attrs.Attribute[Any], router: str | None) -> None:
        if router is not None:
            _check_urls(self, attribute, (router,))

    @worker_hosts.validator
    def _check_worker_hosts(self, _: object, hosts: tuple[str, ...]) -> None:
        for host in hosts:
            if "/" not in host and _HOST.fullmatch(host):
                continue
            try:
                ipaddress.ip_network(host, strict=False)
            except ValueError:
                text = f"worker_hosts: {host!r} is not a host or network, such as gpu7, *.cluster.local or 10.0.0.0/8"
                raise ValueError(text) from None

    @actors.validator
    def _check_actors(self, _: object, actors: tuple[str, ...]) -> None:
        if "" in actors or len(set(actors)) < len(actors):
            raise ValueError(f"actors: expected distinct names, such as [rollout_0, rollout_1], got {list(actors)}")

    @actor_attribute.validator
    def _check_actor_attribute(self, _: object, path: str | None) -> None:
        if path is not None and not _DOTTED.fullmatch(path):
            raise ValueError(f"actor_attribute: expected a dotted path, such as worker.engine, got {path!r}")

    @replicas.validator
    def _check_replicas(self, _: object, replicas: tuple[int, ...] | None) -> None:
        if replicas is not None and (not replicas or min(replicas) < 0):
            raise ValueError(f"replicas: expected numbers that are at least 0, such as [0, 3], got {list(replicas)}")

    def __attrs_post_init__(self) -> None:
        """Validate combinations of fields."""
        if (self.policy is Policy.QUORUM) != (self.quorum is not None):
            raise ValueError("quorum: the policy 'quorum' requires this key, and other policies do not allow it")
        if self.worker_hosts and self.router is None:
            raise ValueError("worker_hosts: this key applies to the workers of a router; set router as well")
        if self.sample_by is SampleBy.LOAD and (self.router is None or self.sample is None):
            raise ValueError(
                "sample_by: load selects a sample by the request counts of a router; set router and sample as well"
            )
        if self.actor_namespace is not None and not self.actors:
            raise ValueError("actor_namespace: this key applies to actors; set actors as well")

    @property
    def needed(self) -> int | None:
        """Minimum number of targets that must start; None for all."""
        return {Policy.ANY: 1, Policy.QUORUM: self.quorum, Policy.ALL: None}[self.policy]

    @property
    def discovers(self) -> bool:
        """True if the config specifies where to find targets."""
        return bool(self.urls or self.router or self.file or self.actors)
