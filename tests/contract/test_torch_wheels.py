"""What the torch backend calls is there in the oldest supported release and in later ones."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from profdeck_torch import TorchBackend

# The release that requirements/torch.txt pins is not read but run, by the tests marked torch.
RELEASES = ["2.6.0", "2.9.0", "2.11.0"]

pytestmark = pytest.mark.parametrize("version", RELEASES)


def functions(tree: ast.AST) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def classes(tree: ast.AST) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def arguments(function: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}


def test_the_profiler_takes_our_arguments_and_has_our_methods(source, version: str) -> None:
    found = classes(source("torch", version, "torch/profiler/profiler.py"))
    profile, base = functions(found["profile"]), functions(found["_KinetoProfile"])
    assert {
        "activities", "schedule", "record_shapes", "with_stack", "profile_memory", "with_flops", "with_modules",
        "acc_events",
    } <= arguments(profile["__init__"])  # fmt: skip
    assert {"start", "stop", "step"} <= profile.keys()
    assert {"preset_metadata_json", "export_chrome_trace"} <= base.keys()
    assert arguments(base["preset_metadata_json"]) == {"self", "key", "value"}
    # The recorder sets step_num before start() and reads current_action after it.
    attributes = {node.attr for node in ast.walk(profile["__init__"]) if isinstance(node, ast.Attribute)}
    assert {"step_num", "current_action"} <= attributes
    assert "ProfilerStep#" in {node.value for node in ast.walk(profile["start"]) if isinstance(node, ast.Constant)}


def test_the_stop_reads_what_the_recorder_sets(source, version: str) -> None:
    """Of `torch.autograd.profiler.profile`: whether events are parsed, and which device is synchronized."""
    profile = classes(source("torch", version, "torch/autograd/profiler.py"))["profile"]
    (stop,) = (node for node in profile.body if isinstance(node, ast.FunctionDef) and node.name == "__exit__")
    tests = {ast.unparse(node.test) for node in ast.walk(stop) if isinstance(node, ast.If)}
    assert {"self.acc_events", "self.use_device and hasattr(torch, self.use_device)"} <= tests


def test_an_active_profiler_can_be_asked_for(source, version: str) -> None:
    tree = source("torch", version, "torch/autograd/__init__.py")
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert "_profiler_enabled" in names


def test_optimizers_tell_of_their_steps(source, version: str) -> None:
    assert "register_optimizer_step_post_hook" in functions(source("torch", version, "torch/optim/optimizer.py"))


def test_the_allocator_history_is_where_we_call_it(source, version: str) -> None:
    found = functions(source("torch", version, "torch/cuda/memory.py"))
    assert "enabled" in arguments(found["_record_memory_history"])
    assert "max_entries" in arguments(found["_record_memory_history_impl"])
    assert "_dump_snapshot" in found


def test_the_release_is_in_the_range_that_the_backend_declares(version: str) -> None:
    from packaging.specifiers import SpecifierSet

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    (requirement,) = project["project"]["optional-dependencies"]["torch"]
    assert version in SpecifierSet(TorchBackend.libraries[0].versions)
    assert version in SpecifierSet(requirement.removeprefix("torch"))
