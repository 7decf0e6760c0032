from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from distributions import install
from profdeck.base.identity import Identity, parallel_from_environment
from profdeck.base.launchers import installed_launchers, launcher_identity, library_identity
from profdeck.records.run_directory import run_name
from profdeck_torch.launchers import MEGATRON
from profdeck_traces.base.errors import ConfigError


def test_stem_contains_rank_and_coordinates() -> None:
    assert Identity(rank=3, world_size=4).stem == "rank_0003"
    assert Identity(rank=0, world_size=8, parallel={"tp": 0, "pp": 1, "dp": 3}).stem == "rank_0000_tp0-pp1-dp3"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "SLURM_PROCID": "7", "SLURM_NTASKS": "9"}, (3, 8, 1)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, (2, 4, 0)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}, (1, 2, 1)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, (1, 2, 1)),
    ],
)
def test_launcher_identity_reads_the_environment(environ: dict[str, str], expected: tuple[int, int, int]) -> None:
    identity = launcher_identity("trainer", environ)
    assert identity is not None
    assert (identity.rank, identity.world_size, identity.local_rank) == expected


def test_launcher_identity_is_none_without_a_launcher() -> None:
    assert launcher_identity("trainer", {"RANK": "3"}) is None
    assert launcher_identity("trainer", {}) is None


def test_invalid_identity_is_rejected() -> None:
    with pytest.raises(ConfigError, match="RANK='x' is not a number"):
        launcher_identity("trainer", {"RANK": "x", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="rank 2 must be less than the world size 2"):
        launcher_identity("trainer", {"RANK": "2", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="parallel coordinate"):
        Identity(parallel={"../x": 0})
    with pytest.raises(ValueError, match="must match regex"):
        Identity(role="../x")


def test_parallel_coordinates_are_read_from_the_environment() -> None:
    assert parallel_from_environment({"PROFDECK_PARALLEL": "tp=0, pp=1,dp=3"}) == {"tp": 0, "pp": 1, "dp": 3}
    assert parallel_from_environment({}) == {}
    with pytest.raises(ConfigError, match="expected a form such as 'tp=0,pp=1,dp=3'"):
        parallel_from_environment({"PROFDECK_PARALLEL": "tp0"})


@pytest.mark.torch
def test_megatron_coordinates_are_read_if_it_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub replaces `megatron.core.parallel_state`. tests/contract checks the functions of the real module."""
    sizes = {"tp": 2, "pp": 1, "cp": 1, "ep": 1, "dp": 4}
    state = ModuleType("megatron.core.parallel_state")
    state.model_parallel_is_initialized = lambda: True  # type: ignore[attr-defined]
    for short, name in MEGATRON.items():
        setattr(state, f"get_{name}_world_size", lambda short=short: sizes[short])
        setattr(state, f"get_{name}_rank", lambda short=short: sizes[short] - 1)
    monkeypatch.setitem(sys.modules, state.__name__, state)
    import torch  # noqa: F401  # the launcher queries only libraries that are already imported

    assert library_identity().parallel == {"tp": 1, "dp": 3}
    state.model_parallel_is_initialized = lambda: False  # type: ignore[attr-defined]
    assert library_identity().parallel == {}


def test_import_of_a_moved_function_names_its_new_module() -> None:
    with pytest.raises(ImportError, match=r"was moved\. Import profdeck\.base\.launchers\.library_identity\."):
        from profdeck.base.identity import distributed_identity  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Identiti'"):
        from profdeck.base.identity import Identiti  # noqa: F401


def test_launcher_plugin_is_loaded_and_a_broken_one_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "farm.py").write_text(
        "from profdeck.base.launchers import Launcher\n"
        "FARM = Launcher(name='farm', priority=50, rank='FARM_RANK', world_size='FARM_SIZE', job_id='FARM_JOB')\n"
        "WRONG = 3\n"
    )
    install(tmp_path, "farm", "[profdeck.launchers]\nfarm = farm:FARM\nwrong = farm:WRONG\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed_launchers.cache_clear()
    try:
        identity = launcher_identity("trainer", {"FARM_RANK": "1", "FARM_SIZE": "3", "RANK": "0", "WORLD_SIZE": "2"})
        assert identity is not None
        assert (identity.rank, identity.world_size) == (1, 3)
        assert run_name(None, {"FARM_JOB": "7", "SLURM_JOB_ID": "8"}) == "farm-7"
        expected = "profdeck.base.launchers.Launcher, got 3."
        assert f"'wrong' in profdeck.launchers must be an instance of {expected}" in caplog.text
    finally:
        installed_launchers.cache_clear()
