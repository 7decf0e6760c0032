"""Tests of the PyTorch interfaces that the torch backend calls."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from profdeck_torch import TorchBackend

# Tests marked `torch` use the release pinned in requirements/torch.txt.
RELEASES = ["2.6.0", "2.9.0", "2.11.0"]

pytestmark = pytest.mark.parametrize("version", RELEASES)


@pytest.fixture
def wheel(code, version: str):
    return lambda path: code("torch", version, f"torch/{path}")


def test_the_profiler_accepts_our_arguments_and_has_the_methods_we_call(wheel) -> None:
    module = wheel("profiler/profiler.py")
    profile, base = module["profile"], module["_KinetoProfile"]
    assert {
        "activities", "schedule", "record_shapes", "with_stack", "profile_memory", "with_flops", "with_modules",
        "acc_events",
    } <= set(profile["__init__"].parameters)  # fmt: skip
    assert all(name in profile for name in ("start", "stop", "step"))
    assert "export_chrome_trace" in base
    assert base["preset_metadata_json"].parameters == ["key", "value"]
    # The recorder sets step_num before start() and reads current_action after it.
    assert profile["__init__"].uses("self.step_num")
    assert profile["__init__"].uses("self.current_action")
    assert profile["start"].has_literal("ProfilerStep#")


def test_stop_reads_the_attributes_that_the_recorder_sets(wheel) -> None:
    """`acc_events` enables event parsing. `use_device` selects the device to synchronize."""
    stop = wheel("autograd/profiler.py")["profile"]["__exit__"]
    assert stop.uses("self.acc_events")
    assert stop.uses("self.use_device")


def test_an_active_profiler_can_be_detected(wheel) -> None:
    assert wheel("autograd/__init__.py").imported_from("_profiler_enabled")


def test_optimizers_have_a_step_hook(wheel) -> None:
    assert "register_optimizer_step_post_hook" in wheel("optim/optimizer.py")


def test_the_allocator_history_has_the_functions_we_call(wheel) -> None:
    memory = wheel("cuda/memory.py")
    assert "enabled" in memory["_record_memory_history"].parameters
    assert "max_entries" in memory["_record_memory_history_impl"].parameters
    assert "_dump_snapshot" in memory


def test_the_backend_declares_support_for_the_release(version: str) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    requirement, *_ = project["project"]["optional-dependencies"]["torch"]
    assert version in SpecifierSet(TorchBackend.libraries[0].versions)
    assert version in SpecifierSet(requirement.removeprefix("torch"))
