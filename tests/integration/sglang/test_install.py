from __future__ import annotations

from requirement_closure import required


def test_profdeck_adds_two_packages() -> None:
    assert required("profdeck") - required("sglang") == {"isal", "pluggy"}
