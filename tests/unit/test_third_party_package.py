"""Tests of the distribution tests/packages/meter. Its plugins use only the public API."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "packages" / "meter"
PUBLIC = {"profdeck", "profdeck.testing"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables of a process in which the distribution is installed."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dist_info = tmp_path_factory.mktemp("site") / f"meter_plugins-{project['version']}.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = project["entry-points"].items()
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entry_points.items())
        for group, entry_points in groups
    ]
    (dist_info / "entry_points.txt").write_text("\n".join(lines))
    path = os.pathsep.join([str(dist_info.parent), str(PACKAGE / "src"), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path}


def test_package_tests_pass(environment: dict[str, str]) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(PACKAGE)]
    options += ["--confcutdir", str(PACKAGE)]
    command = [sys.executable, "-m", "pytest", *options, str(PACKAGE / "tests")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_package_plugins_are_listed(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "profdeck", "plugins", "--json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    plugins = {
        plugin["name"]: [(hook["name"], hook["wrapper"]) for hook in plugin["hooks"]]
        for plugin in json.loads(result.stdout)["plugins"]
        if plugin["provided_by"] == "meter-plugins 1.0"
    }
    assert plugins == {
        "meter": [("profile_start", False), ("profile_step", False), ("profile_stop", False)],
        "meter-gate": [("profile_start", False)],
        "meter-log": [("capture_finished", False), ("profile_stop", False)],
        "meter-timer": [("profile_start", True)],
    }


def test_package_imports_only_the_public_api() -> None:
    imported = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                imported.add(str(node.module))
            elif isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
    assert {name for name in imported if name.split(".")[0] == "profdeck"} <= PUBLIC
