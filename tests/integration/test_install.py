"""Tests of installations: from the wheel, from the sdist, editable, and with a third-party backend."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from processes import python_path

ROOT = Path(__file__).parents[2]

USE = """
from profdeck import Profiler
from profdeck.verification.run_report import read_run
from pathlib import Path
profiler = Profiler.from_config(settings={"output": ".", "run": "run", "steps": [1], "trainer.backend": "tally",
                                          "listeners": ["diary"], "trainer.options.fail_at": None})
with profiler.capture(1):
    pass
print(read_run(Path("run")).status)
"""


def run_command(*command: str | Path, cwd: Path, **environ: str) -> str:
    result = subprocess.run(
        [str(argument) for argument in command],
        cwd=cwd,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the sdist from the tree, and the wheel from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    run_command(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=ROOT)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture
def site(tmp_path: Path):
    """Return a function that installs packages into an empty directory.

    It returns a function that runs Python with only these packages and the dependencies.
    """
    target = tmp_path / "site"
    flags = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--target", target)

    def python(*arguments: str | Path) -> str:
        return run_command(sys.executable, *arguments, cwd=tmp_path, PYTHONPATH=python_path(target))

    def install(*packages: Path):
        for package in packages:
            run_command(sys.executable, "-m", "pip", "install", *flags, package, cwd=tmp_path)
        return python

    return install


def test_wheel_contains_the_files_of_the_tree(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        wheel_files = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
    wheel_files.discard("profdeck_traces/reading/_reader.so")  # built only with a C++ compiler; see test_reader_build
    tracked = {
        str(path.relative_to(ROOT / root))
        for root in ("core", "plugins")
        for path in (ROOT / root).rglob("*")
        if path.suffix in (".py", ".typed", ".jinja", ".js", ".css", ".html") and "__pycache__" not in path.parts
    }
    assert wheel_files == tracked


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_third_party_backend_works(built: dict[str, Path], site, kind: str) -> None:
    python = site(built[kind], ROOT / "tests" / "packages" / "tally")
    location = python("-c", "import profdeck; print(profdeck.__file__)")
    assert str(ROOT) not in location
    assert python("-c", USE) == "complete\n"
    assert "tally-backend 0.3" in " ".join(python("-m", "profdeck", "plugins").split())
    assert "fail_at" in python("-m", "profdeck", "plugins", "tally")


@pytest.mark.slow
def test_tests_of_the_sdist_pass(built: dict[str, Path], tmp_path: Path) -> None:
    """The sdist has the files that `make test` requires: sessions, pins, tests and docs."""
    with tarfile.open(built["sdist"]) as sdist:
        sdist_files = {name.partition("/")[2] for name in sdist.getnames()}
        sdist.extractall(tmp_path, filter="data")
    tracked = {
        name
        for name in run_command("git", "ls-files", cwd=ROOT).splitlines()
        if name.partition("/")[0] not in {".ci", ".gitignore", ".pre-commit-config.yaml"}
    }
    assert tracked - sdist_files == set()
    (tree,) = tmp_path.iterdir()
    tests = ("tests/unit/test_house.py", "tests/unit/test_packaging.py", "tests/unit/test_config.py")
    run_command(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=tree)


def test_editable_install_uses_this_tree() -> None:
    location = run_command(
        sys.executable, "-c", "import profdeck, profdeck_torch; print(profdeck.__file__)", cwd=Path("/")
    )
    assert Path(location.strip()).is_relative_to(ROOT)
    assert run_command(Path(sys.executable).parent / "profdeck", "--version", cwd=Path("/")).startswith("profdeck ")
