"""Backends whose library fails to load: the error says whose it is, what stands behind it, and what to do."""

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

INSTALLED = """[profdeck.backends]
ink = ink_backends:Ink
pen = ink_backends:Pen
quill = ink_backends:Quill
torn = ink_backends:Torn
"""
BLOTTER = "blotter = ink_backends:Blotter\n"

CAUSE = "RuntimeError: Failed to load the extension: ink, from ImportError: libink.so: cannot open shared object file"
REMEDY = "The ink of libink.so has dried up. Add water."

# As torch fails with an extension that fails.
LIBRARY = """
import ink_backends
ink_backends.IMPORTS.append("ink_library")
try:
    raise ImportError("libink.so: cannot open shared object file")
except ImportError as error:
    raise RuntimeError("Failed to load the extension: ink.") from error
"""

BACKENDS = '''
import importlib
from typing import ClassVar

from profdeck import Backend, hookimpl
from profdeck_traces.base.errors import MissingLibraryError

IMPORTS = []
FAILURES = []  # of the quill's preflight, one for each call


class Ink(Backend):
    """Its library fails to load."""

    name: ClassVar[str] = "ink"

    def identify(self):
        importlib.import_module("ink_library")

    def preflight(self):
        importlib.import_module("ink_library")

    @hookimpl
    def profile_start(self, capture):
        pass

    @hookimpl
    def profile_stop(self, capture):
        pass


class Quill(Ink):
    """Fails as it is told."""

    name: ClassVar[str] = "quill"

    def identify(self):
        pass

    def preflight(self):
        if FAILURES:
            raise FAILURES.pop()


class Pen(Quill):
    """Explains itself why its library fails to load."""

    name: ClassVar[str] = "pen"

    def preflight(self):
        try:
            importlib.import_module("ink_library")
        except RuntimeError as error:
            raise MissingLibraryError("The pen is empty.") from error


class Torn(Ink):
    """Cannot tell what is wrong."""

    name: ClassVar[str] = "torn"

    @classmethod
    def diagnose(cls, error):
        raise RuntimeError("torn")


class Blotter(Quill):
    """Knows what is wrong with ink."""

    name: ClassVar[str] = "blotter"

    @classmethod
    def diagnose(cls, error):
        if error.__cause__ is not None and "libink.so" in str(error.__cause__):
            return "The ink of libink.so has dried up. Add water."
        return None
'''


@pytest.fixture
def about(tmp_path: Path) -> Path:
    """The entry points of the distribution `ink`."""
    install(tmp_path / "site", "ink", INSTALLED)
    (tmp_path / "site" / "ink_library.py").write_text(LIBRARY, encoding="utf-8")
    (tmp_path / "site" / "ink_backends.py").write_text(BACKENDS, encoding="utf-8")
    return tmp_path / "site" / "ink-1.0.dist-info" / "entry_points.txt"


@pytest.fixture(autouse=True)
def ink(about: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Install the distribution `ink` in a process in which nothing has failed yet."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(backend_setup, "_failed_imports", {})
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    import ink_backends

    yield ink_backends
    sys.modules.pop("ink_backends", None)


@pytest.fixture
def blotter(about: Path) -> None:
    """Install the backend that knows what is wrong, too."""
    about.write_text(INSTALLED + BLOTTER, encoding="utf-8")


def backend(name: str) -> Backend:
    cls = plugins.load_backend(name)
    return cls(cls.Options())


def test_an_error_of_a_library_names_the_backend_and_all_causes() -> None:
    with pytest.raises(PluginError) as error:
        backend_setup.run_preflight(backend("ink"))
    assert str(error.value) == f"The backend 'ink' cannot be used in this process: {CAUSE}."
    assert str(error.value.__cause__) == "Failed to load the extension: ink."


@pytest.mark.usefixtures("blotter")
def test_another_backend_may_know_what_is_wrong() -> None:
    with pytest.raises(PluginError) as error:
        backend_setup.run_preflight(backend("ink"))
    assert str(error.value) == f"The backend 'ink' cannot be used in this process: {REMEDY}"


@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.parametrize("environment", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])  # asks the library who it is, or not
def test_a_host_learns_it_before_it_trains(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], on_error: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PluginError, match=r"The backend 'ink' cannot be used in this process: .* libink\.so"):
        Profiler.from_config(settings={"steps": [1], "trainer.backend": "ink", "on_error": on_error})


def test_a_library_that_has_failed_is_not_loaded_again(ink: ModuleType) -> None:
    for _ in range(3):
        with pytest.raises(PluginError, match=r"libink\.so"):
            backend_setup.run_preflight(backend("ink"))
    with pytest.raises(PluginError, match=r"libink\.so"):
        backend_setup.resolve_identity("trainer", backend("ink"))
    assert ink.IMPORTS == ["ink_library"]


def test_nor_that_of_a_backend_which_explains_itself(ink: ModuleType) -> None:
    for _ in range(3):
        with pytest.raises(MissingLibraryError, match=r"^The pen is empty\.$"):
            backend_setup.run_preflight(backend("pen"))
    assert ink.IMPORTS == ["ink_library"]


def test_what_fails_after_another_import_names_that_one_too() -> None:
    with pytest.raises(PluginError):
        backend_setup.run_preflight(backend("ink"))
    with pytest.raises(MissingLibraryError) as error:
        backend_setup.run_preflight(backend("pen"))
    first = f"The backend 'ink' cannot be used in this process: {CAUSE}."
    assert str(error.value) == f"The pen is empty. An earlier import in this process also failed: {first}"


def test_what_fails_without_an_import_may_work_later(ink: ModuleType) -> None:
    ink.FAILURES.append(OSError("the device is busy"))
    with pytest.raises(PluginError, match=r"'quill' cannot be used in this process: OSError: the device is busy\."):
        backend_setup.run_preflight(backend("quill"))
    backend_setup.run_preflight(backend("quill"))


def test_what_a_backend_says_itself_is_left_as_it_is(ink: ModuleType) -> None:
    ink.FAILURES += [ConfigError("Sharpen it."), PluginError("It is a feather.")]
    for text in ("It is a feather.", "Sharpen it."):
        with pytest.raises((ConfigError, PluginError)) as error:
            backend_setup.run_preflight(backend("quill"))
        assert str(error.value) == text


@pytest.mark.usefixtures("blotter")
def test_a_check_of_this_machine_says_it_for_each_role(ink: ModuleType, tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("steps: [1]\nroles: {trainer: {backend: ink}, ref: {backend: ink}}\n", encoding="utf-8")
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["check", str(config), "--here"])
    assert result.exit_code == 3, result.output
    assert result.stdout.count(f"The backend 'ink' cannot be used in this process: {REMEDY}") == 2
    assert ink.IMPORTS == ["ink_library"]
