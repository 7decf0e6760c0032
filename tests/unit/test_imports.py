"""Tests of callbacks that run after an import."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from profdeck.base.imports import after_import

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Function that writes a module and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    finders, names = [*sys.meta_path], list[str]()

    def write_module(text: str) -> str:
        names.append(f"awaited_{len(names)}")
        (tmp_path / f"{names[-1]}.py").write_text(text)
        importlib.invalidate_caches()
        return names[-1]

    yield write_module
    sys.meta_path[:] = finders
    for name in names:
        sys.modules.pop(name, None)


def test_callback_runs_after_the_import(write: Write) -> None:
    name, modules = write("def function(): return 1\n"), list[ModuleType]()
    after_import(name, modules.append)
    after_import(name, modules.append)
    assert modules == []
    assert name not in sys.modules
    module = importlib.import_module(name)
    assert modules == [module, module]
    assert module.function() == 1
    assert "return 1" in inspect.getsource(module)  # requires the module's own loader
    importlib.reload(module)
    assert len(modules) == 2


def test_callback_runs_immediately_for_an_imported_module(write: Write) -> None:
    name, modules = write(""), list[ModuleType]()
    module = importlib.import_module(name)
    after_import(name, modules.append)
    assert modules == [module]


def test_callback_error_does_not_break_the_import(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    name, modules = write("imported = True\n"), list[ModuleType]()
    after_import(name, lambda _: 1 / 0)
    after_import(name, modules.append)
    with caplog.at_level(logging.ERROR, "profdeck"):
        assert importlib.import_module(name).imported
    assert f"profdeck could not patch {name}, so this module is not captured." in caplog.text
    assert len(modules) == 1


def test_callback_does_not_run_if_the_import_fails(write: Write) -> None:
    name, modules = write("raise ValueError\n"), list[ModuleType]()
    after_import(name, modules.append)
    with pytest.raises(ValueError):  # noqa: PT011  # raised by the module
        importlib.import_module(name)
    assert modules == []


def test_missing_module_raises_the_usual_error() -> None:
    after_import("missing_module", print)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("missing_module")
