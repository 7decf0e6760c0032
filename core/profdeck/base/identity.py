"""Identity of a process in the job: role, rank, replica and parallel coordinates."""

from __future__ import annotations

import operator
import os
import re
import socket
from collections.abc import Mapping
from typing import Any, SupportsIndex

import attrs
from attrs import converters, validators

from profdeck_traces.base.errors import ConfigError

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
"""Valid names of roles, stages and backends. They are used in file and directory names."""


def _to_ints(parallel: Mapping[str, SupportsIndex]) -> dict[str, int]:
    return {name: operator.index(index) for name, index in parallel.items()}


@attrs.frozen(kw_only=True)
class Identity:
    """Identity of one process in the job. Ranks start at 0 and number all processes of the role."""

    role: str = attrs.field(default="trainer", validator=validators.matches_re(NAME))
    # The converters accept NumPy integers and convert them to int, because manifests cannot contain NumPy integers.
    rank: int = attrs.field(default=0, converter=operator.index, validator=validators.ge(0))
    world_size: int = attrs.field(default=1, converter=operator.index, validator=validators.ge(1))
    local_rank: int = attrs.field(default=0, converter=operator.index, validator=validators.ge(0))
    replica: int | None = attrs.field(
        default=None, converter=converters.optional(operator.index), validator=validators.optional(validators.ge(0))
    )
    """Number of the engine replica that this process belongs to; None if the role has no replicas."""
    parallel: Mapping[str, int] = attrs.field(factory=dict, converter=_to_ints)
    """Coordinates by parallel dimension, such as ``{"tp": 0, "pp": 1, "dp": 3}``."""
    worker_type: str | None = attrs.field(
        default=None, validator=validators.optional(validators.in_(("prefill", "decode")))
    )
    """Phase that a server runs with disaggregated prefill; None if it runs both phases or if the phase is unknown."""
    host: str = attrs.field(factory=socket.gethostname)
    pid: int = attrs.field(factory=os.getpid)

    @rank.validator
    def _rank_in_world(self, _: object, rank: int) -> None:
        if rank >= self.world_size:
            raise ValueError(f"rank {rank} must be less than the world size {self.world_size}. Pass both or neither.")

    @parallel.validator
    def _short_dimension_names(self, _: object, parallel: Mapping[str, int]) -> None:
        for name, index in parallel.items():
            if not re.fullmatch(r"[a-z]{1,8}", name) or index < 0:
                raise ValueError(
                    f"parallel coordinate {name!r}={index!r}: expected 1 to 8 lower-case letters and an index from 0"
                )

    @property
    def stem(self) -> str:
        """Prefix of this rank's file names; see `file_stem`."""
        return file_stem(self.rank, self.parallel)


def file_stem(rank: int, parallel: Mapping[str, int]) -> str:
    """Return the prefix of a rank's file names, such as ``rank_0003_tp1-dp1``."""
    coordinates = "-".join(f"{name}{index}" for name, index in parallel.items())
    return f"rank_{rank:04d}" + (f"_{coordinates}" if coordinates else "")


def parallel_from_environment(environ: Mapping[str, str] = os.environ) -> dict[str, int]:
    """Read ``PROFDECK_PARALLEL``, such as ``tp=0,pp=1,dp=3``.

    Raises:
        ConfigError: the variable is invalid.
    """
    text = environ.get("PROFDECK_PARALLEL", "")
    pairs = [item.split("=") for item in text.replace(" ", "").split(",") if item]
    try:
        return {name: int(index) for name, index in pairs}
    except ValueError:
        raise ConfigError(f"PROFDECK_PARALLEL={text!r}: expected a form such as 'tp=0,pp=1,dp=3'.") from None


_MOVED = {
    "launcher_identity": "profdeck.base.launchers.launcher_identity",
    "distributed_identity": "profdeck.base.launchers.library_identity",
}


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        raise ImportError(f"profdeck.base.identity.{name} was moved. Import {_MOVED[name]}.")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
