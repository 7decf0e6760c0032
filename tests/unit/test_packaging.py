"""What the project says of itself agrees with what is on disk, and importing it costs little."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import profdeck

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_on_disk() -> set[str]:
    return {
        str(path.parent.relative_to(ROOT))
        for house in ("core", "plugins")
        for path in (ROOT / house).glob("*/__init__.py")
    }


def test_every_package_is_in_the_wheel() -> None:
    assert set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == packages_on_disk()


def test_every_package_is_typed() -> None:
    assert all((ROOT / package / "py.typed").exists() for package in packages_on_disk())


def test_the_version_is_said_once_in_effect() -> None:
    assert profdeck.__version__ == PROJECT["project"]["version"] == metadata.version("profdeck")


def test_there_is_an_extra_per_library_and_none_for_all() -> None:
    features = {"tables", "traces", "upload", "view"}
    libraries = {"torch", "vllm", "sglang", "npu", "ray", "verl", "s3"}
    trackers = {"mlflow", "swanlab", "tensorboard", "wandb"}
    assert set(PROJECT["project"]["optional-dependencies"]) == libraries | trackers | features


def test_extras_that_read_traces_include_the_extra_traces() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    including = {name for name, requirements in extras.items() if "profdeck[traces]" in requirements}
    assert including == {"torch", "ray", "tables", "view", "mlflow", "swanlab", "tensorboard", "wandb"}


def test_every_entry_point_leads_somewhere() -> None:
    for points in PROJECT["project"]["entry-points"].values():
        for name, value in points.items():
            module, _, attribute = value.partition(":")
            relative = module.replace(".", "/")
            files = [
                ROOT / part / f"{relative}{end}" for part in ("core", "plugins") for end in (".py", "/__init__.py")
            ]
            (file,) = filter(Path.exists, files)
            assert attribute in file.read_text(), name


def imported_by(code: str) -> set[str]:
    program = f"import sys; before = set(sys.modules)\n{code}\nafter = set(sys.modules)\nimport json\n"
    program += "print(json.dumps(sorted(after - before)))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout))


def test_importing_profdeck_imports_no_library_at_all() -> None:
    found = imported_by("import profdeck")
    assert {name.partition(".")[0] for name in found} & {
        "torch",
        "typer",
        "rich",
        "numpy",
        "attrs",
        "pluggy",
    } == set()


def test_a_command_that_reads_traces_imports_no_module_of_the_recorder() -> None:
    found = imported_by("import profdeck_traces, profdeck_traces.cli.summary, profdeck_traces.loading")
    assert "profdeck_traces.analysis.model" in found
    assert {name for name in found if name.partition(".")[0] == "profdeck"} == set()


def test_a_profiler_that_does_nothing_imports_no_engine_and_no_command_line() -> None:
    found = imported_by("from profdeck import Profiler; Profiler.from_config().step(1)")
    assert found & {"torch", "typer", "rich", "click", "numpy"} == set()


def test_the_torch_backend_can_be_described_without_torch() -> None:
    found = imported_by("from profdeck_torch import TorchBackend; TorchBackend.Options()")
    assert found & {"torch", "typer", "rich", "numpy"} == set()


def test_all_names_of_the_public_interface_exist() -> None:
    values = {"hookimpl", "HOOKSPEC_VERSION"}
    assert {name: getattr(profdeck, name).__name__ for name in profdeck.__all__ if name not in values}
    assert callable(profdeck.hookimpl)
    assert profdeck.HOOKSPEC_VERSION == 1
    with pytest.raises(AttributeError, match="has no attribute 'Profilr'"):
        _ = profdeck.Profilr
