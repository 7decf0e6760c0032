"""Build hook that compiles the trace reader for wheels and editable installs.

If the machine has no C++ compiler, the build installs `ziglang`, which provides one. If compilation fails, profdeck
reads traces in Python. To compile the library in a checkout, run `python hatch_build.py`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGED = "profdeck_traces/reading/_reader.so"
_OPTIONS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-w")


class ReaderBuildHook(BuildHookInterface[Any]):
    """Adds the compiled reader to the wheel."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return `ziglang` as a build requirement if the machine has no C++ compiler."""
        return [] if os.environ.get("PROFDECK_PURE") or next(compilers(), None) else ["ziglang>=0.13"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the library. If that fails, build a pure-Python wheel."""
        if self.target_name != "wheel":
            return
        library = Path(self.root) / "core" / PACKAGED
        problem = compile_library(Path(self.root))
        if problem is not None:
            self.app.display_warning(f"Traces will be read in Python, which is slower: {problem}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().translate(str.maketrans('-.', '__'))}"
        if version != "editable":
            build_data["force_include"][str(library)] = PACKAGED


def compilers() -> Iterator[list[str]]:
    """Yield the command for each C++ compiler on this machine."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(name.split()[0]):
            yield name.split()
    if importlib.util.find_spec("ziglang"):
        # Without a target, zig generates code that may run only on this machine's CPU model.
        target = ["-target", f"{platform.machine()}-linux-gnu.2.17"] if sys.platform == "linux" else []
        yield [sys.executable, "-m", "ziglang", "c++", *target]


def compile_library(root: Path) -> str | None:
    """Compile the library unless it is up to date. Return an explanation if the library cannot be built.

    A library built from different sources is deleted, so that it is neither loaded nor packaged.
    """
    library, sources = root / "core" / PACKAGED, root / "native"
    if os.environ.get("PROFDECK_PURE"):
        library.unlink(missing_ok=True)
        return "PROFDECK_PURE is set."
    files = sorted(path for path in sources.iterdir() if path.suffix in {".cpp", ".h"})
    source_hash = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    if library.exists() and source_hash.encode() in library.read_bytes():
        return None
    library.unlink(missing_ok=True)
    problem = "no C++ compiler was found."
    for compiler in compilers():
        # Wheels may be installed on machines with a different C++ runtime.
        for linking in (("-static-libstdc++", "-static-libgcc"), ()):
            with tempfile.TemporaryDirectory(dir=library.parent) as directory:
                built = Path(directory) / library.name
                command = [*compiler, *_OPTIONS, *linking, f'-DSOURCE_HASH="{source_hash}"']
                command += [str(sources / "reader.cpp"), "-o", str(built)]
                try:
                    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
                except (OSError, subprocess.SubprocessError) as error:
                    output = str(getattr(error, "stderr", None) or error).strip().splitlines()
                    problem = f"{compiler[0]} failed: {output[-1] if output else error}"
                    continue
                built.replace(library)  # a rename, so that running processes keep the file they have loaded
                return None
    return problem


if __name__ == "__main__":
    sys.exit(compile_library(Path(__file__).parent))
