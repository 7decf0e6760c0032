"""Errors of backends whose library fails to load. They name the backend, the cause and, if known, the solution."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from distributions import install
from profdeck import Backend, Profiler
from profdeck.backends import backend_setup, plugins
from profdeck.cli import app
from profdeck_traces.base.errors import ConfigError, MissingLibraryError, PluginError

ENTRY_POINTS = """[profdeck.backends]
accel = accel_backends:Accel
describing = accel_backends:Describing
failing = accel_backends:Failing
undiagnosable = accel_backends:Undiagnosable
"""
DIAGNOSING_ENTRY_POINT = "diagnosing = accel_backends:Diagnosing\n"

CAUSE = (
    "RuntimeError: Failed to load the extension: accel, from ImportError: libaccel.so: cannot open shared object file"
)
DIAGNOSIS = "The driver of libaccel.so is missing. Install the driver."

# torch fails in the same way if an extension fails to load.
LIBRARY = """
import accel_backends
accel_backends.IMPORTS.append("accel_library")
try:
    raise ImportError("libaccel.so: cannot open shared object file")
except ImportError as error:
    raise RuntimeError("Failed to load the extension: accel.") from error
"""

BACKENDS = '''
import importlib
from typing import ClassVar

from profdeck import Backend, hookimpl
from profdeck_traces.base.errors import MissingLibraryError

IMPORTS = []
FAILURES = []  # exceptions for the next calls of Failing.preflight


class Accel(Backend):
    """The library of this backend fails to load."""

    name: ClassVar[str] = "accel"

    def identify(self):
        importlib.import_module("accel_library")

    def preflight(self):
        importlib.import_module("accel_library")

    @hookimpl
    def profile_start(self, capture):
        pass

    @hookimpl
    def profile_stop(self, capture):
        pass


class Failing(Accel):
    """Raises the exceptions in FAILURES."""

    name: ClassVar[str] = "failing"

    def identify(self):
        pass

    def preflight(self):
        if FAILURES:
            raise FAILURES.pop()


class Describing(Failing):
    """Raises its own error if the library fails to load."""

    name: ClassVar[str] = "describing"

    def preflight(self):
        try:
            importlib.import_module("accel_library")
        except RuntimeError as error:
            raise MissingLibraryError("The library is missing.") from error


class Undiagnosable(Accel):
    """Fails to diagnose an error."""

    name: ClassVar[str] = "undiagnosable"

    @classmethod
    def diagnose(cls, error):
        raise RuntimeError("diagnosis failed")


class Diagnosing(Failing):
    """Diagnoses the error of accel_library."""

    name: ClassVar[str] = "diagnosing"

    @classmethod
    def diagnose(cls, error):
        if error.__cause__ is not None and "libaccel.so" in str(error.__cause__):
            return "The driver of libaccel.so is missing. Install the driver."
        return None
'''


@pytest.fixture
def entry_points(tmp_path: Path) -> Path:
    """Install the distribution `accel`. Return the path of its entry points."""
    install(tmp_path / "site", "accel", ENTRY_POINTS)
    (tmp_path / "site" / "accel_library.py").write_text(LIBRARY, encoding="utf-8")
    (tmp_path / "site" / "accel_backends.py").write_text(BACKENDS, encoding="utf-8")
    return tmp_path / "site" / "accel-1.0.dist-info" / "entry_points.txt"


@pytest.fixture(autouse=True)
def accel(entry_points: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Make `accel` importable, in a process without earlier import failures."""
    del entry_points
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(backend_setup, "_failed_imports", {})
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    import accel_backends

    yield accel_backends
    sys.modules.pop("accel_backends", None)


@pytest.fixture
def diagnosing(entry_points: Path) -> None:
    """Also install the backend that diagnoses the error."""
    entry_points.write_text(ENTRY_POINTS + DIAGNOSING_ENTRY_POINT, encoding="utf-8")


def create_backend(name: str) -> Backend:
    cls = plugins.load_backend(name)
    return cls(cls.Options())


def test_library_error_names_the_backend_and_all_causes() -> None:
    with pytest.raises(PluginError) as error:
        backend_setup.run_preflight(create_backend("accel"))
    assert str(error.value) == f"The backend 'accel' cannot be used in this process: {CAUSE}."
    assert str(error.value.__cause__) == "Failed to load the extension: accel."


@pytest.mark.usefixtures("diagnosing")
def test_another_backend_can_diagnose_the_error() -> None:
    with pytest.raises(PluginError) as error:
        backend_setup.run_preflight(create_backend("accel"))
    assert str(error.value) == f"The backend 'accel' cannot be used in this process: {DIAGNOSIS}"


@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.parametrize("environment", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])  # without and with a launcher
def test_creating_a_profiler_raises_the_error(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], on_error: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PluginError, match=r"The backend 'accel' cannot be used in this process: .* libaccel\.so"):
        Profiler.from_config(settings={"steps": [1], "trainer.backend": "accel", "on_error": on_error})


def test_failed_import_is_not_repeated(accel: ModuleType) -> None:
    for _ in range(3):
        with pytest.raises(PluginError, match=r"libaccel\.so"):
            backend_setup.run_preflight(create_backend("accel"))
    with pytest.raises(PluginError, match=r"libaccel\.so"):
        backend_setup.resolve_identity("trainer", create_backend("accel"))
    assert accel.IMPORTS == ["accel_library"]


def test_failed_import_reported_by_the_backend_is_not_repeated(accel: ModuleType) -> None:
    for _ in range(3):
        with pytest.raises(MissingLibraryError, match=r"^The library is missing\.$"):
            backend_setup.run_preflight(create_backend("describing"))
    assert accel.IMPORTS == ["accel_library"]


def test_second_failed_import_names_the_first() -> None:
    with pytest.raises(PluginError):
        backend_setup.run_preflight(create_backend("accel"))
    with pytest.raises(MissingLibraryError) as error:
        backend_setup.run_preflight(create_backend("describing"))
    first_error = f"The backend 'accel' cannot be used in this process: {CAUSE}."
    assert str(error.value) == f"The library is missing. An earlier import in this process also failed: {first_error}"


def test_failure_without_an_import_is_not_cached(accel: ModuleType) -> None:
    accel.FAILURES.append(OSError("the device is busy"))
    with pytest.raises(PluginError, match=r"'failing' cannot be used in this process: OSError: the device is busy\."):
        backend_setup.run_preflight(create_backend("failing"))
    backend_setup.run_preflight(create_backend("failing"))


def test_backend_errors_are_raised_unchanged(accel: ModuleType) -> None:
    accel.FAILURES += [ConfigError("Set a device."), PluginError("There is no device.")]
    for message in ("There is no device.", "Set a device."):
        with pytest.raises((ConfigError, PluginError)) as error:
            backend_setup.run_preflight(create_backend("failing"))
        assert str(error.value) == message


@pytest.mark.usefixtures("diagnosing")
def test_check_reports_the_error_for_each_role(accel: ModuleType, tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("steps: [1]\nroles: {trainer: {backend: accel}, ref: {backend: accel}}\n", encoding="utf-8")
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["check", str(config), "--here"])
    assert result.exit_code == 3, result.output
    assert result.stdout.count(f"The backend 'accel' cannot be used in this process: {DIAGNOSIS}") == 2
    assert accel.IMPORTS == ["accel_library"]
