"""profdeck as users get it: from a wheel, from an sdist, editable, and with somebody else's backend beside it."""

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


def sh(*command: str | Path, cwd: Path, **environ: str) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=os.environ | environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the sdist from the tree, and the wheel from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    sh(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=ROOT)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture
def site(tmp_path: Path):
    """Install into an empty directory; returns what runs Python with that and the dependencies, and nothing else."""
    target = tmp_path / "site"
    flags = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--target", target)

    def python(*arguments: str | Path) -> str:
        return sh(sys.executable, *arguments, cwd=tmp_path, PYTHONPATH=python_path(target))

    def install(*packages: Path):
        for package in packages:
            sh(sys.executable, "-m", "pip", "install", *flags, package, cwd=tmp_path)
        return python

    return install


def test_the_wheel_holds_what_the_tree_holds(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        inside = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
    tracked = {
        str(path.relative_to(ROOT / house))
        for house in ("core", "plugins")
        for path in (ROOT / house).rglob("*")
        if path.suffix in (".py", ".typed", ".jinja", ".js", ".css", ".html") and "__pycache__" not in path.parts
    }
    assert inside == tracked


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_backend_of_another_distribution_works(built: dict[str, Path], site, kind: str) -> None:
    python = site(built[kind], ROOT / "tests" / "packages" / "tally")
    where = python("-c", "import profdeck; print(profdeck.__file__)")
    assert str(ROOT) not in where
    assert python("-c", USE) == "complete\n"
    assert "tally-backend 0.3" in " ".join(python("-m", "profdeck", "plugins").split())
    assert "fail_at" in python("-m", "profdeck", "plugins", "tally")


@pytest.mark.slow
def test_the_sdist_tests_itself(built: dict[str, Path], tmp_path: Path) -> None:
    """It has all that `make test` needs: sessions, pins, tests, docs."""
    with tarfile.open(built["sdist"]) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
        sdist.extractall(tmp_path, filter="data")
    tracked = {
        name
        for name in sh("git", "ls-files", cwd=ROOT).splitlines()
        if name.partition("/")[0] not in {".ci", ".gitignore", ".pre-commit-config.yaml"}
    }
    assert tracked - inside == set()
    (tree,) = tmp_path.iterdir()
    tests = ("tests/unit/test_house.py", "tests/unit/test_packaging.py", "tests/unit/test_config.py")
    sh(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=tree)


def test_the_editable_install_is_this_tree() -> None:
    done = sh(sys.executable, "-c", "import profdeck, profdeck_torch; print(profdeck.__file__)", cwd=Path("/"))
    assert Path(done.strip()).is_relative_to(ROOT)
    assert sh(Path(sys.executable).parent / "profdeck", "--version", cwd=Path("/")).startswith("profdeck ")
