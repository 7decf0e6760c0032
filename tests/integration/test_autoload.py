"""What engines load by themselves, in processes without an engine."""

from __future__ import annotations

from importlib import metadata

import pytest


@pytest.mark.parametrize(("armed", "expected"), [({}, set()), ({"VLLM_PLUGINS": "other"}, set())])
def test_until_it_is_armed_vllms_entry_point_imports_nothing(start, armed: dict[str, str], expected: set[str]) -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "from profdeck_vllm.autoload import register; register()\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    out, err = start(code, **armed).communicate(timeout=30)
    loaded = set(out.split())
    assert "profdeck_vllm" in loaded, err
    assert not loaded & {"torch", "pluggy", "attrs", "attr", "cattrs", "yaml", "numpy", "profdeck", "vllm"} - expected


def test_without_vllm_an_armed_entry_point_does_not_raise(start) -> None:
    code = "import profdeck_vllm.autoload as autoload; autoload.register(); print('went on')"
    process = start(code, VLLM_PLUGINS="profdeck")
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out.strip()) == (0, "went on")


def test_both_of_vllms_groups_know_us_by_one_name() -> None:
    for group in ("vllm.general_plugins", "vllm.endpoint_plugins"):
        (point,) = [point for point in metadata.entry_points(group=group) if point.value.startswith("profdeck")]
        assert point.name == "profdeck"
