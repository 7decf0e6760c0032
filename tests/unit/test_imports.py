"""What waits for modules of a host to be imported."""

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
    """Write a module, which can be imported by the name that is returned."""
    monkeypatch.syspath_prepend(tmp_path)
    finders, names = [*sys.meta_path], list[str]()

    def make(text: str) -> str:
        names.append(f"awaited_{len(names)}")
        (tmp_path / f"{names[-1]}.py").write_text(text)
        importlib.invalidate_caches()
        return names[-1]

    yield make
    sys.meta_path[:] = finders
    for name in names:
        sys.modules.pop(name, None)


def test_it_is_called_when_the_module_is_there(write: Write) -> None:
    name, seen = write("def function(): return 1\n"), list[ModuleType]()
    after_import(name, seen.append)
    after_import(name, seen.append)
    assert seen == []
    assert name not in sys.modules
    module = importlib.import_module(name)
    assert seen == [module, module]
    assert module.function() == 1
    assert "return 1" in inspect.getsource(module)  # its loader is its own
    importlib.reload(module)
    assert len(seen) == 2


def test_it_is_called_at_once_for_what_has_been_imported(write: Write) -> None:
    name, seen = write(""), list[ModuleType]()
    module = importlib.import_module(name)
    after_import(name, seen.append)
    assert seen == [module]


def test_what_it_raises_costs_no_import(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    name, seen = write("there = True\n"), list[ModuleType]()
    after_import(name, lambda _: 1 / 0)
    after_import(name, seen.append)
    with caplog.at_level(logging.ERROR, "profdeck"):
        assert importlib.import_module(name).there
    assert f"profdeck could not patch {name}, so this module is not captured." in caplog.text
    assert len(seen) == 1


def test_a_module_that_fails_is_awaited_on(write: Write) -> None:
    name, seen = write("raise ValueError\n"), list[ModuleType]()
    after_import(name, seen.append)
    with pytest.raises(ValueError):  # noqa: PT011  # the module's own
        importlib.import_module(name)
    assert seen == []


def test_a_module_that_is_not_there_stays_so() -> None:
    after_import("awaited_in_vain", print)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("awaited_in_vain")
