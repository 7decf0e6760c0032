"""Tests of the entry points that engines load, in processes without an engine."""

from __future__ import annotations

from importlib import metadata

import pytest

THIRD_PARTY = {"torch", "pluggy", "attrs", "attr", "yaml", "numpy", "profdeck", "vllm", "sglang"}


@pytest.mark.parametrize("environ", [{}, {"VLLM_PLUGINS": "other"}, {"SGLANG_PLUGINS": "other"}])
@pytest.mark.parametrize("plugin", ["profdeck_vllm", "profdeck_sglang"])
def test_unarmed_entry_point_imports_no_third_party_packages(start, plugin: str, environ: dict[str, str]) -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        f"from {plugin}.autoload import register; register()\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    out, err = start(code, **environ).communicate(timeout=30)
    loaded = set(out.split())
    assert plugin in loaded, err
    assert not loaded & THIRD_PARTY


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_armed_entry_point_does_not_raise_without_the_engine(start, engine: str) -> None:
    code = f"import profdeck_{engine}.autoload as autoload; autoload.register(); print('went on')"
    process = start(code, **{f"{engine.upper()}_PLUGINS": "profdeck"})
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out.strip()) == (0, "went on")


@pytest.mark.parametrize("group", ["vllm.general_plugins", "vllm.endpoint_plugins", "sglang.srt.plugins"])
def test_entry_points_of_all_groups_have_one_name(group: str) -> None:
    (point,) = [point for point in metadata.entry_points(group=group) if point.value.startswith("profdeck")]
    assert point.name == "profdeck"
