"""Project metadata matches the source tree, and imports load only the required libraries."""

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


def find_packages() -> set[str]:
    return {
        str(path.parent.relative_to(ROOT))
        for directory in ("core", "plugins")
        for path in (ROOT / directory).glob("*/__init__.py")
    }


def test_every_package_is_in_the_wheel() -> None:
    assert set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == find_packages()


def test_every_package_is_typed() -> None:
    assert all((ROOT / package / "py.typed").exists() for package in find_packages())


def test_versions_are_equal() -> None:
    assert profdeck.__version__ == PROJECT["project"]["version"] == metadata.version("profdeck")


def test_extras_are_libraries_trackers_and_features() -> None:
    features = {"tables", "traces", "upload", "view"}
    libraries = {"torch", "vllm", "sglang", "npu", "ray", "verl", "s3"}
    trackers = {"mlflow", "swanlab", "tensorboard", "wandb"}
    assert set(PROJECT["project"]["optional-dependencies"]) == libraries | trackers | features


def test_extras_that_read_traces_include_the_extra_traces() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    including = {name for name, requirements in extras.items() if "profdeck[traces]" in requirements}
    assert including == {"torch", "ray", "tables", "view", "mlflow", "swanlab", "tensorboard", "wandb"}


def test_every_entry_point_exists() -> None:
    for entry_points in PROJECT["project"]["entry-points"].values():
        for name, value in entry_points.items():
            module, _, attribute = value.partition(":")
            relative = module.replace(".", "/")
            files = [
                ROOT / directory / f"{relative}{suffix}"
                for directory in ("core", "plugins")
                for suffix in (".py", "/__init__.py")
            ]
            (file,) = filter(Path.exists, files)
            assert attribute in file.read_text(), name


def find_imported_modules(code: str) -> set[str]:
    program = f"import sys; before = set(sys.modules)\n{code}\nafter = set(sys.modules)\nimport json\n"
    program += "print(json.dumps(sorted(after - before)))"
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(json.loads(result.stdout))


def test_profdeck_imports_no_library() -> None:
    modules = find_imported_modules("import profdeck")
    assert {name.partition(".")[0] for name in modules} & {
        "torch",
        "typer",
        "rich",
        "numpy",
        "attrs",
        "pluggy",
    } == set()


def test_profdeck_traces_does_not_import_profdeck() -> None:
    modules = find_imported_modules("import profdeck_traces, profdeck_traces.cli.summary, profdeck_traces.loading")
    assert "profdeck_traces.analysis.model" in modules
    assert {name for name in modules if name.partition(".")[0] == "profdeck"} == set()


def test_disabled_profiler_imports_no_engine_and_no_cli_library() -> None:
    modules = find_imported_modules("from profdeck import Profiler; Profiler.from_config().step(1)")
    assert modules & {"torch", "typer", "rich", "click", "numpy"} == set()


def test_torch_backend_options_do_not_import_torch() -> None:
    modules = find_imported_modules("from profdeck_torch import TorchBackend; TorchBackend.Options()")
    assert modules & {"torch", "typer", "rich", "numpy"} == set()


def test_all_public_names_exist() -> None:
    values = {"hookimpl", "HOOKSPEC_VERSION"}
    assert {name: getattr(profdeck, name).__name__ for name in profdeck.__all__ if name not in values}
    assert callable(profdeck.hookimpl)
    assert profdeck.HOOKSPEC_VERSION == 1
    with pytest.raises(AttributeError, match="has no attribute 'Profilr'"):
        _ = profdeck.Profilr
