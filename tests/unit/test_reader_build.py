"""Tests of the build hook, which compiles the reader and never packages a library built from different sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from profdeck_traces.reading.compiled import SOURCES, UnusableLibraryError, open_library, source_hash

ROOT = Path(__file__).parents[2]
LIBRARY = "profdeck_traces/reading/_reader.so"
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A minimal copy of this source tree that contains a stale library."""
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "native", tmp_path / "native")
    project = (tmp_path / "pyproject.toml").read_text()
    begin = project.index("packages = [", project.index("[tool.hatch.build.targets.wheel]"))
    end = project.index("]", begin)
    (tmp_path / "pyproject.toml").write_text(
        f'{project[:begin]}packages = ["core/profdeck", "core/profdeck_traces"{project[end:]}'
    )
    (tmp_path / "core/profdeck").mkdir(parents=True)
    shutil.copy(ROOT / "core/profdeck/__init__.py", tmp_path / "core/profdeck")
    (tmp_path / "core" / LIBRARY).parent.mkdir(parents=True)
    (tmp_path / "core" / LIBRARY).with_name("__init__.py").touch()
    (tmp_path / "core" / LIBRARY).write_bytes(b"stale")
    return tmp_path


def build_wheel(tree: Path, **environ: str) -> tuple[str, list[str]]:
    """Build a wheel. Return its file name and the shared libraries in it."""
    code = "import hatchling.build, sys; print(hatchling.build.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, "dist"], cwd=tree, env=os.environ | environ, check=True)
    (wheel,) = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return wheel.name, [name for name in archive.namelist() if name.endswith(".so")]


@needs_compiler
def test_a_wheel_has_the_library_of_its_sources(tree: Path) -> None:
    name, libraries = build_wheel(tree)
    assert "-py3-none-" in name
    assert not name.endswith("-any.whl")
    assert libraries == [LIBRARY]
    assert open_library(tree / "core" / LIBRARY, tree / "native").reader_format() == 1


@pytest.mark.parametrize("environ", [{"PROFDECK_PURE": "1"}, {"PATH": "/nonexistent"}, {"PATH": "broken"}])
def test_a_wheel_without_the_library_is_pure(tree: Path, environ: dict[str, str]) -> None:
    if environ.get("PATH") == "broken":
        (tree / "broken").mkdir()
        (tree / "broken" / "g++").write_text("#!/bin/sh\nexit 1\n")
        (tree / "broken" / "g++").chmod(0o755)
        environ = {"PATH": str(tree / "broken")}
    name, libraries = build_wheel(tree, **environ)
    assert name.endswith("-py3-none-any.whl")
    assert libraries == []
    assert not (tree / "core" / LIBRARY).exists()


@needs_compiler
def test_a_library_built_from_different_sources_is_rejected(tree: Path) -> None:
    build_wheel(tree)
    (tree / "native" / "scan.h").write_text((tree / "native" / "scan.h").read_text() + "\n")
    with pytest.raises(UnusableLibraryError, match="different sources"):
        open_library(tree / "core" / LIBRARY, tree / "native")
    with pytest.raises(UnusableLibraryError):
        open_library(tree / "README.md", tree / "native")


def test_the_hash_covers_all_sources(tree: Path) -> None:
    before = source_hash(tree / "native")
    (tree / "native" / "more.h").write_text("")
    (tree / "native" / "more.h").write_text("int x;")
    assert source_hash(tree / "native") != before == source_hash(SOURCES)
