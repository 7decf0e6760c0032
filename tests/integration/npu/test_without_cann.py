"""Tests of the real torch_npu without CANN: `import torch` fails, and messages must contain instructions.

These tests do not use the stub driver.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

Program = Callable[..., "subprocess.CompletedProcess[str]"]

REMEDIES = ("source CANN's set_env.sh", "TORCH_DEVICE_BACKEND_AUTOLOAD=0", "uninstall torch_npu")
RANK = {"RANK": "0", "WORLD_SIZE": "1"}
OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

# A typical host: it sets up profiling first, and continues without profiling after an error.
HOST = """
from profdeck import Profiler
from profdeck.base.errors import PluginError

for attempt in range(3):
    try:
        Profiler.from_config(settings={"steps": [1], "trainer.backend": "npu"})
    except PluginError as error:
        print(f"{attempt} {type(error).__name__}: {error}")
"""

ROLES = """
output: profiles
steps: [1]
roles:
  trainer: {backend: torch}
  ref: {backend: torch}
  reward: {backend: npu}
  critic: {backend: npu}
  chat: {backend: vllm}
"""


@pytest.fixture
def python(tmp_path: Path) -> Program:
    """Return a function that runs Python without CANN and without the stub driver."""
    foreign = ("LD_LIBRARY_PATH", "ASCEND_", "TORCH_DEVICE_", "RANK", "WORLD_SIZE")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            check=False,
            cwd=tmp_path,
            env=environ | variables,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


def has_instructions(text: str, backend: str) -> bool:
    """Return whether a text has the backend, the reason of the failed import and the instructions."""
    installed = f"torch_npu {metadata.version('torch-npu')} is installed"
    reason = f"{installed}, but its dependency libhccl.so of CANN cannot be loaded."
    return f"The backend '{backend}' cannot be used in this process: {reason}" in text and all(
        remedy in text for remedy in REMEDIES
    )


def test_check_reports_each_role(python: Program, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(ROLES, encoding="utf-8")
    result = python("-m", "profdeck", "check", "a.yaml", "--here", "--json")
    assert (result.returncode, result.stderr) == (3, "")
    failed_checks = {check["what"]: check["detail"] for check in json.loads(result.stdout)["checks"] if not check["ok"]}
    assert failed_checks.keys() == {f"roles.{role} on this machine" for role in ("trainer", "ref", "reward", "critic")}
    assert has_instructions(failed_checks["roles.trainer on this machine"], "torch")
    assert failed_checks["roles.ref on this machine"] == failed_checks["roles.trainer on this machine"]
    # torch is only partly imported at this point, so another import can raise any error.
    for role in ("reward", "critic"):
        assert failed_checks[f"roles.{role} on this machine"].startswith(
            "The backend 'npu' cannot be used in this process: "
        )
        assert has_instructions(failed_checks[f"roles.{role} on this machine"], "torch")


def test_host_gets_the_error_before_training(python: Program) -> None:
    result = python("-c", HOST, **RANK)
    assert (result.returncode, result.stderr) == (0, "")
    errors = result.stdout.splitlines()
    assert len(errors) == 3
    assert all(has_instructions(error, "npu") for error in errors)


def test_autoload_variable_is_restored(python: Program) -> None:
    """torch_npu sets the variable during its import. Child processes of the host must not inherit it."""
    code = (
        "import os\nfrom profdeck_npu import cann\nfrom profdeck.base.errors import PluginError\n"
        "try: cann.load()\nexcept PluginError: print(os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD'))\n"
    )
    assert [python("-c", code, **environment).stdout for environment in ({}, OFF)] == ["None\n", "0\n"]


def test_run_exits_with_a_message(python: Program, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch\n", encoding="utf-8")
    result = python("-m", "profdeck", "run", "--steps", "1", "--set", "trainer.backend=npu", "script.py")
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert has_instructions(result.stderr, "npu")


def test_instructions_in_the_message_work(python: Program, tmp_path: Path) -> None:
    """Without autoload, torch works, and the NPU backend still reports the missing library."""
    (tmp_path / "a.yaml").write_text(ROLES, encoding="utf-8")
    result = python("-m", "profdeck", "check", "a.yaml", "--here", "--json", **OFF)
    checks = {check["what"]: check for check in json.loads(result.stdout)["checks"]}
    assert checks["roles.trainer on this machine"]["ok"], result.stdout
    assert has_instructions(checks["roles.reward on this machine"]["detail"], "npu")
    assert result.returncode == 3
