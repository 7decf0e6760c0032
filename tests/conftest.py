"""Fixtures that all tests share."""

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

# What a launcher, a user or CI may have set must not reach the tests.
for _name in [name for name in os.environ if name.startswith(("PROFDECK_", "TORCHELASTIC_", "SLURM_"))]:
    if _name not in {
        "PROFDECK_TEST_AXE",
        "PROFDECK_TEST_DATA",
        "PROFDECK_TEST_SEED",
        "PROFDECK_TEST_SGLANG_PYTHON",
        "PROFDECK_TEST_SLIME",
        "PROFDECK_TEST_VERL_SGLANG_PYTHON",
        "PROFDECK_FUZZ_FILES",
        "PROFDECK_FUZZ_CONFIGS",
        "PROFDECK_FUZZ_EXAMPLES",
        "PROFDECK_CHAOS_JOBS",
    }:
        del os.environ[_name]
os.environ["PROFDECK_CACHE"] = "off"  # of what is started before a test has a directory of its own
# Which readline sets in the process that starts the workers of pytest-xdist.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)
# Ctrl-C is ignored in jobs that a shell runs in the background, and then in all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder with real traces."""
    if not _DATA.is_dir():
        pytest.skip(f"there are no real traces in {_DATA}; PROFDECK_TEST_DATA names another folder")
    return _DATA


@pytest.fixture(scope="session")
def tally_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH that offers the backend `tally` as an installed distribution would."""
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

    for cache in (device_backend, plugin_manager):  # the next test imports a module of its own
        cache.cache_clear()
    yield tally_backend
    sys.modules.pop("tally_backend", None)
    for cache in (device_backend, plugin_manager):
        cache.cache_clear()


_numbers = itertools.count()


@pytest.fixture(autouse=True)
def own_directories(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the leases of a test, and what it read, to itself."""
    monkeypatch.setenv("PROFDECK_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setenv("PROFDECK_CACHE", str(tmp_path_factory.getbasetemp() / "results" / str(next(_numbers))))
