"""Public modules. They import each name on first use."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from types import ModuleType

import pytest

import profdeck
import profdeck_traces as traces
from profdeck import engines, plugin

MODULES = [profdeck, plugin, engines, traces]


def find_type_checking_names(module: ModuleType) -> dict[str, str]:
    """Map each name that a module imports under ``if TYPE_CHECKING`` to the module that defines it."""
    (block,) = (node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.If))
    return {
        alias.name: node.module or "" for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


@pytest.mark.parametrize("module", MODULES)
def test_runtime_names_match_type_checking_imports(module: ModuleType) -> None:
    home_by_name = find_type_checking_names(module)
    assert set(home_by_name) <= set(dir(module))
    for name, home in home_by_name.items():
        assert getattr(module, name) is getattr(importlib.import_module(home), name)
    public_names = {name for name in dir(module) if not name.startswith("_")}
    submodules = {name for name in public_names if isinstance(getattr(module, name), ModuleType)}
    other_names = {"SECTIONS", "HOMES", "lazy_names", "annotations", "TYPE_CHECKING", "Any"}
    assert public_names - submodules - set(home_by_name) <= other_names


@pytest.mark.parametrize("module", MODULES)
def test_unknown_name_raises_attribute_error(module: ModuleType) -> None:
    with pytest.raises(AttributeError, match=rf"module '{module.__name__}' has no attribute 'unknown'"):
        _ = module.unknown


@pytest.mark.parametrize("module", ["profdeck", "profdeck.plugin", "profdeck.engines", "profdeck_traces"])
def test_public_module_imports_no_library(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert {"attrs", "numpy", "pluggy", "torch", "typer", "asyncio"} & set(result.stdout.split()) == set()
