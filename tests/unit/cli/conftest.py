from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import profdeck_traces
from profdeck import Identity, Profiler
from profdeck.cli import app
from profdeck_traces.analysis import summary

SITE = Path(__file__).parent / "site"

Cli = Callable[..., Result]
Program = Callable[..., "subprocess.CompletedProcess[str]"]
Record = Callable[..., Path]


_KEPT_VARIABLES = {"PROFDECK_CACHE", "PROFDECK_LEASE_DIR"}
_REMOVED_VARIABLES = {"RANK", "WORLD_SIZE", "COLUMNS", "FORCE_COLOR", "SLURM_PROCID"}


@pytest.fixture(autouse=True)
def _install_paper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Install the distribution in `SITE`, remove variables that affect profdeck, and change to `tmp_path`."""
    monkeypatch.syspath_prepend(SITE)
    for name in [*os.environ]:
        if (name.startswith("PROFDECK") and name not in _KEPT_VARIABLES) or name in _REMOVED_VARIABLES:
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cli() -> Cli:
    """Return a function that runs a command in this process with a terminal width of 80 columns."""
    runner = CliRunner(env={"COLUMNS": "80"})
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments], prog_name="profdeck")


@pytest.fixture
def python() -> Program:
    """Return a function that runs Python with the distribution in `SITE` installed."""
    return lambda *arguments: run_python([SITE], *arguments)


@pytest.fixture
def python_without(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Return a function that runs Python in a process that cannot import the given modules."""

    def run(modules: tuple[str, ...], *arguments: object) -> subprocess.CompletedProcess[str]:
        blocked = tmp_path_factory.mktemp("blocked")
        program = f"import sys\nsys.modules.update(dict.fromkeys({modules!r}))\n"
        (blocked / "sitecustomize.py").write_text(program)
        return run_python([blocked, SITE], *arguments)

    return run


def run_python(first_paths: list[Path], *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python with `first_paths` at the start of its import path. Warnings are errors."""
    path = os.pathsep.join([*map(str, first_paths), *filter(None, sys.path)])
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, text=True, capture_output=True, check=False)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Return a function that records a run with the backend `paper`. The ranks are recorded sequentially."""

    def run(*steps: int, ranks: tuple[int, ...] = (0,), world_size: int = 1, role: str = "trainer",
            replica: int | None = None, stage: str | None = None, **options: object) -> Path:  # fmt: skip
        settings: dict[str, object] = {
            "output": str(tmp_path / "profiles"),
            "run": "job",
            "steps": [*steps],
            "on_error": "raise",
        }
        settings |= {f"{role}.backend": "paper", f"{role}.ranks": "all"}
        settings |= {f"{role}.options.{name}": value for name, value in options.items()}
        if stage:
            settings["mode"] = "discrete"
        for rank in ranks:
            identity = Identity(role=role, rank=rank, world_size=world_size, replica=replica)
            with Profiler.from_config(identity=identity, settings=settings) as profiler:
                for step in range(max(steps) + 1):
                    with profiler.capture(step):
                        if stage:
                            with profiler.stage(stage):
                                pass
        return tmp_path / "profiles" / "job"

    return run


@pytest.fixture
def read_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the names of files are appended when this process reads them."""
    names: list[str] = []
    read_trace, check_trace = summary.read_trace, profdeck_traces.check_trace

    def read_and_record(path: Path, **options: object) -> object:
        names.append(path.name)
        return read_trace(path, **options)  # type: ignore[arg-type]

    def check_and_record(path: Path, **options: object) -> object:
        names.append(path.name)
        return check_trace(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(summary, "read_trace", read_and_record)
    monkeypatch.setattr(profdeck_traces, "check_trace", check_and_record)
    return names
