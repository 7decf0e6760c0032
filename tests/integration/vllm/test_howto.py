"""Tests for the scripts in docs/how-to/vllm.md, run with a tiny model."""

from __future__ import annotations

from typing import ClassVar

from engine_contract import PageContract
from pages import ROOT


class TestPage(PageContract):
    page = ROOT / "docs" / "how-to" / "vllm.md"
    plugins: ClassVar[dict[str, str]] = {"VLLM_PLUGINS": "profdeck"}
    tiny = 'load_format="dummy", enforce_eager=True, max_model_len=256, dtype="float32"'
