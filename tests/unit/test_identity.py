from __future__ import annotations

import sys
from types import ModuleType

import pytest

from profdeck.base.errors import ConfigError
from profdeck.base.identity import (
    MEGATRON,
    Identity,
    distributed_identity,
    launcher_identity,
    parallel_from_environment,
)


def test_the_stem_names_rank_and_coordinates() -> None:
    assert Identity(rank=3, world_size=4).stem == "rank_0003"
    assert Identity(rank=0, world_size=8, parallel={"tp": 0, "pp": 1, "dp": 3}).stem == "rank_0000_tp0-pp1-dp3"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "SLURM_PROCID": "7", "SLURM_NTASKS": "9"}, (3, 8, 1)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, (2, 4, 0)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, (1, 2, 1)),
    ],
)
def test_a_launcher_gives_rank_and_world_size(environ: dict[str, str], expected: tuple[int, int, int]) -> None:
    found = launcher_identity("trainer", environ)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank) == expected


def test_without_a_launcher_nothing_is_known() -> None:
    assert launcher_identity("trainer", {"RANK": "3"}) is None
    assert launcher_identity("trainer", {}) is None


def test_what_is_no_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="RANK='x' is not a number"):
        launcher_identity("trainer", {"RANK": "x", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="rank 2 is not below the world size 2"):
        launcher_identity("trainer", {"RANK": "2", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="parallel coordinate"):
        Identity(parallel={"../x": 0})
    with pytest.raises(ValueError, match="must match regex"):
        Identity(role="../x")


def test_parallel_coordinates_from_the_environment() -> None:
    assert parallel_from_environment({"PROFDECK_PARALLEL": "tp=0, pp=1,dp=3"}) == {"tp": 0, "pp": 1, "dp": 3}
    assert parallel_from_environment({}) == {}
    with pytest.raises(ConfigError, match="expected a form such as 'tp=0,pp=1,dp=3'"):
        parallel_from_environment({"PROFDECK_PARALLEL": "tp0"})


@pytest.mark.torch
def test_the_coordinates_of_megatron_are_taken_where_it_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub in the place of `megatron.core.parallel_state`, whose functions tests/contract finds in the wheel."""
    sizes = {"tp": 2, "pp": 1, "cp": 1, "ep": 1, "dp": 4}
    state = ModuleType("megatron.core.parallel_state")
    state.model_parallel_is_initialized = lambda: True  # type: ignore[attr-defined]
    for short, name in MEGATRON.items():
        setattr(state, f"get_{name}_world_size", lambda short=short: sizes[short])
        setattr(state, f"get_{name}_rank", lambda short=short: sizes[short] - 1)
    monkeypatch.setitem(sys.modules, state.__name__, state)
    assert distributed_identity().parallel == {"tp": 1, "dp": 3}
    state.model_parallel_is_initialized = lambda: False  # type: ignore[attr-defined]
    assert distributed_identity().parallel == {}
