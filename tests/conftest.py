"""Fixtures and settings for all tests."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

from distributions import install

settings.register_profile(
    "fixed",
    max_examples=25,
    derandomize=True,
    database=None,
    # On a busy machine, examples can exceed the default deadline.
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fixed")
if examples := os.environ.get("PROFDECK_FUZZ_EXAMPLES"):
    settings.register_profile("fuzz", max_examples=int(examples), derandomize=False, print_blob=True)
    settings.load_profile("fuzz")

HERE = Path(__file__).parent
_DATA = Path(os.environ.get("PROFDECK_TEST_DATA") or HERE.parent.parent / "shared" / "data")

# Remove variables that a launcher, the user or CI may have set.
for _name in [name for name in os.environ if name.startswith(("PROFDECK_", "TORCHELASTIC_", "SLURM_"))]:
    if _name not in {
        "PROFDECK_TEST_AXE",
        "PROFDECK_TEST_DATA",
        "PROFDECK_TEST_SEED",
        "PROFDECK_TEST_SGLANG_PYTHON",
        "PROFDECK_TEST_SLIME",
        "PROFDECK_TEST_VERL_SGLANG_PYTHON",
        "PROFDECK_FUZZ_FILES",
        "PROFDECK_FUZZ_READER",
        "PROFDECK_FUZZ_COMMANDS",
        "PROFDECK_FUZZ_CONFIGS",
        "PROFDECK_FUZZ_EXAMPLES",
        "PROFDECK_CHAOS_JOBS",
    }:
        del os.environ[_name]
os.environ["PROFDECK_CACHE"] = "off"  # for processes that start before `isolated_directories` sets the variable
# readline sets these in the process that starts the pytest-xdist workers.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)
# Background jobs of a shell ignore SIGINT, and their child processes inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def data() -> Path:
    """The directory of real traces. The test is skipped if it does not exist."""
    if not _DATA.is_dir():
        pytest.skip(f"there are no real traces in {_DATA}; PROFDECK_TEST_DATA names another folder")
    return _DATA


@pytest.fixture(scope="session")
def tally_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH on which the distribution of the backend `tally` is installed."""
    site = tmp_path_factory.mktemp("site")
    backends = "tally = tally_backend:TallyBackend\ntally-engine = tally_backend:TallyEngineBackend"
    listeners = "diary = tally_backend:Diary"
    entry_points = f"[profdeck.backends]\n{backends}\n\n[profdeck.listeners]\n{listeners}\n"
    install(site, "tally-backend", entry_points, "0.3")
    return f"{site}{os.pathsep}{HERE / 'packages' / 'tally' / 'src'}"


@pytest.fixture
def tally(tally_path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Make the backend `tally` available in this process."""
    for path in tally_path.split(os.pathsep):
        monkeypatch.syspath_prepend(path)
    import tally_backend

    from profdeck.backends.plugin_manager import plugin_manager
    from profdeck.engine.worker.device import device_backend

    for cache in (device_backend, plugin_manager):  # they refer to the module that the previous test imported
        cache.cache_clear()
    yield tally_backend
    sys.modules.pop("tally_backend", None)
    for cache in (device_backend, plugin_manager):
        cache.cache_clear()


_test_numbers = itertools.count()


@pytest.fixture(autouse=True)
def isolated_directories(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use separate directories for the leases and cached results of each test."""
    base, number = tmp_path_factory.getbasetemp(), str(next(_test_numbers))
    monkeypatch.setenv("PROFDECK_LEASE_DIR", str(base / "leases" / number))
    monkeypatch.setenv("PROFDECK_CACHE", str(base / "results" / number))
